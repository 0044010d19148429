"""What a round costs and brings: exact values."""

from __future__ import annotations

import pytest

from pyllama_mtp.drafting.depth import (
    Costs,
    best_depth,
    break_even,
    expected_tokens,
    speed,
    times_by_depth,
)
from pyllama_mtp.errors import UsageError

COSTS = Costs(verify=(0.0, 1.0, 1.5, 1.75, 2.05), draft=(0.0, 0.14, 0.26, 0.38))
#: The same in a unit of 20 ms: only ratios may matter where a ratio is asked for.
IN_SECONDS = Costs(tuple(0.02 * v for v in COSTS.verify), tuple(0.02 * d for d in COSTS.draft))


@pytest.mark.parametrize(
    ("verify", "draft"),
    [
        ((0.0, 1.0), (0.0, 0.1)),  # no verification of the draft
        ((0.0, 1.0, 1.5), (0.0,)),
        ((0.0,), ()),
        ((1.0, 1.5), (0.0,)),  # the index is the number of rows
        ((0.0, 1.0, 1.5), (0.1, 0.2)),
        ((0.0, 1.0, -1.5), (0.0, 0.1)),
        ((0.0, 1.0, 1.5), (0.0, 0.0)),
        ((0.0, 1.0, float("inf")), (0.0, 0.1)),
        ((0.0, 1.0, float("nan")), (0.0, 0.1)),
    ],
)
def test_bad_costs_are_refused(verify: tuple[float, ...], draft: tuple[float, ...]) -> None:
    with pytest.raises(UsageError, match="costs"):
        Costs(verify, draft)


@pytest.mark.parametrize(
    ("acceptance", "depth", "tokens"),
    [
        ((), 0, 1.0),
        ((0.5, 0.5), 0, 1.0),
        ((0.5, 0.5), 1, 1.5),
        ((0.5, 0.5), 2, 1.75),
        ((0.9, 0.8, 0.6, 0.3), 3, 1 + 0.9 + 0.72 + 0.432),
        ((1.0, 1.0, 1.0), 3, 4.0),
        ((0.0, 1.0, 1.0), 3, 1.0),
        *(  # the paper's equation 1
            ((rate,) * 6, n, (1 - rate ** (n + 1)) / (1 - rate))
            for rate in (0.1, 0.95)
            for n in (1, 6)
        ),
    ],
)
def test_expected_tokens(acceptance: tuple[float, ...], depth: int, tokens: float) -> None:
    assert expected_tokens(acceptance, depth) == pytest.approx(tokens, abs=1e-12)


@pytest.mark.parametrize("depth", [3, -1])
def test_a_depth_without_rates_is_refused(depth: int) -> None:
    with pytest.raises(UsageError, match=f"depth is {depth}"):
        expected_tokens((0.5, 0.5), depth)


def test_times_of_rounds() -> None:
    """A draft that is dropped is paid for; the rows it would have had are not."""
    assert times_by_depth(COSTS, 2, (1.0, 1.0)) == pytest.approx([1.0, 0.14 + 1.5, 0.26 + 1.75])
    none, one, two = 0.14 + 1.0, 0.26 + 1.5, 0.26 + 1.75
    expected = 0.4 * none + 0.6 * 0.5 * one + 0.6 * 0.5 * two
    assert times_by_depth(COSTS, 2, (0.6, 0.5))[2] == pytest.approx(expected)
    assert times_by_depth(COSTS, 2, (0.0, 0.5))[2] == pytest.approx(none)


def test_speed() -> None:
    assert speed(IN_SECONDS, (0.8, 0.8, 0.8), 0) == pytest.approx(50.0)
    assert speed(IN_SECONDS, (0.8, 0.8, 0.8), 2) == pytest.approx(2.44 / (0.02 * 2.01))


@pytest.mark.parametrize(("rate", "depth"), [(0.1, 0), (0.6, 0), (0.7, 2), (0.9, 3), (1.0, 3)])
def test_best_depth(rate: float, depth: int) -> None:
    assert best_depth(COSTS, [rate] * 3) == best_depth(IN_SECONDS, [rate] * 3) == depth


def test_best_depth_with_costs_and_rates() -> None:
    assert best_depth(COSTS, [0.9]) == 1
    assert best_depth(COSTS, []) == 0
    assert best_depth(COSTS, [0.9] * 9) == 3
    assert best_depth(COSTS, [0.9, 0.9, 0.0]) == 2


def test_the_shallowest_of_equals_is_best() -> None:
    assert best_depth(Costs((0.0, 1.0, 1.0), (0.0, 0.5)), [0.5]) == 0


def test_speed_at_break_even_is_that_of_plain_decoding() -> None:
    for depth in (1, 2, 3):
        rate = break_even(COSTS, depth)
        assert rate is not None
        assert speed(COSTS, [rate] * depth, depth) == pytest.approx(1.0)
        assert break_even(IN_SECONDS, depth) == pytest.approx(rate)


def test_break_even_at_the_ends() -> None:
    assert break_even(COSTS, 0) == 0.0
    assert break_even(Costs((0.0, 1.0, 0.7), (0.0, 0.3)), 1) == 0.0
    assert break_even(Costs((0.0, 1.0, 1.5), (0.0, 0.5)), 1) == pytest.approx(1.0)
    assert break_even(Costs((0.0, 1.0, 1.6), (0.0, 0.5)), 1) is None
