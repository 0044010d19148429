"""How often a comparison is wrong: without a difference, and with a slow-down of 5 %.

Both sides are simulated: twelve cells, every sample with noise of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from pyllama_mtp.measure.compare import Change, compare
from pyllama_mtp.measure.figures import Cell

from ..marks import usual
from .conftest import make_matrix

RUNS = 60


def uneven(size: int) -> float:
    """Noise of short prompts twice that of long ones."""
    return {512: 0.03, 2048: 0.02}.get(size, 0.015)


def findings(
    noise: object,
    repeat: int,
    chosen: Callable[[Cell], bool] = lambda cell: False,
    **how: object,
) -> list[list[Change]]:
    """What got slower in each of RUNS comparisons with the default settings: decode of NEW's
    chosen cells is 5 % slower."""
    found = []
    for seed in range(RUNS):
        old, new = (make_matrix(2 * seed + side, noise=noise, repeat=repeat) for side in (0, 1))
        for cell in filter(chosen, new):
            for sample in cell.samples:
                sample.decode_tps *= 0.95
        found.append(compare(old, new, **how).slower)
    return found


def share(found: Sequence[object]) -> float:
    """The share of the runs that found something."""
    return sum(map(bool, found)) / len(found)


@pytest.mark.parametrize(
    ("noise", "repeat", "ratios"),
    usual(
        (0.03, 3, False),
        long=[
            (0.03, 3, True),
            *((noise, 7, ratios) for noise in (0.025, uneven) for ratios in (False, True)),
        ],
    ),
)
def test_a_thing_is_not_slower_than_itself(noise: object, repeat: int, ratios: bool) -> None:
    """At most once in 20 times, over all cells and both figures together."""
    assert share(findings(noise, repeat, ratios=ratios)) <= 0.05


@pytest.mark.parametrize(("noise", "repeat"), usual((0.02, 5), long=[(uneven, 7)]))
def test_five_percent_at_one_depth_are_found(noise: object, repeat: int) -> None:
    found = findings(noise, repeat, lambda cell: cell.n_max == 3)
    named = [[change for change in changes if change.name.startswith("MTP 3")] for changes in found]
    assert share(named) >= 0.9
