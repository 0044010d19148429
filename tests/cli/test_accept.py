"""``pyllama-mtp accept`` with the real library and the demo model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pyllama_mtp import Model, Session, Settings
from pyllama_mtp.measure.figures import Cell
from pyllama_mtp.measure.prompts import demo_prompts
from pyllama_mtp.measure.records import read_cells
from pyllama_mtp.measure.worth import costs_of, doubt

from ..processes import Cli, Program

SHORT = ("accept", "--threads", "1", "--draft-n-max", "3", "--max-tokens", "48")
QUICK = (*SHORT, "--context-lengths", "none")


def worths(cells: list[Cell]) -> list[str]:
    """What is said of the costs at each size: a busy machine's samples may contradict each other,
    and these have no table."""
    sizes = {cell.n_prompt for cell in cells}
    costs = [costs_of(cell for cell in cells if cell.n_prompt == size) for size in sizes]
    return [doubt(one) or "break-even" for one in costs if one]


def test_rates_are_those_of_the_pairs(in_process: Program, demo: Model) -> None:
    """Of the first prompt of a class, counted from the pairs that a generation logs."""
    options = ("--classes", "code", "--prompts-per-class", "1", "--format", "json")
    (row,) = json.loads(in_process(*QUICK, *options).stdout)
    prompt = next(one for one in demo_prompts() if one.kind == "code")
    with Session(demo, Settings(n_ctx=1024, draft_n_max=3, n_threads=1)) as session:
        generation = session.generate(prompt.tokens(demo), max_tokens=48, log_pairs=True).run()
    pairs = generation.telemetry.pairs or []
    for position, rate in enumerate(row["conditional"], start=1):
        judged = [pair for pair in pairs if pair.position == position]
        held = sum(pair.drafted == pair.actual for pair in judged)
        assert rate[0] == pytest.approx(held / len(judged), abs=1 / len(judged))


@pytest.mark.long
def test_a_whole_run_is_written_and_shown_again(in_process: Program, tmp_path: Path) -> None:
    options = ("--prompts-per-class", "3", "--classes", "code,thinking", "--output", "run.jsonl")
    lengths = ("--context-lengths", "300,200", "--context-prompts", "1")
    done = in_process(*SHORT, *options, *lengths, "--format", "markdown")
    cells = read_cells(tmp_path / "run.jsonl")
    measured = {(c.n_prompt, c.prompt_class, c.n_max): len(c.samples) for c in cells}
    assert measured == {
        (size, kind, depth): 1 if size else 3
        for size in (0, 200, 300)
        for kind in ("code", "thinking")
        for depth in (0, 3)
    }
    assert {s.n_prompt for c in cells for s in c.samples if c.n_prompt} == {200, 300}
    asked = [s.n_prompt for c in cells for s in c.samples if not c.n_prompt]
    assert len({*asked}) > 1 and max(asked) < 200
    out = done.stdout.decode()
    for word in (*worths(cells), "| 200 |", "| 300 |", "| as is | code | 3 |", "verdict: "):
        assert word in out, word
    again = in_process("accept", "--read", "run.jsonl", "--format", "markdown")
    assert again.stdout.decode() == out


def test_reads_any_matrix(in_process: Program, tmp_path: Path) -> None:
    """Of text to continue, too, whose acceptance the matrix itself shows in its table only."""
    plan = ("--depths", "0,2", "-p", "64", "-n", "16", "--repeat", "2", "--output", "m.jsonl")
    out = in_process("matrix", "--threads", "1", *plan).stdout.decode()
    assert "break-even" not in out
    again = in_process("accept", "--read", "m.jsonl").stdout.decode()
    assert out in again and "| 64 | text | 2 |" in again
    said = worths(read_cells(tmp_path / "m.jsonl"))
    assert said and all(word in again for word in said)


def test_an_answer_ends_where_the_model_ends_it(in_process: Program, tmp_path: Path) -> None:
    options = ("--classes", "factual", "--prompts-per-class", "2", "--output", "a.jsonl")
    in_process(*QUICK, "-n", "400", *options)
    generated = {s.n_generated for c in read_cells(tmp_path / "a.jsonl") for s in c.samples}
    assert min(generated) < 400


def test_prompts_of_ones_own(in_process: Program, tmp_path: Path) -> None:
    """Beside a class of the package; a model under another name is not the demo."""
    from pyllama_mtp.models.demo import demo_path

    (tmp_path / "m.gguf").write_bytes(demo_path().read_bytes())
    (tmp_path / "mine.jsonl").write_text('{"class": "mine", "prompt": "import os\\n"}\n')
    options = ("--prompts", "mine.jsonl", "--classes", "factual", "--prompts-per-class", "1")
    done = in_process(*QUICK, "--model", "m.gguf", *options, "--format", "json")
    assert [row["class"] for row in json.loads(done.stdout)] == ["mine", "factual", "all"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--synthetic-acceptance", "0.9,0.9,0.9,0.9"), "imposed acceptance cannot be measured"),
        (("--p-min", "0.5"), "leave --p-min out"),
        (("--classes", "code,cod"), "no prompts of class 'cod'"),
        (("--context-lengths", "512,512"), "name one value twice"),
        (("--prompts", "nowhere.jsonl"), "cannot read the prompts file nowhere.jsonl"),
        (("--prompts", "bad.jsonl"), "bad.jsonl, line 2: not a prompt"),
        (("--output", "bad.jsonl"), "bad.jsonl, line 1: not a record"),
        (("--read", "bad.jsonl", "--output", "a"), "--read measures nothing"),
    ],
)
def test_refusals_come_before_a_model_is_loaded(
    cli: Cli, options: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pyllama_mtp.llama.model.Model", lambda *_, **__: pytest.fail("loaded"))
    Path("bad.jsonl").write_text('{"prompt": "a"}\n{"promt": "b"}\n')
    result = cli("accept", *options)
    assert result.code == 2 and message in result.err and not result.out
    assert Path("bad.jsonl").read_text().endswith('{"promt": "b"}\n')
