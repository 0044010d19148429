"""What a measurement says about the machine: enough to compare, nothing that identifies it.

No host name, user name or path is ever read.
"""

from __future__ import annotations

import platform
import re
from pathlib import Path
from typing import Any

from pyllama_mtp.settings import available_threads

_CPUINFO = Path("/proc/cpuinfo")
_MEMINFO = Path("/proc/meminfo")


def _first_match(path: Path, pattern: str) -> str | None:
    try:
        found = re.search(pattern, path.read_text(errors="replace"), re.MULTILINE)
    except OSError:
        return None
    return found.group(1).strip() if found else None


def cpu_model() -> str:
    """The CPU's name as the system gives it."""
    name = _first_match(_CPUINFO, r"^(?:model name|Model|Hardware)\s*:\s*(.+)$")
    return name or platform.processor() or platform.machine()


def memory_bytes() -> int | None:
    """Physical memory in bytes."""
    kibibytes = _first_match(_MEMINFO, r"^MemTotal:\s*(\d+) kB")
    return int(kibibytes) * 1024 if kibibytes else None


def describe_machine(devices: list[str] | None = None) -> dict[str, Any]:
    """The `machine` field of a cell.

    Args:
        devices: descriptions of the accelerators in use, as the driver lists them.
    """
    return {
        "cpu": cpu_model(),
        "cores": available_threads(),
        "memory_bytes": memory_bytes(),
        "devices": list(devices or ()),
        "os": f"{platform.system()} {'.'.join(platform.release().split('.')[:2])}",
        "arch": platform.machine(),
        "python": platform.python_version(),
    }
