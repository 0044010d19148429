"""Medians, ratios, and the plan that both sides share."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchkit.plan import Plan, random_prompt
from benchkit.statistics import Ratio, Spread, expected_tokens_per_round

PLAN = Plan(Path("/somewhere/model.gguf"), threads=2)


def test_spread() -> None:
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0, 3)
    with pytest.raises(ValueError, match="no samples"):
        Spread.of([])


def test_ratio_is_of_medians_and_its_spread_of_paired_rounds() -> None:
    ratio = Ratio.of([10.0, 20.0, 30.0], [10.0, 10.0, 20.0])
    assert ratio.of_medians == 2.0
    assert ratio.paired == Spread(1.5, 1.0, 2.0, 3)


@pytest.mark.parametrize("sides", [([], [1.0]), ([1.0], []), ([0.0], [1.0])])
def test_ratio_needs_samples_above_zero(sides: tuple[list[float], list[float]]) -> None:
    with pytest.raises(ValueError, match=r"no samples|above 0"):
        Ratio.of(*sides)


def test_expected_tokens_per_round() -> None:
    assert expected_tokens_per_round((0.84, 0.76, 0.67)) == pytest.approx(3.27)


def test_the_plan_gives_both_sides_the_same_context_and_prompt() -> None:
    assert PLAN.n_ctx(512) == 512
    assert PLAN.n_ctx(513) == 768
    assert PLAN.driver_settings(449)["n_ctx"] == 512
    assert random_prompt(5, 100) == random_prompt(5, 100)
    assert all(0 <= token < 100 for token in random_prompt(1000, 100))
    assert PLAN.to_dict()["model"] == "model.gguf"
