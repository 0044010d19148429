"""Two threads: on a session each they get the right text; on the same one, an error."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pyllama_mtp import Model, Sampling, Session, Settings
from pyllama_mtp.engine import Engine
from pyllama_mtp.errors import ContextClosedError, UsageError
from pyllama_mtp.llama.native import Exclusive

from ..marks import usual
from ..processes import RunPython

PROMPTS = ["def read_lines(path):\n", "class Reader:\n    def __init__(self"]
SETTINGS = Settings(n_ctx=512, n_threads=1, draft_n_max=3)


def text_of(session: Session, prompt: str, **more: object) -> str:
    return session.generate(prompt, max_tokens=48, ignore_eos=True, **more).run().text  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", usual(0.8, long=[0.0]))
def test_a_session_each_on_one_model(demo: Model, temperature: float) -> None:
    sampling = Sampling(temperature=temperature, seed=5)

    def work(prompt: str) -> list[str]:
        texts = []
        for _ in range(3):  # contexts come and go beside a computation
            with Session(demo, SETTINGS) as session:
                texts += [text_of(session, prompt, sampling=sampling) for _ in range(2)]
                session.reset()
        return texts

    alone = [work(prompt) for prompt in PROMPTS]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, PROMPTS)) == alone
    assert alone[0][0] != alone[1][0]


@pytest.fixture
def busy(
    demo: Model, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Session, Callable[[], str]]]:
    """A session in which a thread computes, and a function that lets it finish: its text."""
    inside, go_on = threading.Event(), threading.Event()
    with Session(demo, SETTINGS) as session, ThreadPoolExecutor(1) as pool:
        text_of(session, PROMPTS[1])
        verify = Engine.verify

        def slow(*arguments: Any) -> object:
            inside.set()
            assert go_on.wait(60)
            return verify(*arguments)

        monkeypatch.setattr(Engine, "verify", slow)
        future = pool.submit(text_of, session, PROMPTS[0])
        assert inside.wait(60)

        def finish() -> str:
            go_on.set()
            return future.result(60)

        yield session, finish
        go_on.set()


@pytest.mark.parametrize("what", ["generate", "process", "reset", "save", "restore"])
def test_one_session_from_two_threads_is_refused(
    busy: tuple[Session, Callable[[], str]], demo: Model, tmp_path: object, what: str
) -> None:
    session, finish = busy
    doing: dict[str, Callable[[], object]] = {
        "generate": lambda: text_of(session, PROMPTS[1]),
        "process": lambda: session.process(PROMPTS[1]),
        "reset": session.reset,
        "save": lambda: session.save(f"{tmp_path}/a"),
        "restore": lambda: session.restore(f"{tmp_path}/a"),
    }
    with pytest.raises(UsageError, match="two threads at once"):
        doing[what]()
    with Session(demo, SETTINGS) as fresh:
        assert finish() == text_of(fresh, PROMPTS[0]), "the first thread is not harmed"


def test_a_session_closed_by_another_thread_says_so(
    busy: tuple[Session, Callable[[], str]],
) -> None:
    session, finish = busy
    session.close()
    with pytest.raises(ContextClosedError):
        finish()


def test_exclusive_is_free_again_after_an_interruption() -> None:
    """Ctrl-C at any moment of taking and releasing it, thousands of times."""
    alone, interrupted = Exclusive("it"), 0

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        while interrupted < 5000:
            try:
                signal.setitimer(signal.ITIMER_REAL, 2e-5)
                while True:
                    with alone:
                        pass
            except KeyboardInterrupt:
                interrupted += 1
            with alone:  # refused if it was never given back
                pass
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_model_is_freed_whatever_its_contexts_say(
    demo_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model(demo_file)
    first, second = Session(model, SETTINGS), Session(model, SETTINGS)
    freed: list[object] = []
    free = model.weights._free
    monkeypatch.setattr(model.weights, "_free", lambda handle: [freed.append(handle), free(handle)])
    with first._engine.target._alone, pytest.raises(UsageError, match="two threads at once"):
        model.close()
    assert second._engine.target.closed and not freed, "the first one may still read the weights"
    first.close()
    assert len(freed) == 1


AT_ONCE = """
import time
from concurrent.futures import ThreadPoolExecutor
from pyllama_mtp.llama import native

locate, begun = native.locate, []

def slowly(library):  # so that all are within
    begun.append(library)
    time.sleep(0.3)
    return locate(library)

native.locate = slowly

with ThreadPoolExecutor(8) as pool:
    loaded = list(pool.map(lambda _: native.load(), range(8)))
assert None not in loaded and len(begun) == 1, begun
"""


def test_all_load_the_library_at_once(run_python: RunPython) -> None:
    done = run_python(AT_ONCE)
    assert done.returncode == 0, done.stderr
