"""The model that is measured: a file of the user's, or a synthetic one made once."""

from __future__ import annotations

import random
import sys
from pathlib import Path

from benchkit import ROOT
from pyllama_mtp.models.synth import write_synthetic

SHAPE, TYPE = "qwen3.5-0.8b", "q8_0"
#: Of a synthetic model whose head drafts well: acceptance some 0.85 / 0.70 / 0.59.
HEAD_NOISE = 0.05
FOLDER = ROOT / "build" / "bench"


def model_file(given: Path | None, head_noise: float | None = None) -> Path:
    """`given`, or the synthetic model."""
    return given.resolve() if given is not None else synthetic(SHAPE, head_noise)


def synthetic(shape: str, head_noise: float | None = None) -> Path:
    """A synthetic model of a shape, as `pyllama-mtp synth` writes one; made once."""
    noise = f"-noise-{head_noise:g}" if head_noise is not None else ""
    path = FOLDER / f"synth-{shape}-{TYPE}{noise}.gguf"
    if not path.exists():
        print(f"writing the synthetic model {path.name} ...", file=sys.stderr, flush=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_synthetic(path, shape, TYPE, head_noise=head_noise)
    return path


def random_prompt(n_tokens: int, n_vocab: int, seed: int = 0) -> list[int]:
    """Random token ids, as llama-bench takes them; the same for the same arguments."""
    draw = random.Random(seed)
    return [draw.randrange(n_vocab) for _ in range(n_tokens)]
