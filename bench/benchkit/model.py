"""The model that is measured: a file of the user's, or a synthetic one made once."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from benchkit.paths import ROOT, ensure_driver

SHAPE, TYPE = "qwen3.5-0.8b", "q8_0"
#: Of a synthetic model whose head drafts well: acceptance some 0.85 / 0.70 / 0.59.
HEAD_NOISE = 0.05
FOLDER = ROOT / "build" / "bench"


def model_file(given: Path | None, head_noise: float | None = None) -> Path:
    """`given`, or the synthetic model."""
    return given.resolve() if given is not None else synthetic(SHAPE, head_noise)


def synthetic(
    shape: str, head_noise: float | None = None, tensor_type: str = TYPE, path: Path | None = None
) -> Path:
    """A synthetic model of a shape, the same as `pyllama-mtp synth` writes; made once."""
    if path is None:
        noise = f"-noise-{head_noise:g}" if head_noise is not None else ""
        path = FOLDER / f"synth-{shape}-{tensor_type}{noise}.gguf"
    if not path.exists():
        ensure_driver()
        from pyllama_mtp.models.synth import write_synthetic

        print(f"writing the synthetic model {path.name} ...", file=sys.stderr, flush=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_synthetic(path, shape, tensor_type, head_noise=head_noise)
    return path


@dataclass(frozen=True)
class Dimensions:
    """What of a model's shape the measurements need."""

    n_vocab: int
    n_embd: int


def dimensions(path: Path) -> Dimensions:
    """Read from the file's header. Raises the driver's ModelFileError for a bad file."""
    ensure_driver()
    from pyllama_mtp.models.ggufinfo import validate_model_file

    info = validate_model_file(path, require_mtp=True)
    return Dimensions(int(info.n_vocab), int(info.n_embd))
