"""The commands with the real library and the demo model."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from pyllama_mtp.llama import native
from pyllama_mtp.measure.figures import base_of
from pyllama_mtp.measure.records import read_cells
from pyllama_mtp.measure.verdict import slow_types, step_shares
from pyllama_mtp.models.demo import demo_path
from pyllama_mtp.models.ggufinfo import read_gguf

from ..marks import usual
from ..processes import Program, start

PROMPT = "def add(a, b):\n"


#: More threads would spin at every barrier where the cores are shared with other work.
DEMO = ("--model", str(demo_path()), "--threads", "1")


# -- generate --------------------------------------------------------------------------------------


def test_ctrl_c_keeps_the_partial_text(tmp_path: Path) -> None:
    options = ("--stats", "--max-tokens", "4000", "--ignore-eos", "--log-pairs", "p.jsonl")
    process = start("generate", *DEMO, *options, PROMPT, cwd=tmp_path)
    assert process.stdout
    first = b""
    while len(first) < 40:  # some rounds
        first += os.read(process.stdout.fileno(), 1)
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=60)
    assert process.returncode == 130, err.decode()
    assert (first + rest).endswith(b"\n")
    assert "Traceback" not in err.decode() and "per second" in err.decode()
    assert (tmp_path / "p.jsonl").read_text().startswith("{")


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    options = ("--max-tokens", "4000", "--ignore-eos")
    process = start("generate", *DEMO, *options, PROMPT, cwd=tmp_path)
    assert process.stdout and process.stderr
    os.read(process.stdout.fileno(), 1)
    process.stdout.close()
    assert process.wait(timeout=60) == 141
    assert process.stderr.read() == b""
    process.stderr.close()


def test_output_that_nothing_takes() -> None:
    with Path("/dev/full").open("wb") as full:
        process = start("--version", stdout=full)
        _, err = process.communicate(timeout=60)
    said = "pyllama-mtp: error: cannot write the output: No space left on device; free some"
    assert process.returncode == 2 and err.decode().startswith(said)


def test_logs_of_the_library_come_when_asked_for(program: Program) -> None:
    command = ("generate", *DEMO, "--draft-n-max", "0", "--max-tokens", "2")
    assert program(*command, PROMPT).stderr == b""
    assert b"pyllama_mtp.llama.native: DEBUG: " in program("-vv", *command, PROMPT).stderr


# -- matrix ----------------------------------------------------------------------------------------

SMALL = ("--prompt-sizes", "32,64", "--depths", "0,2", "--max-tokens", "8", "--repeat", "2")


@pytest.mark.parametrize("variant", usual("patched", long=["upstream"]))
def test_matrix_measures_every_cell(
    program: Program, in_process: Program, tmp_path: Path, variant: str
) -> None:
    run = program if variant == "upstream" else in_process  # which has a library
    done = run("matrix", *DEMO, "--lib", variant, *SMALL)
    cells = read_cells(tmp_path / "matrix.jsonl")
    order = [(cell.n_prompt, cell.n_max) for cell in cells]
    assert order == [(size, depth) for size in (32, 64) for depth in (0, 2)]
    info = read_gguf(demo_path())
    slow = slow_types(info, native.load()) if variant == "patched" else step_shares(info)
    for cell in cells:
        assert cell.slow_types == {kind: round(share, 4) for kind, share in slow.items()}
        assert cell.variant == variant and re.fullmatch(r"[0-9a-f]{40}|b\d+", cell.upstream_commit)
        assert [sample.n_prompt for sample in cell.samples] == [cell.n_prompt] * 2
        assert [sample.n_generated for sample in cell.samples] == [8] * 2
        assert cell.prefill_tps and cell.decode_tps and cell.elapsed_s
        assert len(cell.drafted) == len(cell.accepted) == cell.n_max
        assert cell.settings["draft_n_max"] == cell.n_max and cell.memory["weights"] > 0
        if cell.n_max:
            assert cell.drafted[0] > 0 and cell.accepted[0] <= cell.drafted[0]
    assert f"{variant} build of llama.cpp" in done.stdout.decode()


def test_several_sequences_are_an_axis(in_process: Program, tmp_path: Path) -> None:
    """Each sequence has its own text; each number of sequences has its own cell without MTP."""
    in_process(
        *("matrix", "-p", "32", "-n", "8", "--repeat", "1", *DEMO),
        *("--depths", "0,2", "--axis", "n-sequences=1,3", "--output", str(tmp_path / "m.jsonl")),
    )
    cells = read_cells(tmp_path / "m.jsonl")
    assert [(c.n_max, c.axes["n_sequences"]) for c in cells] == [(0, 1), (0, 3), (2, 1), (2, 3)]
    found = [(c.samples[0].n_prompt, c.samples[0].n_generated) for c in cells]
    assert found == [(32, 8), (96, 24)] * 2
    assert [c.rounds for c in cells[:2]] == [7, 21]
    assert [base_of(c, cells) for c in cells[2:]] == cells[:2]
    assert cells[3].drafted[0] > cells[2].drafted[0] > 0


def test_the_states_of_the_prefill(in_process: Program, tmp_path: Path) -> None:
    small = ("--prompt-sizes", "48", "--depths", "0,2", "--max-tokens", "4", "--repeat", "1")
    options = ("matrix", *DEMO, *small, "--rows", "all,last")
    in_process(*options, "--sync", "full,kv")
    cells = read_cells(tmp_path / "matrix.jsonl")
    used = [(c.settings["prompt_rows"], c.samples[0].prompt_sync) for c in cells]
    assert used[1:] == [("all", "full"), ("all", "kv"), ("last", "full"), ("last", "kv")]
    shares = [c.prompt_sync_share or 0 for c in cells[1:]]
    assert shares[1] == shares[3] == 0 and 0 < shares[0] < 1 and 0 < shares[2] < 1


# -- doctor ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["patched", "upstream"])
def test_doctor_finds_nothing_wrong(program: Program, variant: str) -> None:
    done = program("doctor", "--lib", variant)
    out = done.stdout.decode()
    assert "everything is in order" in out and "drafts accepted" in out
    assert f"{variant}, loaded from" in out
