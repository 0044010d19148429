"""The models that are measured: files of the user's, or synthetic ones made once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from benchkit import BENCH, ROOT
from pyllama_mtp.models.mmproj import write_synthetic_mmproj
from pyllama_mtp.models.synth import write_synthetic

SHAPE, TYPE = "qwen3.5-0.8b", "q8_0"
#: Of a synthetic model whose head drafts well: acceptance some 0.85 / 0.70 / 0.59.
HEAD_NOISE = 0.05
FOLDER = ROOT / "build" / "bench"

SMALL, EXPERTS = "qwen3.5-0.8b", "qwen3.6-moe-small"
#: Synthetic models: shape and type. Their heads draft well, so acceptance is real.
SYNTHETIC = {
    **{f"0.8b-{t}": (SMALL, t) for t in ("q4_k_m", "q4_0", "q5_k_m", "q6_k", "iq4_xs", "q8_0")},
    **{f"moe-{t}": (EXPERTS, t) for t in ("q4_k_m", "q8_0")},
    **{shape: (shape, "iq4_nl") for shape in ("qwen3.6-27b", "qwen3.6-35b-a3b")},
}
#: What bench/archmodels.py writes.
OTHERS = ("glm4moe", "qwen3next", "step35", "deepseek2")


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


def make_picture(folder: Path) -> None:
    """Write `picture.png` (256 tokens) and `encoder-0.8b.gguf`, a tower of random weights with 98
    million parameters, unless they are there."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (picture := folder / "picture.png").exists():
        noise = np.random.default_rng(34).integers(0, 256, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(noise).resize((512, 512), Image.Resampling.BICUBIC).save(picture)
    if not (encoder := folder / "encoder-0.8b.gguf").exists():
        tower = {"width": 768, "n_heads": 12, "n_ff": 3072, "n_blocks": 12, "image": 768}
        write_synthetic_mmproj(encoder, 1024, **tower)


def make_models(folder: Path, names: Sequence[str]) -> None:
    """Write the models that the folder lacks."""
    folder.mkdir(parents=True, exist_ok=True)
    missing = [name for name in names if not (folder / f"{name}.gguf").exists()]
    for name in missing:
        if name in SYNTHETIC:
            (shape, kind), path = SYNTHETIC[name], folder / f"{name}.tmp.gguf"
            words = ["--shape", shape, "--type", kind, "--head-noise", "0.05", "--force", str(path)]
            subprocess.run([sys.executable, "-m", "pyllama_mtp", "synth", *words], check=True)
            path.rename(folder / f"{name}.gguf")
    if set(missing) & {*OTHERS}:
        subprocess.run([sys.executable, BENCH / "archmodels.py", folder], check=True)
