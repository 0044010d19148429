"""The depth of each round: how close it comes to the best fixed depth, what rounds teach, and exact
values of what a round costs and brings.

Round times are SIMULATED from tables of costs, and acceptance is drawn by a seeded generator: this
tests the choice, and says nothing about the speed of any model or machine.
"""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from statistics import mean

import pytest

from pyllama_mtp.drafting.depth import (
    AcceptanceTracker,
    CostModel,
    Costs,
    DepthController,
    best_depth,
    break_even,
    round_time,
    speed,
    times_by_depth,
    tokens_by_depth,
)
from pyllama_mtp.errors import UsageError

from ..marks import usual

LIMIT = 6


def table(verify: Sequence[float], per_token: float, fixed: float = 0.0) -> Costs:
    """Costs in plain steps; `verify` begins with one row."""
    draft = (fixed + per_token * k for k in range(1, len(verify)))
    return Costs((0.0, *verify), (0.0, *draft))


SLOW_BATCHES = (1.0, 1.5, 1.75, 2.05, 2.3, 2.6, 2.9)
TABLES = {
    "cpu": table(SLOW_BATCHES, 0.12, 0.02),
    "amx": table((1.0, 1.3, 1.5, 1.45, 1.42, 1.5, 1.6), 0.1),
    "gpu": table((1.0, 1.03, 1.05, 1.08, 1.12, 1.16, 1.2), 0.06),
    "full vocabulary": table(SLOW_BATCHES, 0.35),
    "small batches": table((1.0, 1.15, 1.3, 1.55, 1.8, 2.0, 2.2), 0.05, 0.04),
    "experts": table((1.0, 1.4, 1.75, 2.0, 2.35, 2.6, 2.8), 0.05, 0.05),
    "hopeless": table((1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0), 0.1),
}
TEXTS = [(rate,) * LIMIT for rate in (0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)]
TEXTS += [(0.9, 0.8, 0.6, 0.3, 0.3, 0.3), (0.87, 0.85, 0.75, 0.75, 0.7, 0.7)]

Rates = Callable[[int], Sequence[float]]


def generate(
    chooser: DepthController | int, costs: Costs, rates: Rates, n_tokens: int, seed: int
) -> float:
    """Generate a text; plain steps that it takes. A draft for a position of the text is accepted if
    the text's draw there is below the rate, so all depths meet the same predictable tokens. Rounds
    are told with noise and stalls, and a change of depth takes 0.02 steps."""
    draw = random.Random(seed)
    text = [draw.random() for _ in range(n_tokens + LIMIT + 1)]
    position, total, last = 0, 0.0, -1
    while position < n_tokens:
        most = n_tokens - position - 1
        fixed = isinstance(chooser, int)
        asked = min(chooser, most) if fixed else chooser.choose(most)  # type: ignore
        holds = (text[position + i] < rates(position)[i] for i in range(asked))
        n_held = sum(1 for _ in itertools.takewhile(bool, holds))
        took = round_time(costs, asked) + (0.02 if asked != last else 0.0)
        if isinstance(chooser, DepthController):
            noise = math.exp(draw.gauss(0.0, 0.05)) * (3 if draw.random() < 0.02 else 1)
            chooser.update(asked, [(asked, n_held)], took * noise)
        total, position, last = total + took, position + n_held + 1, asked
    return total


def nearly(costs: Costs, seed: int) -> Mapping[int, Costs]:
    """As measured: each time is 3 % off."""
    draw = random.Random(seed)

    def off(times: Sequence[float]) -> tuple[float, ...]:
        return tuple(time * math.exp(draw.gauss(0.0, 0.03)) for time in times)

    return {1: Costs(off(costs.verify), off(costs.draft))}


def share(costs: Costs, rates: Rates, n_tokens: int) -> float:
    """Speed as a share of that of the fixed depth which turns out to be the best."""
    seeds = range(12)
    fixed = (
        sum(generate(depth, costs, rates, n_tokens, seed) for seed in seeds)
        for depth in range(LIMIT + 1)
    )
    ours = sum(
        generate(DepthController(nearly(costs, seed)), costs, rates, n_tokens, seed)
        for seed in seeds
    )
    return min(fixed) / ours


