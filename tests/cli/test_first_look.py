"""matrix without a model: a synthetic one of a usual size, and the demo model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pyllama_mtp.errors import DiskFullError
from pyllama_mtp.measure.records import read_cells, read_file
from pyllama_mtp.models import synth

from ..processes import Cli
from .conftest import Watched, interrupt


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch, demo_file: Path, tmp_path: Path) -> list[Path]:
    """The paths of synthetic models that would have been written; each is the demo model."""
    found: list[Path] = []
    path = tmp_path / "cache" / synth.EXAMPLE_NAME

    def write(progress: Any) -> Path:
        progress(1, 1)
        path.parent.mkdir()
        path.symlink_to(demo_file)
        found.append(path)
        return path

    monkeypatch.setattr(synth, "example_path", lambda: path)
    monkeypatch.setattr("pyllama_mtp.cli.matrix.FIRST_SIZES", (12,))
    monkeypatch.setattr("pyllama_mtp.cli.matrix.FIRST_TOKENS", 4)

    monkeypatch.setattr(synth, "write_example", write)
    monkeypatch.setattr(synth, "example_is_there", lambda: bool(found))
    monkeypatch.setattr("pyllama_mtp.machine.available_memory", lambda: 8 << 30)
    return found


def test_the_first_look_is_at_a_usual_size_and_at_real_text(
    watched: Watched, cli: Cli, written: list[Path]
) -> None:
    result = cli("matrix", "--repeat", "1", "--threads", "1")
    assert result.code == 0 and written == [synth.example_path()]
    assert "random weights" in result.err and str(written[0]) in result.err
    cells = read_cells("matrix.jsonl")
    assert [(c.model, c.n_prompt, c.n_max, c.max_tokens) for c in cells] == [
        (model, 12, depth, 4)
        for model in (synth.EXAMPLE_NAME, "demo.gguf")
        for depth in (0, 2, 3, 6)
    ]
    last = result.out.strip().split("\n\n")[-2:]
    assert [text.split(":")[0] for text in last] == [synth.EXAMPLE_NAME, "demo.gguf"]
    assert f"{synth.EXAMPLE_NAME}: random weights and an MTP head made to draft well" in result.out


def test_some_repeats_are_measured_however_long_they_take(
    watched: Watched, cli: Cli, written: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pyllama_mtp.cli.matrix.FIRST_BUDGET", 1e-6)
    monkeypatch.setattr("pyllama_mtp.cli.matrix.FIRST_REPEATS", 2)
    assert cli("matrix", "--threads", "1").code == 0
    assert {len(c.samples) for c in read_cells("matrix.jsonl")} == {2}
    assert cli("matrix", "--threads", "1", "--budget", "0.000001s", "--output", "b.jsonl").code == 0
    assert {len(c.samples) for c in read_cells("b.jsonl")} == {1}


@pytest.mark.parametrize("short", ["memory", "disk"])
def test_the_first_look_does_without_the_synthetic_model_and_says_so(
    watched: Watched, cli: Cli, written: list[Path], monkeypatch: pytest.MonkeyPatch, short: str
) -> None:
    if short == "memory":
        monkeypatch.setattr("pyllama_mtp.machine.available_memory", lambda: 1 << 30)
        why = "1.07 GB of memory are free, and it takes 2.15 GB"
    else:
        why = "no room at all"

        def refuse(progress: Any) -> Path:
            raise DiskFullError(why)

        monkeypatch.setattr(synth, "write_example", refuse)
    result = cli("matrix", "--repeat", "1", "--threads", "1")
    assert result.code == 0 and "only the demo model is measured" in result.err
    assert why in result.err
    assert {c.model for c in read_cells("matrix.jsonl")} == {"demo.gguf"} and not written


def test_the_first_look_goes_on_where_it_ended(
    watched: Watched, cli: Cli, written: list[Path]
) -> None:
    """Interrupted in the first model; at the end both models are measured, in one run each, and the
    synthetic one has been written once."""
    watched.script[10] = interrupt
    look = ("matrix", "--repeat", "2", "--threads", "1")
    assert cli(*look).code == 130
    assert {c.model for c in read_cells("matrix.jsonl")} == {synth.EXAMPLE_NAME}
    for _ in range(2):
        assert cli(*look, "--resume").code == 0
    runs = read_file("matrix.jsonl").runs.values()
    assert [run.header.model.name for run in runs] == [synth.EXAMPLE_NAME, "demo.gguf"]
    assert [len(run.measured) for run in runs] == [8, 8] and len(written) == 1


def test_what_is_asked_for_is_measured_on_the_demo_model_alone(
    watched: Watched, cli: Cli, written: list[Path]
) -> None:
    watched.refused.update(dict.fromkeys((0, 2, 3, "auto"), DiskFullError("no session")))
    for options in (("--depths", "0,2"), ("--prompt-sizes", "64")):
        result = cli("matrix", *options, "--repeat", "1")
        assert result.code == 2 and "no session" in result.err
    assert not written
