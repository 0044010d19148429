"""Where things are: the repository, the driver in it or installed, the results folder."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

BENCH = Path(__file__).resolve().parent.parent
ROOT = BENCH.parent
RESULTS = BENCH / "results"


def ensure_driver() -> None:
    """Make ``import pyllama_mtp`` work: the installed package, else the one of this checkout."""
    if importlib.util.find_spec("pyllama_mtp") is None:
        sys.path.insert(0, str(ROOT))
