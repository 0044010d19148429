"""The files of a report, what is drawn, and what the page must not do with text. The words of the
page are in test_outputs.py."""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.container import BarContainer
from matplotlib.figure import Figure

from pyllama_mtp.errors import UsageError
from pyllama_mtp.measure import page as plots
from pyllama_mtp.measure.figures import Cell
from pyllama_mtp.measure.page import KINDS, curves, write_report

from ..processes import Cli
from .conftest import MEASURED, make_cell, make_matrix


@pytest.fixture
def unrendered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is drawn, for tests of the text around pictures."""
    monkeypatch.setattr(plots, "picture", lambda cells, kind: b"<svg/>")


def page(directory: Path) -> str:
    return (directory / "index.html").read_text(encoding="utf-8")


def test_the_files_of_a_real_result(cli: Cli, tmp_path: Path) -> None:
    """Measured by this project once, at imposed acceptance."""
    folder = tmp_path / "out"
    result = cli("report", MEASURED, "-o", folder)
    assert result.code == 0 and result.out == f"{folder / 'index.html'}\n"
    wanted = {"index.html", "tables.md", "tables.csv", *(f"{name}.svg" for name in KINDS[1:])}
    assert {path.name for path in folder.iterdir()} == wanted
    for name in KINDS[1:]:
        assert ET.parse(folder / f"{name}.svg").getroot().tag.endswith("svg")
        assert b"SYNTHETIC ACCEPTANCE" in (folder / f"{name}.svg").read_bytes()
    text = page(folder)
    assert len(re.findall(r'<img src="data:image/svg', text)) == 5
    assert not re.search(r"""(?:src|href|srcset)=["'](?!data:)|<script|@import|url\(""", text)


@pytest.mark.usefixtures("unrendered")
def test_models_and_machines_have_sections_of_their_own(tmp_path: Path) -> None:
    other = {"cpu": "Other & <Sons>", "cores": 8, "devices": []}
    cells = [
        cell
        for changes in ({}, {"model": "<b>n</b>.gguf"}, {"machine": other})
        for cell in (make_cell(0, **changes), make_cell(3, **changes))
    ]
    files = {path.name for path in write_report(cells, tmp_path)}
    assert {"models.svg", "decode-1.svg", "decode-3.svg"} <= files and "decode.svg" not in files
    text = page(tmp_path)
    assert text.count("<h2>") == 3 and text.count("<img") == 1 + 15
    assert "<b>n" not in text and "&lt;b&gt;n" in text and "Other &amp; &lt;Sons&gt;" in text


def test_bad_input(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty, good = tmp_path / "empty.jsonl", MEASURED
    empty.touch()
    for arguments, message in (
        ([empty], "nothing to report"),
        ([tmp_path / "none.jsonl"], "cannot read"),
        ([good, "-o", good], "another folder"),
    ):
        result = cli("report", *arguments)
        assert result.code == 2 and message in result.err, arguments
    with pytest.raises(UsageError, match="no cells"):
        write_report([], tmp_path / "x")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = cli("report", good, "-o", tmp_path / "x")
    assert result.code == 2 and "pip install 'pyllama-mtp[report]'" in result.err
    assert not (tmp_path / "x").exists()


# -- what is drawn ---------------------------------------------------------------------------------


def drawn(cells: list[Cell], kind: str) -> Axes:
    axes = Figure().add_subplot()
    plots.draw(axes, cells, kind)
    return axes


def bars(axes: Axes) -> list[BarContainer]:
    return [one for one in axes.containers if isinstance(one, BarContainer)]


@pytest.mark.parametrize("kind", KINDS[1:-1])
def test_one_size_has_bars_from_0_and_several_have_lines(kind: str) -> None:
    axes = drawn([make_cell(0), make_cell(2), make_cell(3)], kind)
    assert len(bars(axes)) == (2 if kind.endswith("ratio") else 3)
    assert axes.get_ylim()[0] == 0 and [t.get_text() for t in axes.get_xticklabels()] == ["512"]
    assert not bars(drawn(make_matrix(1), kind))


def test_a_chart_over_models_has_bars_of_every_model() -> None:
    """At the shortest prompt that it was measured with; a depth has one colour."""
    cells = [*make_matrix(1), *make_matrix(2, model="n.gguf", sizes=(128, 256), depths=(0, 3))]
    axes = drawn(cells, "models")
    assert [t.get_text() for t in axes.get_xticklabels()] == ["m.gguf", "n.gguf"]
    assert {one.get_label(): len(one) for one in bars(axes)} == {
        **{"no-MTP": 2, "MTP 2": 1, "MTP 3": 2, "MTP 4": 1}
    }
    assert [p.x for p in curves(cells, "models")[2].points] == [0, 1]


@pytest.mark.parametrize(("kind", "words"), [("decode", "~68"), ("decode-ratio", "~1.7x")])
def test_one_sample_has_no_bounds_and_two_digits(kind: str, words: str) -> None:
    once = [make_cell(0, 512, [200], [40]), make_cell(3, 512, [190], [68.4])]
    axes = drawn(once, kind)
    assert words in {text.get_text() for text in axes.texts}
    assert all(point.low is None for curve in curves(once, kind) for point in curve.points)
    assert not any(getattr(bar, "errorbar", None) for bar in bars(axes))
