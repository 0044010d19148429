"""``python -m pyllama_mtp`` is ``pyllama-mtp``."""

from __future__ import annotations

import sys

from pyllama_mtp.cli import entry

if __name__ == "__main__":
    sys.exit(entry())
