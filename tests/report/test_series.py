"""Series: which cells belong together, how they are called, and what is plotted of them."""

from __future__ import annotations

from pyllama_mtp.measure.figures import (
    LEAST_DRAFTS,
    Cell,
    Labels,
    latest,
    series_key,
)
from pyllama_mtp.measure.page import Point, curves

from .conftest import make_cell


def names(cells: list[Cell]) -> list[str]:
    return [*map(Labels(cells), cells)]


def test_a_label_names_only_what_varies() -> None:
    assert names([make_cell(0), make_cell(3), make_cell(3, 1024)]) == ["no-MTP", "MTP 3", "MTP 3"]
    two = [make_cell(0), make_cell(3), make_cell(3, variant="upstream", series="x")]
    assert names(two) == ["no-MTP, patched", "MTP 3, patched", "MTP 3, upstream"]


def test_a_switch_is_named_where_it_varies() -> None:
    cells = [
        make_cell(0),
        make_cell(2, axes={"prompt_rows": "last"}),
        make_cell(2, axes={"prompt_rows": "all"}),
        make_cell(2),  # not varied there: its default
    ]
    assert names(cells) == ["no-MTP", "MTP 2, rows last", "MTP 2, rows all", "MTP 2, rows last"]
    assert series_key(cells[1]) == series_key(cells[3])


def test_a_peer_is_named_by_its_program_not_by_its_build() -> None:
    peer = make_cell(3, program="llama-server", variant="release", series="", backend="cpu")
    assert names([make_cell(3), peer]) == ["MTP 3", "llama-server MTP 3"]


def test_the_last_measurement_counts_unless_it_was_skipped() -> None:
    first, second = make_cell(3, time="1"), make_cell(3, time="2")
    skipped = make_cell(3, prefill=[], decode=[], skipped="too long")
    assert latest([first, make_cell(0), second]) == [second, make_cell(0)]
    assert latest([first, skipped]) == [first]
    assert latest([skipped]) == [skipped]


# -- curves ----------------------------------------------------------------------------------------


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


def test_acceptance_of_adaptive_depth_needs_drafts() -> None:
    """Drafts of all sizes count together; a fixed depth drafts at every position in every round."""
    half = LEAST_DRAFTS // 2
    cells = [make_cell(3, size, adaptive=adaptive) for size in (512, 1024) for adaptive in (0, 1)]
    for cell in cells:
        counted(cell, [LEAST_DRAFTS, half, half - 1], [half, half, 0])
    fixed, chosen = curves(cells, "acceptance")
    assert (fixed.label, chosen.label) == ("MTP 3", "MTP auto")
    assert [(p.x, p.y) for p in fixed.points] == [(1, 0.5), (2, 1.0), (3, 0.0)]
    assert [(p.x, p.y) for p in chosen.points] == [(1, 0.5), (2, 1.0)]
    for cell in cells:
        counted(cell, [half - 1, 0, 0], [0, 0, 0])
    assert [curve.label for curve in curves(cells, "acceptance")] == ["MTP 3"]
