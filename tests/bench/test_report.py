"""Tables and files: what they hold, and that they name no folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import memory
import pytest
from benchkit import report, results
from benchkit.measures import MEASURES, summarize
from benchkit.model import Dimensions
from benchkit.ours import parse_status
from benchkit.plan import Plan
from benchkit.sample import Sample

PLAN = Plan(Path("/home/somebody/models/synth.gguf"), threads=2)
MACHINE = {"cpu": "Some CPU", "cores": 2, "memory_bytes": 2**34, "devices": [], "os": "Linux 6"}
BUILD = {"upstream_commit": "0c1e57098bba", "compiler": "GNU 12", "cpu_features": "avx2"}
BUILD |= {"variant": "patched", "series": "7ffaa8541e19"}


def result() -> dict[str, Any]:
    """A result with two rounds of everything."""
    plain = [Sample(200.0, 20.0, 256, 192), Sample(210.0, 21.0, 256, 192)]
    drafted = [Sample(190.0, 30.0, 256, 192, 177, 132, 60)] * 2
    measured = {
        m.name: summarize(
            m, PLAN, dict.fromkeys(("theirs", "ours"), drafted if m.name == "mtp" else plain)
        )
        for m in MEASURES
    }
    return {
        **results.header(MACHINE, BUILD),
        "plan": PLAN.to_dict(),
        "rounds": {"done": 2, "planned": 5},
        "notes": ["a note"],
        "measures": measured,
    }


def test_the_table_has_every_comparison() -> None:
    lines = report.table(result()["measures"])
    first = [line.split("|")[1].strip() for line in lines[2:]]
    assert first[:3] == ["plain prefill, tok/s", "plain decode, tok/s", "draft-MTP decode, tok/s"]
    assert first[3:] == ["... at equal acceptance", "MTP prefill, tok/s"]
    assert "205.0 (200.0-210.0)" in lines[2]
    assert "1.000" in lines[2]
    assert len({len(line) for line in lines}) == 1


def test_a_side_without_samples_is_a_dash() -> None:
    summary = summarize(MEASURES[0], PLAN, {"theirs": [], "ours": [Sample(9.0, None, 1, 0)]})
    row = report.table({"prefill": summary})[-1]
    assert [cell.strip() for cell in row.split("|")[3:7]] == ["-", "9.0 (9.0-9.0)", "-", "-"]


def test_the_report_says_how_it_was_measured() -> None:
    text = report.render(result())
    assert "3.200 tokens per round over 120 rounds" in text
    assert "- Rounds: 2 of 5, interleaved" in text
    assert "- Note: a note" in text
    assert "0.84, 0.76, 0.67" in text
    assert "times 3.27" in text


def test_files_hold_the_raw_samples_and_no_folder(tmp_path: Path) -> None:
    given = result()
    paths = results.write(given, report.render(given), "name", tmp_path)
    assert [path.name for path in paths] == ["name.json", "name.md"]
    read = json.loads(paths[0].read_text())
    assert len(read["measures"]["decode"]["samples"]["ours"]) == 2
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
    on |= {"draft_context": 40, "draft_compute": 60, "hidden_rows": 9}
    parts = memory.explain(on, off, rows=7, graph_objects=8)
    assert parts["draft_cache"] == 40
    assert parts["rollback_states"] == 30
    assert parts["target_compute"] == 5
    assert parts["hidden_rows"] == 9
    assert parts["not_explained"] == 200 - (40 + 30 + 60 + 5 + 9 + 7 + 8)


def test_output_rows_of_mtp() -> None:
    """Hidden rows: a batch of the target's, one draft row. Logits: 3 more rows, one draft row."""
    size = Dimensions(n_vocab=1000, n_embd=10)
    assert memory.output_rows(size, 512, 3, taps=False) == 4 * (513 * 10 + 4 * 1000)
    assert memory.output_rows(size, 512, 3, taps=True) == 4 * 4 * 1000
