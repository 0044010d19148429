"""``pyllama-mtp tune`` with the real library and the demo model."""

from __future__ import annotations

import json
import re
from pathlib import Path

from pyllama_mtp.models.synth import write_synthetic

from ..processes import Program

QUICK = ("--limit", "2", "--prompt-size", "64", "--repeat", "2", "--threads", "1", "--n-ctx", "256")
#: Room for two more sizes of n_ubatch.
LONGER = (*QUICK, "--n-ctx", "512", "--n-ubatch", "128")


def test_table_profile_and_recommendation(program: Program) -> None:
    done = program("tune", *LONGER, "--profile")
    out = done.stdout.decode()
    lines = out.splitlines()
    assert lines[0].startswith("| depth | draft | verify | round | break-even % |")
    assert [line.split("|")[1].strip() for line in lines[2:5]] == ["0 (no MTP)", "1", "2"]
    assert "draft_n_max=" in out
    assert "|  | no MTP: % | ms per token | MTP: % | ms per token |" in out
    assert "| delta net |" in out and "| the prompt itself |" in out
    assert "takes somewhat longer" in " ".join(out.split())
    ubatch = (
        r"Tokens per second of 512 by --n-ubatch: 128: \d+ \(1\.00x\), 256: \d+ \(\d\.\d\dx\), "
        r"512: \d+ \(\d\.\d\dx\)\. .*--n-ubatch (128|256|512)\b"
    )
    assert re.search(ubatch, out), out


def test_json_has_the_costs_in_seconds(program: Program) -> None:
    costs = json.loads(program("tune", *LONGER, "--profile", "--json").stdout)
    assert len(costs["verify"]) == 4 and len(costs["draft"]) == 3
    assert 0 < costs["verify"][1] < 1
    profiled = {name: one["n_prompt"] for name, one in costs["profile"].items()}
    assert profiled == dict.fromkeys(("no MTP", "MTP"), 64)
    ubatches = costs["n_ubatch"]
    rounds = {n: len(seconds) for n, seconds in ubatches["seconds"].items()}
    assert rounds == {"128": 3, "256": 3, "512": 3} and ubatches["best"] in (128, 256, 512)
    assert (ubatches["n_prompt"], ubatches["usual"]) == (512, 128)


def test_a_context_that_is_too_short(program: Program) -> None:
    done = program("tune", *QUICK, "--prompt-size", "250", "--n-ctx", "256", code=2)
    assert b"longer context" in done.stderr


def test_what_the_draft_head_could_be(program: Program, tmp_path: Path) -> None:
    file = write_synthetic(tmp_path / "m.gguf", "tiny", "q8_0", n_vocab=70_000)
    done = program("tune", "--model", file, *QUICK)
    out = done.stdout.decode()
    assert "Not compared: --n-ubatch" in out, "256 tokens have no room for it"
    lines = out.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("| draft vocabulary"))
    shown = {tuple(cell.strip() for cell in line.split("|")[1:3]) for line in lines[start + 2 :]}
    sizes = (8192, 16384, 32768, 65536, 70_000)
    assert {(str(size), kind) for size in sizes for kind in ("file", "q4_0")} <= shown
    assert '"auto" has taken' in lines[-1]
