"""Tables and files: what they hold, and that they name no folder."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import memory
import pytest
from benchkit import results

from pyllama_mtp.measure.peers import PeerError
from pyllama_mtp.models.ggufinfo import read_gguf

MIB = 2**20
BUILD = {"upstream_commit": "0c1e57098bba", "compiler": "GNU 12", "cpu_features": "avx2"}
BUILD |= {"variant": "patched", "series": "7ffaa8541e19"}


def test_files_hold_the_raw_samples_and_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["/home/somebody/memory.py", "--model", "/home/m.gguf"])
    given = {**results.header(BUILD), "samples": [200.5, 201.5]}
    results.write(given, "\n".join(results.header_lines(given)), "name")
    found = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert sorted(found) == ["name.json", "name.md"]
    assert json.loads(found["name.json"])["samples"] == [200.5, 201.5]
    for text in found.values():
        assert "bench/memory.py --model m.gguf" in text and "/home/" not in text


def test_the_difference_in_memory_is_taken_apart() -> None:
    off = {"peak_rss": 1000, "target_context": 100, "target_compute": 50}
    off |= {"draft_context": 0, "draft_compute": 0}
    on = {"peak_rss": 1200, "target_context": 130, "target_compute": 55}
    on |= {"draft_context": 40, "draft_compute": 60}
    parts = memory.explain(on, off, rows=7, graph_objects=8)
    assert parts["draft_context"] == 40
    assert parts["target_context"] == 30
    assert parts["target_compute"] == 5
    assert parts["not_explained"] == 200 - (40 + 30 + 60 + 5 + 7 + 8)


def test_output_rows_of_mtp(demo_file: Path) -> None:
    """Logits: 3 more rows. With the head apart one of its own, and hidden rows of a batch, too."""
    size = dataclasses.replace(read_gguf(demo_file), n_vocab=1000, n_embd=10)
    assert memory.output_rows(size, 512, 3, apart=True) == 4 * (513 * 10 + 4 * 1000)
    assert memory.output_rows(size, 512, 3, apart=False) == 4 * 3 * 1000


def test_the_peak_is_the_programs_own() -> None:
    """Not that of the process that starts it, which holds more."""
    mine = bytearray(200 * MIB)
    mine[::4096] = b"x" * len(mine[::4096])
    code = "import time; kept = b'x' * (60 << 20); time.sleep(0.3); del kept; time.sleep(0.2)"
    assert 60 * MIB < memory.peak([sys.executable, "-c", code]) < 120 * MIB
    with pytest.raises(PeerError, match=r"failed \(3\)"):
        memory.peak([sys.executable, "-c", "raise SystemExit(3)"])


def test_memory_is_shown_beside_that_of_llama_bench() -> None:
    def given(peak: int) -> dict[str, int]:
        return {"peak_rss": peak * MIB, "before_the_model": 32 * MIB}

    middle = {memory.OFF: given(1040), memory.ON: given(1100)}
    result = {"bytes": middle, "difference": {"peak_rss": 60 * MIB}, "llama_bench": 1000 * MIB}
    lines = "\n".join(memory.tables(result))
    assert "llama-bench: peak 1000.0 MiB; above it: MTP off +40.0, MTP on +100.0 MiB" in lines
    assert lines.count("Python and the libraries are 32.0.") == 1
    assert "llama-bench" not in "\n".join(memory.tables({**result, "llama_bench": None}))


def test_dry_run(
    demo_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Processes of their own, which say what they took."""
    monkeypatch.setattr(memory, "synthetic", lambda shape: demo_file)
    assert memory.main(["--dry-run", "--model", str(demo_file), "--threads", "1"]) == 0
    lines = capsys.readouterr().out.partition("| MTP on minus")[0].splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if "." in line]
    figures = {name: [*map(float, row)] for name, *row in rows}
    off, loaded, on = figures["peak rss"]
    assert 0 < figures["before the model"][0] < off and loaded > 0 and on > 0
    assert figures["target context"][2] > figures["target context"][0]
