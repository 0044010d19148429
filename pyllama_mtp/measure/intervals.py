"""Ratios of what was measured side by side, and intervals that say what noise may have done.

Every interval is Student's, on a logarithmic scale: few repeats know little of their noise, so
their intervals are wide.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import mean

import numpy as np

from pyllama_mtp.errors import UsageError

#: Probability, 0 to 1, with which an interval holds the true value.
CONFIDENCE = 0.95
#: Speeds are called equal if the whole interval of their ratio is this close to 1.
EQUAL = 0.03
#: Logarithms that differ by less do so from rounding.
_ROUNDING = 1e-12


@dataclass(frozen=True)
class Ratio:
    """An estimate from n paired ratios, and an interval that holds the true ratio with
    `CONFIDENCE`; None, None from a single pair, which says nothing of the noise."""

    value: float
    low: float | None
    high: float | None
    n: int

    @property
    def holds_one(self) -> bool:
        """Whether noise can be all of it."""
        return self.low is None or self.high is None or self.low <= 1 <= self.high

    @property
    def is_one(self) -> bool:
        """Whether the true ratio is 1, but for `EQUAL`, as far as the interval says."""
        known = self.low is not None and self.high is not None
        return known and (self.low or 0) >= 1 - EQUAL and (self.high or 0) <= 1 + EQUAL

    @property
    def unclear(self) -> bool:
        """Whether it cannot be told which side of 1 it is on, nor that it :attr:`is_one`."""
        return self.holds_one and not self.is_one


def typical_ratio(*rows: Sequence[float], confidence: float = CONFIDENCE) -> Ratio:
    """The typical ratio of a row of paired ratios, with its interval; of several rows, the
    geometric mean of their typical ratios.

    Of one row it is the Hodges-Lehmann estimate, the median of the geometric means of all pairs,
    each ratio with itself too. It takes all ratios, and a stray one moves it as little as a median.

    Raises:
        UsageError: no ratio, or one that is not above 0.
    """
    center, error, freedom = _estimate(rows)
    n = sum(map(len, rows))
    if not freedom:
        return Ratio(math.exp(center), None, None, n)
    width = error * student(confidence, freedom)
    return Ratio(math.exp(center), math.exp(center - width), math.exp(center + width), n)


def typical_ratios(lines: Sequence[Sequence[Sequence[float]]]) -> list[Ratio]:
    """:func:`typical_ratio` of each line of rows. Their intervals are as wide as Holm's method
    wants: any of them leaves out a true ratio of 1 with a probability of 1 - `CONFIDENCE` at most,
    however many lines there are (S. Holm, "A Simple Sequentially Rejective Multiple Test
    Procedure", 1979).

    Raises:
        UsageError: no line has two ratios in each row, so nothing is known of the noise.
    """
    chances = [_chance_of_one(rows) for rows in lines]
    if all(chance is None for chance in chances):
        raise UsageError(
            "every cell has one sample only, so nothing is known of the noise; measure again "
            "with at least --repeat 3 (7 or more tell small changes)"
        )
    ratios, left = dict[int, Ratio](), sum(chance is not None for chance in chances)
    order = sorted((chance, number) for number, chance in enumerate(chances) if chance is not None)
    for _, number in order:
        ratio = typical_ratio(*lines[number], confidence=1 - (1 - CONFIDENCE) / left)
        ratios[number], left = ratio, left - (not ratio.holds_one)
    return [ratios.get(number) or typical_ratio(*rows) for number, rows in enumerate(lines)]


def _estimate(rows: Sequence[Sequence[float]]) -> tuple[float, float, int]:
    """Of the logarithms: the mean of the rows' estimates, its standard error, and the degrees of
    freedom that this is known with; 0: a row has one ratio only."""
    if not rows or not all(rows):
        raise UsageError("no repeat was measured on both sides, so there is no ratio")
    if (least := min(map(min, rows))) <= 0:
        raise UsageError(f"a ratio of speeds must be above 0, not {least}")
    center = mean(math.log(_typical(row)) for row in rows)
    if min(map(len, rows)) < 2:
        return center, math.inf, 0
    error = math.sqrt(sum(np.var(np.log(row), ddof=1) / len(row) for row in rows)) / len(rows)
    center, error = (value if abs(value) > _ROUNDING else 0.0 for value in (center, error))
    return center, error, sum(len(row) - 1 for row in rows)


def _typical(row: Sequence[float]) -> float:
    first, second = np.triu_indices(len(row))
    values = np.array(row, dtype=float)
    return float(np.median(np.sqrt(values[first] * values[second])))


def _chance_of_one(rows: Sequence[Sequence[float]]) -> float | None:
    """How probable a ratio this far from 1 is if the true one is 1; None: not known."""
    center, error, freedom = _estimate(rows)
    if not freedom:
        return None
    if not error:
        return float(not center)
    return 1 - _within(abs(center) / error, freedom)


@lru_cache(maxsize=1024)
def student(confidence: float, freedom: int) -> float:
    """The bound that a Student variable of so many degrees of freedom keeps within, either way,
    with this probability."""
    low, high = 0.0, 1.0
    while _within(high, freedom) < confidence:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < confidence else (low, middle)
    return high


def _within(bound: float, freedom: int) -> float:
    """The probability that it keeps within the bound (Abramowitz and Stegun, "Handbook of
    Mathematical Functions", 26.7.3 and 26.7.4)."""
    angle, odd = math.atan(bound / math.sqrt(freedom)), freedom % 2
    term, total = math.cos(angle) if odd else 1.0, 0.0
    for power in range(odd, freedom - 1, 2):
        total += term
        term *= math.cos(angle) ** 2 * (power + 1) / (power + 2)
    return 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total
