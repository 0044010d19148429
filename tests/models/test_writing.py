"""Model files that are written: whole or not at all, and never over another file unasked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pyllama_mtp import files
from pyllama_mtp.errors import DiskFullError, UsageError
from pyllama_mtp.models.ggufinfo import read_gguf
from pyllama_mtp.models.quantize import quantize_model
from pyllama_mtp.models.surgery import extract_head
from pyllama_mtp.models.synth import write_synthetic

from ..processes import disk_full_at

Write = Callable[..., Path]


@pytest.fixture(params=["synth", "quantize", "extract"])
def write(request: pytest.FixtureRequest, demo_file: Path) -> Write:
    """Writes a model file: `write(path, progress=..., force=...)`."""
    ways: dict[str, Write] = {
        "synth": lambda path, **options: write_synthetic(path, "tiny", "q8_0", **options),
        "quantize": lambda path, **options: quantize_model(demo_file, path, "q4_0", **options),
        "extract": lambda path, **options: extract_head(demo_file, path, **options),
    }
    return ways[request.param]


def test_progress_ends_at_the_total(write: Write, demo_file: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    path = write(tmp_path / "m.gguf", progress=lambda done, total: seen.append((done, total)))
    written = path.stat().st_size - read_gguf(path).tensors[0].offset
    total = seen[-1][0]
    assert total in (written, read_gguf(demo_file).weight_bytes)
    assert seen == sorted(seen) and {each for _, each in seen} == {total}
    assert len({done for done, _ in seen}) > 10


def test_an_existing_file_is_kept_unless_forced(write: Write, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_text("precious")
    with pytest.raises(UsageError, match="exists; choose another name"):
        write(path)
    assert path.read_text() == "precious"
    assert read_gguf(write(path, force=True)).tensors


def test_missing_folder_and_directory(write: Write, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist; create it"):
        write(tmp_path / "no" / "m.gguf")
    with pytest.raises(UsageError, match="is a directory"):
        write(tmp_path, force=True)


def test_a_disk_that_is_too_small(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(files.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(DiskFullError, match=r"needs 0\.00 GB, 0\.00 GB are free"):
        write(tmp_path / "m.gguf")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("limit", [1000, 60_000, 500_000])
def test_a_disk_that_fills_up(write: Write, limit: int, tmp_path: Path) -> None:
    """In the header, in the vocabulary, in the weights."""
    with disk_full_at(limit), pytest.raises(DiskFullError, match=r"free some|partial file was re"):
        write(tmp_path / "m.gguf")
    assert not list(tmp_path.iterdir())


def test_interruption_leaves_nothing(write: Write, tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "m.gguf", progress=interrupt)
    assert not list(tmp_path.iterdir())
