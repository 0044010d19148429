"""The Python interface: cells as records and frames, plots, reports, comparisons, a matrix."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pyllama_mtp import Model, bench
from pyllama_mtp.errors import UsageError
from pyllama_mtp.measure.figures import Cell
from pyllama_mtp.measure.page import KINDS
from pyllama_mtp.measure.plan import AXES
from pyllama_mtp.measure.records import read_cells
from pyllama_mtp.settings import Settings

from ..cli.conftest import Watched
from .conftest import MEASURED, make_cell

Write = Callable[[str, Sequence[Cell]], Path]


def test_cells_as_records() -> None:
    results = bench.read(MEASURED)
    assert len(results) == 8 == len(list(results))
    plain, mtp, *_ = results.records()
    assert set(plain) == set(mtp)
    assert (plain["mode"], plain["decode_ratio"], plain["acceptance_1"]) == ("no-mtp", None, None)
    assert (mtp["n_max"], mtp["n_prompt"], mtp["synthetic"]) == (2, 512, True)
    assert mtp["decode_tps_low"] <= mtp["decode_tps"] <= mtp["decode_tps_high"]
    assert mtp["decode_ratio"] == pytest.approx(0.698, abs=1e-3)
    assert (mtp["acceptance_2"], mtp["acceptance_3"]) == (pytest.approx(7 / 9), None)


def test_cells_as_a_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pandas")
    frame = bench.read(MEASURED).frame()
    assert frame.shape == (8, len(bench.read(MEASURED).records()[0]))
    assert frame.query("n_max == 3").decode_tps.round(1).tolist() == [30.6, 28.9]
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UsageError, match="pip install pandas"):
        bench.read(MEASURED).frame()


def test_files_are_read_together_and_selected_from(write_cells: Write) -> None:
    more = write_cells("more.jsonl", [make_cell(3)])
    results = bench.read(MEASURED, more)
    assert len(results) == 9
    assert [c.n_prompt for c in results.select(n_max=3, variant="patched")] == [512, 2048, 512]
    assert results.select(model="m.gguf").cells == read_cells(more)
    with pytest.raises(UsageError, match="cells have no 'depth'"):
        results.select(depth=3)
    with pytest.raises(UsageError, match="at least one file"):
        bench.read()


@pytest.fixture
def pyplot() -> Iterator[ModuleType]:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    yield pyplot
    pyplot.close("all")


@pytest.mark.parametrize("kind", KINDS)
def test_a_plot_in_one_call(pyplot: ModuleType, kind: str) -> None:
    axes = bench.read(MEASURED).plot(kind)
    assert pyplot.get_fignums() == [axes.figure.number]
    assert {"MTP 2", "MTP 3", "MTP 4"} <= {t.get_text() for t in axes.get_legend().get_texts()}
    _, mine = pyplot.subplots()
    assert bench.read(MEASURED).plot(kind, mine) is mine
    assert mine.containers and mine.get_title(loc="left") == axes.get_title(loc="left")


def test_plots_that_cannot_be_drawn(pyplot: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    results = bench.Results([make_cell(3)])
    with pytest.raises(UsageError, match="ratios need cells with MTP and without"):
        results.plot("decode-ratio")
    assert not pyplot.get_fignums()
    with pytest.raises(UsageError, match="there is no plot 'speed'"):
        results.plot("speed")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match=r"pyllama-mtp\[report\]"):
        results.plot("decode")


def test_comparing_files_results_and_variants() -> None:
    assert not bench.compare(MEASURED, MEASURED).slower
    old, slow = make_cell(0), make_cell(0, prefill=[180, 189, 171])
    found = bench.compare(bench.Results([old]), bench.Results([slow]))
    assert {change.figure for change in found.slower} == {"prefill"}
    both = bench.Results([make_cell(0, variant="upstream"), slow])
    assert both.compare_variants("upstream", "patched").slower
    with pytest.raises(UsageError, match="at least 0 and below 1"):
        both.compare_variants("upstream", "patched", threshold=1)
    for threshold in ("3%", "0.03", None, True):
        with pytest.raises(UsageError, match="a number, at least 0 and below 1"):
            both.compare_variants("upstream", "patched", threshold=threshold)
        with pytest.raises(UsageError, match="a number, at least 0 and below 1"):
            bench.compare(both, both, threshold=threshold)


# -- results in words ------------------------------------------------------------------------------


def test_a_notebook_shows_the_tables() -> None:
    results = bench.read(MEASURED)
    assert results._repr_markdown_() == results.markdown()
    assert bench.Results()._repr_markdown_() == "no cells"


# -- a matrix --------------------------------------------------------------------------------------


M = "folder/m.gguf"
FEW: dict[str, Any] = {"max_tokens": 4, "repeat": 1, "settings": Settings(n_threads=1)}


def test_a_matrix_in_one_call(watched: Watched, tmp_path: Path) -> None:
    output = tmp_path / "cells.jsonl"
    seen: list[str] = []
    results = bench.matrix(
        M,
        sizes=[24, 48],
        depths=[0, 2],
        **{**FEW, "repeat": 2},
        prompt_rows=["last", "all"],
        output=output,
        on_event=lambda event: seen.append(event.kind),
    )
    assert [(cell.n_prompt, cell.n_max) for cell in results] == [
        *((24, 0), (24, 2), (24, 2)),
        *((48, 0), (48, 2), (48, 2)),
    ]
    assert read_cells(output) == results.cells
    assert all(len(cell.samples) == 2 for cell in results) and seen.count("done") == 12
    assert results.records()[1]["decode_ratio"] is not None
    assert "- command: pyllama_mtp.bench.matrix" in results.markdown()
    assert bench.read(output).commands == results.commands


def test_a_matrix_of_an_open_model_leaves_it_open(demo: Model) -> None:
    for _ in range(2):
        (cell,) = bench.matrix(demo, sizes=[24], depths=[0], **FEW)
        assert cell.model == "demo.gguf"
    assert demo.tokenize("x")


@pytest.mark.usefixtures("nothing_loads")
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"foo": 1}, rf"no argument 'foo'; the axes are {', '.join(AXES)}; .* into settings="),
        ({"depths": []}, "no depths"),
        ({"sizes": "64"}, "sizes is '64', it must be a whole number, 1 or more"),
        ({"sizes": True}, "sizes is True; it must be a sequence"),
        ({"depths": "0,2"}, "depths is '0,2', it must be a whole number, 0 or more, or 'auto'"),
        ({"classes": "text,code"}, "no prompts of class 'text,code'; there are text, source"),
        ({"prompt_sync": "kv,full"}, "prompt_sync is 'kv,full', it must be one of auto, kv, full"),
        ({"draft_vocab": [None]}, "draft_vocab has None"),
        ({"max_tokens": 1.5}, "max_tokens is 1.5, it must be a whole number"),
        ({"budget_s": float("nan")}, "budget_s is nan; it must be a number of seconds above 0"),
        ({"settings": {"n_ctx": 100}}, "settings is a dict; it must be a Settings"),
        ({"sampling": Settings()}, "sampling is a Settings; it must be a Sampling"),
    ],
)
def test_an_argument_that_makes_no_sense(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        bench.matrix(M, **given)
