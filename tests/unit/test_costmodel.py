"""What rounds cost, learned from rounds: stalls, rebuilds, age, and what was never measured."""

from __future__ import annotations

import math

import pytest

from pyllama_mtp.speculative.costmodel import (
    DRAFT_GUESS,
    LONE_AGE,
    LONE_TRUST,
    MOST_AGE,
    ROW_GUESS,
    STALL,
    WEIGHT,
    CostModel,
    Times,
    completed,
    interpolated,
)
from pyllama_mtp.speculative.costs import Costs

TABLE = Costs(verify=(0.0, 1.0, 1.5, 1.75, 2.05), draft=(0.0, 0.14, 0.26, 0.38))


def estimate(*samples: float) -> float:
    times = Times()
    for now, seconds in enumerate(samples):
        times.add(1, seconds, now)
    return times[1].seconds


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        ((2.0,), 2.0),
        ((1.0, 1.21), 1.1),  # the geometric mean
        ((1.21, 1.0), 1.1),
        ((9.0, 1.0), 1.0),  # the first one had stalled
        ((9.0, 9.0, 1.0), 1.0),
        ((1.0, 1.0, 9.0), math.exp(STALL / 3)),  # a stall, believed up to a limit
    ],
)
def test_estimate_is_a_mean_without_stalls(samples: tuple[float, ...], expected: float) -> None:
    assert estimate(*samples) == pytest.approx(expected)


def test_late_samples_count() -> None:
    assert 1.0 < estimate(*[1.0] * 1000, 1.2) < 1.2 ** (1 / WEIGHT)
    assert estimate(*[1.0] * 1000, *[1.2] * 4 * WEIGHT) == pytest.approx(1.2, abs=0.01)


def test_an_old_estimate_goes_when_a_new_sample_comes() -> None:
    times = Times()
    times.add(1, 1.0, now=0)
    times.add(1, 1.21, now=MOST_AGE)
    assert (times[1].seconds, times[1].n) == (pytest.approx(1.1), 2)
    times.add(1, 2.0, now=2 * MOST_AGE + 1)
    assert (times[1].seconds, times[1].n, times[1].newest) == (2.0, 1, 2 * MOST_AGE + 1)


def test_a_rebuild_counts_only_until_there_is_a_steady_sample() -> None:
    times = Times()
    times.add(3, 5.0, now=1, steady=False)
    assert times[3].seconds == 5.0
    times.add(3, 6.0, now=2)
    assert (times[3].seconds, times[3].n) == (6.0, 1)
    times.add(3, 1.0, now=3, steady=False)
    assert (times[3].seconds, times[3].newest) == (6.0, 2)


def test_what_slows_all_rounds_down_is_not_a_cost_of_the_depth_in_use() -> None:
    """Depth 3 is in use when the machine becomes half as fast; plain steps, measured long before,
    are then known to be slower as well."""
    model = CostModel(3)
    for depth in (0, 3):
        for _ in range(20):
            model.update(depth, depth, TABLE.draft[depth], TABLE.verify[depth + 1])
    for _ in range(60):
        model.update(3, 3, 2 * TABLE.draft[3], 2 * TABLE.verify[4])
    costs = known(model)
    assert costs.verify[4] == pytest.approx(2 * TABLE.verify[4], rel=0.1)
    assert costs.plain == pytest.approx(2.0, rel=0.2)


def test_counts_are_apart() -> None:
    times = Times()
    times.add(1, 1.0, now=1)
    times.add(2, 9.0, now=2)
    assert {count: one.seconds for count, one in times.items()} == {1: 1.0, 2: 9.0}


@pytest.mark.parametrize(("count", "value"), [(1, 1.0), (2, 2.0), (3, 3.0), (4, 3.5), (6, 4.5)])
def test_interpolated(count: int, value: float) -> None:
    assert interpolated({1: 1.0, 3: 3.0}, count, slope=0.5) == pytest.approx(value)


def test_completed_from_one_value() -> None:
    assert completed({1: 1.0}, {}, range(1, 4), 0.3) == pytest.approx((1.0, 1.3, 1.6))


def test_completed_beyond_the_greatest_count() -> None:
    """With the mean growth so far; never falling."""
    known = {1: 1.0, 3: 2.0}
    assert completed(known, {}, range(1, 6), 0.3) == pytest.approx((1, 1.5, 2, 2.5, 3))
    assert completed({1: 1.0, 2: 0.9}, {}, [3], 0.3) == (0.9,)


def test_a_lone_sample_is_believed_within_limits() -> None:
    assert completed({1: 1.0}, {2: 1.5}, [2, 3], 0.3) == pytest.approx((1.5, 2.0))
    most = LONE_TRUST * 1.3
    assert completed({1: 1.0}, {2: 3.9}, [2, 3], 0.3) == pytest.approx((most, 2 * most - 1))
    assert completed({1: 1.0, 2: 5.0}, {2: 1.0}, [2], 0.3) == (5.0,), "a surer value exists"


def known(model: CostModel) -> Costs:
    assert model.costs
    return model.costs


def plain_steps(model: CostModel, n: int, seconds: float = 1.0) -> None:
    for _ in range(n):
        model.update(0, 0, 0.0, seconds)


def test_nothing_is_known_before_a_plain_step() -> None:
    model = CostModel(2)
    assert model.costs is None and not model.plain_is_doubtful
    model.update(1, 1, 0.1, 1.5)
    assert model.costs is None


