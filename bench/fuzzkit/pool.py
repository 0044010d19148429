"""Runs cases in long-living worker processes, and notices a worker that dies, hangs or swells.

A worker gets one case at a time, and many after each other: starting Python and loading the library
takes longer than most cases. A worker that ends, does not answer in time or takes too much memory
is a finding, and is replaced.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import resource
import signal
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest import mock

from benchkit import memory_of

from fuzzkit.cases import FINDING, Cases, Result
from fuzzkit.edits import Edit

#: Cases after which a worker is replaced, so that no case is blamed for the leaks of others.
LIFE = 400
#: Seconds in which a process has to start and to load the library, with its first case.
START_S = 30.0
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GGML_NO_BACKTRACE": "1", "MALLOC_ARENA_MAX": "2"}


@dataclass(frozen=True)
class Limits:
    """Limits of a case: seconds, resident MiB beyond the worker's own, MiB of address space."""

    seconds: float = 30.0
    peak_mib: int = 512
    address_space_mib: int = 4096


@dataclass
class Case:
    """A case to run: by its seed, or by its edits, if there are any."""

    kind: str
    seed: int
    edits: list[Edit] | None = None


@dataclass(frozen=True)
class Outcome:
    """How a case ended: one of cases.OUTCOMES with its details."""

    case: Case
    outcome: str
    detail: str
    edits: list[Edit]


def work(pipe: Connection, base: Path, folder: Path, address_space_mib: int) -> None:
    """In a worker: answer each case with its edits, before they are tried, and with the result and
    the MiB that it took."""
    errors = os.open(folder / "stderr", os.O_WRONLY)
    os.dup2(errors, 1)
    os.dup2(errors, 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    logging.disable(logging.CRITICAL)
    cases = Cases(base, folder)
    limit = memory_of("self", "VmSize") + (address_space_mib << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    with suppress(EOFError):  # the pool is closed
        while True:
            case: Case = pipe.recv()
            edits = cases.edits(case.kind, case.seed) if case.edits is None else case.edits
            pipe.send(edits)
            Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
            before = memory_of("self", "VmRSS")
            result = cases.run(case.kind, edits)
            pipe.send((result, (memory_of("self", "VmHWM") - before) >> 20))


class _Worker:
    def __init__(self, base: Path, limits: Limits) -> None:
        self._limits = limits
        self._folder = tempfile.TemporaryDirectory(prefix="fuzz-")
        self._errors = Path(self._folder.name) / "stderr"
        self._errors.touch()
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        given = (theirs, base, self._errors.parent, limits.address_space_mib)
        self.process = context.Process(target=work, args=given, daemon=True)
        with mock.patch.dict(os.environ, ENVIRONMENT):
            self.process.start()
        theirs.close()
        self.case: Case | None = None
        self._n_left = LIFE

    def start(self, case: Case) -> None:
        self.case, self._edits = case, case.edits or []
        start_s = START_S if self._n_left == LIFE else 0
        self.end = time.monotonic() + self._limits.seconds + start_s
        with suppress(BrokenPipeError):  # it is dead, which the end of its answers tells
            self.pipe.send(case)

    @property
    def idle(self) -> bool:
        """Whether it can be given another case: after a finding it keeps its case."""
        return self.case is None and self._n_left > 0 and self.process.is_alive()

    def outcome(self, answered: bool) -> Outcome | None:
        """The outcome of its case; None: it is still running."""
        result, peak_mib = None, 0
        if not answered:
            if time.monotonic() >= self.end:
                result = Result(FINDING, f"no answer in {self._limits.seconds:.0f} s")
        else:
            result, peak_mib = self._answer()
        if result is None:
            return None
        if result.outcome != FINDING and peak_mib > self._limits.peak_mib:
            detail = f"{peak_mib} MiB of memory; {result.outcome}: {result.detail}"
            result = Result(FINDING, detail)
        assert self.case
        found = Outcome(self.case, result.outcome, result.detail, self._edits)
        if result.outcome != FINDING:  # after which it may not be what it was
            self.case, self._n_left = None, self._n_left - 1
        return found

    def _answer(self) -> tuple[Result | None, int]:
        """The result and the MiB that it took; None: the edits came, which are before it."""
        try:
            answer = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            code = self.process.exitcode or 0
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            words = self._errors.read_bytes()[-1500:].decode(errors="replace").strip()
            return Result(FINDING, f"the process ended ({how}): {words}"), 0
        if isinstance(answer, list):
            self._edits = answer
            return None, 0
        return answer

    def close(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()
        self._folder.cleanup()


class Pool:
    """Some workers on one base model. A context manager."""

    def __init__(self, base: Path, jobs: int, limits: Limits | None = None) -> None:
        self._base, self._limits, self._jobs = base.resolve(), limits or Limits(), jobs
        self._workers: set[_Worker] = set()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *raised: Any) -> None:
        for worker in self._workers:
            worker.close()

    def run(self, cases: Iterable[Case]) -> Iterator[Outcome]:
        """Outcomes as they come, in any order."""
        waiting = iter(cases)
        idle: list[_Worker] = []
        while True:
            while idle or len(self._workers) < self._jobs:
                case = next(waiting, None)
                if case is None:
                    break
                if not idle:
                    idle.append(_Worker(self._base, self._limits))
                    self._workers.add(idle[0])
                idle.pop().start(case)
            busy = [worker for worker in self._workers if worker.case]
            if not busy:
                return
            soonest = min(worker.end for worker in busy)
            ready = wait([worker.pipe for worker in busy], max(0.0, soonest - time.monotonic()))
            for worker in busy:
                outcome = worker.outcome(worker.pipe in ready)
                if outcome:
                    if worker.idle:
                        idle.append(worker)
                    else:
                        self._workers.remove(worker)
                        worker.close()
                    yield outcome
