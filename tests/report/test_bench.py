"""The Python interface: cells as records and frames, plots, reports, comparisons, a matrix."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

import pyllama_mtp
from pyllama_mtp import bench
from pyllama_mtp.errors import UsageError
from pyllama_mtp.measure.cells import Cell, read_cells

MakeCell = Callable[..., Cell]
MakeMatrix = Callable[..., list[Cell]]
MEASURED = Path(__file__).parents[1] / "data" / "matrix-schema-1.jsonl"


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


def test_files_are_read_together_and_selected_from(tmp_path: Path, make_cell: MakeCell) -> None:
    more = tmp_path / "more.jsonl"
    more.write_text(make_cell(3).to_json() + "\n")
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


@pytest.mark.parametrize(
    "kind", ["prefill", "decode", "prefill-ratio", "decode-ratio", "acceptance"]
)
def test_a_plot_in_one_call(pyplot: ModuleType, kind: str) -> None:
    axes = bench.read(MEASURED).plot(kind)
    assert pyplot.get_fignums() == [axes.figure.number]
    assert {"MTP 2", "MTP 3", "MTP 4"} <= {t.get_text() for t in axes.get_legend().get_texts()}
    _, mine = pyplot.subplots()
    assert bench.read(MEASURED).plot(kind, mine) is mine
    assert mine.containers and mine.get_title(loc="left") == axes.get_title(loc="left")


def test_what_the_axes_show(pyplot: ModuleType) -> None:
    axes = bench.read(MEASURED).plot("decode-ratio", published=bench.read_published())
    assert (axes.get_xscale(), axes.get_xlabel()) == ("log", "prompt size (tokens)")
    axes.figure.canvas.draw()
    assert [tick.get_text() for tick in axes.get_xticklabels()][:2] == ["512", "1k"]
    assert any(list(line.get_ydata()) == [1.0, 1.0] for line in axes.get_lines())
    assert len(axes.get_lines()) > 3 + 3 * 2


def test_plots_that_cannot_be_drawn(
    pyplot: ModuleType, make_cell: MakeCell, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = bench.Results([make_cell(3)])
    with pytest.raises(UsageError, match="without beside it"):
        results.plot("decode-ratio")
    assert not pyplot.get_fignums()
    with pytest.raises(UsageError, match="there is no plot 'speed'"):
        results.plot("speed")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match=r"pyllama-mtp\[report\]"):
        results.plot("decode")


def test_report_and_markdown(tmp_path: Path, make_cell: MakeCell) -> None:
    results = bench.Results([make_cell(0)])
    index = results.report(tmp_path / "report")
    assert index.name == "index.html" and "m.gguf" in index.read_text()
    assert "| 512 | no-MTP | 200.0 |" in results.markdown()
    assert results.markdown() in (tmp_path / "report" / "tables.md").read_text()


def test_comparing_files_results_and_variants(make_matrix: MakeMatrix, tmp_path: Path) -> None:
    old = bench.Results([*make_matrix(1), *make_matrix(2, variant="upstream")])
    assert not bench.compare(MEASURED, MEASURED).slower
    assert not bench.compare(old, old, ratios=True).slower
    new = make_matrix(1)
    for cell in new:
        for sample in cell.samples:
            sample.prefill_tps *= 0.9
    found = bench.compare(bench.Results(make_matrix(1)), bench.Results(new))
    assert {change.figure for change in found.slower} == {"prefill"}
    both = bench.Results([*make_matrix(3, variant="upstream"), *new])
    assert both.compare_variants("upstream", "patched", figures=["prefill"]).slower
    with pytest.raises(UsageError, match="at least 0"):
        both.compare_variants("upstream", "patched", threshold=-1)


@pytest.fixture
def fake(fake_driver: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    fake_driver.reset()
    for name in ("Model", "Session"):
        monkeypatch.setattr(pyllama_mtp, name, getattr(fake_driver, name), raising=False)
    monkeypatch.setattr(pyllama_mtp, "native", fake_driver.Native(), raising=False)
    yield fake_driver
    fake_driver.reset()


def test_a_matrix_in_one_call(fake: ModuleType, tmp_path: Path) -> None:
    output = tmp_path / "cells.jsonl"
    seen: list[str] = []
    results = bench.matrix(
        "fake.gguf",
        sizes=[64, 128],
        depths=[0, 2],
        max_tokens=8,
        repeat=2,
        prompt_rows=["last", "all"],
        output=output,
        on_event=lambda event: seen.append(event.kind),
    )
    assert [(cell.n_prompt, cell.n_max) for cell in results] == [
        *((64, 0), (64, 2), (64, 2)),
        *((128, 0), (128, 2), (128, 2)),
    ]
    assert read_cells(output) == results.cells
    assert all(len(cell.samples) == 2 for cell in results) and seen.count("done") == 12
    assert results.records()[1]["decode_ratio"] is not None
    assert "- command: pyllama_mtp.bench.matrix" in results.markdown()
    assert bench.read(output).commands == results.commands
    with pytest.raises(UsageError, match="no depths"):
        bench.matrix("fake.gguf", depths=[])


def test_a_matrix_of_an_open_model_leaves_it_open(fake: ModuleType) -> None:
    with fake.Model("fake.gguf") as model:
        results = bench.matrix(model, sizes=[64], depths=[0], max_tokens=4, repeat=1)
        assert len(results) == 1 and results.cells[0].model == "fake.gguf"
        assert not [entry for entry in fake.log if entry[0] == "model closed"]
        assert len(bench.matrix(model, sizes=[64], depths=[0], max_tokens=4, repeat=1)) == 1
