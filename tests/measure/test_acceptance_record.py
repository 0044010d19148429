"""The file of an acceptance run: what is written is read again, and every damage is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pyllama_mtp.errors import UsageError
from pyllama_mtp.measure.acceptance import read_run
from pyllama_mtp.measure.records import Lines

from . import acceptance_fakes as fakes


@pytest.fixture
def lines() -> list[dict[str, Any]]:
    run = fakes.a_run()
    objects = [run.header, *run.results, *run.costs]
    return [dict(json.loads(msgspec.json.encode(each))) for each in objects]


def write(path: Path, objects: list[Any]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in objects))
    return path


def test_a_line_without_a_field_is_refused(tmp_path: Path, lines: list[Any]) -> None:
    for number, line in enumerate(lines):
        for name in line.keys() - {"schema", "kind"}:
            without = {key: value for key, value in line.items() if key != name}
            path = write(tmp_path / "run.jsonl", [*lines[:number], without])
            with pytest.raises(UsageError, match=rf"line {number + 1}: .*required field `{name}`"):
                read_run(path)
    path = write(tmp_path / "run.jsonl", [{**line, "more": 1} for line in lines])
    assert len(read_run(path).results) == 3, "what a later writer adds is left out"


def test_what_is_written_is_read_at_once(tmp_path: Path, lines: list[Any]) -> None:
    path = tmp_path / "run.jsonl"
    with Lines(path) as file:
        file.write(lines[0])
        assert len(read_run(path).results) == 0
        file.write(*lines[1:3])
        assert len(read_run(path).results) == 2
        file.write(*lines[3:])
    run = fakes.a_run()
    found = read_run(path)
    assert (found.header, found.results, found.costs) == (run.header, run.results, run.costs)


def test_a_failure_before_the_first_line_leaves_no_file(tmp_path: Path, lines: list[Any]) -> None:
    for written in (0, 1):
        path = tmp_path / f"{written}.jsonl"
        with pytest.raises(KeyboardInterrupt), Lines(path) as file:
            file.write(*lines[:written])
            raise KeyboardInterrupt
        assert path.exists() is bool(written)


def damage(number: int, **changes: Any) -> Callable[[list[Any]], None]:
    def change(found: list[Any]) -> None:
        found[number].update(changes)

    return change


@pytest.mark.parametrize(
    ("change", "number", "message"),
    [
        (damage(0, schema=2), 1, "Invalid enum value 2"),
        (damage(0, kind="cell"), 1, "not the header of an acceptance run"),
        (damage(0, depth=0), 1, "Expected `int` >= 1 - at `$.depth`"),
        (damage(0, settings=[]), 1, "Expected `object`, got `array` - at `$.settings`"),
        (lambda found: found.pop(0), 1, "not the header of an acceptance run"),
        (damage(1, kind="else"), 2, "Invalid value 'else' - at `$.kind`"),
        (damage(1, kind="acceptance"), 2, "Invalid value 'acceptance' - at `$.kind`"),
        (damage(1, accepted=[1, -1]), 2, "Expected `int` >= 0 - at `$.accepted[1]`"),
        (damage(1, accepted=[1, 3]), 2, "3 accepted of 2 drafts"),
        (damage(1, accepted=[True]), 2, "Expected `int`, got `bool` - at `$.accepted[0]`"),
        (damage(2, decode_s=float("nan")), 3, "damaged, not a whole JSON object"),
        (damage(2, context_length=0), 3, "Expected `int` >= 1 - at `$.context_length`"),
        (damage(4, verify=[0.0, 1.0]), 5, "verification"),
        (damage(4, draft=[0.0, 1.0], verify=[0.0, 1.0, 1.0]), 5, "costs of 1 drafts in a run with"),
        (lambda found: found.insert(2, "text"), 3, "Expected `object`, got `str`"),
    ],
)
def test_damage_is_refused_by_file_and_line(
    tmp_path: Path, lines: list[Any], change: Callable[[list[Any]], Any], number: int, message: str
) -> None:
    change(lines)
    with pytest.raises(UsageError) as error:
        read_run(write(tmp_path / "run.jsonl", lines))
    assert f"run.jsonl, line {number}: " in str(error.value) and message in str(error.value)


def test_a_miss_says_where_it_was() -> None:
    assert msgspec.to_builtins(fakes.a_run().misses[0]) == {
        "class": "code", "prompt": 1, "context_length": None, "generated": 7, "position": 1,
        "drafted": 3, "actual": 4, "drafted_text": " a", "actual_text": "|b",
        "context": "before it",
    }  # fmt: skip
