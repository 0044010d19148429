"""Estimates of the acceptance rates of drafts, and the allowance for losses."""

from __future__ import annotations

import random

import pytest

from pyllama_mtp.drafting.depth import (
    PRIOR_RATE,
    PRIOR_WEIGHT,
    RECENT_MEMORY,
    SHARE,
    AcceptanceTracker,
    Allowance,
)


def prior(held: int, tried: int, rate: float = PRIOR_RATE) -> float:
    return (held + PRIOR_WEIGHT * rate) / (tried + PRIOR_WEIGHT)


def test_before_anything_is_known() -> None:
    assert AcceptanceTracker(3).rates() == pytest.approx((PRIOR_RATE,) * 3)
    assert AcceptanceTracker(2, rate=1.0).rates() == (1.0, 1.0)


@pytest.mark.parametrize(
    ("n_held", "held"), [(0, (0,)), (1, (1, 0)), (2, (1, 1, 0)), (3, (1,) * 3)]
)
def test_one_round(n_held: int, held: tuple[int, ...]) -> None:
    """Positions after the first failure were not tried; they get the rate of the last one."""
    tracker = AcceptanceTracker(4)
    tracker.update(3, n_held)
    rate, expected = PRIOR_RATE, []
    for one in held:
        rate = prior(one, 1, rate)
        expected.append(rate)
    expected += [rate] * (4 - len(held))
    assert tracker.rates() == pytest.approx(expected)


def test_rates_are_conditional() -> None:
    """Every other first draft holds, every second one after it."""
    tracker = AcceptanceTracker(2)
    for _ in range(100):
        for n_held in (0, 2, 0, 1):
            tracker.update(2, n_held)
    assert tracker.rates() == pytest.approx((0.5, 0.5), abs=0.06)


def test_plain_rounds_say_nothing() -> None:
    tracker = AcceptanceTracker(2)
    for _ in range(5):
        tracker.update(1, 0)
    before = tracker.rates()
    for _ in range(100):
        tracker.update(0, 0)
    assert tracker.rates() == before


def test_old_rounds_fade() -> None:
    """Slowly enough that no run of outcomes contradicts the rate: by weight alone."""
    tracker = AcceptanceTracker(1)
    for i in range(100):
        tracker.update(1, i % 2)
    at_half = tracker.rates()[0]
    for i in range(60):
        tracker.update(1, i % 4 > 0)
    assert at_half == pytest.approx(0.5, abs=0.05)
    assert tracker.rates()[0] == pytest.approx(0.7, abs=0.05)


@pytest.mark.parametrize(("first", "then"), [(0.9, 0), (0.2, 1)])
def test_a_change_of_text_is_noticed_soon(first: float, then: int) -> None:
    tracker, draw = AcceptanceTracker(1), random.Random(1)
    for _ in range(200):
        tracker.update(1, draw.random() < first)
    assert tracker.rates()[0] == pytest.approx(first, abs=0.12)
    for _ in range(16):
        tracker.update(1, then)
    assert abs(tracker.rates()[0] - then) < 0.3


def test_chance_is_not_taken_for_a_change() -> None:
    """With a constant rate the estimate keeps the precision of its long memory."""
    tracker, draw = AcceptanceTracker(1), random.Random(2)
    errors = []
    for _ in range(3000):
        tracker.update(1, draw.random() < 0.7)
        errors.append((tracker.rates()[0] - 0.7) ** 2)
    only_recent = 0.7 * 0.3 / (2 * RECENT_MEMORY - 1)
    assert sum(errors) / len(errors) < 0.65 * only_recent


def test_allowance() -> None:
    allowance = Allowance(balance=1.0, most=2.0)
    allowance.count(steps=2.0, lost=0.5)
    assert allowance.balance == pytest.approx(0.5 + 2 * SHARE)
    allowance.count(steps=1.0, lost=3.0)
    assert allowance.balance == pytest.approx(-2.5 + 3 * SHARE)
    allowance.count(steps=1.0, lost=-9.0)
    assert allowance.balance == 2.0
