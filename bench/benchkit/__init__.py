"""What the scripts of bench/ share: models, servers, environments, result files."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import psutil

BENCH = Path(__file__).resolve().parents[1]
ROOT, RESULTS = BENCH.parent, BENCH / "results"
#: What is condensed into a page of RESULTS by hand; not in git.
DRAFTS = ROOT / "build" / "results"

sys.path.append(str(ROOT))  # for tests.*; after the installed package


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """A parser of a script's options, whose help begins with the script's docstring."""
    raw = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=doc, formatter_class=raw)


def anonymous(process: psutil.Process) -> int:
    """Bytes of a process in memory that do not belong to a file."""
    memory = process.memory_info()
    return int(memory.rss - memory.shared)


def growth(readings: Sequence[int], warm_up: float) -> tuple[float, float]:
    """Memory after the warm-up, a share of the readings: medians of the first and of the last
    tenth, in bytes."""
    settled = readings[int(warm_up * len(readings)) :]
    tenth = max(len(settled) // 10, 1)
    return float(np.median(settled[:tenth])), float(np.median(settled[-tenth:]))
