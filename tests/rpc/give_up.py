"""Run by test_giving_up.py in a process of its own: a signal comes while a worker is silent.

Arguments: what happens, model file, address of the worker, its process id. Prints what happened as
JSON lines; that it gets to the last one is a part of the test.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from pyllama_mtp import Model, Session, Settings
from pyllama_mtp.errors import PyllamaMtpError
from pyllama_mtp.llama import native

WHAT, FILE, WORKER, PID = *sys.argv[1:4], int(sys.argv[4])
SETTINGS = Settings(n_ctx=1024, n_batch=64, n_ubatch=16, n_threads=1, draft_n_max=3)
PROMPT = "def add(a, b):\n    return a + b\n\n" * 10
#: When the first signal comes, the second one, and when the worker goes on; seconds.
FIRST_S, SECOND_S, GO_ON_S = 0.5, 1.0, 2.0
LONG_S = 1000.0
#: The share of the weights that is read when the worker falls silent.
IN_LOADING = {"reading": 0.2, "read": 1.0}


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


def later(seconds: float, act: Callable[[], None]) -> None:
    threading.Timer(seconds, act).start()


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def silence() -> None:
    """Stop the worker, and have come what is to come."""
    os.killpg(PID, signal.SIGSTOP)
    later(FIRST_S, interrupt)
    if WHAT == "answers":
        later(GO_ON_S, lambda: os.killpg(PID, signal.SIGCONT))
    elif WHAT in ("twice", *IN_LOADING):
        later(SECOND_S, interrupt)


def attempt(step: str, act: Callable[[], object]) -> None:
    begin = time.monotonic()
    try:
        found: dict[str, object] = {"result": act()}
    except (PyllamaMtpError, KeyboardInterrupt, TimeoutError) as error:
        found = {"error": type(error).__name__, "message": str(error)}
    say(step=step, seconds=time.monotonic() - begin, **found)


def generate(session: Session, at_piece: Callable[[], None] | None = None) -> list[int]:
    run = session.generate(PROMPT, max_tokens=60, ignore_eos=True)
    for number, _ in enumerate(run):
        if number == 5 and at_piece:
            at_piece()
    return run.tokens


def load(progress: Callable[[float], None] | None = None) -> Model:
    return Model(FILE, rpc_servers=WORKER, rpc_timeout=int(LONG_S), progress=progress)


def in_loading() -> None:
    done: list[bool] = []

    def progress(share: float) -> None:
        if share >= IN_LOADING[WHAT] and not done:
            done.append(True)
            silence()

    attempt("interrupted", lambda: load(progress).close())


def in_use() -> None:
    with load() as model, Session(model, SETTINGS) as session:
        attempt("whole", lambda: generate(session))
        attempt("interrupted", lambda: generate(session, silence))
        attempt("again", lambda: generate(session))
        if WHAT == "answers":
            attempt("interrupted once more", lambda: generate(session, silence))
            attempt("and again", lambda: generate(session))


def raise_timeout(number: int, frame: FrameType | None) -> NoReturn:
    raise TimeoutError("of the user's")


def between_calls() -> None:
    """Ctrl-C is heard where no native call waits; then everything is closed."""

    def interrupted() -> None:
        with load() as model, Session(model, SETTINGS) as session:
            for number, _ in enumerate(session.generate(PROMPT, max_tokens=60, ignore_eos=True)):
                if number == 5:
                    os.killpg(PID, signal.SIGSTOP)
                    raise KeyboardInterrupt

    attempt("interrupted", interrupted)


native.PATIENCE_S = 1.0 if WHAT in ("patience", "handler", "between") else LONG_S
if WHAT == "handler":
    signal.signal(signal.SIGINT, raise_timeout)
if WHAT in IN_LOADING:
    in_loading()
elif WHAT == "between":
    between_calls()
else:
    in_use()
os.killpg(PID, signal.SIGCONT)
attempt("anew", lambda: load().close())
say(step="end", parked=native.pending.exception is not None)
