"""Tables: which columns there are, and the order of rows. What users read is in
tests/report/test_outputs.py."""

from __future__ import annotations

from typing import Any

from pyllama_mtp.measure.figures import Cell
from pyllama_mtp.measure.table import markdown_table, matrix_columns

from ..cells import made_cell, made_sample


def cell(depth: int, **changes: Any) -> Cell:
    return made_cell(depth, [made_sample(512, 64, 100, 10)], **changes)


def test_auto_is_shown_as_what_it_came_down_to() -> None:
    cells = [cell(3, axes={"prompt_sync": sync}) for sync in ("kv", "auto", "auto")]
    cells[-1].samples, cells[-1].skipped = [], "too long"
    assert "sync" not in [column.title for column in matrix_columns(cells)]
    cells[0].samples[0].prompt_sync = "full"
    assert "sync" in [column.title for column in matrix_columns(cells)]


def test_rows_of_axes_are_in_order() -> None:
    """In whatever order the samples came: numbers by size, "auto" last."""
    sequences = [(3, 8), (0, 16), (3, 16), (0, 8), (3, 1), (0, 1)]
    cells = [cell(depth, axes={"n_sequences": n}) for depth, n in sequences]
    cells.insert(0, cell(6, adaptive=True, axes={"n_sequences": 1}))
    lines = [line.split(" | ") for line in markdown_table(cells).splitlines() if "TP" in line]
    found = [(words[1], int(words[2])) for words in lines if words[0] == "| 512"]
    modes = [("no-MTP", 1), ("no-MTP", 8), ("no-MTP", 16)]
    assert found == [*modes, ("MTP 3", 1), ("MTP 3", 8), ("MTP 3", 16), ("MTP auto", 1)]
