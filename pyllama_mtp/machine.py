"""The machine: what it is, how busy it is, and the memory that it has left.

Nothing identifies it: no host name, user name or path is ever read.
"""

from __future__ import annotations

import os
import platform
import re
import resource
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from .settings import available_threads

_CPUINFO = Path("/proc/cpuinfo")
_MEMINFO = Path("/proc/meminfo")
_STAT = Path("/proc/stat")
_TASKS = Path("/proc/self/task")


def _first_match(path: Path, pattern: str) -> str | None:
    try:
        found = re.search(pattern, path.read_text(errors="replace"), re.MULTILINE)
    except OSError:
        return None
    return found.group(1).strip() if found else None


def describe_machine(devices: list[str] | None = None) -> dict[str, Any]:
    """The `machine` field of a cell.

    Args:
        devices: descriptions of the accelerators in use, as the driver lists them.
    """
    name = _first_match(_CPUINFO, r"^(?:model name|Model|Hardware)\s*:\s*(.+)$")
    kibibytes = _first_match(_MEMINFO, r"^MemTotal:\s*(\d+) kB")
    return {
        "cpu": name or platform.processor() or platform.machine(),
        "cores": available_threads(),
        "memory_bytes": int(kibibytes) * 1024 if kibibytes else None,
        "devices": list(devices or ()),
        "os": f"{platform.system()} {'.'.join(platform.release().split('.')[:2])}",
        "arch": platform.machine(),
        "python": platform.python_version(),
    }


def waited_for_core() -> float:
    """Seconds that this process's threads, added up, have been ready to run while others had the
    core; 0 where the system does not count it.

    Source: the second number of /proc/PID/task/TID/schedstat, in nanoseconds (Linux,
    Documentation/scheduler/sched-stats.rst).
    """
    waited, tasks = 0, list[Path]()
    with suppress(OSError):
        tasks = [*_TASKS.iterdir()]  # Path.glob() imports, which the interpreter's end forbids
    for task in tasks:
        with suppress(OSError, ValueError):  # the thread may have ended
            waited += int((task / "schedstat").read_text().split()[1])
    return waited / 1e9


def busy_cores(seconds: float = 0.5) -> float:
    """Cores of this process's affinity that other programs keep busy, measured while it sleeps.

    0 where /proc/stat cannot be read. Time that is stolen from a virtual machine counts as busy.
    """
    before = _idle_ticks()
    began = time.perf_counter()
    time.sleep(seconds)
    after = _idle_ticks()
    ticks = (time.perf_counter() - began) * os.sysconf("SC_CLK_TCK")
    cores = before.keys() & after.keys()
    return sum(max(0.0, 1 - (after[core] - before[core]) / ticks) for core in cores)


def idle_seconds() -> float:
    """Seconds that the cores of this process, added up, have been idle; 0 where /proc/stat cannot
    be read."""
    return sum(_idle_ticks().values()) / os.sysconf("SC_CLK_TCK")


def _idle_ticks() -> dict[str, int]:
    """Ticks that each core of this process has been idle or waiting for a disk."""
    try:
        lines = [line.split() for line in _STAT.read_text().splitlines()]
    except OSError:
        return {}
    own = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    return {words[0]: int(words[4]) + int(words[5]) for words in lines if words[0] in own}


# -- the number of threads -------------------------------------------------------------------------

#: Seconds of computing in a look at the machine, and in a trial of another number of threads.
WINDOW_S = 0.1
#: Threads without a core, or idle cores, from which fewer or more threads are tried. A trial that
#: has lost this part of a window is over.
LOAD = 0.25
#: Computations of fewer seconds may spend more of them waiting for each other than they gain.
SHORT_S = 0.004
#: Another number stays only if it is faster by this factor.
GAIN = 1.03
#: The pause after a trial, as a multiple of its time: after one that was faster, and one that was
#: not.
PAUSE, PAUSE_IN_VAIN = 20.0, 200.0


def threads_beside(n: int, busy: float) -> int:
    """Of `n` threads, those that have a core beside programs that keep so many cores busy."""
    return max(1, n - round(busy))


