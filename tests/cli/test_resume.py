"""matrix --resume."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from pyllama_mtp.measure.recordfile import read_cells

from ..processes import Cli
from .conftest import SMALL


def test_resume_measures_what_is_missing(fake: ModuleType, cli: Cli) -> None:
    fake.script[10] = fake.interrupt
    assert cli(*SMALL).code == 130
    before = Path("matrix.jsonl").read_bytes()
    fake.reset()
    result = cli(*SMALL, "--resume")
    assert result.code == 0
    assert "going on with run " in result.err and ": 4 of 8 samples are there" in result.err
    assert result.err.splitlines()[1].startswith("[5/8] ")
    after = Path("matrix.jsonl").read_bytes()
    assert after.startswith(before) and after.count(b'"kind": "run"') == 1
    assert [c.repeats for c in read_cells("matrix.jsonl")] == [[0, 1]] * 4
    assert "medians of 2 samples" in result.out


def test_resume_of_a_complete_run_measures_nothing(fake: ModuleType, cli: Cli) -> None:
    first = cli(*SMALL)
    before = Path("matrix.jsonl").read_bytes()
    again = cli(*SMALL, "--resume")
    assert (again.code, again.out) == (0, first.out)
    assert Path("matrix.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--repeat", "3"), "plan.repeat was 2"),
        (("--prompt-sizes", "64,256"), "plan.sizes was [64, 128]"),
        (("--n-ubatch", "64"), "settings.n_ubatch was 512"),
        (("--temperature", "1"), "sampling.temperature was 0.0"),
        (("--model", "other.gguf"), "model.name was 'm.gguf'"),
    ],
)
def test_resume_of_something_else_is_refused(
    fake: ModuleType, cli: Cli, options: tuple[str, ...], message: str
) -> None:
    cli(*SMALL)
    before = Path("matrix.jsonl").read_bytes()
    result = cli(*SMALL, "--resume", *options)
    assert result.code == 2
    assert f"--resume: {message}" in result.err
    assert Path("matrix.jsonl").read_bytes() == before


def test_resume_keeps_the_threads_that_were_chosen(
    fake: ModuleType, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine was busy when the run began, and is not now."""
    monkeypatch.setattr("pyllama_mtp.settings.available_threads", lambda: 4)
    monkeypatch.setattr("pyllama_mtp.measure.machine.busy_cores", lambda: 1.2)
    result = cli(*SMALL)
    assert "other programs keep 1 of 4 cores busy; measuring with 3 threads" in result.err
    monkeypatch.setattr("pyllama_mtp.measure.machine.busy_cores", lambda: 0.0)
    assert cli(*SMALL, "--resume").code == 0
    assert {c.settings["n_threads"] for c in read_cells("matrix.jsonl")} == {3}
    cli(*SMALL, "--threads", "4", "--output", "four.jsonl")
    assert {c.settings["n_threads"] for c in read_cells("four.jsonl")} == {4}


def test_a_damaged_file_is_refused_before_anything_is_loaded(fake: ModuleType, cli: Cli) -> None:
    cli(*SMALL)
    path = Path("matrix.jsonl")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], b"{}\n", *lines[2:]]))
    fake.reset()
    result = cli(*SMALL, "--resume")
    assert result.code == 2 and "matrix.jsonl, line 3: not a record" in result.err
    assert not fake.log
