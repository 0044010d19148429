"""matrix: the file of cells, the three formats, interruption, progress."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pyllama_mtp.cli.matrix import DEMO_REPEAT, REPEAT
from pyllama_mtp.errors import InsufficientMemoryError
from pyllama_mtp.measure.figures import base_of
from pyllama_mtp.measure.records import Writer, read_cells, read_file

from ..processes import Cli
from .conftest import SMALL


def test_table_and_cells(fake: ModuleType, cli: Cli) -> None:
    result = cli(*SMALL)
    assert result.code == 0
    cells = read_cells("matrix.jsonl")
    assert [(c.n_prompt, c.n_max, len(c.samples)) for c in cells] == [
        (64, 0, 2), (64, 2, 2), (128, 0, 2), (128, 2, 2),
    ]  # fmt: skip
    for word in ("MTP 2", "no-MTP", "1,000", "1.00x", "medians of 2 samples", "m.gguf"):
        assert word in result.out, word
    assert "samples in matrix.jsonl: 8" in result.err
    assert "folder" not in Path("matrix.jsonl").read_text(), "no path of this machine"
    assert fake.log[-1] == ("model closed",)


def test_defaults_cover_what_the_manual_promises(fake: ModuleType, cli: Cli) -> None:
    assert cli("matrix", "--model", "m.gguf").code == 0
    cells = read_cells("matrix.jsonl")
    assert {(c.n_prompt, c.n_max) for c in cells} == {
        (size, depth) for size in (512, 1024, 2048) for depth in (0, 2, 3, 6)
    }
    assert all(len(c.samples) == REPEAT and c.max_tokens == 256 for c in cells)
    assert {c.n_max for c in cells if c.adaptive} == {6}
    assert REPEAT >= 5


@pytest.mark.parametrize(
    ("options", "repeats"),
    [((), DEMO_REPEAT), (("--repeat", "3"), 3), (("--budget", "1h"), DEMO_REPEAT)],
)
def test_the_demo_model_is_repeated_more_often(
    fake: ModuleType, cli: Cli, options: tuple[str, ...], repeats: int
) -> None:
    result = cli("matrix", "--depths", "0", "--prompt-sizes", "64", *options)
    assert result.code == 0 and "left out" not in result.err
    (cell,) = read_cells("matrix.jsonl")
    assert len(cell.samples) == repeats


def test_the_demo_model_is_done_in_its_budget(
    fake: ModuleType, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pyllama_mtp.cli.matrix.DEMO_BUDGET", "0.000001s")
    assert "left out for the budget" in cli("matrix", "--depths", "0").err
    assert "left out for the budget" not in cli("matrix", "--depths", "0", "--repeat", "2").err


def test_the_states_of_the_prefill_side_by_side(fake: ModuleType, cli: Cli) -> None:
    """All rows or the last, full synchronization or K and V only."""
    options = ("--rows", "all,last", "--sync", "full,kv", "--checkpoints", "9")
    options += ("--hidden", "pre-norm", "--threads", "2")  # ratios of one thread are by CPU time
    result = cli(*SMALL, *options)
    assert result.code == 0
    found = [cell for cell in read_cells("matrix.jsonl") if cell.n_prompt == 64]
    names = ("prompt_rows", "prompt_sync", "hidden")
    settings = [(c.n_max, *(c.settings[name] for name in names)) for c in found]
    both = [(rows, sync) for rows in ("all", "last") for sync in ("full", "kv")]
    drafting = [(2, *each, "pre-norm") for each in both]
    assert settings == [(0, "last", "auto", "post-norm"), *drafting]
    assert {c.settings["checkpoints"] for c in found} == {9}
    assert [c.samples[0].prompt_sync for c in found[1:]] == ["full", "kv", "full", "kv"]
    first = "prompt 64, depth 2, rows all, sync full, repeat 1: prefill"
    assert any(first in line for line in result.err.splitlines()[:5])
    rows = [line.split() for line in result.out.splitlines() if " MTP 2 " in line][:4]
    assert [row[3:7] for row in rows] == [
        ["all", "full", "444.4", "0.44x"],
        ["all", "kv", "500.0", "0.50x"],
        ["last", "full", "800.0", "0.80x"],
        ["last", "kv", "1,000", "1.00x"],
    ]


def test_settings_by_name_are_axes(fake: ModuleType, cli: Cli) -> None:
    """Every cell is compared with the one without MTP that has its cache; rates are per cell."""
    axes = ("--axis", "cache-type-k=f16,q8_0", "--axis", "synthetic-acceptance=0.5^2,none")
    result = cli(*SMALL, "-p", "64", *axes)
    assert result.code == 0, result.err
    cells = read_cells("matrix.jsonl")
    found = [(c.n_max, c.settings["cache_type_k"], c.synthetic_acceptance) for c in cells]
    assert found == [
        *((0, "f16", None), (0, "q8_0", None)),
        *((2, kind, rates) for kind in ("f16", "q8_0") for rates in ([0.5, 0.25], None)),
    ]
    assert [base_of(cell, cells) for cell in cells[2:]] == [cells[0]] * 2 + [cells[1]] * 2
    header, *rows = (line.split() for line in result.out.splitlines() if " MTP 2" in line)
    assert " ".join(header[3:7]) == "SYNTHETIC f16 0.5^2 1,000" and len(rows) == 3
    assert result.out.count("SYNTHETIC ACCEPTANCE 0.5, 0.25") == 1
    assert any("cache type k q8_0, acceptance none" in line for line in result.err.splitlines())


def test_prompts_by_turns(fake: ModuleType, cli: Cli) -> None:
    """The first session changes from step to step; the prompt's time is the sum of its steps."""
    assert cli(*SMALL, "--repeat", "1", "-p", "64", "--prompt-step", "24").code == 0
    steps = [entry[1:] for entry in fake.log if entry[0] == "process"]
    assert steps == [(0, 25), (2, 25), (2, 49), (0, 49)], "a prompt's last token is left"
    cells = read_cells("matrix.jsonl")
    assert [c.samples[0].prefill_s for c in cells] == pytest.approx([0.064 + 0.025 + 0.049] * 2)
    assert [c.prefill_tps for c in cells] == pytest.approx([64 / 0.138] * 2)
    header = next(iter(read_file("matrix.jsonl").runs.values())).header
    assert header.plan.prompt_step == 24 and not header.plan.peers


