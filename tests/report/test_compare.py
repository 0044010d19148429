"""Comparing: which cells are matched, what is found and said, and the exit code."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from pyllama_mtp.errors import UsageError
from pyllama_mtp.measure.compare import compare, of_variants
from pyllama_mtp.measure.figures import Cell

from ..processes import Cli
from .conftest import MEASURED, make_cell, make_matrix

Write = Callable[[str, Sequence[Cell]], Path]


def slowed(cells: Sequence[Cell], factor: float, figure: str = "decode_tps") -> list[Cell]:
    """A copy whose speeds are all multiplied by `factor`."""
    cells = copy.deepcopy(list(cells))
    for cell in cells:
        for sample in cell.samples:
            setattr(sample, figure, getattr(sample, figure) * factor)
    return cells


def test_a_file_compared_with_itself_finds_nothing(cli: Cli) -> None:
    """A file that was measured."""
    for options in ([], ["--threshold", "0.1%"]):
        result = cli("compare", MEASURED, MEASURED, *options)
        assert result.code == 0 and "nothing got slower" in result.out, options


def test_a_slow_down_in_every_format(cli: Cli, write_cells: Write) -> None:
    old = write_cells("old.jsonl", make_matrix(1))
    new = write_cells("new.jsonl", slowed(make_matrix(1), 0.95))
    result = cli("compare", old, new)
    lines = [line for line in result.out.splitlines() if "SLOWER" in line]
    assert result.code == 1 and all(line.startswith(("decode", "SLOWER")) for line in lines)
    assert any(line.startswith("decode") and "all cells" in line for line in lines)
    assert cli("compare", old, new, "--threshold", "10%").code == 0
    faster = cli("compare", new, old)
    assert faster.code == 0 and "faster" in faster.out
    result = cli("compare", old, new, "--format", "json")
    found = json.loads(result.out)
    assert result.code == 1 and found["slower"] == 17 and found["threshold"] == 0.03
    assert found["changes"][0]["verdict"] == "same"
    markdown = cli("compare", old, new, "--format", "markdown")
    assert markdown.code == 1 and "**SLOWER by 3 % or more: 17 of 34 lines" in markdown.out


def test_in_a_file_of_its_own_scale() -> None:
    """Without noise the threshold decides alone, and it is included."""
    old = make_matrix(1)
    assert not compare(old, slowed(old, 0.951), threshold=0.05).slower
    assert len(compare(old, slowed(old, 0.95), threshold=0.05).slower) == 12 + 4 + 1
    change = compare(old, slowed(old, 0.95)).slower[0]
    assert change.ratio == pytest.approx(0.95)
    assert (change.low, change.high) == pytest.approx((0.95, 0.95))
    assert change.new == pytest.approx(0.95 * (change.old or 0))


def test_noise_past_the_threshold_is_unclear_not_slower() -> None:
    old = [make_cell(0, decode=[40, 40, 40])]
    found = compare(old, [make_cell(0, decode=[36, 44, 30])])
    assert [change.verdict for change in found.changes] == ["same", "unclear"]
    low, high = found.changes[1].low, found.changes[1].high
    assert low is not None and high is not None and low < 1 < high


def test_cells_of_one_side_only_are_named() -> None:
    skipped = make_cell(3, 4096, prefill=[], decode=[], skipped="too long")
    found = compare(
        [make_cell(0), make_cell(3), make_cell(3, 4096)], [make_cell(0), make_cell(2), skipped]
    )
    assert found.only_old == ["MTP 3, prompt 512", "MTP 3, prompt 4096"]
    assert found.only_new == ["MTP 2, prompt 512"]


def test_other_measurements_do_not_match() -> None:
    for changed in (
        {"model": "n.gguf"},
        {"program": "llama-server"},
        {"prompt_class": "code"},
        {"max_tokens": 65},
        {"axes": {"prompt_sync": "full"}},
        {"synthetic_acceptance": [0.5]},
    ):
        with pytest.raises(UsageError, match=r"no cell was measured on both sides.*MTP 2"):
            compare([make_cell(2)], [make_cell(2, **changed)])


def test_what_differs_besides_is_said() -> None:
    old = make_cell(2, settings={"n_threads": 2, "n_ctx": 1, "gone": 1})
    new = make_cell(
        2,
        series="0badcafe00",
        machine={"cpu": "Testcore", "cores": 4, "devices": []},
        settings={"n_threads": 4, "n_ctx": 2},
    )
    plain = make_cell(0, series=new.series, machine=new.machine)
    assert compare([old, make_cell(0), old], [new, plain]).notes == [
        "measured more than once in OLD, the last counts: 1 cell",
        "different machine: cores 2 -> 4",
        "different build: series feedc0dedead -> 0badcafe00",
        "different settings: n_threads 2 -> 4",
    ]


def test_two_variants_of_one_file(cli: Cli, write_cells: Write) -> None:
    cells = [*make_matrix(1, variant="upstream", series="u"), *slowed(make_matrix(2), 0.9)]
    path = write_cells("both.jsonl", cells)
    result = cli("compare", path, "--variants", "upstream,patched")
    assert result.code == 1 and "variant upstream -> patched" in result.out
    assert cli("compare", path, "--variants", "patched,upstream").code == 0
    wrong = cli("compare", path, "--variants", "upstream,mine")
    assert wrong.code == 2 and "there are: upstream, patched" in wrong.err
    with pytest.raises(UsageError, match="both patched"):
        of_variants(cells, "patched", "patched")


def test_a_file_appended_to_by_two_new_builds() -> None:
    """Neither build is the old one, so the last measurement counts."""
    new = [make_cell(2, series="b", decode=[9, 9, 9]), make_cell(2, series="c")]
    found = compare([make_cell(2)], new)
    assert not found.slower and "series feedc0dedead -> c" in found.notes[-1]
    assert compare([make_cell(2, series="b")], new).slower


def test_what_cannot_be_compared_ends_with_2(cli: Cli, write_cells: Write, tmp_path: Path) -> None:
    good = write_cells("good.jsonl", make_matrix(1))
    once = write_cells("once.jsonl", make_matrix(1, repeat=1))
    other = write_cells("other.jsonl", [make_cell(9)])
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    for arguments, message in (
        ([good], "two files"),
        ([good, good, "--variants", "a,b"], "within one file"),
        ([good, empty], "holds no measured cell"),
        ([good, tmp_path / "none.jsonl"], "cannot read"),
        ([good, other], "on both sides"),
        ([once, once], "one sample only"),
        ([good, good, "--threshold", "5"], "3% or 0.03"),
    ):
        result = cli("compare", *arguments)
        assert result.code == 2 and message in result.err, arguments
        assert not result.out
