"""bench/attention.py and bench/columns.py: a moment of each on this machine."""

from __future__ import annotations

import attention
import columns
import pytest

Capture = pytest.CaptureFixture[str]
WAYS = ("before", "now", "before / now")
SMALL = ("--rows", "512", "--columns", "512")


def test_attention(capsys: Capture) -> None:
    """Few rows and many; each line comes at once, and again in the table."""
    words = ["--seconds", "0.01", "--types", "f16,q8_0", "--cells", "300", "--rows", "2,20"]
    assert attention.main([*words, "--heads", "4,2", "--size", "64", "--layers", "2"]) == 0
    said = capsys.readouterr().out
    wanted = [[kind, "300", rows] for kind in ("f16", "q8_0") for rows in ("2", "20")]
    assert [line.split("\t")[:3] for line in said.splitlines()[:4]] == wanted
    rows = [line.split("|")[1:-1] for line in said.splitlines() if line.startswith(("| f", "| q"))]
    assert [[cell.strip() for cell in row[:3]] for row in rows] == wanted
    assert all(float(row[4]) > 0 for row in rows)


def test_columns(capsys: Capture) -> None:
    """A type that upstream repacks, and one that it does not."""
    assert columns.main(["--seconds", "0.01", "--types", "q4_k,q6_k", "-n", "1,40", *SMALL]) == 0
    said = capsys.readouterr().out
    rows = [line.split("|")[1:-1] for line in said.splitlines() if line.startswith("| Q")]
    ways = [[name, way] for name in ("Q4_K", "Q6_K") for way in WAYS]
    assert [[cell.strip() for cell in row[:2]] for row in rows] == ways
    assert all(float(row[3]) > 0 for row in rows)
