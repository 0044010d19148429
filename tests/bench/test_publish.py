"""bench/publish.py: sections go on where they ended, and it prints what was measured."""

from __future__ import annotations

import json
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import publish
import pytest
from benchkit.model import OTHERS, SYNTHETIC

from pyllama_mtp.cli import build_parser, main

TINY = publish.Section(
    "classes", "A title", "-p 32 -n 8 --depths 0,1,2,auto --threads 1 --repeat 2 --no-ngram"
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the results go; the only section is a small one on the demo model, and its command
    runs in this process."""

    def run(command: list[str], **options: Any) -> SimpleNamespace:
        monkeypatch.chdir(options["cwd"])
        with redirect_stdout(StringIO()):  # the matrix's own table
            return SimpleNamespace(returncode=main(command[3:]))

    monkeypatch.setattr(publish, "RESULTS", tmp_path)
    monkeypatch.setattr(publish, "SECTIONS", (TINY,))
    monkeypatch.setattr(publish, "subprocess", SimpleNamespace(run=run))
    return tmp_path


def run(folder: Path, *more: str) -> int:
    return publish.main(["--models", str(folder), "--only", "classes", *more])


def test_a_section_is_measured_once_and_goes_on(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(folder, "--minutes", "0") == publish.UNFINISHED
    assert run(folder) == 0
    records = folder / "classes.jsonl"
    whole = records.read_bytes()
    lines = whole.splitlines(keepends=True)
    assert sum(json.loads(line)["kind"] == "sample" for line in lines) == 8
    assert "Not finished" not in capsys.readouterr().out
    assert run(folder) == 0 and records.read_bytes() == whole, "all was there"
    records.write_bytes(b"".join(lines[:-1]))  # as after a crash
    assert run(folder, "--minutes", "0") == publish.UNFINISHED
    assert "**Not finished: demo.**" in capsys.readouterr().out
    assert run(folder) == 0
    again = records.read_bytes().splitlines()
    assert len(again) == len(lines) and "Not finished" not in capsys.readouterr().out

    # With samples changed to known speeds: 100 without MTP, 150, 200, and 180 with auto.
    changed = [json.loads(line) for line in again]
    for line in changed:
        if line["kind"] == "sample":
            cell, sample = line["cell"], line["sample"]
            speed = 180.0 if cell.get("adaptive") else 100.0 + 50 * cell["n_max"]
            sample |= {"decode_tps": speed, "prefill_tps": 10.0, "cpu_s": {}}
    records.write_text("".join(json.dumps(line) + "\n" for line in changed))
    assert run(folder) == 0
    head, _, row = capsys.readouterr().out.partition("| file |")[2].splitlines()[:3]
    names, values = (text.strip("| ").split(" | ") for text in (head, row))
    figures = dict(zip(names, values[1:], strict=True))
    assert figures["best depth to no MTP"] == "2.00 (2.00-2.00, depth 2)"
    assert figures["auto to no MTP"] == "1.80 (1.80-1.80)" and figures["auto, tok/s"] == "180.0"
    assert figures["auto to the best depth"] == "0.90 (0.90-0.90)"
    assert figures["prompt with MTP to without"].startswith("1.00 ")


def test_lengths_for_which_there_was_no_time_are_measured_later(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = "--at 256,512 -p 32 -n 8 --depths 0,2 --threads 1 --repeat 1 --no-ngram"
    monkeypatch.setattr(publish, "SECTIONS", (replace(TINY, options=options),))
    # The time is over after the first length.
    assert run(folder, "--more", "--budget 0.001s") == publish.UNFINISHED
    assert "**Not finished: demo.**" in capsys.readouterr().out
    assert run(folder) == 0
    text = capsys.readouterr().out
    assert "Not finished" not in text
    _, _, *rows = text.partition("\n| file | ")[2].splitlines()
    assert [row.split(" | ")[1] for row in rows if row] == ["32 @ d256 source", "32 @ d512 source"]


@pytest.mark.parametrize("section", publish.SECTIONS, ids=lambda section: section.name)
def test_every_command_is_one_of_matrix(section: publish.Section) -> None:
    build_parser("matrix").parse_args(["matrix", *section.options.split()])
    assert {*section.models, *section.further} <= {*SYNTHETIC, *OTHERS, publish.DEMO}
