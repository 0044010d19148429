"""The machine: what it is, how busy it is, and the memory that it has left.

Nothing identifies it: no host name, user name or path is ever read.
"""

from __future__ import annotations

import os
import platform
import re
import resource
import time
from collections.abc import Iterator
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
    waited = 0
    for task in _TASKS.glob("*/schedstat"):
        with suppress(OSError, ValueError):  # the thread may have ended
            waited += int(task.read_text().split()[1])
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


def _idle_ticks() -> dict[str, int]:
    """Ticks that each core of this process has been idle or waiting for a disk."""
    try:
        lines = [line.split() for line in _STAT.read_text().splitlines()]
    except OSError:
        return {}
    own = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    return {words[0]: int(words[4]) + int(words[5]) for words in lines if words[0] in own}


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
