"""matrix: the file of cells, the three formats, interruption, progress."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from pyllama_mtp import Model, Session
from pyllama_mtp.cli.matrix import DEMO_REPEAT
from pyllama_mtp.errors import FatalDecodeError, InsufficientMemoryError
from pyllama_mtp.measure.figures import base_of
from pyllama_mtp.measure.plan import REPEAT
from pyllama_mtp.measure.records import Writer, read_cells, read_file
from pyllama_mtp.models.demo import demo_path
from pyllama_mtp.models.synth import write_synthetic

from ..processes import Cli
from .conftest import SMALL, Watched, interrupt

TOO_LARGE = InsufficientMemoryError("needs 99 GiB, 1 GiB available")


def test_table_and_cells(watched: Watched, cli: Cli) -> None:
    result = cli(*SMALL)
    assert result.code == 0
    cells = read_cells("matrix.jsonl")
    assert [(c.n_prompt, c.n_max, len(c.samples)) for c in cells] == [
        (24, 0, 2), (24, 2, 2), (48, 0, 2), (48, 2, 2),
    ]  # fmt: skip
    for word in ("MTP 2", "no-MTP", "1.00x", "medians of 2 samples", "m.gguf"):
        assert word in result.out, word
    assert "samples in matrix.jsonl: 8" in result.err
    lines = result.err.splitlines()
    assert lines[0].startswith("[1/8] prompt 24, no MTP, repeat 1: prefill ")
    assert lines[7].startswith("[8/8] prompt 48, ") and ", repeat 2: prefill" in lines[7]
    assert "folder" not in Path("matrix.jsonl").read_text(), "no path of this machine"


def test_the_demo_model_is_repeated_more_often_within_its_budget(
    watched: Watched, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A number of repeats or a budget that is given counts in its place."""
    small = ("matrix", "--depths", "0", "--prompt-sizes", "8", "-n", "1", "--threads", "1")
    assert DEMO_REPEAT > 2 * REPEAT
    monkeypatch.setattr("pyllama_mtp.cli.matrix.DEMO_REPEAT", 4)
    result = cli(*small)
    assert result.code == 0 and "left out" not in result.err
    assert len(read_cells("matrix.jsonl")[0].samples) == 4
    monkeypatch.setattr("pyllama_mtp.cli.matrix.DEMO_BUDGET", 1e-6)
    assert " left out " in cli(*small).err
    for given in (("--repeat", "2"), ("--budget", "1h")):
        assert " left out " not in cli(*small, *given).err


def test_settings_by_name_are_axes(watched: Watched, cli: Cli) -> None:
    """Every cell is compared with the one without MTP that has its cache; rates are per cell."""
    axes = ("--axis", "cache-type-k=f16,q8_0", "--axis", "synthetic-acceptance=0.5^2,none")
    result = cli(*SMALL, "-p", "24", *axes)
    assert result.code == 0, result.err
    cells = read_cells("matrix.jsonl")
    found = [(c.n_max, c.settings["cache_type_k"], c.synthetic_acceptance) for c in cells]
    assert found == [
        *((0, "f16", None), (0, "q8_0", None)),
        *((2, kind, rates) for kind in ("f16", "q8_0") for rates in ([0.5, 0.25], None)),
    ]
    assert [base_of(cell, cells) for cell in cells[2:]] == [cells[0]] * 2 + [cells[1]] * 2
    assert result.out.count("SYNTHETIC ACCEPTANCE 0.5, 0.25") == 1
    assert any("cache type k q8_0, acceptance none" in line for line in result.err.splitlines())


def test_json_and_markdown(watched: Watched, cli: Cli) -> None:
    options = ("-p", "24", "--repeat", "1", "--no-output")
    cells = json.loads(cli(*SMALL, *options, "--format", "json").out)
    assert [cell["n_max"] for cell in cells] == [0, 2]
    markdown = cli(*SMALL, *options, "--format", "markdown", "--per-round").out
    assert "\n\n| prompt tokens | mode |" in markdown and "| 24 | MTP 2 |" in markdown
    assert "| mean acceptance length | drafts /round | draft ms/round | looked up % |" in markdown
    pasted = cli(*SMALL, *options, "--format", "llama-bench").out
    rows = [[word.strip() for word in line.split("|")[1:-1]] for line in pasted.splitlines()]
    assert [row[-2] for row in rows[2:-2]] == ["pp24", "tg6", "pp24+mtp2", "tg6+mtp2"]
    with Model(demo_path()) as model:
        assert rows[2][:2] == [model.description, f"{model.info.weight_bytes / 2**20:.2f} MiB"]
        assert rows[2][2:5] == [f"{model.n_params / 1e6:.2f} M", "CPU", "1"]
    assert [path.name for path in Path.cwd().iterdir()] == ["folder"], "--no-output writes nothing"


