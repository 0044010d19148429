"""Medians, ratios, and the plan that both sides share."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchkit.measures import MEASURES, compare_sides, pooled, summarize
from benchkit.plan import Plan, random_prompt
from benchkit.sample import Sample
from benchkit.statistics import Ratio, Spread, expected_tokens_per_round

PLAN = Plan(Path("/somewhere/model.gguf"), threads=2)


def decoded(rate: float, accepted: int = 0, n_decoded: int = 60) -> Sample:
    """A draft-MTP sample, or a plain one without accepted drafts."""
    rounds = n_decoded - accepted if accepted else 0
    return Sample(100.0, rate, 256, n_decoded, 3 * rounds, accepted, rounds)


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


def test_sides_without_samples_have_no_ratio() -> None:
    sides = compare_sides({"ours": [decoded(2.0)], "theirs": []}, lambda sample: sample.decode_tps)
    assert sides["theirs"] is None
    assert sides["ours"]["median"] == 2.0
    assert "ratio" not in sides


def test_equal_acceptance_takes_luck_out() -> None:
    """Both sides make 10 passes a second; ours was luckier in its draws."""
    mtp = next(measure for measure in MEASURES if measure.name == "mtp")
    samples = {"ours": [decoded(30.0, accepted=40)], "theirs": [decoded(20.0, accepted=30)]}
    summary = summarize(mtp, PLAN, samples)
    assert summary["ratio"]["of_medians"] == 1.5
    assert summary["equal_acceptance"]["ratio"]["of_medians"] == pytest.approx(1.0)
    assert summary["equal_acceptance"]["ours"]["median"] == pytest.approx(10 * 3.27)
    assert summary["prefill"]["ratio"]["of_medians"] == 1.0


def test_pooled_acceptance_is_total_over_total() -> None:
    total = pooled([decoded(1.0, accepted=40), decoded(1.0, accepted=30)])
    assert (total["rounds"], total["accepted"], total["drafted"]) == (50, 70, 150)
    assert total["tokens_per_round"] == pytest.approx(120 / 50)
    assert total["acceptance"] == pytest.approx(70 / 150)


def test_the_plan_gives_both_sides_the_same_context_and_prompt() -> None:
    assert PLAN.n_ctx(512) == 512
    assert PLAN.n_ctx(513) == 768
    assert PLAN.driver_settings(449)["n_ctx"] == 512
    assert random_prompt(5, 100) == random_prompt(5, 100)
    assert all(0 <= token < 100 for token in random_prompt(1000, 100))
    assert PLAN.to_dict()["model"] == "model.gguf"
