"""The runner reads outputs, compares them, and writes its table. Nothing is built."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from . import run as runner

CASE = runner.Case("test-a, demo model", "test-a", "-m {demo}", runner.CHECKS)
EXPLAINED = runner.Case(
    "test-b", "test-b", fails_because="the demo model has no such token", fails_with="no token 7"
)

GAINING = runner.Case("test-c", "test-c", checks=runner.CHECKS, gained=2)


def outcome(status: str = "pass", reason: str = "", **counts: int) -> Any:
    return runner.Outcome(status, counts, 1.25, reason)


@pytest.mark.parametrize(
    ("code", "output", "status"),
    [
        (0, "PASS", "pass"),
        (0, "SKIP SKIP", "ran nothing"),
        (1, "PASS", "exit 1"),
        (-6, "PASS", "signal SIGABRT"),
        (None, "PASS", "timeout"),
    ],
)
def test_judges_a_run(code: int | None, output: str, status: str) -> None:
    found = runner.judge(CASE, code, output, 2.0)
    assert found.status == status
    assert found.reason == ("" if status == "pass" else output)


@pytest.mark.parametrize(
    ("case", "upstream", "patched", "problem"),
    [
        (CASE, outcome(PASS=3), outcome(PASS=3), ""),
        (CASE, outcome(PASS=3), outcome("exit 1", PASS=3), "differ"),
        (CASE, outcome(PASS=3), outcome(PASS=2, SKIP=1), "differ"),
        (GAINING, outcome(PASS=3, SKIP=4), outcome(PASS=5, SKIP=2), ""),
        (GAINING, outcome(PASS=3, SKIP=4), outcome(PASS=3, SKIP=4), "differ"),
        (EXPLAINED, outcome("exit 1", "no token 7"), outcome("exit 1", "no token 7"), ""),
        (EXPLAINED, outcome("exit 1", "no token 7"), outcome("exit 1", "no state"), "not for"),
        (CASE, outcome("exit 1"), outcome("exit 1"), "no reason"),
    ],
)
def test_comparison(case: Any, upstream: Any, patched: Any, problem: str) -> None:
    row = runner.Row(case, upstream, patched)
    assert problem in row.problem and bool(problem) == bool(row.problem)


def test_every_case_is_one_of_the_unpacked_tests() -> None:
    sys.path.insert(0, str(runner.ROOT / "vendor"))
    import tree

    unpacked = {Path(name).stem for name in tree.KEEP if name.startswith("tests/test-")}
    unpacked.remove("test-backend-ops")  # that of tests/devices
    assert {case.program for case in runner.CASES} == unpacked and len(unpacked) == 7
    values = {"demo": "d", "models": "m", "threads": 2, "contexts": 1}
    assert all("{" not in case.arguments.format_map(values) for case in runner.CASES)