def test_ctrl_c_while_a_sample_is_written(
    watched: Watched, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(self: Writer, record: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Writer, "write", write)
    assert cli(*SMALL).code == 130
    assert watched.n_open == 0


def test_ctrl_c_before_the_first_sample(watched: Watched, cli: Cli) -> None:
    watched.script[0] = interrupt
    result = cli(*SMALL)
    assert (result.code, result.out) == (130, "")
    assert not Path("matrix.jsonl").exists()


def test_a_failure_keeps_finished_samples(watched: Watched, cli: Cli) -> None:
    def fail(generation: object) -> None:
        raise FatalDecodeError("llama_decode failed with -3", -3)

    watched.script[6] = fail
    result = cli(*SMALL)
    assert result.code == 2
    assert "pyllama-mtp: error: llama_decode failed with -3" in result.err
    assert [c.n_prompt for c in read_cells("matrix.jsonl")] == [24, 24]
    assert "MTP 2" in result.out


@pytest.mark.usefixtures("nothing_loads")
def test_no_model_is_loaded_if_one_cannot_hold_a_size(cli: Cli, tmp_path: Path) -> None:
    write_synthetic(tmp_path / "short.gguf", "tiny", "f16", n_ctx_train=512)
    result = cli(*SMALL, "--model", "short.gguf", "--prompt-sizes", "24,600")
    assert result.code == 2 and "606 tokens exceed the model's context, 512" in result.err


def test_what_a_budget_left_out_is_said_and_can_be_measured(watched: Watched, cli: Cli) -> None:
    result = cli(*SMALL, "--budget", "0.000001s")
    assert result.code == 0
    assert "the budget of 0 s left out 6 of 8 samples; --resume with more" in result.err
    (run,) = read_file("matrix.jsonl").runs.values()
    assert len(run.measured) == 2
    assert cli(*SMALL, "--resume").code == 0
    (run,) = read_file("matrix.jsonl").runs.values()
    assert len(run.measured) == 8


def test_prompts_come_from_the_file(watched: Watched, cli: Cli, demo: Model) -> None:
    Path("p.txt").write_text("0123456789" * 50)
    cli(*SMALL, "--prompt-file", "p.txt", "--repeat", "1")
    tokens = {token for prompt, _ in watched.of("generate") for token in prompt}
    assert {*demo.detokenize(sorted(tokens))} == {*"0123456789"}


def test_a_report_of_this_run_at_the_end(
    watched: Watched, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Drawing takes seconds.
    monkeypatch.setattr("pyllama_mtp.measure.page.picture", lambda *_: b"<svg/>")
    small = (*SMALL, "-p", "24", "--repeat", "1")
    cli(*small)
    result = cli(*small, "--classes", "source", "--report", "page")
    assert result.code == 0 and f"report: {Path('page', 'index.html')}" in result.err
    tables = Path("page", "tables.md").read_text()
    assert "MTP 2" in tables and "source" in tables
    assert tables.count("\n## ") == 1, "the earlier run in the same file is not in it"
    written = {path.suffix for path in Path("page").iterdir()}
    assert written == {".html", ".svg", ".md", ".csv"}
    watched.script[watched.n_generations + 6] = interrupt
    result = cli(*small, "--repeat", "2", "--report", "interrupted")
    assert result.code == 130 and Path("interrupted", "index.html").is_file()


def test_what_cannot_end_well_is_refused_before_anything_is_measured(
    watched: Watched, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("page").write_text("")
    monkeypatch.setattr(Session, "generate", None)
    for options, message in (
        (("--report", "page"), "cannot write the report to page"),
        (("--classes", "text,code"), "24 tokens are too few for a code prompt"),
        (("--prompt-sizes", "64,5000"), "5000 + 6 generated: 5006 tokens exceed the"),
    ):
        result = cli(*SMALL, *options)
        assert result.code == 2 and message in result.err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = cli(*SMALL, "--report", "other")
    assert result.code == 2 and "pyllama-mtp[report]" in result.err
    assert not Path("matrix.jsonl").exists()


def test_nothing_measured_is_a_failure(watched: Watched, cli: Cli) -> None:
    watched.refused[0] = TOO_LARGE
    result = cli(*SMALL, "--depths", "0")
    assert result.code == 2 and "error: nothing was measured" in result.err
    assert "skipped: no-MTP, prompt 24: needs 99 GiB" in result.out