def test_what_a_round_does_has_columns(fake: ModuleType, cli: Cli) -> None:
    result = cli(*SMALL, "--per-round", "--format", "markdown")
    (head,) = [line for line in result.out.splitlines() if "| mode" in line]
    assert head.endswith("| tokens /round | drafts /round | draft ms/round | looked up % |")
    rows = [line for line in result.out.splitlines() if "| MTP 2 |" in line]
    assert all(row.endswith("| 2.00 | 0.00 | - |") for row in rows) and len(rows) == 2


def test_several_models_are_measured_one_after_the_other(fake: ModuleType, cli: Cli) -> None:
    assert cli(*SMALL, "--model", "b.gguf").code == 0
    runs = read_file("matrix.jsonl").runs.values()
    assert [run.header.model.name for run in runs] == ["m.gguf", "b.gguf"]
    assert [len(run.measured) for run in runs] == [8, 8]


def test_json_and_markdown(fake: ModuleType, cli: Cli) -> None:
    cells = json.loads(cli(*SMALL, "--format", "json").out)
    assert [cell["n_max"] for cell in cells] == [0, 2, 0, 2]
    markdown = cli(*SMALL, "--format", "markdown").out
    assert markdown.startswith("With MTP decode is ") and "\n\n| prompt tokens | mode |" in markdown
    assert "| 128 | MTP 2 |" in markdown


