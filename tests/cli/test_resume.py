"""matrix --resume."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyllama_mtp.measure.records import read_cells

from ..processes import Cli
from .conftest import SMALL, Watched, interrupt


def test_resume_measures_what_is_missing(watched: Watched, cli: Cli) -> None:
    watched.script[10] = interrupt  # in the third group: size 24, repeat 2
    result = cli(*SMALL)
    assert result.code == 130 and "interrupted" in result.err
    assert "medians of 1 sample," in result.out
    assert "samples in matrix.jsonl: 4; --resume goes on" in result.err
    assert watched.n_open == 0
    path = Path("matrix.jsonl")
    before = path.read_bytes()
    refused = cli(*SMALL, "--resume", "--n-ubatch", "32")
    assert refused.code == 2 and "--resume: settings.n_ubatch was 64" in refused.err
    assert path.read_bytes() == before
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


def test_of_several_models_each_goes_on_by_itself(watched: Watched, cli: Cli) -> None:
    """The second one has no run yet."""
    first = (*SMALL, "--prompt-sizes", "24", "--repeat", "1")
    both = (*first, "--model", "folder/b.gguf", "--resume")
    assert cli(*first).code == 0
    assert cli(*both).code == 0
    assert [c.model for c in read_cells("matrix.jsonl")] == ["m.gguf"] * 2 + ["b.gguf"] * 2
    before = Path("matrix.jsonl").read_bytes()
    assert cli(*both).code == 0 and Path("matrix.jsonl").read_bytes() == before


def test_resume_keeps_the_threads_that_were_chosen(
    watched: Watched, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine was busy when the run began, and is not now."""
    small = (*SMALL[:-2], "-p", "8", "--depths", "0", "-n", "1")
    monkeypatch.setattr("pyllama_mtp.settings.available_threads", lambda: 4)
    monkeypatch.setattr("pyllama_mtp.machine.busy_cores", lambda: 2.2)
    result = cli(*small)
    assert "other programs keep 2 of 4 cores busy; measuring with 2 threads" in result.err
    monkeypatch.setattr("pyllama_mtp.machine.busy_cores", lambda: 0.0)
    assert cli(*small, "--resume").code == 0
    assert {c.settings["n_threads"] for c in read_cells("matrix.jsonl")} == {2}


@pytest.mark.usefixtures("nothing_loads")
def test_what_cannot_go_on_is_refused_before_anything_is_loaded(cli: Cli) -> None:
    Path("matrix.jsonl").write_text("{}\n")
    result = cli(*SMALL, "--resume")
    assert result.code == 2 and "matrix.jsonl, line 1: not a record" in result.err
    result = cli(*SMALL, "--resume", "--output", "typo.jsonl")
    assert result.code == 2 and "cannot read typo.jsonl: No such file" in result.err
    assert not Path("typo.jsonl").exists()
