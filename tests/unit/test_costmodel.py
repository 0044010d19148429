"""What rounds cost, learned from rounds: stalls, rebuilds, age, and what was never measured."""

from __future__ import annotations

import pytest

from pyllama_mtp.drafting.depth import COST_MEMORY, GUESS, LINE, STALL, CostModel, Costs, Line

TABLE = Costs(verify=(0.0, 1.0, 1.5, 1.75, 2.05), draft=(0.0, 0.14, 0.26, 0.38))


def estimate(*samples: float) -> float:
    line = Line()
    for now, seconds in enumerate(samples):
        line.add(1, seconds, now)
    return line[1].seconds


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        ((2.0,), 2.0),
        ((1.0, 1.2), 1.1),
        ((1.2, 1.0), 1.1),
        ((9.0, 1.0), 1.0),  # the first one had stalled
        ((9.0, 9.0, 1.0), 1.0),
    ],
)
def test_estimate_is_a_mean_without_early_stalls(
    samples: tuple[float, ...], expected: float
) -> None:
    assert estimate(*samples) == pytest.approx(expected, rel=0.01)


def test_late_samples_count() -> None:
    assert 1.0 < estimate(*[1.0] * 1000, 1.2) < 1.002
    assert estimate(*[1.0] * 1000, *[1.2] * 4 * int(COST_MEMORY)) == pytest.approx(1.2, abs=0.01)


def test_an_old_estimate_weighs_little() -> None:
    line = Line()
    line.add(1, 1.0, now=0)
    line.add(1, 1.2, now=10 * int(COST_MEMORY))
    assert line[1].seconds == pytest.approx(1.2, rel=0.01) and 1.0 < line[1].n < 1.01


def test_the_line() -> None:
    """Least squares from its base; the guess is a sample at 1."""
    line = Line()
    assert line.fit(1.0, 0.3, 3, now=0)[0] == pytest.approx(0.3)
    for count in (1, 2, 3):
        for _ in range(9):
            line.add(count, 1.0 + 0.5 * count, now=0)
    assert line.fit(1.0, 0.3, 3, now=0)[0] == pytest.approx(0.5, abs=0.01)
    assert line.fit(9.0, 0.3, 3, now=0)[0] == 0.0, "it never falls"


def test_what_was_measured_seldom_is_drawn_towards_the_line() -> None:
    line = Line()
    line.add(2, 4.0, now=0)
    slope, found = line.fit(1.0, 0.5, 3, now=0)
    drawn = (4.0 + LINE * (1.0 + 2.0 * slope)) / (1.0 + LINE)
    assert found == pytest.approx([1.0, 1.0 + slope, drawn, 1.0 + 3.0 * slope])
    assert line.fit(1.0, 0.5, 2, now=9 * int(COST_MEMORY))[1][2] == pytest.approx(2.0, rel=0.01)


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


def known(model: CostModel, n: int = 1) -> Costs:
    costs = model.costs(n)
    assert costs
    return costs


def learn(model: CostModel, table: Costs, n: int = 3) -> CostModel:
    """Every depth of the table is measured `n` times."""
    for depth in range(model.limit + 1):
        for _ in range(n):
            model.update(depth, depth, table.draft[depth], table.verify[depth + 1])
    return model


def plain_steps(model: CostModel, n: int, seconds: float = 1.0) -> None:
    for _ in range(n):
        model.update(0, 0, 0.0, seconds)


def test_nothing_is_known_before_a_plain_step() -> None:
    model = CostModel(2)
    assert model.costs() is None
    model.update(1, 1, 0.1, 1.5)
    assert model.costs() is None


def test_guesses_after_a_plain_step() -> None:
    model = CostModel(2)
    plain_steps(model, 1, 0.02)
    guess = 0.02 * GUESS
    assert known(model).verify == pytest.approx((0.0, 0.02, 0.02 + guess, 0.02 + 2 * guess))
    assert known(model).draft == pytest.approx((0.0, guess, 2 * guess))


def test_measured_costs_are_found() -> None:
    """Costs need not lie on a line."""
    model = learn(CostModel(3), TABLE, 30)
    assert known(model).verify == pytest.approx(TABLE.verify, rel=0.03)
    assert known(model).draft == pytest.approx(TABLE.draft, rel=0.03)


