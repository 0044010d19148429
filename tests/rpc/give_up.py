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
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

from pyllama_mtp import Model, Session, Settings
from pyllama_mtp.errors import PyllamaMtpError
from pyllama_mtp.llama import native

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
WHAT, FILE, WORKER, PID = *sys.argv[1:4], int(sys.argv[4])
#: When the first signal comes, the second one, and when the worker goes on; seconds.
FIRST_S, SECOND_S, GO_ON_S = 0.5, 1.0, 2.0
LONG_S = 1000.0
#: The share of the weights that is read when the worker falls silent.
IN_LOADING = {"reading": 0.2, "read": 1.0}
SETTINGS = Settings(n_ctx=1024, n_batch=64, n_ubatch=16, n_threads=1, draft_n_max=3)
PROMPT = "def add(a, b):\n    return a + b\n\n" * 10
TIMERS: list[threading.Timer] = []


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


def attempt(step: str, act: Callable[[], object]) -> None:
    """Print the step's result or error, and how long it took."""
    begin = time.monotonic()
    try:
        found: dict[str, object] = {"result": act()}
    except (PyllamaMtpError, KeyboardInterrupt, TimeoutError) as error:
        found = {"error": type(error).__name__, "message": str(error)}
    say(step=step, seconds=time.monotonic() - begin, **found)


def generate(session: Session, at_piece: Callable[[], object] | None = None) -> list[int]:
    """The tokens; something happens after the fifth piece."""
    run = session.generate(PROMPT, max_tokens=60, ignore_eos=True)
    for number, _ in enumerate(run, 1):
        if number == 5 and at_piece:
            at_piece()
    return run.tokens


def stop(group: int) -> None:
    """Stop the processes of a worker; returns when every one has stopped, which may take long."""
    os.killpg(group, signal.SIGSTOP)
    while any(state != "T" for state in _states(group)):
        time.sleep(0.001)


def _states(wanted: int) -> list[str]:
    """States of all threads of a process group (/proc/PID/task/TID/stat, fields 3 and 5)."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/task/*/stat"):
        with suppress(OSError):  # it has ended
            state, _, group = stat.read_text().rpartition(")")[2].split()[:3]
            if int(group) == wanted:
                found.append(state)
    return found


def later(seconds: float, act: Callable[[], None]) -> None:
    TIMERS.append(threading.Timer(seconds, act))
    TIMERS[-1].start()


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def silence() -> None:
    """Stop the worker, and start the timers of the signals."""
    stop(PID)
    later(FIRST_S, interrupt)
    if WHAT == "answers":
        later(GO_ON_S, lambda: os.killpg(PID, signal.SIGCONT))
    elif WHAT in ("twice", *IN_LOADING):
        later(SECOND_S, interrupt)


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

    def stopped() -> None:
        stop(PID)
        raise KeyboardInterrupt

    def interrupted() -> None:
        with load() as model, Session(model, SETTINGS) as session:
            generate(session, stopped)

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
for timer in TIMERS:  # on a busy machine the first signal may have been enough
    timer.cancel()
os.killpg(PID, signal.SIGCONT)
attempt("anew", lambda: load().close())
say(step="end", parked=native.pending.exception is not None)
