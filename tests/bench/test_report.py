"""Tables and files: what they hold, and that they name no folder."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import memory
import pytest
from benchkit import results
from benchkit.model import Dimensions
from benchkit.ours import DriverError, parse_status
from benchkit.plan import Plan

PLAN = Plan(Path("/home/somebody/models/synth.gguf"), threads=2)
MIB = 2**20
MACHINE = {"cpu": "Some CPU", "cores": 2, "memory_bytes": 2**34, "devices": [], "os": "Linux 6"}
BUILD = {"upstream_commit": "0c1e57098bba", "compiler": "GNU 12", "cpu_features": "avx2"}
BUILD |= {"variant": "patched", "series": "7ffaa8541e19"}


def test_files_hold_the_raw_samples_and_no_folder(tmp_path: Path) -> None:
    given = {**results.header(MACHINE, BUILD), "plan": PLAN.to_dict(), "samples": [200.5, 201.5]}
    paths = results.write(given, "\n".join(results.header_lines(given)), "name", tmp_path)
    assert [path.name for path in paths] == ["name.json", "name.md"]
    read = json.loads(paths[0].read_text())
    assert read["samples"] == [200.5, 201.5]
    assert "/home/" not in paths[0].read_text() + paths[1].read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["name.json", "name.md"]


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["/a/bench/memory.py"], "python bench/memory.py"),
        (["memory.py", "--model", "/a/b/m.gguf"], "python bench/memory.py --model m.gguf"),
        (["memory.py", "--model=/a/b/m.gguf"], "python bench/memory.py --model=m.gguf"),
        (["memory.py", "--rates", "0.8,0.7"], "python bench/memory.py --rates 0.8,0.7"),
    ],
)
def test_the_command_is_recorded_without_folders(argv: list[str], expected: str) -> None:
    assert results.command_line(argv) == expected


def test_status_is_read_in_bytes() -> None:
    lines = ["Name:\tpython", "VmHWM:\t  2048 kB", "RssAnon:\t    1024 kB", "Threads:\t1"]
    assert parse_status(lines) == {"VmHWM": 2**21, "RssAnon": 2**20}


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


def test_output_rows_of_mtp() -> None:
    """Logits: 3 more rows. With the head apart one of its own, and hidden rows of a batch, too."""
    size = Dimensions(n_vocab=1000, n_embd=10)
    assert memory.output_rows(size, 512, 3, apart=True) == 4 * (513 * 10 + 4 * 1000)
    assert memory.output_rows(size, 512, 3, apart=False) == 4 * 3 * 1000


def test_the_peak_is_the_programs_own() -> None:
    """Not that of the process that starts it, which holds more."""
    mine = bytearray(200 * MIB)
    mine[::4096] = b"x" * len(mine[::4096])
    code = "import time; kept = b'x' * (60 << 20); time.sleep(0.3); del kept; time.sleep(0.2)"
    assert 60 * MIB < memory.peak([sys.executable, "-c", code]) < 120 * MIB
    with pytest.raises(DriverError, match=r"failed \(3\)"):
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
