"""What is plotted: the numbers of the curves, and the words beside them."""

from __future__ import annotations

import pytest

from pyllama_mtp.measure.columns import LEAST_DRAFTS
from pyllama_mtp.measure.published import Published
from pyllama_mtp.measure.report.curves import Point, curves, published_curves
from pyllama_mtp.measure.report.style import COLORS, DARK, dark, size_words

from .conftest import make_cell


def test_speeds_are_medians_with_the_range_of_the_samples() -> None:
    cells = [make_cell(3, 2048, decode=[1, 2, 9]), make_cell(3), make_cell(0)]
    plain, mtp = curves(cells, "decode")
    assert (plain.label, mtp.label) == ("no-MTP", "MTP 3")
    assert mtp.points == (Point(512, 40, 38, 42), Point(2048, 2, 1, 9))


def test_ratios_are_of_paired_ratios() -> None:
    cells = [make_cell(0, decode=[10, 20, 40]), make_cell(3, decode=[15, 40, 40])]
    (curve,) = curves(cells, "decode-ratio")
    value = (2**0.5 + 1.5) / 2  # the middle of the six means of 1.5, 2 and 1
    assert curve.label == "MTP 3" and curve.points == (Point(512, value, 1.0, 2.0),)
    assert curves(cells[1:], "decode-ratio") == []


def test_acceptance_is_pooled_over_sizes() -> None:
    cells = [make_cell(0), make_cell(2, 512), make_cell(2, 1024)]
    cells[1].drafted, cells[1].accepted = [10, 0], [9, 0]
    cells[2].drafted, cells[2].accepted = [30, 10], [11, 5]
    (curve,) = curves(cells, "acceptance")
    assert [(p.x, p.y) for p in curve.points] == [(1, 0.5), (2, 0.5)]


def test_a_figure_that_was_not_measured_has_no_point() -> None:
    """A program that measures prefill alone."""
    cell = make_cell(0, decode=[0.001] * 3)
    for sample in cell.samples:
        sample.decode_tps = 0.0
    cell.summarize()
    assert curves([cell], "decode") == [] and len(curves([cell], "prefill")) == 1


def test_published_figures_of_the_modes_that_are_shown() -> None:
    figures = [
        Published("s", "m", "gpu", 1024, n_max, speed, 2 * speed)
        for n_max, speed in ((0, 100.0), (2, 50.0), (3, 80.0))
    ] + [Published("s", "m", "gpu", 2048, 3, 60.0, 60.0)]
    cells = [make_cell(0), make_cell(3)]
    speeds = published_curves(figures, curves(cells, "decode"), "decode")
    assert [(c.mode, [p.y for p in c.points]) for c in speeds] == [
        ("no-MTP", [200.0]),
        ("MTP 3", [160.0, 60.0]),
    ]
    (ratio,) = published_curves(figures, curves(cells, "prefill-ratio"), "prefill-ratio")
    assert [(p.x, p.y) for p in ratio.points] == [(1024, 0.8)]
    assert ratio.source == "s: m, gpu"
    assert published_curves(figures, curves(cells, "acceptance"), "acceptance") == []


@pytest.mark.parametrize(
    ("tokens", "words"),
    [(512, "512"), (1024, "1k"), (1536, "1.5k"), (5000, "5000"), (131072, "128k"), (1 << 20, "1M")],
)
def test_sizes_in_words_are_exact(tokens: int, words: str) -> None:
    assert size_words(tokens) == words


def luminance(color: str) -> float:
    """Relative luminance as in WCAG 2.1."""
    parts = [int(color[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_colours_can_be_seen_on_light_and_dark() -> None:
    """WCAG: 4.5 for text, 3 for graphics; on light the last two of the palette have markers."""
    from pyllama_mtp.measure.report import style

    for ground, replaced in ((style.PAPER, {}), (DARK[style.PAPER], DARK)):
        for text in (style.INK, style.MUTED, style.WARNING):
            assert contrast(replaced.get(text, text), ground) >= 4.5, text
        for color in COLORS[:3]:
            assert contrast(replaced.get(color, color), ground) >= 3, color
    assert dark(f"fill: {style.INK}; {style.PAPER}") == (
        f"fill: {DARK[style.INK]}; {DARK[style.PAPER]}"
    )


def test_adaptive_depth_is_the_last_curve() -> None:
    cells = [make_cell(6, adaptive=True), make_cell(8), make_cell(0), make_cell(6)]
    assert [c.mode for c in curves(cells, "decode")] == ["no-MTP", "MTP 6", "MTP 8", "MTP auto"]


def test_acceptance_of_adaptive_depth_needs_drafts() -> None:
    """Drafts of all sizes count together; a fixed depth drafts at every position in every round."""
    half = LEAST_DRAFTS // 2
    cells = [make_cell(3, size, adaptive=adaptive) for size in (512, 1024) for adaptive in (0, 1)]
    for cell in cells:
        cell.drafted, cell.accepted = [LEAST_DRAFTS, half, half - 1], [half, half, 0]
    fixed, chosen = curves(cells, "acceptance")
    assert (fixed.mode, chosen.mode) == ("MTP 3", "MTP auto")
    assert [(p.x, p.y) for p in fixed.points] == [(1, 0.5), (2, 1.0), (3, 0.0)]
    assert [(p.x, p.y) for p in chosen.points] == [(1, 0.5), (2, 1.0)]
    for cell in cells:
        cell.drafted = [half - 1, 0, 0]
    assert [curve.mode for curve in curves(cells, "acceptance")] == ["MTP 3"]
