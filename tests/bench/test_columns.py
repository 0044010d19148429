"""bench/columns.py: the table, and a moment of it on this machine."""

from __future__ import annotations

import columns
import pytest


def test_columns_are_counted_in_products_of_one() -> None:
    least = {"before": dict.fromkeys((1, 2, 8), 3e-6), "now": {1: 1e-6, 2: 1.5e-6, 8: 2e-6}}
    rows = [" ".join(row.split()) for row in columns.table({"Q4_K": least}, [1, 2, 8])[2:]]
    assert rows == ["| Q4_K | before | 3.0 | 1.00 | 1.00 |", "| Q4_K | now | 1.0 | 1.50 | 2.00 |"]
    gains = [" ".join(row.split()) for row in columns.gains({"Q4_K": least}, [1, 2, 8])[2:]]
    assert gains == ["| Q4_K | 3.00 | 2.00 | 1.50 |"]


def test_a_moment_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    """A type that upstream repacks, and one that it does not; each line comes at once, and again in
    the table."""
    assert columns.main(["--seconds", "0.01", "--types", "q4_k,q6_k", "-n", "1,40"]) == 0
    said = capsys.readouterr().out
    rows = [line.split("|")[1:3] for line in said.splitlines() if line.startswith("| Q")]
    ways = [[name, way] for name in ("Q4_K", "Q6_K") for way in ("before", "now")]
    assert [[cell.strip() for cell in row] for row in rows[:8]] == 2 * ways
    assert "- A matrix of 2048 x 2048, 1 thread(s)" in said
