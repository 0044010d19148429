"""bench/attention.py: a moment of it on this machine."""

from __future__ import annotations

import attention
import pytest


def test_a_moment_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    """Few rows and many; each line comes at once, and again in the table."""
    words = ["--seconds", "0.01", "--types", "f16,q8_0", "--cells", "300", "--rows", "2,20"]
    assert attention.main([*words, "--heads", "4,2", "--size", "64", "--layers", "2"]) == 0
    said = capsys.readouterr().out
    wanted = [[kind, "300", rows] for kind in ("f16", "q8_0") for rows in ("2", "20")]
    assert [line.split("\t")[:3] for line in said.splitlines()[:4]] == wanted
    rows = [line.split("|")[1:-1] for line in said.splitlines() if line.startswith(("| f", "| q"))]
    assert [[cell.strip() for cell in row[:3]] for row in rows] == wanted
    assert all(float(row[4]) > 0 for row in rows)
    assert "- 2 layers, 4 heads on 2 of 64 numbers" in said