class Threads:
    """How many threads compute: fewer while other programs keep the cores busy.

    The threads of a computation wait for each other after each of its operations, so that one
    without a core stops all. When threads have waited for a core, or computations are short, fewer
    are tried; when cores are idle, more. The number that computes faster stays. Deterministic: the
    same measurements give the same numbers.

    Attributes:
        most: the largest number, with which it begins if no `first` one is given.
        n: the number for the next computation.
    """

    def __init__(
        self,
        most: int,
        first: int | None = None,
        waited: Callable[[], float] = waited_for_core,
        idle: Callable[[], float] = idle_seconds,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`waited`, `idle`, `clock`: seconds so far: of all threads, of all cores, of the day."""
        self.most, self.n = most, first or most
        self._sources = waited, idle, clock
        self._usual: dict[Hashable, float] = {}  # seconds with `n` threads, by kind
        self._before = 0  # the number to go back to after a trial; 0: there is none
        self._next_trial = 0.0
        self._spent, self._expected, self._calls = 0.0, 0.0, 0  # since the last look
        self._look()

    def took(self, kind: Hashable, seconds: float) -> None:
        """Learn from a computation with `n` threads. Those of one `kind` do the same work."""
        usual, passed = self._usual.get(kind), self._sources[-1]() - self._marks[-1]
        self._calls += 1
        several = self._calls >= 3
        if not self._before:
            self._usual[kind] = seconds if usual is None else usual + (seconds - usual) / 4
            self._spent += seconds
            if passed > 2 * self._spent:  # others may have waited between the computations
                self._look()
            elif several and self._spent >= WINDOW_S:
                self._judge()
            return
        if usual is not None and self._calls > 1:  # the first one wakes threads
            self._spent, self._expected = self._spent + seconds, self._expected + usual
        lost = self._spent - self._expected > LOAD * WINDOW_S
        known = lost or (several and max(self._spent, self._expected) >= WINDOW_S)
        if known or (several and passed > PAUSE * WINDOW_S):  # all were of unknown kinds
            self._end_trial(known)

    def _look(self) -> list[float]:
        """Begin a window, or a trial: waited, idle and clock as of now."""
        self._marks = [source() for source in self._sources]
        self._spent, self._expected, self._calls = 0.0, 0.0, 0
        return self._marks

    def _judge(self) -> None:
        """At the end of a window: try another number, if that may be faster."""
        spent, calls, before = self._spent, self._calls, self._marks
        waited, idle, passed = (b - a for a, b in zip(before, self._look(), strict=True))
        n = self.n
        if waited >= LOAD * spent:
            n = threads_beside(n, max(1.0, waited / spent))
        elif n < self.most and idle >= LOAD * passed:
            n = min(self.most, n + max(1, int(idle / passed)))
        elif spent < SHORT_S * calls:
            n = max(1, n // 2)
        if n != self.n and self._marks[-1] >= self._next_trial:
            self._before, self.n = self.n, n

    def _end_trial(self, known: bool) -> None:
        """Keep the number that is faster; `known`: enough was computed to tell."""
        took_s, faster = max(self._spent, WINDOW_S), known and self._expected > GAIN * self._spent
        if faster:
            self._usual.clear()
        else:
            self.n = self._before
        self._before = 0
        self._next_trial = self._look()[-1] + took_s * (PAUSE if faster else PAUSE_IN_VAIN)


# -- memory ----------------------------------------------------------------------------------------


def available_memory() -> int:
    """Bytes that this process may still allocate.

    It is the least of: the machine's (MemAvailable of /proc/meminfo); the limits of the process's
    control group (version 1 or 2) and its parents, less what is used and no file cache; RLIMIT_AS
    less what is mapped.
    """
    limits = [_machine_memory(), *_cgroup_headroom()]
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        limits.append(soft - _fields(Path("/proc/self/status")).get("VmSize", 0) * 1024)
    return max(0, min(limits))


def _fields(path: Path) -> dict[str, int]:
    """``Name: number`` lines of a /proc file (in kB there) or ``name number`` of a cgroup file."""
    fields: dict[str, int] = {}
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return fields
    for line in lines:
        words = line.replace(":", " ").split()
        if len(words) >= 2 and words[1].isdigit():
            fields[words[0]] = int(words[1])
    return fields


def _machine_memory() -> int:
    fields = _fields(_MEMINFO)
    if "MemAvailable" in fields:
        return fields["MemAvailable"] * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_headroom() -> Iterator[int]:
    """Bytes left of each limit of the process's control groups and their parents."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            root, limit, usage, cache = "", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            root, limit, usage = "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cache = "total_inactive_file"
        else:
            continue
        base = Path("/sys/fs/cgroup") / root
        folder = base / group.lstrip("/")
        for place in (folder, *folder.parents):
            if (room := _headroom(place, limit, usage, cache)) is not None:
                yield room
            if place == base:
                break


def _headroom(folder: Path, limit: str, usage: str, cache: str) -> int | None:
    try:
        allowed = (folder / limit).read_text().strip()
        used = int((folder / usage).read_text())
    except (OSError, ValueError):
        return None
    if not allowed.isdigit():  # "max": no limit
        return None
    return int(allowed) - used + _fields(folder / "memory.stat").get(cache, 0)
