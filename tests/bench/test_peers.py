"""What is known about a build of upstream's programs. Nothing is built here."""

from __future__ import annotations

import json
from pathlib import Path

import peers
import pytest

INFO = {"upstream_commit": "0c1e", "compiler": "GNU 12", "cpu_features": "avx2", "series": "ef"}
INFO |= {"build_type": "Release"}
BUILT = {"GGML_LLAMAFILE": True, "GGML_OPENMP": True, "GGML_CPU_REPACK": False}


def test_a_build_is_current_if_it_is_whole_and_of_this_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "series_stamp", lambda: "ef")
    (tmp_path / "bin").mkdir()
    for name in peers.PROGRAMS:
        (tmp_path / "bin" / name).touch(mode=0o755)
    (tmp_path / "peers.json").write_text(json.dumps({**INFO, "ggml": {}}))
    assert peers.built(tmp_path).missing == list(peers.PROGRAMS), "it is under way"
    request = {"defines": ["GGML_OPENMP=OFF"], "recipe": peers.recipe()}
    (tmp_path / "request.json").write_text(json.dumps(request))
    found = peers.built(tmp_path)
    assert not found.missing and "GGML_OPENMP=OFF" in peers.report(found)
    assert peers.is_current(found, ["GGML_OPENMP=OFF"]) and not peers.is_current(found, [])
    monkeypatch.setattr(peers, "recipe", lambda: "other CMake files")
    assert not peers.is_current(found, ["GGML_OPENMP=OFF"])
    (tmp_path / "bin" / "llama-server").unlink()
    assert peers.built(tmp_path).missing == ["llama-server"]


def test_builds_that_differ_are_noted(tmp_path: Path) -> None:
    build = peers.Peers(tmp_path, {}, {**INFO, "ggml": BUILT})
    same = "CPU : AVX2 = 1 | LLAMAFILE = 1 | OPENMP = 1 | "
    assert peers.differences(build, INFO, same) == []
    assert "cpu_features" in peers.differences(build, {**INFO, "cpu_features": "avx"}, same)[0]
    (note,) = peers.differences(build, INFO, "CPU : AVX2 = 1 | OPENMP = 1 | ")
    assert "GGML_LLAMAFILE: on in upstream's programs" in note
