"""Rates, intervals and verdict, against values worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from pyllama_mtp.measure import acceptance_report
from pyllama_mtp.measure.acceptance_report import Acceptance, by_position, shares

from .acceptance_fakes import result


def tally(*accepted: int, ended: bool = False) -> acceptance_report.Tally:
    """Of a prompt with up to three drafts per round."""
    return acceptance_report.tally(result("code", 1, *accepted, ended=ended), 3)


def counts(*rows: list[int]) -> np.ndarray:
    return np.array(rows, dtype=np.int64)


def test_a_round_is_judged_up_to_its_first_miss() -> None:
    (held, judged, known), rounds = tally(3, 0, 1, 3)
    assert held.tolist() == [3, 2, 2]
    assert judged.tolist() == [4, 3, 2]
    assert known.tolist() == [4, 4, 4]
    assert rounds == 4


def test_nothing_is_known_behind_an_end_token() -> None:
    (held, judged, known), _ = tally(3, 1, ended=True)
    assert held.tolist() == judged.tolist() == known.tolist() == [2, 1, 1]


def test_conditional_and_unconditional_are_pooled_over_prompts() -> None:
    found = Acceptance.of([tally(3, 0, 1, 3), tally(2, 0), tally()], 3)
    assert (found.prompts, found.rounds) == (2, 6)
    assert [rate and (rate.held, rate.tried) for rate in found.conditional] == [
        (4, 6), (3, 4), (2, 3),
    ]  # fmt: skip
    assert [rate and (rate.held, rate.tried) for rate in found.unconditional] == [
        (4, 6), (3, 6), (2, 6),
    ]  # fmt: skip
    assert found.mean_accepted == 9 / 6
    assert found.rates() == [4 / 6, 3 / 4, 2 / 3]


def test_positions_that_were_never_judged_have_no_rate() -> None:
    found = Acceptance.of([tally(1, 0)], 3)
    assert found.conditional[2] is None and found.rates() == [0.5, 0.0]
    nothing = Acceptance.of([], 2)
    assert nothing.conditional == [None, None] and nothing.mean_accepted is None


@pytest.mark.parametrize(
    ("held", "tried", "low", "high"),
    # Newcombe 1998, "Two-sided confidence intervals for the single proportion", table I, method 3.
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_independent_rounds_against_published_values(
    held: int, tried: int, low: float, high: float
) -> None:
    (rate,) = shares(counts([held]), counts([tried]))
    assert rate and (rate.low, rate.high) == pytest.approx((low, high), abs=5e-5)


def test_the_interval_knows_that_prompts_differ() -> None:
    """Of two prompts, one takes everything and one nothing: that is worth one round."""
    (rate,) = shares(counts([50], [0]), counts([50], [50]))
    (one,) = shares(counts([50]), counts([100]))
    assert rate and one and rate.rate == 0.5 and rate.low < 0.1 < 0.9 < rate.high
    alike = shares(counts([25], [25]), counts([50], [50]))[0]
    assert alike and (alike.low, alike.high) == (one.low, one.high)


def test_one_prompt_and_full_acceptance_are_not_certain() -> None:
    (rate,) = shares(counts([9]), counts([9]))
    assert rate and rate.high == 1.0 and rate.low < 0.8


def test_buckets_of_generated_positions() -> None:
    # 15 rounds of 4 tokens from 1 on, one of 3 from 61 on; others from 64, 66, 68 and 70 on.
    prompt = result("code", 1, *[3] * 15, 2, *[1] * 4)
    found = [
        (b.first, b.last, b.acceptance.rounds, b.acceptance.rates())
        for b in by_position([prompt], 3)
    ]
    assert found == [(0, 63, 16, [1.0, 1.0, 15 / 16]), (64, 127, 4, [1.0, 0.0])]
