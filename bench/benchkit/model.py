"""The models that are measured: files of the user's, or synthetic ones made once."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchkit import ROOT
from pyllama_mtp.models.architectures import ARCHITECTURES
from pyllama_mtp.models.mmproj import write_synthetic_mmproj
from pyllama_mtp.models.quantize import quantize_model

FOLDER = ROOT / "build" / "bench"

SMALL, EXPERTS = "qwen3.5-0.8b", "qwen3.6-moe-small"
#: Synthetic models: shape and type. Their heads draft well, so acceptance is real.
SYNTHETIC = {
    **{f"0.8b-{t}": (SMALL, t) for t in ("q4_k_m", "q4_0", "q5_k_m", "q6_k", "iq4_xs", "q8_0")},
    **{f"moe-{t}": (EXPERTS, t) for t in ("q4_k_m", "q8_0")},
    **{shape: (shape, "iq4_nl") for shape in ("qwen3.6-27b", "qwen3.6-35b-a3b")},
}
#: Other architectures: mixtures of experts of some 230 million weights, of which a token uses 100
#: million, in Q8_0; tests/hyperparameters.py has their dimensions. Nine of ten first drafts are
#: right at this noise.
OTHERS, NOISE = ("glm4moe", "qwen3next", "step35", "deepseek2"), 0.02


def model_file(given: Path | None) -> Path:
    """`given`, or the synthetic model of the Qwen3.5-0.8B shape in Q8_0, made once."""
    if given is not None:
        return given.resolve()
    make_models(FOLDER, ["0.8b-q8_0"])
    return FOLDER / "0.8b-q8_0.gguf"


def make_picture(folder: Path) -> None:
    """Write `picture.png` (256 tokens) and `encoder-0.8b.gguf`, a tower of random weights with 98
    million parameters, unless they are there."""
    from PIL import Image  # [test] and [images] bring it; a GPU machine may have neither

    folder.mkdir(parents=True, exist_ok=True)
    if not (picture := folder / "picture.png").exists():
        noise = np.random.default_rng(34).integers(0, 256, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(noise).resize((512, 512), Image.Resampling.BICUBIC).save(picture)
    if not (encoder := folder / "encoder-0.8b.gguf").exists():
        tower = {"width": 768, "n_heads": 12, "n_ff": 3072, "n_blocks": 12, "image": 768}
        write_synthetic_mmproj(encoder, 1024, **tower)


def make_models(folder: Path, names: Sequence[str]) -> None:
    """Write the models that the folder lacks. Another process that does so is waited for."""
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        if not (path := folder / f"{name}.gguf").exists():
            with (folder / "lock").open("wb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not path.exists():
                    _make_model(folder, name)


def _make_model(folder: Path, name: str) -> None:
    partial = folder / f"{name}.tmp.gguf"
    if name in SYNTHETIC:
        shape, kind = SYNTHETIC[name]
        words = ["--shape", shape, "--type", kind, "--head-noise", "0.05", "--force", str(partial)]
        command = [sys.executable, "-m", "pyllama_mtp", "synth", *words]
        subprocess.run(command, check=True, cwd=folder)  # whose sources nobody imports
    else:
        from tests.architectures import write_model

        whole = folder / "f32.gguf"
        n_heads = 3 if ARCHITECTURES[name].several_heads else 1
        write_model(name, whole, n_heads, noise=NOISE, large=True)
        quantize_model(whole, partial, "q8_0")
        whole.unlink()
    partial.rename(folder / f"{name}.gguf")
