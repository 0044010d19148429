"""Intervals that hold together."""

from __future__ import annotations

import random

import pytest

from pyllama_mtp.errors import UsageError
from pyllama_mtp.measure.joint import joint_intervals


def rows(count: int, values: int, seed: int, width: float = 1.0) -> list[list[float]]:
    source = random.Random(seed)
    return [[source.gauss(0, width) for _ in range(values)] for _ in range(count)]


@pytest.mark.parametrize(("count", "values"), [(1, 5), (1, 9), (20, 3), (20, 7)])
def test_all_intervals_hold_in_95_of_100_cases(count: int, values: int) -> None:
    groups = [*([row] for row in range(count)), range(count)]
    missed = 0
    for seed in range(400):
        found = joint_intervals(rows(count, values, seed), ["p"] * count, groups)
        missed += any(not interval.low <= 0 <= interval.high for interval in found)
    assert 0.02 <= missed / 400 <= 0.08


def test_the_centre_is_the_mean_of_the_medians() -> None:
    values = [[1.0, 2.0, 9.0], [5.0, 6.0, 7.0]]
    one, two, both = joint_intervals(values, ["p", "p"], [[0], [1], [0, 1]])
    assert (one.center, two.center, both.center) == (2.0, 6.0, 4.0)
    assert both.high - both.low < one.high - one.low


def test_a_noisier_row_has_a_wider_interval_and_pools_are_apart() -> None:
    quiet, loud = rows(6, 5, 1, 0.01), rows(6, 5, 2, 1.0)
    singles = [[row] for row in range(6)]
    apart = joint_intervals([*quiet[:3], *loud[:3]], ["a"] * 3 + ["b"] * 3, singles)
    together = joint_intervals([*quiet[:3], *loud[:3]], ["a"] * 6, singles)
    widths = [[i.high - i.low for i in found] for found in (apart, together)]
    assert max(widths[0][:3]) < 0.1 < min(widths[0][3:])
    assert min(widths[1][:3]) > max(widths[0][:3])
    assert min(widths[1][3:]) > max(widths[1][:3])


def test_equal_values_have_an_interval_without_width() -> None:
    (found,) = joint_intervals([[0.5, 0.5, 0.5]], ["p"], [[0]])
    assert (found.low, found.center, found.high) == (0.5, 0.5, 0.5)


def test_a_single_value_takes_its_noise_from_the_pool() -> None:
    found = joint_intervals([*rows(3, 5, 1), [0.1]], ["p"] * 4, [[0], [3]])
    assert found[1].high - found[1].low > found[0].high - found[0].low
    with pytest.raises(UsageError, match="one sample only"):
        joint_intervals([[1.0], [2.0]], ["p", "p"], [[0], [1]])


def test_the_same_input_gives_the_same_intervals() -> None:
    values = rows(4, 5, 7)
    singles = [[row] for row in range(4)]
    assert joint_intervals(values, "aabb", singles) == joint_intervals(values, "aabb", singles)
