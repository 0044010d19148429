"""What a callback raises reaches the caller as it is, and harms nothing."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from pyllama_mtp import Model, Session, Settings
from pyllama_mtp.llama import native
from pyllama_mtp.llama.context import Context

PROMPT = "def read_lines(path):\n"
SETTINGS = Settings(n_ctx=256, n_threads=1, draft_n_max=3)


class OfACallback(Exception):
    """Raised by callbacks of these tests only."""


KINDS = (OfACallback, KeyboardInterrupt, SystemExit, MemoryError)


def text_of(session: Session) -> str:
    return session.generate(PROMPT, max_tokens=24, ignore_eos=True).run().text


@pytest.fixture(scope="module")
def expected(demo: Model) -> str:
    with Session(demo, SETTINGS) as session:
        return text_of(session)


class Raising(logging.Handler):
    """A handler of the user's that does not catch what goes wrong in it."""

    def __init__(self, kind: type[BaseException], when: str, n_before: int) -> None:
        super().__init__(logging.DEBUG)
        self._kind, self._when, self._n_before = kind, when, n_before

    def handle(self, record: logging.LogRecord) -> bool:
        if self._when in record.getMessage():
            self._n_before -= 1
            if self._n_before < 0:
                raise self._kind("in a log handler")
        return True


@contextmanager
def logging_fails(kind: type[BaseException], when: str, n_before: int = 0) -> Iterator[None]:
    """Logging raises at a line with `when` in it, after `n_before` such lines."""
    logger, handler = logging.getLogger("pyllama_mtp.llama.native"), Raising(kind, when, n_before)
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


@pytest.mark.parametrize(
    ("kind", "at"),
    [*((kind, 0.5) for kind in KINDS), *((KINDS[0], at) for at in (0.0, 1.0, "a line of the log"))],
)
def test_loading(
    demo_file: Path, kind: type[BaseException], at: float | str, expected: str
) -> None:
    """The callback of its progress raises, at a share of the file, or a handler of its log."""

    def progress(share: float) -> None:
        if share >= at:  # type: ignore[operator]
            raise kind("in progress")

    if isinstance(at, str):
        with logging_fails(kind, "general.architecture"), pytest.raises(kind, match="log handler"):
            Model(demo_file)
    else:
        with pytest.raises(kind, match="in progress"):
            Model(demo_file, progress=progress)
    with Model(demo_file) as model, Session(model, SETTINGS) as session:
        assert text_of(session) == expected


@pytest.mark.parametrize("n_made", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_logging_of_a_new_context(
    demo: Model, kind: type[BaseException], n_made: int, expected: str
) -> None:
    """The session's first or second context fails; contexts made before are closed. Upstream's
    way takes two."""
    before = set(demo.contexts)
    with (
        logging_fails(kind, "constructing llama_context", n_made),
        pytest.raises(kind, match="log handler") as raised,
    ):
        Session(demo, replace(SETTINGS, prompt_sync="full"))
    assert raised.tb, "which keeps what was made"
    made = set(demo.contexts) - before
    assert len(made) == n_made and all(context.closed for context in made)
    with Session(demo, SETTINGS) as session:
        assert text_of(session) == expected


@contextmanager
def polled_by(poll: Callable[[object], int]) -> Iterator[None]:
    """The function polls for signals within decodes."""
    define = native.load().ffi.def_extern
    try:
        define("pyllama_on_poll", onerror=native.on_callback_error, error=1)(poll)
        yield
    finally:
        define("pyllama_on_poll", onerror=native.on_callback_error, error=1)(native.pyllama_on_poll)


def poll_always(model: Model) -> None:
    """Poll between any two nodes of the model's graphs."""
    for context in model.contexts:
        if isinstance(context, Context):  # and no image encoder of another test
            context._interrupt.period_us = 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_callback_within_a_decode(demo: Model, kind: type[BaseException], expected: str) -> None:
    """The poll for signals runs on the thread that decodes, in the middle of it."""
    calls = itertools.count(1)

    def poll(data: object) -> int:
        if next(calls) == 3:
            raise kind("while decoding")
        return 1 if native.pending.exception else 0

    with polled_by(poll), Session(demo, SETTINGS) as session:
        poll_always(demo)
        with pytest.raises(kind, match="while decoding"):
            text_of(session)
        assert next(calls) == 4, "the decode ended there"
        assert text_of(session) == expected, "the session goes on"


def test_a_callback_at_the_end_of_a_decode(demo: Model, expected: str) -> None:
    """The decode completes; its callback's exception is raised all the same."""

    def poll(data: object) -> int:
        native.on_callback_error(OfACallback, OfACallback("at the end"), None)
        return 0

    with polled_by(poll), Session(demo, SETTINGS) as session:
        poll_always(demo)
        with pytest.raises(OfACallback, match="at the end"):
            text_of(session)
    assert native.pending.exception is None
    with Session(demo, SETTINGS) as session:
        assert text_of(session) == expected


def test_an_exception_of_freeing_is_not_kept_for_later(demo_file: Path) -> None:
    model = Model(demo_file)
    session = Session(model, SETTINGS)
    with logging_fails(OfACallback, ""):
        try:
            session.close()
            model.close()
        except OfACallback:
            pass
    assert native.pending.exception is None
