"""The files of a report, and what the page says."""

from __future__ import annotations

import csv
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from pyllama_mtp.errors import UsageError
from pyllama_mtp.measure import page as plots
from pyllama_mtp.measure.page import KINDS, Kind, pictures, three_digits, write_report

from ..processes import Cli
from .conftest import MEASURED, make_cell, make_matrix


@pytest.fixture
def unrendered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plots are drawn but not rendered, for tests of the text around them."""
    monkeypatch.setattr(plots, "_rendered", lambda picture, form: b"<svg/>")


def page(directory: Path) -> str:
    return (directory / "index.html").read_text(encoding="utf-8")


def test_the_files_of_a_real_result(cli: Cli, tmp_path: Path) -> None:
    """Measured by this project once, at imposed acceptance."""
    folder = tmp_path / "out"
    result = cli("report", MEASURED, "-o", folder)
    assert result.code == 0 and result.out == f"{folder / 'index.html'}\n"
    wanted = {"index.html", "tables.md", "tables.csv"}
    wanted |= {f"{name}.{form}" for name in KINDS for form in ("svg", "png")}
    assert {path.name for path in folder.iterdir()} == wanted
    for name in KINDS:
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert ET.parse(folder / f"{name}.svg").getroot().tag.endswith("svg")
    text = page(folder)
    assert len(re.findall(r'<img src="data:image/svg', text)) == 5
    for said in (
        "synth-0.8b-q8_0.gguf",
        "AMD EPYC, 2 cores; 24 GiB",
        "patched build of llama.cpp 0c1e57098, patches 7ffaa8541e19, CPU",
        "2026-11-20 23:31 UTC",
        "pyllama-mtp matrix --model synth-0.8b-q8_0.gguf --prompt-sizes 512,2048 --depths 0,2,3,4 "
        "--max-tokens 96 --repeat 3 --synthetic-acceptance 0.84,0.76,0.67,0.6",
        "MTP 3 SYNTHETIC",
        'class="warning">SYNTHETIC ACCEPTANCE: imposed at 0.84, 0.76, 0.67, 0.6<',
    ):
        assert said in text, said
    assert not re.search(r"""(?:src|href|srcset)=["'](?!data:)|<script|@import|url\(""", text)


@pytest.mark.usefixtures("unrendered")
def test_the_same_figures_in_every_table(tmp_path: Path) -> None:
    cells = [make_cell(0, decode=[10, 20, 40]), make_cell(3, decode=[15, 40, 40])]
    write_report(cells, tmp_path)
    markdown = (tmp_path / "tables.md").read_text()
    row = (
        "| 512 | MTP 3 | 200.0 | 190.0-210.0 | 1.00x | 1.00-1.00 | 0.0 | 40.0 | 15.0-40.0 | 1.46x |"
    )
    assert row in markdown
    cellified = re.sub(r"<[^>]+>", "|", page(tmp_path))
    assert "40.0||15.0-40.0||1.46x||" in cellified
    plain, mtp = csv.DictReader((tmp_path / "tables.csv").open())
    assert plain["decode_ratio"] == "" and round(float(mtp["decode_ratio"]), 3) == 1.457
    assert (mtp["decode_tps"], mtp["decode_tps_low"]) == ("40", "15")
    assert float(mtp["acceptance_1"]) == 0.8
    assert "95 % confidence intervals reach at most" in markdown


@pytest.mark.usefixtures("unrendered")
def test_imposed_acceptance_is_marked_everywhere(tmp_path: Path) -> None:
    cells = [make_cell(0), make_cell(2, synthetic_acceptance=[0.8, 0.7])]
    write_report(cells, tmp_path)
    assert "MTP 2 SYNTHETIC" in (tmp_path / "tables.md").read_text()
    assert "True" in (tmp_path / "tables.csv").read_text()
    alts = re.findall(r' alt="([^"]*)"', page(tmp_path))
    assert len(alts) == 5 and all("ACCEPTANCE: imposed at 0.8, 0.7" in alt for alt in alts)
    write_report([make_cell(0), make_cell(2)], tmp_path)
    assert "SYNTHETIC" not in page(tmp_path)


@pytest.mark.usefixtures("unrendered")
def test_the_result_comes_first_and_noise_is_said(tmp_path: Path) -> None:
    cells = [make_cell(0), make_cell(3, decode=[60.0, 63.0, 57.0])]
    write_report(cells, tmp_path)
    result = "With MTP decode is 1.5 times as fast here (depth 3, 2.8 tokens per pass); the prompt"
    text = page(tmp_path)
    assert text.index("<h1>") < text.index(result) < text.index("<h2>") and "noise" not in text
    assert result in (tmp_path / "tables.md").read_text()
    for sample in cells[1].samples:
        sample.waited_s = {"decode": sample.elapsed_s}
    write_report([*cells, make_cell(0, model="n.gguf")], tmp_path)
    noise = "threads waited for a core 50 % of the time: other programs are running"
    assert f"m.gguf: {result}" in page(tmp_path)
    assert page(tmp_path).count(f'noise">{noise}') == page(tmp_path).count(noise) == 1
    assert noise in (tmp_path / "tables.md").read_text()


