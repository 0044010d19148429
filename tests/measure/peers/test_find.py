"""Finding other programs, and saying how to get those that are missing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from pyllama_mtp.measure.peers import PeerError, find
from pyllama_mtp.measure.records import Build


def test_one_of_the_folder_of_the_environment(peers: Any) -> None:
    found = find("llama-server")
    assert found.command == (str(peers.folder / "llama-server"),)
    assert found.build == Build("llama-server", "0.6.0-dev", "0c1e570", "", "CPU")


def test_the_folder_given_comes_first_path_last(
    peers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    there = Path(shutil.copy(peers.folder / "llama-bench", tmp_path / "bin"))
    assert find("llama-bench", str(tmp_path)).command == (str(there),)
    monkeypatch.setenv("PATH", str(there.parent))
    assert find("llama-bench").command == (str(peers.folder / "llama-bench"),)
    monkeypatch.delenv("PYLLAMA_MTP_PEERS")
    assert find("llama-bench").command == (str(there),)


def test_those_of_the_checkout_say_what_they_are(peers: Any, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    shutil.copy(peers.folder / "llama-bench", tmp_path / "bin")
    info = {"upstream_commit": "0c1e57098bba", "series": "ab12"}
    (tmp_path / "peers.json").write_text(json.dumps(info))
    (tmp_path / "request.json").write_text(json.dumps({"defines": []}))
    found = find("llama-bench", str(tmp_path)).build
    assert found == Build("llama-bench", "upstream", "0c1e57098bba", "ab12", "CPU")


@pytest.mark.parametrize("name", ["llama-server", "llama-bench"])
def test_one_that_is_not_there(no_peers: None, name: str) -> None:
    with pytest.raises(PeerError, match=f"{name} is not installed: `python bench/peers.py`") as why:
        find(name)
    assert "PYLLAMA_MTP_PEERS" in str(why.value)


@pytest.mark.parametrize(
    ("does", "message"),
    [
        ("echo hello", "does not say its version as llama-server does: 'hello'"),
        ("echo no libggml.so >&2; exit 127", r"llama-server failed \(127\): no libggml.so"),
    ],
)
def test_one_that_is_another_program_or_does_not_start(peers: Any, does: str, message: str) -> None:
    (peers.folder / "llama-server").write_text(f"#!/bin/sh\n{does}\n")
    with pytest.raises(PeerError, match=message):
        find("llama-server")


def test_the_backend_is_what_computes(peers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_MODE", "gpu")
    assert find("llama-server").build.backend == "CUDA"
    assert find("llama-server", gpu=False).build.backend == "CPU"
