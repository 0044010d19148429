"""bench/publish.py: sections go on where they ended, and the page says what was measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import publish
import pytest
from benchkit.model import OTHERS, SYNTHETIC
from benchkit.speedpage import write_page

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
        return SimpleNamespace(returncode=main(command[3:]))

    monkeypatch.setattr(publish, "RESULTS", tmp_path)
    monkeypatch.setattr(publish, "SECTIONS", (TINY,))
    monkeypatch.setattr(publish, "subprocess", SimpleNamespace(run=run))
    return tmp_path


def run(folder: Path, *more: str) -> int:
    return publish.main(["--models", str(folder), "--only", "classes", *more])


def test_a_section_is_measured_once_and_goes_on(folder: Path) -> None:
    assert run(folder, "--minutes", "0") == publish.UNFINISHED
    assert run(folder) == 0
    records, page = folder / "classes.jsonl", folder / "speed.md"
    whole = records.read_bytes()
    lines = whole.splitlines(keepends=True)
    assert sum(json.loads(line)["kind"] == "sample" for line in lines) == 8
    assert "Not finished" not in page.read_text()
    assert run(folder) == 0 and records.read_bytes() == whole, "all was there"
    records.write_bytes(b"".join(lines[:-1]))  # as after a crash
    assert run(folder, "--minutes", "0") == publish.UNFINISHED
    assert "**Not finished: demo.**" in page.read_text()
    assert run(folder) == 0
    again = records.read_bytes().splitlines()
    assert len(again) == len(lines) and "Not finished" not in page.read_text()

    # With samples changed to known speeds: 100 without MTP, 150, 200, and 180 with auto.
    changed = [json.loads(line) for line in again]
    for line in changed:
        if line["kind"] == "sample":
            cell, sample = line["cell"], line["sample"]
            speed = 180.0 if cell.get("adaptive") else 100.0 + 50 * cell["n_max"]
            sample |= {"decode_tps": speed, "prefill_tps": 10.0, "cpu_s": {}}
    records.write_text("".join(json.dumps(line) + "\n" for line in changed))
    assert run(folder) == 0
    head, _, row = page.read_text().partition("| file |")[2].splitlines()[:3]
    names, values = (text.strip("| ").split(" | ") for text in (head, row))
    figures = dict(zip(names, values[1:], strict=True))
    assert figures["best depth to no MTP"] == "2.00 (2.00-2.00, depth 2)"
    assert figures["auto to no MTP"] == "1.80 (1.80-1.80)" and figures["auto, tok/s"] == "180.0"
    assert figures["auto to the best depth"] == "0.90 (0.90-0.90)"
    assert figures["prompt with MTP to without"].startswith("1.00 ")


def test_lengths_for_which_there_was_no_time_are_named_and_measured_later(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = "--at 256,512 -p 32 -n 8 --depths 0,2 --threads 1 --repeat 1 --no-ngram"
    monkeypatch.setattr(publish, "SECTIONS", (replace(TINY, options=options),))
    # The time is over after the first length.
    assert run(folder, "--more", "--budget 0.001s") == publish.UNFINISHED
    text = (folder / "speed.md").read_text()
    assert "- demo: there was no time for all after 512 tokens." in text
    assert run(folder) == 0
    text = (folder / "speed.md").read_text()
    assert "Not finished" not in text and "there was no time" not in text
    _, _, table = text.partition("\n| file | after | ")
    _, _, *rows = table.partition("\n\n")[0].splitlines()
    assert [row.split(" | ")[1] for row in rows] == ["256", "512"]


def test_a_part_of_the_page_is_replaced_and_the_others_stay(tmp_path: Path) -> None:
    page, order = tmp_path / "speed.md", ["a", "b", "c"]
    page.write_text("# Title\n\n<!-- other -->\n## Other\n")
    for name, text in (("c", "## C\n\nold"), ("a", "## A"), ("c", "## C\n\nnew")):
        write_page(page, name, text, order)
    text = page.read_text()
    assert text.index("## A") < text.index("## C") < text.index("## Other")
    assert text.startswith("# Title\n") and "new" in text and "old" not in text


@pytest.mark.parametrize("section", publish.SECTIONS, ids=lambda section: section.name)
def test_every_command_is_one_of_matrix(section: publish.Section) -> None:
    build_parser("matrix").parse_args(["matrix", *section.options.split()])
    assert {*section.models, *section.further} <= {*SYNTHETIC, *OTHERS, publish.DEMO}
