"""Run by test_lost_worker.py in a process of its own: lose a worker in a given way, go on.

Arguments: when, model file, addresses of two workers (the first is lost), its process id, and
"and then" to use the workers afterwards. Prints what happened as JSON lines; that it gets to the
last one is a part of the test.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

from pyllama_mtp import Model, Session, Settings
from pyllama_mtp.errors import PyllamaMtpError, WorkerLostError
from pyllama_mtp.llama.batch import Batch
from pyllama_mtp.llama.context import Context, ContextOptions

WHEN, FILE, FIRST, SECOND, PID = *sys.argv[1:5], int(sys.argv[5])
AND_THEN = len(sys.argv) > 6
SETTINGS = Settings(n_ctx=1024, n_batch=64, n_ubatch=16, n_threads=1, draft_n_max=3)
PROMPT = "def add(a, b):\n    return a + b\n\n" * 10
TIMEOUT_S = 2 if "stalled" in WHEN else 60


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


def kill(after: float = 0.0) -> None:
    if after:
        threading.Timer(after, kill).start()
    else:
        os.killpg(PID, signal.SIGKILL)


def stop() -> None:
    """Returns when every process of the worker has stopped, which may take a while."""
    os.killpg(PID, signal.SIGSTOP)
    while any(state != "T" for state in states_of_group()):
        time.sleep(0.001)


def states_of_group() -> list[str]:
    """Of the threads of the worker's processes (/proc/PID/task/TID/stat, fields 3 and 5)."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/task/*/stat"):
        with suppress(OSError):  # it has ended
            state, _, group = stat.read_text().rpartition(")")[2].split()[:3]
            if int(group) == PID:
                found.append(state)
    return found


def attempt(name: str, act: Callable[[], object]) -> None:
    begin = time.monotonic()
    try:
        found: dict[str, object] = {"result": act()}
    except PyllamaMtpError as error:
        address = error.address if isinstance(error, WorkerLostError) else None
        found = {"error": type(error).__name__, "message": str(error), "address": address}
    say(step=name, seconds=time.monotonic() - begin, **found)


def load(progress: Callable[[float], None] | None = None) -> Model:
    return Model(
        FILE,
        rpc_servers=(SECOND, FIRST),  # nothing waits for the last one but who reads the outputs
        tensor_split=(1, 1),
        rpc_timeout=TIMEOUT_S,
        progress=progress,
    )


def generate(session: Session, at_piece: Callable[[], None] | None = None) -> list[int]:
    """The tokens; those before an error are said as a step of their own."""
    run, n_pieces = session.generate(PROMPT, max_tokens=60, ignore_eos=True), 0
    try:
        for _ in run:
            n_pieces += 1
            if n_pieces == 5 and at_piece:
                at_piece()
    except PyllamaMtpError:
        if run.tokens:
            say(step="partly", result=run.tokens)
        raise
    return run.tokens


def at_decode(session: Session, act: Callable[[], object]) -> None:
    """Do something just before the decode that gives the first token."""
    target = session._engine.target
    original, done = target.decode_batch, []

    def decode_batch(batch: Batch) -> None:
        if batch.outputs.any() and not done:
            done.append(act())
        original(batch)

    target.decode_batch = decode_batch


def logits_of_nobody(model: Model) -> float:
    """The largest logit of a decode that its worker does not live to compute."""
    options = ContextOptions(n_ctx=128, n_batch=32, n_ubatch=16, n_threads=1)
    with Context(model, options) as context:
        for start in (0, 2, 4):  # sizes of tensors are asked for once, which waits for answers
            if start == 4:
                stop()
                kill(0.3)
            tokens = np.array([5, 6], dtype=np.int32)
            context.decode(tokens, start, np.array([0, 1], dtype=np.int8))
            largest = float(context.logits(1).max())
        return largest


def decode_without_asking(model: Model, session: Session) -> None:
    """What programs see that do not know of lost workers: llama.cpp's own error."""
    model.refuse_lost_worker = lambda: None
    try:
        target = session._engine.target
        target.clear()
        target.decode(np.array([5, 6], dtype=np.int32), 0, np.array([0, 1], dtype=np.int8))
    finally:
        del model.refuse_lost_worker


def elsewhere(*workers: str) -> list[int]:
    with Model(FILE, rpc_servers=workers) as model, Session(model, SETTINGS) as session:
        return generate(session)


def in_loading() -> None:
    done = []

    def progress(share: float) -> None:
        if share > 0.2 and not done:
            done.append(stop() if WHEN == "load, stalled" else kill())

    attempt("lost", lambda: load(progress).close())


def in_use() -> None:
    model = load()
    session = Session(model, SETTINGS)
    if WHEN == "prefill, computing":
        at_decode(session, lambda: kill(0.003))
    if WHEN == "prefill, computed by nobody":
        at_decode(session, lambda: (stop(), kill(0.3)))
    attempt("whole", lambda: generate(session) if "prefill" not in WHEN else None)
    if WHEN == "between":
        kill()
    acts = {
        "decode, computing": lambda: kill(0.003),
        "decode, computed by nobody": lambda: (stop(), kill(0.3)),
        "decode, stalled": stop,
    }
    if WHEN == "decode of a context":
        attempt("lost", lambda: logits_of_nobody(model))
    else:
        attempt("lost", lambda: generate(session, acts.get(WHEN)))
    attempt("again", lambda: generate(session))
    attempt("new session", lambda: Session(model, SETTINGS).close())
    attempt("lost address", lambda: Model(FILE, rpc_servers=FIRST).close())
    attempt("unasked", lambda: decode_without_asking(model, session))
    attempt("beside", elsewhere)
    attempt("close", lambda: (session.close(), model.close(), model.close())[0])


if WHEN.startswith("load"):
    in_loading()
else:
    in_use()
attempt("local", elsewhere)
if AND_THEN:
    attempt("other worker", lambda: elsewhere(SECOND))
    say(step="restart")
    sys.stdin.readline()
    attempt("same address", lambda: elsewhere(FIRST))
say(step="end")
