"""``pyllama-mtp tune`` with the real library and the demo model."""

from __future__ import annotations

import json

from ..processes import Program

QUICK = ("--limit", "2", "--prompt-size", "64", "--repeat", "2", "--threads", "1", "--n-ctx", "256")


def test_table_and_recommendation(in_process: Program) -> None:
    out = in_process("tune", *QUICK).stdout.decode()
    lines = out.splitlines()
    assert lines[0].startswith("| depth | draft | verify | round | break-even % |")
    assert [line.split("|")[1].strip() for line in lines[2:5]] == ["0 (no MTP)", "1", "2"]
    assert "draft_n_max=" in out or "no verdict" in out


def test_json_has_the_costs_in_seconds(in_process: Program) -> None:
    costs = json.loads(in_process("tune", *QUICK, "--limit", "1", "--json").stdout)
    assert len(costs["verify"]) == 3 and len(costs["draft"]) == 2
    assert 0 < costs["verify"][1] < 1