def test_guesses_after_a_plain_step() -> None:
    model = CostModel(2)
    plain_steps(model, 1, 0.02)
    row, draft = 0.02 * ROW_GUESS, 0.02 * DRAFT_GUESS
    assert known(model).verify == pytest.approx((0.0, 0.02, 0.02 + row, 0.02 + 2 * row))
    assert known(model).draft == pytest.approx((0.0, draft, 2 * draft))


def test_measured_costs_are_found() -> None:
    model = CostModel(3)
    for depth in (0, 1, 2, 3):
        for _ in range(3):
            model.update(depth, depth, TABLE.draft[depth], TABLE.verify[depth + 1])
    assert known(model).verify == pytest.approx(TABLE.verify)
    assert known(model).draft == pytest.approx(TABLE.draft)


def test_what_lies_between_is_interpolated() -> None:
    model = CostModel(3)
    plain_steps(model, 2)
    for _ in range(3):
        model.update(3, 3, 0.6, 2.2)
    assert known(model).verify == pytest.approx((0.0, 1.0, 1.4, 1.8, 2.2))
    assert known(model).draft == pytest.approx((0.0, 0.2, 0.4, 0.6))


def test_a_draft_at_which_drafting_stopped_is_one_more_than_was_made() -> None:
    """p_min: 3 asked for, 1 made: two drafts computed, two rows verified."""
    model = CostModel(3)
    plain_steps(model, 2)
    for _ in range(3):
        model.update(3, 1, 0.3, 1.4)
    assert known(model).draft[2] == pytest.approx(0.3)
    assert known(model).verify[2] == pytest.approx(1.4)


def test_calibration_is_where_estimates_start() -> None:
    assert known(CostModel(3, TABLE)) == TABLE
    assert known(CostModel(2, TABLE)) == Costs(TABLE.verify[:4], TABLE.draft[:3])
    longer = known(CostModel(4, TABLE))
    assert longer.verify[:5] == TABLE.verify and longer.draft[:4] == TABLE.draft
    assert longer.verify[5] == pytest.approx(2.05 + 1.05 / 3)
    assert longer.draft[4] == pytest.approx(0.38 * 4 / 3)


def test_calibration_fades() -> None:
    model = CostModel(3, TABLE)
    plain_steps(model, 2, 1.4)
    assert known(model).plain == pytest.approx(1.4)


def test_costs_follow_the_context() -> None:
    """Attention gets dearer: what is measured now counts, also after a long time elsewhere."""
    model = CostModel(3, TABLE)
    for _ in range(MOST_AGE + 1):
        model.update(3, 3, 0.5, 3.0)
    assert known(model).verify[4] == 3.0 and known(model).draft[3] == 0.5
    plain_steps(model, 2, 1.9)
    assert known(model).plain == 1.9, "two rows cost 1.5, but that was long ago"


def test_a_stalled_plain_step_is_seen() -> None:
    model = CostModel(3)
    plain_steps(model, 2, 3.0)
    assert not model.plain_is_doubtful
    model.update(1, 1, 0.14, 1.5)
    assert model.plain_is_doubtful
    assert known(model).plain == 1.5
    plain_steps(model, 3, 1.0)
    assert not model.plain_is_doubtful
    assert known(model).plain == 1.0


def test_a_stall_does_not_rule_a_depth_out_for_good() -> None:
    model = CostModel(3)
    plain_steps(model, 2)
    model.update(1, 1, 3 * 0.14, 3 * 1.5)
    assert known(model).verify[2] == pytest.approx(LONE_TRUST * (1 + ROW_GUESS))
    assert known(model).draft[1] == pytest.approx(LONE_TRUST * DRAFT_GUESS)
    plain_steps(model, LONE_AGE)
    assert known(model).verify[2] == pytest.approx(LONE_TRUST * (1 + ROW_GUESS))
    plain_steps(model, 1)
    assert known(model).verify[2] == pytest.approx(1 + ROW_GUESS)
    assert known(model).draft[1] == pytest.approx(DRAFT_GUESS)


def test_the_first_round_at_a_depth_pays_for_the_rebuild() -> None:
    model = CostModel(2)
    plain_steps(model, 3)
    for rest, draft in ((1.9, 0.4), (1.5, 0.14), (1.5, 0.14)):
        model.update(1, 1, draft, rest)
    assert (known(model).verify[2], known(model).draft[1]) == (1.5, 0.14)
    plain_steps(model, 1)
    model.update(1, 1, 0.1, 1.1)
    assert (known(model).verify[2], known(model).draft[1]) == (1.5, 0.14)


def test_a_coarse_clock_does_no_harm() -> None:
    model = CostModel(1)
    plain_steps(model, 1, 0.0)
    model.update(1, 1, 0.0, 0.0)
    assert known(model).plain > 0


def test_what_a_rebuild_takes_is_learned_from_the_first_one() -> None:
    """A depth that was seen once is not taken for dearer than it is."""
    model = CostModel(4)
    for seconds in (1.5, 1.0):
        model.update(0, 0, 0.0, seconds)
    model.update(2, 2, 0.2, 1.4 + 0.5)
    assert known(model).verify[3] == pytest.approx(1.4)
    model.update(2, 2, 0.2, 1.3)
    assert known(model).verify[3] == pytest.approx(1.3), "the next one says it itself"
