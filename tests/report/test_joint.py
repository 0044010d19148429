"""Intervals that hold together."""

from __future__ import annotations

import random
from statistics import mean

import pytest

from pyllama_mtp.errors import UsageError
from pyllama_mtp.measure.figures import half_widths, typical

from ..marks import usual


def rows(count: int, values: int, seed: int, width: float = 1.0) -> list[list[float]]:
    source = random.Random(seed)
    return [[source.gauss(0, width) for _ in range(values)] for _ in range(count)]


@pytest.mark.parametrize(
    ("count", "values"), usual((1, 9), (8, 3), long=[(1, 5), (20, 3), (20, 7)])
)
def test_all_intervals_hold_in_95_of_100_cases(count: int, values: int) -> None:
    groups = [*([row] for row in range(count)), range(count)]
    missed = 0
    for seed in range(200):
        drawn = rows(count, values, seed)
        widths = half_widths(drawn, ["p"] * count, groups)
        centers = [mean([float(typical(drawn[row])) for row in group]) for group in groups]
        missed += any(abs(center) > width for center, width in zip(centers, widths, strict=True))
    assert missed / 200 <= 0.08 and (missed / 200 >= 0.01 or count > 1)


def test_a_mean_of_rows_has_a_narrower_interval() -> None:
    values = [[1.0, 2.0, 9.0], [5.0, 6.0, 7.0]]
    one, _, both = half_widths(values, ["p", "p"], [[0], [1], [0, 1]])
    assert both < one


def test_a_noisier_row_has_a_wider_interval_and_pools_are_apart() -> None:
    quiet, loud = rows(6, 5, 1, 0.01), rows(6, 5, 2, 1.0)
    singles = [[row] for row in range(6)]
    apart = half_widths([*quiet[:3], *loud[:3]], ["a"] * 3 + ["b"] * 3, singles)
    assert 2 * max(apart[:3]) < 0.1 < 2 * min(apart[3:])


def test_equal_values_have_an_interval_without_width() -> None:
    assert half_widths([[0.5, 0.5, 0.5]])[0] < 1e-9


def test_a_single_value_takes_its_noise_from_the_pool() -> None:
    found = half_widths([*rows(3, 5, 1), [0.1]], ["p"] * 4, [[0], [3]])
    assert found[1] > found[0]
    with pytest.raises(UsageError, match="one sample only"):
        half_widths([[1.0], [2.0]], ["p", "p"], [[0], [1]])


def test_the_same_input_gives_the_same_intervals() -> None:
    values = rows(4, 5, 7)
    singles = [[row] for row in range(4)]
    assert half_widths(values, "aabb", singles) == half_widths(values, "aabb", singles)