def test_progress_without_a_terminal_is_one_line_per_sample(fake: ModuleType, cli: Cli) -> None:
    result = cli(*SMALL, "-p", "64", "--classes", "text,source")
    lines = result.err.splitlines()
    assert lines[0].startswith("[1/8] prompt 64 text, no MTP, repeat 1: prefill 1000.0 tok/s, dec")
    assert lines[7].startswith("[8/8] prompt 64 source, ") and ", repeat 2: prefill" in lines[7]
    assert " left" not in lines[0] and " left" not in lines[7]
    assert [c.prompt_class for c in read_cells("matrix.jsonl")] == ["text"] * 2 + ["source"] * 2


def test_ctrl_c_between_two_samples_loses_neither(
    fake: ModuleType, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal comes while the first sample of all is being written."""
    write = Writer.write

    def write_and_interrupt(self: Writer, record: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        write(self, record)

    monkeypatch.setattr(Writer, "write", write_and_interrupt)
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        result = cli(*SMALL)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, previous)
    assert result.code == 130
    assert [(c.n_prompt, c.n_max) for c in read_cells("matrix.jsonl")] == [(64, 0)]
    assert "no-MTP" in result.out
    assert fake.state["open_sessions"] == 0 and fake.log[-1] == ("model closed",)


def test_ctrl_c_before_the_first_sample(fake: ModuleType, cli: Cli) -> None:
    fake.script[0] = fake.interrupt
    result = cli(*SMALL)
    assert (result.code, result.out) == (130, "")
    assert not Path("matrix.jsonl").exists()


def test_a_failure_keeps_finished_samples(fake: ModuleType, cli: Cli) -> None:
    fake.script[6] = fake.fail
    result = cli(*SMALL)
    assert result.code == 2
    assert "pyllama-mtp: error: llama_decode failed with -3" in result.err
    assert [c.n_prompt for c in read_cells("matrix.jsonl")] == [64, 64]
    assert "MTP 2" in result.out


# -- budget ----------------------------------------------------------------------------------------


def test_what_a_budget_left_out_is_said_and_recorded(fake: ModuleType, cli: Cli) -> None:
    result = cli(*SMALL, "--budget", "0.000001s")
    assert result.code == 0
    assert "left out for the budget of 0 s: prompt 128 (2 of 2 repeats), 64 (1 of 2" in result.err
    (run,) = read_file("matrix.jsonl").runs.values()
    last = json.loads(Path("matrix.jsonl").read_text().splitlines()[-1])
    assert len(run.measured) == 2 and [last["kind"], len(last["groups"])] == ["dropped", 3]
    assert cli(*SMALL, "--resume").code == 0
    (run,) = read_file("matrix.jsonl").runs.values()
    assert len(run.measured) == 8


# -- axes ------------------------------------------------------------------------------------------


def test_a_size_too_small_for_a_question_is_refused_beforehand(fake: ModuleType, cli: Cli) -> None:
    result = cli(*SMALL, "--classes", "text,code")
    assert result.code == 2 and "64 tokens are too few for a code prompt" in result.err
    assert not Path("matrix.jsonl").exists()


def test_code_mode_asks_for_code_in_a_chat(fake: ModuleType, cli: Cli) -> None:
    options = ("--prompt-sizes", "1k", "--depths", "0", "--repeat", "1", "--output-mode", "code")
    cli("matrix", "--model", "m.gguf", *options)
    (cell,) = read_cells("matrix.jsonl")
    assert cell.max_tokens == 2048 and cell.samples[0].n_generated == 2048
    prompt = bytes([entry[1] for entry in fake.log if entry[0] == "generate"][-1])
    assert len(prompt) == 1024 and b"write a long, complete program" in prompt


def test_imposed_acceptance_is_said_everywhere(fake: ModuleType, cli: Cli) -> None:
    result = cli("matrix", "--model", "m.gguf", "--synthetic-acceptance", "0.8,0.7,0.6")
    cells = read_cells("matrix.jsonl")
    rates = [0.8, 0.7, 0.6]
    assert [(c.n_max, c.adaptive) for c in cells[:4]] == [
        (0, False), (2, False), (3, False), (3, True),
    ]  # fmt: skip
    assert [c.synthetic_acceptance for c in cells[:4]] == [None, rates[:2], rates, rates]
    assert "At the imposed acceptance, with MTP decode is" in result.out
    assert "MTP 3 SYNTHETIC" in result.out and "SYNTHETIC ACCEPTANCE 0.8, 0.7, 0.6" in result.out


def test_prompts_come_from_the_file(fake: ModuleType, cli: Cli) -> None:
    Path("p.txt").write_text("0123456789" * 50)
    cli(*SMALL, "--prompt-file", "p.txt")
    prompts = [entry[1] for entry in fake.log if entry[0] == "generate"]
    assert {token for prompt in prompts for token in prompt} == {*b"0123456789"}


def test_a_report_of_this_run_at_the_end(
    fake: ModuleType, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Plots are drawn but not rendered, which takes seconds.
    monkeypatch.setattr("pyllama_mtp.measure.page._rendered", lambda *_: b"<svg/>")
    cli(*SMALL)
    result = cli(*SMALL, "--classes", "source", "--report", "page")
    assert result.code == 0 and f"report: {Path('page', 'index.html')}" in result.err
    tables = Path("page", "tables.md").read_text()
    assert "MTP 2" in tables and "source" in tables
    assert tables.count("\n## ") == 1, "the earlier run in the same file is not in it"
    written = {path.suffix for path in Path("page").iterdir()}
    assert written == {".html", ".svg", ".png", ".md", ".csv"}
    fake.script[fake.state["generations"] + 10] = fake.interrupt
    result = cli(*SMALL, "--report", "interrupted")
    assert result.code == 130 and Path("interrupted", "index.html").is_file()


def test_a_report_that_cannot_be_made_is_refused_before_anything_is_measured(
    fake: ModuleType, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("page").write_text("")
    result = cli(*SMALL, "--report", "page")
    assert result.code == 2 and "cannot write the report to page" in result.err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = cli(*SMALL, "--report", "other")
    assert result.code == 2 and "pyllama-mtp[report]" in result.err
    assert not fake.log and not Path("matrix.jsonl").exists()


@pytest.mark.parametrize("depths", ["0", "0,2"])
def test_the_head_is_loaded_only_when_a_depth_needs_it(
    fake: ModuleType, cli: Cli, depths: str
) -> None:
    fake.state["has_mtp"] = False
    result = cli(*SMALL, "--depths", depths, "--no-output")
    assert result.code == (0 if depths == "0" else 2)
    assert not list(Path.cwd().iterdir()), "--no-output writes nothing"


def test_adaptive_depth_beside_fixed_ones(fake: ModuleType, cli: Cli) -> None:
    result = cli(*SMALL, "--depths", "0,2,auto", "--no-ngram")
    assert result.code == 0 and "MTP auto: as many drafts per round as pay" in result.out
    cells = [cell for cell in read_cells("matrix.jsonl") if cell.n_prompt == 64]
    assert [(c.n_max, c.adaptive) for c in cells] == [(0, False), (2, False), (6, True)]
    assert cells[2].settings["draft_n_max"] == "auto" and cells[2].settings["ngram"] is False
    assert "prompt 64, depth auto, repeat 1: prefill" in result.err
    assert cli(*SMALL, "--depths", "auto").code == 0


def test_nothing_measured_is_a_failure(fake: ModuleType, cli: Cli) -> None:
    fake.refuse_session[(256, 0)] = InsufficientMemoryError("needs 99 GiB")
    result = cli(*SMALL, "--depths", "0")
    assert result.code == 2 and "error: nothing was measured" in result.err
    assert "skipped: no-MTP, prompt 64: needs 99 GiB" in result.out


def test_a_size_beyond_the_context_is_refused_before_anything_runs(
    fake: ModuleType, cli: Cli
) -> None:
    result = cli(*SMALL, "--prompt-sizes", "64,5000")
    assert result.code == 2 and "5000 + 8 generated: 5008 tokens exceed the" in result.err
    assert not [entry for entry in fake.log if entry[0] == "generate"]
    assert not Path("matrix.jsonl").exists()
