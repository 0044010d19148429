"""bench/columns.py: the table, and a moment of it on this machine."""

from __future__ import annotations

import columns
import pytest


def test_columns_are_counted_in_products_of_one() -> None:
    least = {"before": dict.fromkeys(columns.COLUMNS, 3e-6), "now": {1: 1e-6, 2: 1.5e-6}}
    least["now"] |= dict.fromkeys(columns.COLUMNS[2:], 2e-6)
    rows = [" ".join(row.split()) for row in columns.table({"Q4_K": least})[2:]]
    assert rows[0] == "| Q4_K | before | 3.0 | 1.00 | 1.00 | 1.00 | 1.00 | 1.00 | 1.00 | 1.00 |"
    assert rows[1] == "| Q4_K | now | 1.0 | 1.50 | 2.00 | 2.00 | 2.00 | 2.00 | 2.00 | 2.00 |"


def test_dry_run(capsys: pytest.CaptureFixture[str]) -> None:
    """A type that upstream repacks, and one that it does not."""
    assert columns.main(["--dry-run", "--seconds", "0.01", "--types", "q4_k,q6_k"]) == 0
    rows = [line.split("|")[1:3] for line in capsys.readouterr().out.splitlines()]
    assert [[cell.strip() for cell in row] for row in rows] == [
        [name, way] for name in ("Q4_K", "Q6_K") for way in ("before", "now")
    ]


def test_types_without_kernels_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        columns.main(["--types", "q4_1"])
    assert "no kernels for Q4_1" in capsys.readouterr().err
