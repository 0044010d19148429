"""Runs each case in a process of its own, and notices one that dies, hangs or swells.

Starting Python, loading the library and reading the base takes longer than most cases. So some
workers do that once, and fork for each case.
"""

from __future__ import annotations

import faulthandler
import logging
import multiprocessing
import os
import pickle
import re
import resource
import signal
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import psutil

from fuzzkit.cases import FINDING, Cases, Result
from fuzzkit.document import Edit

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


class Worker:
    """Runs cases, each in a fork of this process. `folder`: for the files of the cases."""

    def __init__(self, base: Path, folder: Path, limits: Limits) -> None:
        self.cases, self.limits = Cases(base, folder), limits
        self.errors, self.result = folder / "stderr", folder / "result"

    def run(self, case: Case) -> Outcome:
        """How a case ended."""
        self.cases.prepare(case.kind)
        edits = self.cases.edits(case.kind, case.seed) if case.edits is None else case.edits
        before = psutil.Process().memory_info().rss
        if not (pid := os.fork()):
            self._child(case.kind, edits)
        end, ended = time.monotonic() + self.limits.seconds, 0
        while not ended and time.monotonic() < end:
            time.sleep(0.001)
            ended, code, used = os.wait4(pid, os.WNOHANG)
        if not ended:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            result = Result(FINDING, f"no answer in {self.limits.seconds:.0f} s")
        elif code:
            words = self.errors.read_text(errors="replace")
            fatal = re.search(r"^Fatal Python error: .*", words, re.M)  # then a trace follows
            words = words[: fatal.end() if fatal else None][-1500:]
            result = Result(FINDING, f"the process ended ({code}): {words}")
        else:
            result = pickle.loads(self.result.read_bytes())
            if (peak_mib := (1024 * used.ru_maxrss - before) >> 20) > self.limits.peak_mib:
                detail = f"{peak_mib} MiB of memory; {result.outcome}: {result.detail}"
                result = Result(FINDING, detail)
        return Outcome(case, result.outcome, result.detail, edits)

    def _child(self, kind: str, edits: list[Edit]) -> None:
        try:
            errors = os.open(self.errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(errors, 1)
            os.dup2(errors, 2)
            faulthandler.enable(errors)  # names the signal that ends the process
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            limit = psutil.Process().memory_info().vms + (self.limits.address_space_mib << 20)
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            self.result.write_bytes(pickle.dumps(self.cases.run(kind, edits)))
            os._exit(0)
        finally:
            os._exit(1)


_worker: Worker


def _start(base: Path, folder: str, limits: Limits) -> None:
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.disable(logging.CRITICAL)
    _worker = Worker(base, Path(tempfile.mkdtemp(dir=folder)), limits)


def _run(case: Case) -> Outcome:
    return _worker.run(case)


class Pool:
    """Some workers on one base model. A context manager."""

    def __init__(self, base: Path, jobs: int, limits: Limits | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="fuzz-")
        given = base.resolve(), self._folder.name, limits or Limits()
        with mock.patch.dict(os.environ, ENVIRONMENT):
            self._pool = multiprocessing.get_context("spawn").Pool(jobs, _start, given)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *raised: Any) -> None:
        self._pool.terminate()
        self._pool.join()
        self._folder.cleanup()

    def run(self, cases: Iterable[Case]) -> Iterator[Outcome]:
        """Outcomes in the order of the cases."""
        return self._pool.imap(_run, cases)
