"""The model that is measured: a file of the user's, or a synthetic one made once."""

from __future__ import annotations

from pathlib import Path

from benchkit.paths import ROOT, ensure_driver

SHAPE, TYPE = "qwen3.5-0.8b", "q8_0"
SYNTHETIC = ROOT / "build" / "bench" / f"synth-{SHAPE}-{TYPE}.gguf"


def model_file(given: Path | None) -> Path:
    """`given`, or the synthetic model, which `pyllama-mtp synth` would write the same."""
    if given is not None:
        return given.resolve()
    if not SYNTHETIC.exists():
        ensure_driver()
        from pyllama_mtp.models.synth import write_synthetic

        print(f"writing the synthetic model {SYNTHETIC.name} ...", flush=True)
        SYNTHETIC.parent.mkdir(parents=True, exist_ok=True)
        write_synthetic(SYNTHETIC, SHAPE, TYPE)
    return SYNTHETIC


def vocabulary_size(path: Path) -> int:
    """Tokens in the file's vocabulary. Raises the driver's ModelFileError for a bad file."""
    ensure_driver()
    from pyllama_mtp.models.ggufinfo import validate_model_file

    return validate_model_file(path, require_mtp=True).n_vocab
