"""A fork after loading: children get a clear error or their own model, and the parent works on."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..marks import usual
from ..processes import RunPython

BEGIN = """
import multiprocessing, os, sys, threading
from pyllama_mtp import Model, Session, Settings
from pyllama_mtp.errors import ContextClosedError, UsageError

def settings(n_threads):
    return Settings(n_ctx=256, n_threads=n_threads, draft_n_max=3)

def text(session):
    return session.generate("def read_lines(path):\\n", max_tokens=16, ignore_eos=True).run().text

def own(path, n_threads):
    with Model(path) as model, Session(model, settings(n_threads)) as session:
        return text(session)

def refused(kind, call, words):
    try:
        call()
    except kind as error:
        assert words in str(error), error
    else:
        raise AssertionError("it was not refused")

def in_child(work):
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        work()
        sys.exit(7)  # with all that an interpreter does at its end
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 7, status
"""

INHERITED = """
def use():
    forked = "the process that this one was forked from"
    refused(ContextClosedError, lambda: text(session), forked)
    refused(ContextClosedError, lambda: next(iter(running)), forked)
    refused(ContextClosedError, lambda: session.save("x"), "")
    refused(ContextClosedError, session.reset, forked)
    refused(ContextClosedError, lambda: model.tokenize("a"), forked)
    refused(ContextClosedError, lambda: Session(model, settings(1)), forked)
    session.close()
    model.close()

with Model(sys.argv[1]) as model, Session(model, settings(2)) as session:
    expected = text(session)
    running = session.generate("class", max_tokens=9)
    next(iter(running))
    holder, free = threading.Event(), threading.Event()
    def hold():  # what another thread held is not held for ever in the child
        with session._engine.alone, session._engine.target._alone:
            holder.set()
            free.wait()
    thread = threading.Thread(target=hold)
    thread.start()
    holder.wait()
    in_child(use)
    free.set()
    thread.join()
    in_child(lambda: None)
    pid = os.fork()
    if not pid:
        os.execv("/bin/true", ["true"])
    assert os.waitpid(pid, 0)[1] == 0
    session.reset()
    assert text(session) == expected
print("parent works on")
"""

OWN = """
def one_thread():
    assert own(sys.argv[1], 1) == expected

def two_threads():
    refused(UsageError, lambda: own(sys.argv[1], 2), "forked")
    found = []
    thread = threading.Thread(target=lambda: found.append(own(sys.argv[1], 2)))
    thread.start()
    thread.join()
    assert found == [expected]

if __name__ == "__main__":
    with Model(sys.argv[1]) as model, Session(model, settings(2)) as session:
        expected = text(session)
        in_child(one_thread)
        in_child(two_threads)
        for method, n_threads in (("fork", 1), ("spawn", 2)):
            with multiprocessing.get_context(method).Pool(1) as pool:
                assert pool.apply(own, (sys.argv[1], n_threads)) == expected
        session.reset()
        assert text(session) == expected
    print("parent works on")
"""


#: The child has ggml's connection, and not the thread that serves it.
WORKERS = """
def connect():
    refused(UsageError, lambda: rpc.connect(["127.0.0.1:1"]), "start processes with spawn")
    refused(UsageError, lambda: rpc.connect(["127.0.0.1:2"]), "no worker can be reached")

from pyllama_mtp.llama import rpc
rpc._in_use["127.0.0.1:1"] += 1
rpc._in_use["127.0.0.1:2"] += 1
rpc.release(["127.0.0.1:2"])
in_child(connect)
print("parent works on")
"""


@pytest.mark.parametrize("script", usual(INHERITED, WORKERS, long=[OWN]))
def test_a_child(run_python: RunPython, demo_file: Path, script: str) -> None:
    """A child may not use or free what it inherits; it may load its own model."""
    done = run_python(BEGIN + script, demo_file)
    assert (done.returncode, done.stdout) == (0, "parent works on\n"), done.stderr
    assert done.stderr == ""
