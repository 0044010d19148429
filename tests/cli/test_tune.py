"""``pyllama-mtp tune`` with the real library and the demo model."""

from __future__ import annotations

import json

from ..processes import Program

QUICK = ("--limit", "2", "--prompt-size", "64", "--repeat", "2", "--threads", "1", "--n-ctx", "256")
#: Room for another size of n_ubatch.
LONGER = (*QUICK, "--n-ctx", "512", "--n-ubatch", "128")


def test_table_profile_and_recommendation(in_process: Program) -> None:
    out = in_process("tune", *QUICK, "--profile").stdout.decode()
    lines = out.splitlines()
    assert lines[0].startswith("| depth | draft | verify | round | break-even % |")
    assert [line.split("|")[1].strip() for line in lines[2:5]] == ["0 (no MTP)", "1", "2"]
    assert "draft_n_max=" in out or "no verdict" in out
    assert "| delta net |" in out and "| the prompt itself |" in out
    assert "Not compared: --n-ubatch" in out, "256 tokens have no room for it"


def test_json_has_the_costs_in_seconds(in_process: Program) -> None:
    costs = json.loads(in_process("tune", *LONGER, "--limit", "1", "--profile", "--json").stdout)
    assert len(costs["verify"]) == 3 and len(costs["draft"]) == 2
    assert 0 < costs["verify"][1] < 1
    assert {name: one["n_prompt"] for name, one in costs["profile"].items()} == {"0": 64, "1": 64}
    ubatches = costs["n_ubatch"]
    assert {*ubatches["seconds"]} == {"128", "256"} and ubatches["best"] in (128, 256)


def test_a_context_that_is_too_short(in_process: Program) -> None:
    done = in_process("tune", *QUICK, "--prompt-size", "250", "--n-ctx", "256", code=2)
    assert b"exceed the context asked for, 256" in done.stderr
