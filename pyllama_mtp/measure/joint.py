"""Intervals of many medians that hold together, for telling a change from noise.

A comparison looks at dozens of cells at once. With intervals that are right for one cell, 95 times
of 100, most comparisons of a build with itself would find a change. These intervals are wide enough
that in 95 of 100 such comparisons none of them misses.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import pi
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pyllama_mtp.errors import UsageError

#: Probability, 0 to 1, that all intervals of a comparison hold at once when nothing changed.
CONFIDENCE = 0.95
_DRAWS = 4000
_SEED = 20240229

Floats = NDArray[np.float64]


class Interval(NamedTuple):
    """A centre and its bounds, on the scale of the values given."""

    center: float
    low: float
    high: float


def joint_intervals(
    values: Sequence[Sequence[float]],
    pools: Sequence[str],
    groups: Sequence[Sequence[int]],
) -> list[Interval]:
    """One interval per group, around the mean of the medians of its rows.

    The half-width is a critical value times the group's standard error. The scale of a row is the
    root of the mean of two variances: its own, which says little with 5 values, and the pooled
    variance of all rows of its pool. So a noisy row gets a wider interval than the others, and a
    row with lucky values hardly a narrower one. The critical value is the `CONFIDENCE` point of the
    largest |mean of medians| / standard error of all groups, drawn 4,000 times from normal noise
    with the same numbers of values (seeded, so the same input gives the same intervals). Source:
    the single-step max-T method of P. H. Westfall and S. S. Young, Resampling-Based Multiple
    Testing (1993), section 2.3, with simulated noise in place of resampled.

    Args:
        values: rows of independent values with the same centre, such as logarithms of ratios.
        pools: the pool of each row; rows of a pool share their noise.
        groups: indices of rows.

    Raises:
        UsageError: no row of a pool has two values, so nothing is known of the noise.
    """
    counts = tuple(len(row) for row in values)
    grouped = tuple(tuple(rows) for rows in groups)
    members = _members(grouped, len(counts))
    medians = np.array([[np.median(row) for row in values]])
    variances = np.array([[np.var(row, ddof=1) if len(row) > 1 else 0.0 for row in values]])
    centers = (medians @ members.T)[0]
    errors = _errors(counts, tuple(pools), variances, members)[0]
    widths = _critical(counts, tuple(pools), grouped) * errors
    return [
        Interval(float(center), float(center - width), float(center + width))
        for center, width in zip(centers, widths, strict=True)
    ]


def _members(groups: tuple[tuple[int, ...], ...], n_rows: int) -> Floats:
    """[group, row]: the weight of a row in the mean of a group."""
    members = np.zeros((len(groups), n_rows))
    for number, rows in enumerate(groups):
        members[number, list(rows)] = 1 / len(rows)
    return members


def _errors(
    counts: tuple[int, ...], pools: tuple[str, ...], variances: Floats, members: Floats
) -> Floats:
    """[draw, row] variances of the values -> [draw, group] standard errors of the means of medians;
    see :func:`joint_intervals`."""
    lengths, names = np.array(counts), np.array(pools)
    freedom = np.maximum(lengths - 1, 0)
    shared = (names[:, None] == names[None, :]).astype(float)  # [row, row]
    known = shared @ freedom
    if not known.all():
        raise UsageError(
            "every cell has one sample only, so nothing is known of the noise; measure again "
            "with at least --repeat 3 (5 or more tell small changes)"
        )
    pooled = (variances * freedom) @ shared / known
    scale = np.where(freedom > 0, (variances + pooled) / 2, pooled)
    # Variance of the median of n normal values over that of one: exact for 1 and for many, 2 % off
    # in between.
    of_median = (pi / 2) / (lengths + pi / 2 - 1)
    return np.asarray(np.sqrt((scale * of_median) @ (members**2).T))


@lru_cache(maxsize=64)
def _critical(
    counts: tuple[int, ...],
    pools: tuple[str, ...],
    groups: tuple[tuple[int, ...], ...],
) -> float:
    """The factor of the half-widths; see :func:`joint_intervals`."""
    random = np.random.default_rng(_SEED)
    members = _members(groups, len(counts))
    medians, variances = np.empty((_DRAWS, len(counts))), np.zeros((_DRAWS, len(counts)))
    for row, count in enumerate(counts):
        drawn = random.standard_normal((_DRAWS, count))
        medians[:, row] = np.median(drawn, axis=1)
        if count > 1:
            variances[:, row] = drawn.var(axis=1, ddof=1)
    errors = _errors(counts, pools, variances, members)
    largest = np.max(np.abs(medians @ members.T) / errors, axis=1)
    return float(np.quantile(largest, CONFIDENCE))
