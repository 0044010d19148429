"""What is known about a build of upstream's programs. Nothing is built here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peers
import pytest

INFO = {"upstream_commit": "0c1e", "compiler": "GNU 12", "cpu_features": "avx2", "series": "ef"}
INFO |= {"build_type": "Release"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A build folder as bench/peers.py leaves it, with empty programs."""
    (tmp_path / "bin").mkdir()
    for name in peers.PROGRAMS:
        (tmp_path / "bin" / name).touch(mode=0o755)
    (tmp_path / "peers.json").write_text(json.dumps({**INFO, "ggml": {}}))
    request = {"defines": ["GGML_OPENMP=OFF"], "recipe": peers.recipe()}
    (tmp_path / "request.json").write_text(json.dumps(request))
    return tmp_path


def test_a_finished_build_is_found(folder: Path) -> None:
    found = peers.built(folder)
    assert not found.missing
    assert found.programs["llama-bench"] == folder / "bin" / "llama-bench"
    assert "GGML_OPENMP=OFF" in peers.report(found)


def test_a_program_that_is_not_built_is_reported(folder: Path) -> None:
    (folder / "bin" / "llama-server").unlink()
    found = peers.built(folder)
    assert found.missing == ["llama-server"]
    assert "llama-server  not built" in peers.report(found)


def test_an_unfinished_build_counts_as_none(folder: Path) -> None:
    (folder / "request.json").unlink()
    assert peers.built(folder).missing == list(peers.PROGRAMS)


def test_only_a_build_of_this_checkout_is_current(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = peers.built(folder)
    monkeypatch.setattr(peers, "series_stamp", lambda: "ef")
    assert peers.is_current(found, ["GGML_OPENMP=OFF"])
    assert not peers.is_current(found, [])
    monkeypatch.setattr(peers, "recipe", lambda: "other CMake files")
    assert not peers.is_current(found, ["GGML_OPENMP=OFF"])


def notes(folder: Path, system_info: str, **stamp: Any) -> list[str]:
    """Notes on a comparison whose upstream side has llamafile and OpenMP, and no repacking."""
    info = {**INFO, "ggml": {"GGML_LLAMAFILE": True, "GGML_OPENMP": True, "GGML_CPU_REPACK": False}}
    built = peers.Peers(folder, {}, info)
    return peers.differences(built, {**INFO, **stamp}, system_info)


def test_builds_that_differ_are_noted(folder: Path) -> None:
    same = "CPU : AVX2 = 1 | LLAMAFILE = 1 | OPENMP = 1 | "
    assert notes(folder, same) == []
    assert "cpu_features" in notes(folder, same, cpu_features="avx")[0]
    (note,) = notes(folder, "CPU : AVX2 = 1 | OPENMP = 1 | ")
    assert "GGML_LLAMAFILE: on in upstream's programs" in note
