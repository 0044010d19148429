"""What the scripts of bench/ share: models, servers, environments, result files."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

BENCH = Path(__file__).resolve().parents[1]
ROOT, RESULTS = BENCH.parent, BENCH / "results"
#: What is condensed into a page of RESULTS by hand; not in git.
DRAFTS = ROOT / "build" / "results"

sys.path.append(str(ROOT))  # for tests.*; after the installed package


def memory_of(process: int | str, key: str) -> int:
    """Bytes of a line of /proc/PID/status, such as "VmRSS"; 0: the process has ended.

    Raises:
        OSError: there is no such process.
    """
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    return 0


def growth(readings: Sequence[int], warm_up: float) -> tuple[float, float]:
    """Memory after the warm-up, a share of the readings: medians of the first and of the last
    tenth, in bytes."""
    settled = readings[int(warm_up * len(readings)) :]
    tenth = max(len(settled) // 10, 1)
    return float(np.median(settled[:tenth])), float(np.median(settled[-tenth:]))
