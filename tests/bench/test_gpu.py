"""bench/gpu.py: what fits into the time is measured, whatever becomes of the pieces before it."""

from __future__ import annotations

from pathlib import Path

import gpu
import publish
import pytest

PIECES = (
    gpu.Piece("broken", 40, "", "-c 'raise SystemExit(7)'"),
    gpu.Piece("endless", 1, "", "-c 'import time; time.sleep(600)'"),
    gpu.Piece("long", 6000, "", "-c 'raise SystemExit(7)'"),
    gpu.Piece("without a model", 1, gpu.DENSE, "-c 'raise SystemExit(7)'"),
    gpu.Piece("good", 40, gpu.SMALL, "-c 'print(1)' {model} {more}"),
)


@pytest.mark.long
def test_pieces_that_fail_or_do_not_fit_do_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "PIECES", PIECES)
    monkeypatch.setattr(gpu.Run, "write", lambda run: run.file(gpu.SMALL).touch())
    options = ["--output", str(tmp_path), "--models", str(tmp_path), "--minutes", "3"]
    assert gpu.main(options) == gpu.FAILED
    said = (tmp_path / "log.txt").read_text()
    for piece, end in zip(
        PIECES, ("FAILED", "UNFINISHED", "no time", "no time", "done"), strict=True
    ):
        assert f"gpu: {piece.name}: {end}" in said
    assert str(tmp_path / f"{gpu.SMALL}.gguf") in said


def test_nine_minutes_hold_what_was_asked_for() -> None:
    """The pieces that were chosen as figures of a GPU, and each is a section of its model."""
    left, chosen = 9 * 60, set[str]()
    for piece in gpu.PIECES:
        if piece.seconds <= left and "installs" not in piece.name:
            left -= piece.seconds
            chosen.add(piece.name)
        if "publish.py" in piece.words:
            section = next(
                one for one in publish.SECTIONS if f"--only {one.name} " in f"{piece.words} "
            )
            assert piece.model in section.models
    assert {"doctor", "texts", "golden-27b", "golden-35b", "32k-27b", "32k-35b"} <= chosen