def test_what_was_not_measured_is_on_the_line() -> None:
    model = CostModel(3)
    plain_steps(model, 2)
    for _ in range(20):
        model.update(3, 3, 0.6, 2.2)
    assert known(model).verify == pytest.approx((0.0, 1.0, 1.4, 1.8, 2.2), rel=0.07)
    assert known(model).draft == pytest.approx((0.0, 0.2, 0.4, 0.6), rel=0.07)


def test_a_draft_at_which_drafting_stopped_is_one_more_than_was_made() -> None:
    """p_min: 3 asked for, 1 made: two drafts computed, two rows verified."""
    model = CostModel(3)
    plain_steps(model, 2)
    for _ in range(20):
        model.update(3, 1, 0.3, 1.4)
    assert known(model).draft[2] == pytest.approx(0.3, rel=0.03)
    assert known(model).verify[2] == pytest.approx(1.4, rel=0.03)


def test_costs_follow_the_context() -> None:
    """Attention gets dearer: what is measured now counts, also after a long time elsewhere."""
    model = learn(CostModel(3), TABLE)
    for _ in range(int(COST_MEMORY)):
        model.update(3, 3, 0.5, 3.0)
    assert known(model).verify[4] == pytest.approx(3.0, rel=0.03)
    assert known(model).draft[3] == pytest.approx(0.5, rel=0.03)
    assert known(model).plain > 1.05
    plain_steps(model, 20, 1.9)
    assert known(model).plain == pytest.approx(1.9, rel=0.1)


def test_a_plain_step_takes_no_longer_than_more_rows() -> None:
    """It had stalled."""
    model = CostModel(3)
    plain_steps(model, 2, 3.0)
    for _ in range(2):
        model.update(1, 1, 0.14, 1.5)
    assert known(model).plain == pytest.approx(1.5)
    plain_steps(model, 6, 1.0)
    assert known(model).plain == pytest.approx(1.0, rel=0.15)


def test_a_stall_does_not_rule_a_depth_out() -> None:
    model = CostModel(3)
    plain_steps(model, 2)
    model.update(1, 1, 3 * 0.14, 3 * 1.5)
    assert known(model).verify[2] <= STALL * (1 + GUESS)
    assert known(model).draft[1] <= STALL * GUESS
    for _ in range(4):
        model.update(1, 1, 0.14, 1.2)
    assert known(model).verify[2] == pytest.approx(1.2, rel=0.05)


def test_what_the_first_round_takes_more_is_learned() -> None:
    """The extra time is subtracted, so a depth seen once does not look dearer than it is."""
    model = CostModel(2)
    for _ in range(9):
        for seconds in (1.5, 1.0, 1.0):
            model.update(0, 0, 0.0, seconds)
        for rest in (1.9, 1.4, 1.4):
            model.update(1, 1, 0.1, rest)
    assert model.change == pytest.approx(0.5, abs=0.1)
    model.update(2, 2, 0.2, 1.8 + 0.5)
    assert known(model).verify[3] == pytest.approx(1.8, rel=0.05)


def test_without_graphs_to_build_a_first_round_counts_like_another() -> None:
    model = CostModel(2)
    for _ in range(20):
        plain_steps(model, 1)
        model.update(1, 1, 0.1, 1.4)
    assert model.change < 0.05
    assert known(model).verify[2] == pytest.approx(1.4, rel=0.05)


def test_other_numbers_of_sequences_are_the_first_guess() -> None:
    """A row costs the same; drafting grows as a plain step does."""
    model = CostModel(3)
    for depth in (0, 3):
        for _ in range(30):
            model.update(depth, depth, 0.1 * depth, 1.0 + 0.2 * depth, n=2)
    assert model.costs(4) is None
    for _ in range(2):
        model.update(0, 0, 0.0, 1.5, n=4)
    four = known(model, 4)
    assert four.verify[4] == pytest.approx(1.5 + 3 * 2 * 0.2, rel=0.03)
    assert four.draft[3] == pytest.approx(0.3 * 1.5, rel=0.03)


def test_a_coarse_clock_does_no_harm() -> None:
    model = CostModel(1)
    plain_steps(model, 1, 0.0)
    model.update(1, 1, 0.0, 0.0)
    assert known(model).plain > 0
