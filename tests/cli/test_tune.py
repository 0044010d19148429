"""``pyllama-mtp tune`` with the real library and the demo model."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

from pyllama_mtp.models.synth import write_synthetic

Program = Callable[..., "subprocess.CompletedProcess[bytes]"]
QUICK = ("--limit", "2", "--prompt-size", "64", "--repeat", "2", "--threads", "1", "--n-ctx", "256")
#: Room for two more sizes of n_ubatch.
LONGER = (*QUICK, "--n-ctx", "512", "--n-ubatch", "128")


def test_table_and_recommendation(program: Program) -> None:
    done = program("tune", *QUICK)
    assert done.returncode == 0, done.stderr.decode()
    lines = done.stdout.decode().splitlines()
    assert lines[0].startswith("| depth | draft | verify | round | break-even % |")
    assert [line.split("|")[1].strip() for line in lines[2:5]] == ["0 (no MTP)", "1", "2"]
    assert "draft_n_max=" in done.stdout.decode()
    assert "Not compared: --n-ubatch" in done.stdout.decode(), "256 tokens have no room for it"


def test_json_has_the_costs_in_seconds(program: Program) -> None:
    done = program("tune", *QUICK, "--json")
    costs = json.loads(done.stdout)
    assert len(costs["verify"]) == 4 and len(costs["draft"]) == 3
    assert 0 < costs["verify"][1] < 1


def test_a_context_that_is_too_short(program: Program) -> None:
    done = program("tune", *QUICK, "--prompt-size", "250", "--n-ctx", "256")
    assert done.returncode == 2 and b"longer context" in done.stderr


def test_what_the_draft_head_could_be(program: Program, tmp_path: Path) -> None:
    file = write_synthetic(tmp_path / "m.gguf", "tiny", "q8_0", n_vocab=70_000)
    done = program("tune", "--model", str(file), *QUICK)
    assert done.returncode == 0, done.stderr.decode()
    lines = done.stdout.decode().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("| draft vocabulary"))
    shown = {tuple(cell.strip() for cell in line.split("|")[1:3]) for line in lines[start + 2 :]}
    sizes = (8192, 16384, 32768, 65536, 70_000)
    assert {(str(size), kind) for size in sizes for kind in ("file", "q4_0")} <= shown
    assert '"auto" has taken' in lines[-1]


def test_where_the_time_of_the_prompt_goes(program: Program) -> None:
    done = program("tune", *QUICK, "--profile")
    assert done.returncode == 0, done.stderr.decode()
    out = done.stdout.decode()
    assert "|  | no MTP: % | ms per token | MTP: % | ms per token |" in out
    assert "| delta net |" in out and "| the prompt itself |" in out
    assert "takes somewhat longer" in " ".join(out.split())
    costs = json.loads(program("tune", *QUICK, "--profile", "--json").stdout)
    assert {name: one["n_prompt"] for name, one in costs["profile"].items()} == {
        **{"no MTP": 64, "MTP": 64}
    }


def test_which_ubatch_is_the_fastest(program: Program) -> None:
    done = program("tune", *LONGER)
    assert done.returncode == 0, done.stderr.decode()
    found = re.search(
        r"Tokens per second of 512 by --n-ubatch: 128: \d+ \(1\.00x\), 256: \d+ \(\d\.\d\dx\), "
        r"512: \d+ \(\d\.\d\dx\)\. .*--n-ubatch (128|256|512)\b",
        done.stdout.decode(),
    )
    assert found, done.stdout.decode()
    ubatches = json.loads(program("tune", *LONGER, "--json").stdout)["n_ubatch"]
    rounds = {n: len(seconds) for n, seconds in ubatches["seconds"].items()}
    assert rounds == {"128": 3, "256": 3, "512": 3} and ubatches["best"] in (128, 256, 512)
    assert (ubatches["n_prompt"], ubatches["usual"]) == (512, 128)