@pytest.mark.parametrize("kind", KINDS[:-1])
def test_bars_where_there_is_one_size(kind: Kind) -> None:
    """One size has bars from 0, one per curve; several sizes have lines; axes name their scale."""
    axes = Figure().add_subplot()
    plots.draw(axes, [make_cell(0), make_cell(2), make_cell(3)], kind)
    bars = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    assert len(bars) == (2 if kind.endswith("ratio") else 3)
    assert axes.get_ylim()[0] == 0 and axes.get_xlabel() == "prompt size: 512 tokens"
    lines = Figure().add_subplot()
    plots.draw(lines, make_matrix(1), kind)
    assert not lines.patches and lines.get_ylabel().endswith("(linear)")
    words = lines.get_title(loc="left")
    assert ("the prompt is processed" in words) == kind.startswith("prefill")
    assert ("the answer is written" in words) == kind.startswith("decode")


def test_figures_that_differ_much_have_a_logarithmic_axis_that_says_so() -> None:
    axes = Figure().add_subplot()
    plots.draw(axes, [make_cell(0), make_cell(0, 1024, prefill=[3000.0] * 3)], "prefill")
    assert axes.get_yscale() == "log" and axes.get_ylabel().endswith("(logarithmic)")


@pytest.mark.parametrize(
    ("value", "words"),
    [(0.9521, "0.952"), (9.996, "10.0"), (68.49, "68.5"), (1234.0, "1,230"), (0, "0")],
)
def test_three_significant_digits(value: float, words: str) -> None:
    assert three_digits(value) == words


def test_the_warning_is_in_the_picture() -> None:
    """Pictures are quoted without the page around them."""
    real, imposed = (
        pictures([make_cell(2, synthetic_acceptance=rates)], "acceptance")
        for rates in (None, [0.8, 0.7])
    )
    assert b"#a84301" in imposed["light.svg"] and b"#a84301" not in real["light.svg"]
    assert b"#ffa366" in imposed["dark.svg"] and b"#ffa366" not in real["dark.svg"]


@pytest.mark.usefixtures("unrendered")
def test_models_and_machines_have_sections_of_their_own(tmp_path: Path) -> None:
    other = {"cpu": "Other & <Sons>", "cores": 8, "devices": []}
    cells = [
        cell
        for changes in ({}, {"model": "<b>n</b>.gguf"}, {"machine": other})
        for cell in (make_cell(0, **changes), make_cell(3, **changes))
    ]
    files = {path.name for path in write_report(cells, tmp_path)}
    assert {f"decode-{number}.svg" for number in (1, 2, 3)} <= files and "decode.svg" not in files
    text = page(tmp_path)
    assert text.count("<h2>") == 3 and text.count("<img") == 15
    assert "<b>n" not in text and "&lt;b&gt;n" in text and "Other &amp; &lt;Sons&gt;" in text


@pytest.mark.usefixtures("unrendered")
def test_peers_are_further_series(tmp_path: Path) -> None:
    peer = {"program": "llama-server", "variant": "release", "series": ""}
    write_report([make_cell(0), make_cell(3), make_cell(3, **peer)], tmp_path)
    text = page(tmp_path)
    assert text.count("<h2>") == 1 and "llama-server</td><td>MTP 3" in text
    assert "llama-server: release of llama.cpp 012345678, CPU" in text


def test_cells_that_were_all_skipped(tmp_path: Path) -> None:
    cell = make_cell(3, prefill=[], decode=[], skipped="prompt too long")
    write_report([cell], tmp_path)
    text = page(tmp_path)
    assert "skipped: MTP 3, prompt 512: prompt too long" in text
    assert "No plot of Decode speed: no cell has samples." in text and "<img" not in text


@pytest.mark.usefixtures("unrendered")
def test_without_no_mtp_there_are_no_ratios_and_it_says_why(tmp_path: Path) -> None:
    write_report([make_cell(2), make_cell(3)], tmp_path)
    text = page(tmp_path)
    assert text.count("<img") == 3
    assert "no cell with MTP has one without beside it" in text
    assert "no MTP (depth 0) was not measured" in text


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


@pytest.mark.usefixtures("unrendered")
def test_adaptive_depth_comes_after_the_fixed_ones(tmp_path: Path) -> None:
    cells = [make_cell(6, adaptive=True), make_cell(6), make_cell(9), make_cell(0)]
    write_report(cells, tmp_path)
    lines = (tmp_path / "tables.md").read_text().splitlines()
    modes = [line.split(" | ")[1] for line in lines if line.startswith("| 512 |")]
    assert modes == ["no-MTP", "MTP 6", "MTP 9", "MTP auto"]
    table = csv.DictReader((tmp_path / "tables.csv").open())
    assert [row["adaptive"] for row in table] == ["False", "False", "False", "True"]
