"""Lengths of the context (matrix --at): filled once per repeat, measured after, a column."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pyllama_mtp import Generation, Model
from pyllama_mtp.bench import matrix
from pyllama_mtp.measure.compare import compare
from pyllama_mtp.measure.page import curves
from pyllama_mtp.measure.plan import Plan
from pyllama_mtp.measure.records import read_cells
from pyllama_mtp.measure.runner import Runner, Task, filling
from pyllama_mtp.measure.table import records
from pyllama_mtp.settings import Sampling, Settings

from ..cells import made_cell, made_sample
from ..cli.conftest import SMALL, Watched, interrupt
from ..processes import Cli
from .test_matrix import collect, make

PLAN = Plan((24,), (0, 2, 3), 9, 2, {"n_context": (100, 50)})
AT = (*SMALL, "-p", "24", "--at", "512,256")


def test_a_repeat_goes_on_from_length_to_length() -> None:
    plan = Plan((24,), (0, 2, 3), 9, 3, PLAN.axes)
    orders = [[(key.n_context, key.depth) for key in keys] for _, keys in plan.groups()]
    assert orders[0] == [(at, depth) for at in (50, 100) for depth in (0, 2, 3)]
    assert orders[1] == [(at, depth) for at in (50, 100) for depth in (3, 2, 0)]
    assert orders[2] == [(at, depth) for at in (50, 100) for depth in (2, 3, 0)]


def test_contexts_are_filled_once_per_repeat(demo: Model, watched: Watched) -> None:
    """With MTP, for all depths; every sample goes on from there with the next text, in a fresh
    session no longer than it needs."""
    cells = collect(demo, make(demo, PLAN)).cells
    filled = [tuple(one) for one in watched.of("process")]
    assert filled == [(1, 51), (1, 101)] * 2
    opened = [(depth, n_ctx) for depth, n_ctx, _ in watched.of("open")]
    assert len(opened) == 12 + 1 and opened[:2] == [(1, 256), (0, 256)]
    assert max(n_open for _, _, n_open in watched.of("open")) == 3 + 1, "one length at a time"
    prompts = [p for p, options in watched.of("generate") if options["max_tokens"] == 9]
    assert [len(p) for p in prompts] == ([74] * 3 + [124] * 3) * 2
    assert len({p[:50] for p in prompts[:6]}) == 1 and prompts[0] != prompts[6][:74]
    assert {len(p) for p, options in watched.of("generate") if options["max_tokens"] != 9} == {24}
    assert [(c.n_context, c.n_max, len(c.samples)) for c in cells] == [
        (at, depth, 2) for at in (50, 100) for depth in (0, 2, 3)
    ]
    for sample in (sample for cell in cells for sample in cell.samples):
        assert (sample.n_prompt, sample.n_generated) == (24, 9)
        assert sample.prefill_tps == pytest.approx(24 / sample.prefill_s)


def test_a_budget_ends_before_a_longer_context(
    demo: Model, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time passes only while a context is filled, a second per 10 tokens, and for every sample, a
    second each. The lengths take 5 + 2, 5 + 2 and 20 + 2 seconds."""
    clock = [0.0]
    monkeypatch.setattr(
        "pyllama_mtp.measure.run.time",
        SimpleNamespace(monotonic=lambda: clock[0], sleep=lambda seconds: None),
    )

    class Slow(Runner):
        at = 0

        def begin(self, key: Hashable, task: Task) -> None:
            clock[0] += (task.n_context - self.at) / 10 + 1
            self.at = task.n_context
            super().begin(key, task)

    plan = Plan((24,), (0, 2), 3, 2, {"n_context": (50, 300, 100)})
    for budget_s, done in ((0.1, 1), (10, 2), (20, 3)):
        clock[0] = 0.0
        matrix = make(demo, plan, Slow(demo), budget_s=budget_s)
        cells = collect(demo, matrix).cells
        assert [(c.n_context, len(c.samples)) for c in cells] == [
            (at, 1) for at in (50, 100, 300)[:done] for _ in range(2)
        ]
        assert matrix.n_to_do == 12 - 2 * done


