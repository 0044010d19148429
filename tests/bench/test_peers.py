"""What is known about a build of upstream's programs. Nothing is built here."""

from __future__ import annotations

import json
from pathlib import Path

import peers
import pytest

INFO = {"upstream_commit": "0c1e", "compiler": "GNU 12", "cpu_features": "avx2", "series": "ef"}
INFO |= {"build_type": "Release", "ggml": {"GGML_OPENMP": True, "GGML_CUDA": False}}


def test_a_build_is_current_if_it_is_whole_and_of_this_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    defines, wanted = ["GGML_OPENMP=OFF"], peers.request(["GGML_OPENMP=OFF"])
    (tmp_path / "bin").mkdir()
    for name in peers.PROGRAMS:
        (tmp_path / "bin" / name).touch(mode=0o755)
    (tmp_path / "peers.json").write_text(json.dumps(INFO))
    assert not peers.description(tmp_path), "it is under way"
    (tmp_path / "request.json").write_text(json.dumps(wanted))
    assert peers.is_current(tmp_path, defines) and not peers.is_current(tmp_path, [])
    monkeypatch.setattr(peers, "request", lambda _: {**wanted, "recipe": "other CMake files"})
    assert not peers.is_current(tmp_path, defines)
    (tmp_path / "bin" / "llama-server").unlink()
    assert peers.missing(tmp_path) == ["llama-server"]


def test_the_report_says_how_the_programs_are_built_and_what_differs(tmp_path: Path) -> None:
    (tmp_path / "peers.json").write_text(json.dumps(INFO))
    (tmp_path / "request.json").write_text(json.dumps({"defines": ["GGML_OPENMP=OFF"]}))
    same = peers.report(tmp_path, INFO)
    assert "not built: llama-bench, llama-server" in same and "another" not in same
    assert '"GGML_OPENMP=OFF"' in same and '"GGML_CUDA": false' in same
    assert "another cpu_features: avx" in peers.report(tmp_path, {**INFO, "cpu_features": "avx"})
