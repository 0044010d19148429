#!/usr/bin/env python3
"""Models of other architectures to measure with: random weights, a head that drafts well, Q8_0.

    python bench/archmodels.py FOLDER      # ARCHITECTURE.gguf, 270 MB each; a minute on two cores

They are mixtures of experts of some 230 million weights, of which a token uses 100 million.
tests/hyperparameters.py has their dimensions.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # after the installed package

from pyllama_mtp.models.architectures import ARCHITECTURES
from pyllama_mtp.models.quantize import quantize_model
from tests.architectures import write_model
from tests.hyperparameters import LARGE

#: Noise of the head, as a share of an embedding's norm; nine of ten first drafts are right.
NOISE = 0.02


def main() -> None:
    """Write the models."""
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    whole = folder / "f32.gguf"
    try:
        for arch in LARGE:
            n_heads = 3 if ARCHITECTURES[arch].several_heads else 1
            write_model(arch, whole, n_heads, noise=NOISE, large=True)
            print(quantize_model(whole, folder / f"{arch}.gguf", "q8_0", force=True))
    finally:
        whole.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
