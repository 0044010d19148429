"""matrix --resume."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from pyllama_mtp.measure.records import read_cells

from ..processes import Cli
from .conftest import SMALL


def test_resume_measures_what_is_missing(fake: ModuleType, cli: Cli) -> None:
    fake.script[10] = fake.interrupt  # in the third group: size 64, repeat 2
    result = cli(*SMALL)
    assert result.code == 130 and "interrupted" in result.err
    assert "medians of 1 sample," in result.out
    assert "samples in matrix.jsonl: 4; --resume goes on" in result.err
    assert fake.state["open_sessions"] == 0 and fake.log[-1] == ("model closed",)
    path = Path("matrix.jsonl")
    before = path.read_bytes()
    refused = cli(*SMALL, "--resume", "--n-ubatch", "64")
    assert refused.code == 2 and "--resume: settings.n_ubatch was 512" in refused.err
    assert path.read_bytes() == before
    fake.reset()
    result = cli(*SMALL, "--resume")
    assert result.code == 0
    assert "going on with run " in result.err and ": 4 of 8 samples are there" in result.err
    assert result.err.splitlines()[1].startswith("[5/8] ")
    after = path.read_bytes()
    assert after.startswith(before) and after.count(b'"kind":"run"') == 1
    assert [c.repeats for c in read_cells(path)] == [[0, 1]] * 4
    assert "medians of 2 samples" in result.out
    again = cli(*SMALL, "--resume")
    assert (again.code, again.out, path.read_bytes()) == (0, result.out, after)


def test_of_several_models_each_goes_on_by_itself(fake: ModuleType, cli: Cli) -> None:
    """The second one has no run yet."""
    both = (*SMALL, "--model", "folder/b.gguf", "--resume")
    assert cli(*SMALL).code == 0
    assert cli(*both).code == 0
    assert [c.model for c in read_cells("matrix.jsonl")] == ["m.gguf"] * 4 + ["b.gguf"] * 4
    before = Path("matrix.jsonl").read_bytes()
    assert cli(*both).code == 0 and Path("matrix.jsonl").read_bytes() == before


def test_resume_keeps_the_threads_that_were_chosen(
    fake: ModuleType, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine was busy when the run began, and is not now."""
    monkeypatch.setattr("pyllama_mtp.settings.available_threads", lambda: 4)
    monkeypatch.setattr("pyllama_mtp.machine.busy_cores", lambda: 1.2)
    result = cli(*SMALL)
    assert "other programs keep 1 of 4 cores busy; measuring with 3 threads" in result.err
    monkeypatch.setattr("pyllama_mtp.machine.busy_cores", lambda: 0.0)
    assert cli(*SMALL, "--resume").code == 0
    assert {c.settings["n_threads"] for c in read_cells("matrix.jsonl")} == {3}
    cli(*SMALL, "--threads", "4", "--output", "four.jsonl")
    assert {c.settings["n_threads"] for c in read_cells("four.jsonl")} == {4}


def test_a_damaged_file_is_refused_before_anything_is_loaded(fake: ModuleType, cli: Cli) -> None:
    Path("matrix.jsonl").write_text("{}\n")
    result = cli(*SMALL, "--resume")
    assert result.code == 2 and "matrix.jsonl, line 1: not a record" in result.err
    assert not fake.log


def test_a_run_that_is_not_there_cannot_go_on(fake: ModuleType, cli: Cli) -> None:
    result = cli(*SMALL, "--resume", "--output", "typo.jsonl")
    assert result.code == 2 and "cannot read typo.jsonl: No such file" in result.err
    assert not fake.log and not Path("typo.jsonl").exists()
