"""What is plotted: the numbers of the curves, and the words beside them."""

from __future__ import annotations

import pytest

from pyllama_mtp.measure.figures import LEAST_DRAFTS, Cell
from pyllama_mtp.measure.page import Point, curves, size_words

from .conftest import make_cell


def test_speeds_are_medians_with_the_range_of_the_samples() -> None:
    cells = [make_cell(3, 2048, decode=[1, 2, 9]), make_cell(3), make_cell(0)]
    plain, mtp = curves(cells, "decode")
    assert (plain.label, mtp.label) == ("no-MTP", "MTP 3")
    assert mtp.points == (Point(512, 40, 38, 42), Point(2048, 2, 1, 9))


def counted(cell: Cell, drafted: list[int], accepted: list[int]) -> None:
    """Let the cell have one sample with these counts."""
    del cell.samples[1:], cell.repeats[1:]
    cell.samples[0].drafted, cell.samples[0].accepted = drafted, accepted


def test_acceptance_is_pooled_over_sizes() -> None:
    cells = [make_cell(0), make_cell(2, 512), make_cell(2, 1024)]
    counted(cells[1], [10, 0], [9, 0])
    counted(cells[2], [30, 10], [11, 5])
    (curve,) = curves(cells, "acceptance")
    assert [(p.x, p.y) for p in curve.points] == [(1, 0.5), (2, 0.5)]


def test_a_figure_that_was_not_measured_has_no_point() -> None:
    """A program that measures prefill alone."""
    cell = make_cell(0, decode=[0.001] * 3)
    for sample in cell.samples:
        sample.decode_tps = 0.0
    assert curves([cell], "decode") == [] and len(curves([cell], "prefill")) == 1


@pytest.mark.parametrize(
    ("tokens", "words"),
    [(512, "512"), (1024, "1k"), (1536, "1.5k"), (5000, "5000"), (131072, "128k"), (1 << 20, "1M")],
)
def test_sizes_in_words_are_exact(tokens: int, words: str) -> None:
    assert size_words(tokens) == words


def test_adaptive_depth_is_the_last_curve() -> None:
    cells = [make_cell(6, adaptive=True), make_cell(8), make_cell(0), make_cell(6)]
    assert [c.mode for c in curves(cells, "decode")] == ["no-MTP", "MTP 6", "MTP 8", "MTP auto"]


def test_acceptance_of_adaptive_depth_needs_drafts() -> None:
    """Drafts of all sizes count together; a fixed depth drafts at every position in every round."""
    half = LEAST_DRAFTS // 2
    cells = [make_cell(3, size, adaptive=adaptive) for size in (512, 1024) for adaptive in (0, 1)]
    for cell in cells:
        counted(cell, [LEAST_DRAFTS, half, half - 1], [half, half, 0])
    fixed, chosen = curves(cells, "acceptance")
    assert (fixed.mode, chosen.mode) == ("MTP 3", "MTP auto")
    assert [(p.x, p.y) for p in fixed.points] == [(1, 0.5), (2, 1.0), (3, 0.0)]
    assert [(p.x, p.y) for p in chosen.points] == [(1, 0.5), (2, 1.0)]
    for cell in cells:
        counted(cell, [half - 1, 0, 0], [0, 0, 0])
    assert [curve.mode for curve in curves(cells, "acceptance")] == ["MTP 3"]
