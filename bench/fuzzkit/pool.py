"""Runs cases in long-living worker processes, and notices a worker that dies, hangs or swells.

A worker gets one case at a time, and many after each other: starting Python and loading the library
takes longer than most cases. A worker that ends, does not answer in time or takes too much memory
is a finding, and is replaced.
"""

from __future__ import annotations

import faulthandler
import logging
import multiprocessing
import os
import re
import resource
import signal
import tempfile
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, TimeoutError
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from benchkit import memory_of

from fuzzkit.cases import FINDING, Cases
from fuzzkit.document import Edit

#: Cases after which a worker is replaced, so that no case is blamed for the leaks of others.
LIFE = 400
#: Seconds in which a process has to start and to load the library, or to read the base.
START_S = 120.0
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GGML_NO_BACKTRACE": "1", "MALLOC_ARENA_MAX": "2"}


@dataclass(frozen=True)
class Limits:
    """Limits of a case: seconds, resident MiB beyond the worker's own, MiB of address space."""

    seconds: float = 30.0
    peak_mib: int = 512
    address_space_mib: int = 4096


@dataclass(frozen=True)
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
    edits: list[Edit] = field(default_factory=list)


# -- in a worker -----------------------------------------------------------------------------------


_cases: Cases


def _start(base: Path, folder: Path, address_space_mib: int) -> None:
    global _cases
    errors = os.open(folder / "stderr", os.O_WRONLY | os.O_CREAT)
    os.dup2(errors, 1)
    os.dup2(errors, 2)
    faulthandler.enable()  # names the signal that ends the process
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    logging.disable(logging.CRITICAL)
    _cases = Cases(base, folder)
    limit = memory_of("self", "VmSize") + (address_space_mib << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _edits(case: Case) -> list[Edit]:
    return _cases.edits(case.kind, case.seed) if case.edits is None else case.edits


def _run(case: Case) -> tuple[Outcome, int]:
    """How a case ended, and the MiB that it took."""
    edits = _edits(case)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    before = memory_of("self", "VmRSS")
    result = _cases.run(case.kind, edits)
    peak_mib = (memory_of("self", "VmHWM") - before) >> 20
    return Outcome(case, result.outcome, result.detail, edits), peak_mib


# -- beside them -----------------------------------------------------------------------------------


class _Worker:
    """A process for cases."""

    def __init__(self, base: Path, folder: Path, limits: Limits) -> None:
        self.n_left, self.errors = LIFE, folder / "stderr"
        given = base, folder, limits.address_space_mib
        spawn = multiprocessing.get_context("spawn")
        self.process = ProcessPoolExecutor(1, spawn, _start, given)
        self.pid = self.process.submit(os.getpid).result(START_S)


class Pool:
    """Some workers on one base model. A context manager."""

    def __init__(self, base: Path, jobs: int, limits: Limits | None = None) -> None:
        self._base, self._limits = base.resolve(), limits or Limits()
        self._threads, self._mine = ThreadPoolExecutor(jobs), threading.local()
        self._workers: list[_Worker] = []
        self._folder = tempfile.TemporaryDirectory(prefix="fuzz-")
        self._environment = mock.patch.dict(os.environ, ENVIRONMENT)

    def __enter__(self) -> Pool:
        self._environment.start()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._threads.shutdown(cancel_futures=True)
        for worker in self._workers:
            worker.process.shutdown()
        self._environment.stop()
        self._folder.cleanup()

    def run(self, cases: Iterable[Case]) -> Iterator[Outcome]:
        """Outcomes in the order of the cases."""
        return self._threads.map(self._outcome, cases)

    def _worker(self) -> _Worker:
        """This thread's worker; a new one where there is none that can go on."""
        worker: _Worker | None = getattr(self._mine, "worker", None)
        if not worker or not worker.n_left:
            if worker:
                worker.process.shutdown()
            folder = Path(tempfile.mkdtemp(dir=self._folder.name))
            worker = self._mine.worker = _Worker(self._base, folder, self._limits)
            self._workers.append(worker)
        worker.n_left -= 1
        return worker

    def _outcome(self, case: Case) -> Outcome:
        worker = self._worker()
        edits = list[Edit]()
        try:
            edits = worker.process.submit(_edits, case).result(START_S)  # the first reads the base
            outcome, peak_mib = worker.process.submit(_run, case).result(self._limits.seconds)
            if outcome.outcome != FINDING and peak_mib <= self._limits.peak_mib:
                return outcome
            detail = f"{peak_mib} MiB of memory; {outcome.outcome}: {outcome.detail}"
        except TimeoutError:
            os.kill(worker.pid, signal.SIGKILL)
            detail = f"no answer in {self._limits.seconds:.0f} s"
        except BrokenProcessPool:
            words = worker.errors.read_text(errors="replace")
            fatal = re.search(r"^Fatal Python error: .*", words, re.M)  # then a trace follows
            detail = f"the process ended: {words[: fatal.end() if fatal else None][-1500:]}"
        worker.n_left = 0  # it may not be what it was
        edits = edits or self._worker().process.submit(_edits, case).result(START_S)
        return Outcome(case, FINDING, detail, edits)
