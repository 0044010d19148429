"""The machine in a measurement: enough to compare, nothing that identifies it.

No host name, user name or path is ever read.
"""

from __future__ import annotations

import os
import platform
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from pyllama_mtp.settings import available_threads

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
