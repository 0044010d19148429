"""The parts of bench/fuzz.py, which is no package, are found as the script finds them."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
