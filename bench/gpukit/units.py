"""Units of work: commands that run one after the other until the time of a step is used up.

GPUs are often rented by the minute: a command gets what is left of the step, is interrupted
(SIGINT, then SIGKILL) when that is over, and runs again in the next call.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpukit.state import CUT, DONE, FAILED, RunbookError, Work

#: Seconds that an interrupted command gets to write down what it has.
GRACE_S = 15.0
#: Exit codes of a step.
ALL_DONE, SOME_FAILED, USAGE, CALL_AGAIN = 0, 1, 2, 3


def parse_budget(text: str) -> float:
    """Seconds of "9m", "540s" or "540". Raises RunbookError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
    if not match or not float(match[1]):
        raise RunbookError(f"a budget of {text!r}: give a time such as 9m, 540s or 1h")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]


@dataclass(frozen=True)
class Unit:
    """One command.

    Attributes:
        command: words, or a function that makes them of the seconds that are left.
        least_s: not begun with less time left than this.
        missing: called when the command succeeded: what is still to do ("" is nothing).
        resumes: the next attempt goes on where this one was cut; otherwise it begins anew, and a
            unit that was cut though it had a whole step can never finish.
        accepted: exit codes that are no failure.
    """

    name: str
    command: Sequence[str] | Callable[[float], Sequence[str]]
    least_s: float = 5.0
    missing: Callable[[], str] = lambda: ""
    resumes: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    cwd: Path | None = None
    accepted: tuple[int, ...] = (0,)

    def words(self, left_s: float) -> list[str]:
        """The command for so much time."""
        return list(self.command(left_s) if callable(self.command) else self.command)


def run_units(
    work: Work,
    units: Sequence[Unit],
    budget_s: float,
    stop: bool = False,
    whole_s: float | None = None,
) -> int:
    """Run the units that are not done, in order; every one is noted when it ends.

    Args:
        stop: nothing further is begun after a failure.
        whole_s: the most that a call can have, where this one has only what others left of it.

    Returns:
        ALL_DONE; CALL_AGAIN: the time was over; SOME_FAILED: units failed (the next call tries them
        again).
    """
    begun, whole_s = time.monotonic(), whole_s or budget_s
    failed = False
    for unit in units:
        if work.is_done(unit.name):
            continue
        left = budget_s - (time.monotonic() - begun)
        if left < unit.least_s:
            if unit.least_s >= whole_s:
                _say(f"{unit.name}: needs {unit.least_s:.0f} s; give a larger --budget")
                return SOME_FAILED
            return SOME_FAILED if failed else CALL_AGAIN
        status = _attempt(work, unit, left, whole=left > 0.95 * whole_s)
        if status == CUT:
            return SOME_FAILED if failed else CALL_AGAIN
        failed = failed or status == FAILED
        if failed and stop:
            break
    return SOME_FAILED if failed else ALL_DONE


def _attempt(work: Work, unit: Unit, left_s: float, whole: bool) -> str:
    """Run one unit and note how it ended."""
    words, log = unit.words(left_s), work.log(unit.name)
    _say(f"{unit.name} ...")
    started = time.monotonic()
    try:
        code = run_logged(words, log, left_s, unit.environment, unit.cwd)
    except OSError as error:
        work.note(unit.name, FAILED, 0.0, words, f"cannot be started: {error}")
        _say(f"{unit.name}: {error}")
        return FAILED
    except KeyboardInterrupt:
        work.note(unit.name, CUT, time.monotonic() - started, words, "interrupted")
        raise
    seconds = time.monotonic() - started
    if code is None:
        status, message = CUT, f"cut after {seconds:.0f} s"
        if whole and not unit.resumes:
            status, message = FAILED, f"not finished in a whole step of {seconds:.0f} s"
            message += "; give a larger --budget, or leave it out"
    elif code not in unit.accepted:
        status, message = FAILED, f"exit code {code}: {_tail(log)}"
    else:
        message = unit.missing()
        status = CUT if message else DONE
    work.note(unit.name, status, seconds, words, message)
    _say(f"{unit.name}: {status}, {seconds:.0f} s{f'; {message}' if message else ''}")
    return status


def run_logged(
    words: Sequence[str],
    log: Path,
    limit_s: float,
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> int | None:
    """Run a command, its output appended to `log`, and return its exit code; None: it was cut."""
    log.parent.mkdir(parents=True, exist_ok=True)
    grace = min(GRACE_S, limit_s / 4)
    with log.open("ab") as file:
        process = subprocess.Popen(
            list(words),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            cwd=cwd,
            start_new_session=True,
        )
        try:
            return process.wait(timeout=limit_s - grace)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end(process, grace)


def _end(process: subprocess.Popen[bytes], grace_s: float) -> None:
    """End a command and all it started, politely first."""
    for number in (signal.SIGINT, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=grace_s)


def _tail(log: Path) -> str:
    """The last lines of a log, for a message."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " | ".join(line.strip()[:200] for line in lines[-3:])


def _say(text: str) -> None:
    print(f"runbook: {text}", file=sys.stderr, flush=True)