@pytest.mark.parametrize(("depth", "sync"), [(0, "kv"), (3, "kv"), ("auto", "kv"), (3, "full")])
def test_a_sample_after_a_context_is_that_of_the_whole_text(
    demo: Model, watched: Watched, depth: int | str, sync: str
) -> None:
    """Tokens and drafts; going on from one length to the next, in a context filled with MTP."""
    text = demo.tokenize("The lengths of the context are filled once for each repeat. " * 20)
    options: dict[str, Any] = {"n_threads": 1, "ngram": False, "n_ctx": 512}
    settings = Settings(draft_n_max=depth, prompt_sync=sync, **options)
    runner, samples, generations = Runner(demo), [], list[Generation]()
    watched.script = dict.fromkeys((1, 3, 5), generations.append)  # before each a warm-up
    for n_context in (0, 60, 150):
        filled = filling(replace(settings, draft_n_max=3), 512, demo)
        task = Task(settings, Sampling(), [text[:174]], 30, 8, n_context, filled)
        runner.begin(n_context, task)
        samples.append(runner.finish(n_context)[0])
    runner.close()
    assert watched.n_open == 0
    assert [one.n_prompt for one in samples] == [174, 114, 24]
    assert len({tuple(one.tokens) for one in generations}) == 1
    if depth == 3:
        whole, part, rest = (one.accepted for one in samples)
        assert whole == part == rest and whole[0]


def test_matrix_at(watched: Watched, cli: Cli) -> None:
    """Ctrl-C after the first length; the rest fills the second one at once."""
    watched.script[5] = interrupt  # the second length, no MTP is warmed up: 4
    result = cli(*AT, "--repeat", "1")
    assert result.code == 130 and "samples in matrix.jsonl: 2" in result.err
    watched.log.clear()
    result = cli(*AT, "--repeat", "1", "--resume", "--format", "markdown")
    assert result.code == 0 and "2 of 4 samples are there" in result.err
    assert "[3/4] prompt 24, no MTP, context 512, repeat 1: prefill" in result.err
    assert [tuple(one) for one in watched.of("process")] == [(1, 513)]
    assert watched.n_open == 0
    assert "| context tokens | prompt tokens | mode |" in result.out
    cells = read_cells("matrix.jsonl")
    assert [(c.n_context, c.n_max) for c in cells] == [(256, 0), (256, 2), (512, 0), (512, 2)]
    assert [record["n_context"] for record in records(cells)] == [256, 256, 512, 512]


@pytest.mark.usefixtures("folder")
def test_a_length_that_does_not_fit_is_refused_before_anything_runs(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = cli(*AT, "--at", "512,5000")
    assert result.code == 2
    assert "context 5000 + prompt 24 + 6 generated: 5030 tokens exceed the" in result.err
    assert "given by --at" in cli(*SMALL, "--axis", "n-context=512").err
    monkeypatch.setattr("pyllama_mtp.memory.available_memory", lambda: 10**5)
    result = cli(*AT)
    assert result.code == 2 and "a context of 512 tokens cannot be filled" in result.err
    assert not Path("matrix.jsonl").exists()


def test_long_and_short_contexts_hold_the_same_kind_of_text(demo: Model) -> None:
    """There are few docstrings, so the default is source; of another class, if it is asked for."""
    few: dict[str, Any] = {"depths": 0, "max_tokens": 2, "repeat": 1, "n_context": (20, 40)}
    for given, used in ((None, "source"), ("text", "text")):
        cells = matrix(demo, classes=given, **few).cells
        assert {(cell.n_prompt, cell.prompt_class) for cell in cells} == {(512, used)}


# -- what is shown ---------------------------------------------------------------------------------


def cells_of(*speeds: tuple[int, float, float]) -> list[Any]:
    """Without MTP and at depth 3, decode at these speeds after so many tokens, two samples each."""
    cells = []
    for at, *both in speeds:
        for depth, tps in zip((0, 3), both, strict=True):
            samples = [made_sample(512, 64, 100, tps, rounds=20, mean_acceptance_length=3.0)] * 2
            cells.append(made_cell(depth, samples, axes={"n_context": at}))
    return cells


def test_a_plot_goes_along_the_contexts() -> None:
    cells = cells_of((16384, 20, 60), (1024, 50, 75))
    plain, mtp = curves(cells, "decode")
    assert (plain.label, mtp.label) == ("no-MTP", "MTP 3")
    assert [(p.x, p.y) for p in mtp.points] == [(1024, 75), (16384, 60)]
    (ratio,) = curves(cells, "decode-ratio")
    assert [(p.x, round(p.y, 9)) for p in ratio.points] == [(1024, 1.5), (16384, 3.0)]
    assert [p.x for p in curves(cells[2:], "decode-ratio")[0].points] == [1024]


def test_each_length_is_compared_with_itself() -> None:
    """The table of each length is in tests/report/test_outputs.py."""
    cells = cells_of((1024, 50, 75), (16384, 20, 60))
    changes = compare(cells, cells).changes
    assert [(c.n_prompt, c.n_context, c.name) for c in changes[:4]] == [
        (512, at, name) for at in (1024, 16384) for name in ("no-MTP", "MTP 3")
    ]
