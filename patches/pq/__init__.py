"""The patch queue: reading it, applying it, editing it, trying it on another release."""

import sys
from pathlib import Path

PATCHES = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PATCHES.parent / "vendor"))  # sdist and tree
