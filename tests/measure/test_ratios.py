"""Paired ratios: which samples are paired, the estimate, its interval, intervals of many lines."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from pyllama_mtp.errors import UsageError
from pyllama_mtp.measure.figures import (
    Cell,
    Sample,
    base_of,
    paired_ratios,
)
from pyllama_mtp.measure.intervals import student, typical_ratio, typical_ratios

from ..cells import made_cell
from ..marks import usual


def cell(depth: int, speeds: dict[int, float], **changes: Any) -> Cell:
    """A cell with these decode speeds, by repeat; prefill is ten times as fast."""
    samples = [
        Sample(9, 8, 1.0, 1.0, 60 / v if v else 1.0, 10 * v, v, [], [], 0, 1.0)
        for v in speeds.values()
    ]
    return made_cell(depth, samples, repeats=list(speeds), **changes)


def test_ratios_are_of_the_same_repeat() -> None:
    """The machine was half as fast in repeat 1; the ratio of medians would be 150 / 50."""
    plain = cell(0, {0: 100.0, 1: 50.0, 2: 50.0})
    mtp = cell(3, {2: 75.0, 0: 150.0, 3: 150.0})
    assert paired_ratios(mtp, plain, "decode_tps") == [1.5, 1.5]
    assert paired_ratios(mtp, plain, "prefill_tps") == [1.5, 1.5]
    assert paired_ratios(mtp, plain, "elapsed_s") == pytest.approx([1 / 1.5, 1 / 1.5])


def test_a_sample_without_a_rate_has_no_ratio() -> None:
    assert paired_ratios(cell(3, {0: 0.0, 1: 9.0}), cell(0, {0: 1.0, 1: 3.0}), "decode_tps") == [3]


def test_the_base_is_the_plain_cell_of_the_same_setting() -> None:
    plain = cell(0, {0: 1.0})
    others = [
        cell(0, {0: 1.0}, **change)
        for change in (
            {"n_prompt": 1024},
            {"variant": "upstream"},
            {"prompt_class": "code"},
            {"run": "b"},
            {"program": "llama-server"},
            {"max_tokens": 9},
        )
    ]
    mtp = cell(3, {0: 1.0})
    assert base_of(mtp, [*others, mtp, plain]) is plain
    assert base_of(plain, [*others, plain]) is plain
    assert base_of(mtp, [*others, mtp, cell(0, {})]) is None, "a cell without a sample is no base"


def test_of_several_bases_the_closest_is_taken() -> None:
    first, second = cell(0, {0: 1.0}), cell(0, {0: 2.0})
    mtp = cell(3, {0: 4.0})
    assert base_of(mtp, [first, cell(2, {0: 1.0}), second, mtp]) is second
    assert base_of(mtp, [first, mtp, cell(2, {0: 1.0}), second]) is first


# -- intervals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratios", "value", "width"),
    [
        ([1.5], 1.5, None),
        ([1.0, 2.0, 4.0], 2.0, 4.303 * math.log(2) / math.sqrt(3)),
        ([1.0] * 8 + [50.0], 1.0, 2.306 * math.log(50) / 9),  # a stray one
        ([0.9, 0.9], 0.9, 0.0),
    ],
)
def test_estimate_and_interval(ratios: list[float], value: float, width: float | None) -> None:
    found = typical_ratio(ratios)
    assert found.value == pytest.approx(value) and found.n == len(ratios)
    if width is None:
        assert found.low is found.high is None and found.holds_one
    else:
        bounds = value * math.exp(-width), value * math.exp(width)
        assert (found.low, found.high) == pytest.approx(bounds, rel=1e-3)
        assert found.holds_one == (bounds[0] <= 1 <= bounds[1])


@pytest.mark.parametrize(("ratios", "message"), [([], "no repeat"), ([1.0, 0.0], "above 0")])
def test_what_has_no_ratio_is_refused(ratios: list[float], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        typical_ratio(ratios)


@pytest.mark.parametrize(
    ("confidence", "freedom", "bound"),
    [(0.95, 1, 12.706), (0.95, 2, 4.303), (0.95, 7, 2.365), (0.999, 12, 4.318), (0.9, 200, 1.653)],
)
def test_students_bounds(confidence: float, freedom: int, bound: float) -> None:
    """Of the tables that every book has."""
    assert student(confidence, freedom) == pytest.approx(bound, abs=1e-3)


def noisy(source: random.Random, n: int, rows: int = 1) -> list[list[float]]:
    return [[source.lognormvariate(0, 0.2) for _ in range(n)] for _ in range(rows)]


@pytest.mark.parametrize(("n", "rows"), usual((3, 1), long=[(2, 1), (9, 1), (3, 4)]))
def test_the_interval_holds_the_true_ratio_as_often_as_it_says(n: int, rows: int) -> None:
    source = random.Random(7)
    found = [typical_ratio(*noisy(source, n, rows)) for _ in range(600)]
    assert 0.93 <= sum(one.holds_one for one in found) / len(found) <= 0.97


@pytest.mark.parametrize(("n", "lines"), usual((3, 20), long=[(5, 20), (9, 2)]))
def test_of_many_lines_any_is_wrong_once_in_20_times(n: int, lines: int) -> None:
    source = random.Random(3)
    trials = [typical_ratios([noisy(source, n) for _ in range(lines)]) for _ in range(200)]
    wrong = sum(not all(one.holds_one for one in trial) for trial in trials) / len(trials)
    assert 0.01 <= wrong <= 0.075


def test_holms_method() -> None:
    """Each difference that is found makes the next one easier to find; a line with one pair is in
    nobody's way."""
    sure, close, single = [[2.0, 2.01, 2.02]], [[1.5, 1.6, 1.75]], [[3.0]]
    assert not typical_ratio(*close).holds_one
    both = typical_ratios([close, sure, single])
    assert both[0] == typical_ratio(*close) and both[2].low is None
    wider = typical_ratios([close, [[1.0, 2.0, 0.5]]])
    assert (wider[0].high or 0) > (both[0].high or 0)
    assert not both[1].holds_one and (both[1].high or 9) > (typical_ratio(*sure).high or 0)
    with pytest.raises(UsageError, match="one sample only"):
        typical_ratios([single, single])
