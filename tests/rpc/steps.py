"""Helpers of the scripts that run in their own process and print how each step went."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from pyllama_mtp import Session, Settings
from pyllama_mtp.errors import PyllamaMtpError

SETTINGS = Settings(n_ctx=1024, n_batch=64, n_ubatch=16, n_threads=1, draft_n_max=3)
PROMPT = "def add(a, b):\n    return a + b\n\n" * 10


def say(**what: object) -> None:
    """Print a line of JSON."""
    print(json.dumps(what), flush=True)


def attempt(step: str, act: Callable[[], object]) -> None:
    """Print the step's result or error, and how long it took."""
    begin = time.monotonic()
    try:
        found: dict[str, object] = {"result": act()}
    except (PyllamaMtpError, KeyboardInterrupt, TimeoutError) as error:
        kind, address = type(error).__name__, getattr(error, "address", None)
        found = {"error": kind, "message": str(error), "address": address}
    say(step=step, seconds=time.monotonic() - begin, **found)


def generate(session: Session, at_piece: Callable[[], object] | None = None) -> list[int]:
    """The tokens; those before an error are printed as the step "partly"."""
    run = session.generate(PROMPT, max_tokens=60, ignore_eos=True)
    try:
        for number, _ in enumerate(run, 1):
            if number == 5 and at_piece:
                at_piece()
    except PyllamaMtpError:
        if run.tokens:
            say(step="partly", result=run.tokens)
        raise
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
