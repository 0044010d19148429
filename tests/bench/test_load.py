"""bench/load.py: what its figures count, and a short load."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import load
import pytest


def test_answers_that_are_broken_off_count() -> None:
    """With their tokens so far, and with the time that was waited in vain."""
    whole = load.Answer(began=0, first=2.0, last=6.0, longest=1.5, n=41, text=82 * "x")
    part = load.Answer(began=1, first=4.0, last=9.0, longest=0.5, text=20 * "x")
    none = load.Answer(began=2)
    failed = load.Answer(began=3, error="503")
    cell = {"clients": 4, "seconds": 10.0, "memory": [2**20, 2**21]}
    cell["answers"] = [asdict(one) for one in (whole, part, none, failed)]
    of = load.figures(cell)
    assert (of["ended"], of["failed"], of["longest"]) == (1, 1, 1.5)
    assert of["speed"] == pytest.approx((41 + 10) / 10)
    assert of["first"][0] == pytest.approx(5.0), "the median of 2, 3, 7 and 8"
    assert [*of["between"]] == pytest.approx([0.1, 0.1])


def run(folder: Path, *options: str) -> tuple[int, list[dict[str, Any]]]:
    """The exit code, and all cells so far."""
    code = load.main([*options, "--output", str(folder / "load.jsonl")])
    return code, [json.loads(line) for line in (folder / "load.jsonl").read_text().splitlines()]


def test_cells_that_are_there_are_not_measured_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A failed request shows in the exit code, also of later calls."""

    async def measure(side: str, n_clients: int, args: argparse.Namespace) -> dict[str, Any]:
        error = "" if n_clients == 1 else "no answer"
        answer = asdict(load.Answer(0.0, 1.0, 2.0, 1.0, 10, "text", error))
        return {"answers": [answer], "memory": [], "seconds": 2.0}

    monkeypatch.setattr(load, "measure", measure)
    options = ["--clients", "1,2", "--sides", "ours,llama-server"]
    code, cells = run(tmp_path, *options, "--most", "2")
    assert code == 0 and [cell["clients"] for cell in cells] == [1, 1]
    code, cells = run(tmp_path, *options)
    assert code == 1 and [cell["clients"] for cell in cells] == [1, 1, 2, 2]
    assert run(tmp_path, *options) == (1, cells)
    assert len(run(tmp_path, *options, "--places", "2")[1]) == 8
    assert "| llama-server | 2 |" in capsys.readouterr().out


@pytest.mark.long
def test_a_short_load(tmp_path: Path) -> None:
    """Two clients of our server; and a long prompt beside a running answer."""
    options = ["--sides", "ours", "--threads", "1"]
    run(tmp_path, *options, "--clients", "0", "--seconds", "300")
    code, (interrupted, two) = run(tmp_path, *options, "--clients", "2", "--seconds", "8")
    assert code == 0, [cell["answers"] for cell in (interrupted, two)]
    assert len(interrupted["answers"]) == 2 and interrupted["answers"][1]["n"] == 1
    assert load.figures(two)["speed"] > 0 and max(two["memory"]) > 0
