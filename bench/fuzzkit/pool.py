"""Runs cases in long-living worker processes, and notices a worker that dies, hangs or swells.

A worker gets one case at a time. A worker that ends, does not answer in time or takes too much
memory is a finding, and is replaced.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import pyllama_mtp

#: Cases after which a worker is replaced, so that no case is blamed for the leaks of others.
LIFE = 400
_ROOTS = (Path(__file__).resolve().parents[1], Path(pyllama_mtp.__file__).resolve().parents[1])


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
    edits: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class Outcome:
    """How a case ended: one of cases.OUTCOMES with its details."""

    case: Case
    outcome: str
    detail: str
    seconds: float
    peak_mib: int = 0
    edits: list[dict[str, Any]] = field(default_factory=list)


class _Worker:
    def __init__(self, base: Path, limits: Limits) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="fuzz-")
        self.errors = (Path(self.folder.name) / "stderr").open("w+b")
        paths = [str(root) for root in _ROOTS]
        arguments = (str(base), self.folder.name, str(limits.address_space_mib))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "fuzzkit.worker", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            cwd=self.folder.name,  # or "-m" would import what lies in this process's folder
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(paths),
                "OMP_NUM_THREADS": "1",
                "GGML_NO_BACKTRACE": "1",
                "MALLOC_ARENA_MAX": "2",
            },
        )
        self.case: Case | None = None
        self.edits: list[dict[str, Any]] = []
        self._rest = b""
        self.began, self.done = 0.0, 0

    def start(self, case: Case) -> None:
        assert self.process.stdin
        self.case, self.began = case, time.monotonic()
        self.edits = case.edits or []
        request = {"kind": case.kind, "seed": case.seed, "edits": case.edits}
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it is dead, which the end of its output tells

    def lines(self) -> list[bytes] | None:
        """The whole lines that have arrived; None: the process has ended."""
        assert self.process.stdout
        data = os.read(self.process.stdout.fileno(), 1 << 20)
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        return lines

    def last_words(self) -> str:
        self.errors.seek(0)
        return self.errors.read()[-1500:].decode(errors="replace").strip()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.errors.close()
        self.folder.cleanup()


class Pool:
    """Some workers on one base model. A context manager."""

    def __init__(self, base: Path, jobs: int, limits: Limits | None = None) -> None:
        self.base, self.limits, self.jobs = base.resolve(), limits or Limits(), jobs
        self._selector = selectors.DefaultSelector()
        self._workers: set[_Worker] = set()

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        for worker in list(self._workers):
            self._retire(worker)

    def run(self, cases: Iterable[Case]) -> Iterator[Outcome]:
        """Outcomes as they come, in any order."""
        waiting = iter(cases)
        idle: list[_Worker] = []
        more = True
        while True:
            while more and (idle or len(self._workers) < self.jobs):
                case = next(waiting, None)
                if case is None:
                    more = False
                    break
                (idle.pop() if idle else self._hire()).start(case)
            busy = [worker for worker in self._workers if worker.case]
            if not busy:
                return
            for worker, outcome in self._answers(busy):
                yield outcome
                if worker.process.poll() is None and worker.done < LIFE and worker.case is None:
                    idle.append(worker)
                else:
                    self._retire(worker)

    def _hire(self) -> _Worker:
        worker = _Worker(self.base, self.limits)
        self._workers.add(worker)
        self._selector.register(worker.process.stdout, selectors.EVENT_READ, worker)  # type: ignore
        return worker

    def _retire(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        self._selector.unregister(worker.process.stdout)  # type: ignore[arg-type]
        worker.close()

    def _answers(self, busy: list[_Worker]) -> list[tuple[_Worker, Outcome]]:
        """Workers that have answered, died or run out of time; waits for the first."""
        now = time.monotonic()
        # The first case of a process also starts it and loads the library.
        ends = {w: w.began + self.limits.seconds + (30 if not w.done else 0) for w in busy}
        ready = self._selector.select(max(0.0, min(ends.values()) - now))
        found = [(key.data, self._read(key.data)) for key, _ in ready]
        now = time.monotonic()
        for worker in busy:
            if now >= ends[worker] and worker not in {w for w, outcome in found if outcome}:
                worker.process.kill()
                detail = f"no answer in {self.limits.seconds:.0f} s"
                found.append((worker, self._finding(worker, detail)))
        return [(worker, outcome) for worker, outcome in found if outcome]

    def _read(self, worker: _Worker) -> Outcome | None:
        """The outcome of the worker's case; None: it is still running."""
        lines = worker.lines()
        if lines is None:
            code = worker.process.wait()
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            words = worker.last_words()
            return self._finding(worker, f"the process ended ({how}): {words}")
        for line in lines:
            answer = json.loads(line)
            if "edits" in answer:
                worker.edits = answer["edits"]
                continue
            if answer["peak_mib"] > self.limits.peak_mib:
                detail = f"{answer['outcome']}: {answer['detail']}"
                detail = f"{answer['peak_mib']} MiB of memory; {detail}"
                return self._finding(worker, detail, answer["peak_mib"])
            assert worker.case
            case, seconds = worker.case, time.monotonic() - worker.began
            worker.case, worker.done = None, worker.done + 1
            return Outcome(case, seconds=seconds, edits=worker.edits, **answer)
        return None

    def _finding(self, worker: _Worker, detail: str, peak_mib: int = 0) -> Outcome:
        """A finding; `worker.case` stays set, so that the worker is not used again."""
        assert worker.case
        seconds = time.monotonic() - worker.began
        return Outcome(worker.case, "finding", detail, seconds, peak_mib, worker.edits)