@pytest.mark.parametrize(
    ("n_tokens", "typical", "least"), usual((128, 0.97, 0.92), long=[(448, 0.98, 0.95)])
)
def test_as_fast_as_the_best_fixed_depth(n_tokens: int, typical: float, least: float) -> None:
    """Acceptance is learned on the way, from the first token on, and costs are a little wrong."""
    found = [
        share(costs, lambda _, rates=rates: rates, n_tokens)  # type: ignore[misc]
        for costs in TABLES.values()
        for rates in TEXTS
    ]
    assert mean(found) > typical and min(found) > least


def test_text_that_changes() -> None:
    """Predictable and unpredictable parts of 60 tokens in turns. Drafts that fail where they nearly
    pay are soon tried again."""
    found = [
        share(costs, lambda at: (0.95 if at // 60 % 2 else 0.4,) * LIMIT, 448)
        for costs in TABLES.values()
    ]
    assert mean(found) > 0.98 and min(found) > 0.96


def test_a_memory_that_was_faster_when_costs_were_measured() -> None:
    """Milliseconds of Q8_0 files: passes over few rows wait for memory, those over many do not."""
    measured = Costs((0.0, 23.1, 23.1, 33.4, 40.4, 47.7, 52.7, 60.4), (0, 2, 4, 6, 7, 9, 11))
    true = Costs((0.0, 33.0, 33.0, 37.0, 45.0, 50.0, 56.0, 62.0), measured.draft)
    for rates in ((0.83, 0.8, 0.8, 0.75, 0.7, 0.7), (0.9,) * LIMIT):

        def total(chooser: int | None, rates: tuple[float, ...] = rates) -> float:
            found = 0.0
            for seed in range(12):
                depths = DepthController({1: measured}) if chooser is None else chooser
                found += generate(depths, true, lambda _: rates, 448, seed)
            return found

        assert min(map(total, range(LIMIT + 1))) > 0.89 * total(None)


#: Milliseconds of rounds of 0 to 6 drafts on an H200: decode speed and tokens per round at 1,024
#: tokens of context, from cadab973:bench/results/speed.md, "On a GPU". 1, 5 and 6 are inter- and
#: extrapolated.
ON_A_GPU = {
    "27b": (11.25, 12.9, 14.59, 16.86, 18.93, 21.0, 23.1),
    "35b-a3b": (4.093, 5.08, 6.068, 7.246, 8.13, 9.1, 10.1),
}
#: The same of 0 and 3 drafts by context, and how often positions 1 to 6 were accepted, percent: "By
#: length of the context". 4 to 6 are extrapolated where `auto` did not draft as many.
BY_CONTEXT = [
    ("27b", 1024, 11.25, 16.86, (74, 55, 40, 33, 28, 22)),
    ("27b", 32768, 12.06, 17.77, (84, 62, 42, 36, 28, 22)),
    ("35b-a3b", 1024, 4.093, 7.246, (61, 38, 23, 16, 10, 7)),
    ("35b-a3b", 4096, 4.361, 8.037, (62, 44, 30, 24, 18, 12)),
    ("35b-a3b", 32768, 4.708, 8.546, (57, 33, 19, 11, 5, 3)),
    ("35b-a3b", 131072, 5.2, 9.118, (61, 31, 20, 12, 7, 4)),
]


@pytest.mark.parametrize(("name", "n_context", "plain", "three", "accepted"), BY_CONTEXT)
def test_recorded_rounds_of_a_gpu(
    name: str, n_context: int, plain: float, three: float, accepted: tuple[int, ...]
) -> None:
    """Costs as they were measured in a short context, of drafts that read the same experts: a draft
    seemed to take 0.3 of what it takes. The first answer of a machine, and a later one."""
    recorded = ON_A_GPU[name]
    scale = (three / plain - 1.0) / (recorded[3] / recorded[0] - 1.0)
    steps = [1.0 + scale * (time / recorded[0] - 1.0) for time in recorded]
    true = table(steps, 1e-6)
    seemed = table([1.0 + 0.3 * (step - 1.0) for step in steps], 1e-6)
    rates = [now / before for before, now in itertools.pairwise((100, *accepted))]
    seeds = range(8)

    def total(depths: Sequence[DepthController | int], seed: int = 0) -> float:
        return sum(
            generate(one, true, lambda _: rates, 192, seed + at) for at, one in enumerate(depths)
        )

    ours = [DepthController(nearly(seemed, seed)) for seed in seeds]
    for least, seed in ((0.94, 0), (0.96, 100)):
        fixed = [total([depth] * len(seeds), seed) for depth in range(LIMIT + 1)]
        took = total(ours, seed)
        assert least * took < min(fixed) and took < fixed[0] / 1.1


def one_round(controller: DepthController, costs: Costs, held: float = 1.0, n: int = 1) -> int:
    """A round of `n` sequences in exactly the time of the table; this share of drafts held."""
    asked = controller.choose(n_sequences=n)
    outcomes = [(asked, int(held * asked))] * n
    controller.update(asked, outcomes, round_time(costs, asked))
    return asked


@pytest.mark.parametrize("name", TABLES)
def test_trying_drafts_where_none_hold_costs_a_percent(name: str) -> None:
    controller = DepthController({1: TABLES[name]})
    for _ in range(100):
        one_round(controller, TABLES[name], 0.0)
    depths = [one_round(controller, TABLES[name], 0.0) for _ in range(2000)]
    lost = sum(round_time(TABLES[name], depth) - 1.0 for depth in depths)
    assert any(depths) and lost < 0.011 * len(depths) + 1.0


def test_drafts_that_hold_again_are_noticed() -> None:
    costs = TABLES["cpu"]
    controller = DepthController({1: costs})
    for _ in range(300):
        one_round(controller, costs, 0.0)
    assert controller.depth() == 0
    for _ in range(200):
        one_round(controller, costs)
    assert controller.depth() == best_depth(costs, [1.0] * LIMIT)


def test_no_more_than_can_be_used() -> None:
    controller = DepthController({1: TABLES["gpu"]})
    assert [controller.choose(most) for most in (2, 0, -1)] == [2, 0, 0]
    assert controller.choose() > 2
    assert DepthController({1: Costs((0.0, 1.0), (0.0,))}).choose() == 0


def test_drafting_that_stops_by_itself_is_reckoned_with() -> None:
    """p_min ends every round at its first draft: drafting more costs a draft each time."""
    costs = TABLES["full vocabulary"]
    controller = DepthController({1: costs})
    assert controller.choose() > 0
    for _ in range(100):
        asked = controller.choose()
        controller.update(0, [(asked, 0)], 1.35)
    assert controller.depth() == 0


def test_each_number_of_sequences_has_costs_of_its_own() -> None:
    """Rows that are free for one sequence are not for sixteen; those between are interpolated."""
    costs = {1: TABLES["gpu"], 4: TABLES["cpu"], 16: TABLES["hopeless"]}
    controller = DepthController(costs)
    for i in range(50):
        controller.choose()
        controller.update(6, [(6, (6, 1, 3, 2)[i % 4])], 1.56)
    depths = [controller.depth(n) for n in (1, 2, 4, 8, 16)]
    assert depths == sorted(depths, reverse=True) and depths[0] > depths[-1] == 0
    between = CostModel(costs).costs(2).verify[3]
    assert between == pytest.approx(1.05 + (1.75 - 1.05) / 3)
    assert not controller.why_fewer(1)
    assert re.fullmatch("4 sequences: [12] of [34] drafts pay here", controller.why_fewer(4))
    assert controller.why_fewer(16) == "16 sequences: drafts do not pay here"


def test_outcomes_of_all_sequences_count() -> None:
    """Drafting pays where three of four sequences have drafts that hold, not where one has."""
    depths, costs = [], TABLES["cpu"]
    for n_good in (3, 1):
        controller = DepthController({4: costs})
        for _ in range(200):
            depth = controller.choose(n_sequences=4)
            outcomes = [(depth, depth if i < n_good else 0) for i in range(4)]
            controller.update(depth, outcomes, round_time(costs, depth))
        depths.append(controller.depth(4))
    assert depths[0] > depths[1] == 0


# -- acceptance ------------------------------------------------------------


def test_rates_go_to_what_was_seen_and_older_outcomes_fade() -> None:
    tracker = AcceptanceTracker(3)
    for i in range(400):
        tracker.update(2, (2, 2, 1, 2, 0)[i % 5])
    first, second, third = tracker.rates()
    assert first == pytest.approx(0.8, abs=0.03) and second == pytest.approx(0.75, abs=0.04)
    assert third == pytest.approx(second), "never reached: as the one before"
    for _ in range(300):
        tracker.update(1, 0)
    assert tracker.rates()[0] < 0.05
    before = tracker.rates()
    tracker.update(0, 0)
    assert tracker.rates() == before, "a round without drafts teaches nothing"


# -- costs ------------------------------------------------------------


def test_a_machine_that_slows_down_slows_all_depths() -> None:
    costs = TABLES["experts"]
    model = CostModel({1: costs})
    for i in range(100):
        model.update(3, 3, (2.0 if i > 40 else 1.0) * round_time(costs, 3))
    factors = model.factors()
    assert model.plain() == pytest.approx(2.0, rel=0.1)
    assert factors[3] / factors[2] == pytest.approx(1.0, abs=0.1)


def test_a_wrong_cost_is_corrected_and_learned() -> None:
    """Depth 2 was measured in a moment in which the machine was busy, and rounds of experts cost
    more than the calibration's; that the machine is slower now is no cost of a depth."""
    true = TABLES["cpu"]
    wrong = Costs((*true.verify[:3], 1.8 * true.verify[3], *true.verify[4:]), true.draft)
    model = CostModel({1: wrong})
    assert not model.learned()
    for _ in range(60):
        for depth in (0, 2, 3):
            model.update(depth, depth, 1.5 * round_time(true, depth))
    learned = model.learned()[1]
    for depth in (2, 3):
        ratio = round_time(learned, depth) / learned.plain
        assert ratio == pytest.approx(round_time(true, depth), rel=0.05)
    assert learned.plain == pytest.approx(1.0, rel=0.05)


def test_a_stall_teaches_little() -> None:
    costs = TABLES["cpu"]
    model = CostModel({1: costs})
    for i in range(200):
        model.update(2, 2, round_time(costs, 2) * (50.0 if i % 40 == 39 else 1.0))
    factors = model.factors()
    assert factors[2] < 1.05 * factors[0]


# -- what a round costs and brings: exact values --------------------------------------------------

COSTS = Costs(verify=(0.0, 1.0, 1.5, 1.75, 2.05), draft=(0.0, 0.14, 0.26, 0.38))
#: The same in a unit of 20 ms: only ratios may matter where a ratio is asked for.
IN_SECONDS = Costs(tuple(0.02 * v for v in COSTS.verify), tuple(0.02 * d for d in COSTS.draft))


def test_bad_costs_are_refused() -> None:
    for verify, draft in (
        ((0.0, 1.0), (0.0, 0.1)),  # no verification of the draft
        ((0.0,), ()),
        ((1.0, 1.5), (0.0,)),  # the index is the number of rows
        ((0.0, 1.0, 1.5), (0.1, 0.2)),
        ((0.0, 1.0, -1.5), (0.0, 0.1)),
        ((0.0, 1.0, 1.5), (0.0, 0.0)),
        ((0.0, 1.0, math.inf), (0.0, 0.1)),
        ((0.0, 1.0, math.nan), (0.0, 0.1)),
    ):
        with pytest.raises(UsageError, match="costs"):
            Costs(verify, draft)


def test_tokens_by_depth() -> None:
    assert tokens_by_depth(()) == [1.0]
    found = tokens_by_depth((0.9, 0.8, 0.6, 0.3))
    assert found == pytest.approx([1.0, 1.9, 2.62, 3.052, 3.1816])
    for rate in (0.0, 0.1, 0.95):  # the paper's equation 1
        wanted = [(1 - rate ** (n + 1)) / (1 - rate) for n in range(7)]
        assert tokens_by_depth((rate,) * 6) == pytest.approx(wanted)


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


def test_best_depth() -> None:
    for rates, depth in (
        *(((rate,) * 3, depth) for rate, depth in ((0.1, 0), (0.6, 0), (0.7, 2), (1.0, 3))),
        ((0.9,), 1),  # no more than there are rates
        ((), 0),
        ((0.9,) * 9, 3),  # nor than there are costs
        ((0.9, 0.9, 0.0), 2),
    ):
        assert best_depth(COSTS, rates) == best_depth(IN_SECONDS, rates) == depth
    assert best_depth(Costs((0.0, 1.0, 1.0), (0.0, 0.5)), [0.5]) == 0, "the shallowest of equals"


def test_break_even() -> None:
    """There a depth is as fast as plain decoding."""
    for depth in (1, 2, 3):
        rate = break_even(COSTS, depth)
        assert rate is not None
        assert speed(COSTS, [rate] * depth, depth) == pytest.approx(1.0)
        assert break_even(IN_SECONDS, depth) == pytest.approx(rate)
    assert break_even(COSTS, 0) == 0.0
    assert break_even(Costs((0.0, 1.0, 0.7), (0.0, 0.3)), 1) == 0.0
    assert break_even(Costs((0.0, 1.0, 1.5), (0.0, 0.5)), 1) == pytest.approx(1.0)
    assert break_even(Costs((0.0, 1.0, 1.6), (0.0, 0.5)), 1) is None
