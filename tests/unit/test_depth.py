"""The depth of each round: what the controller knows, what it tries, and what that costs.

Round times are SIMULATED from cost tables, and acceptance is drawn by a seeded generator: this
tests the controller's logic and says nothing about the speed of any model or machine.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import mode
from typing import Any

import pytest

from pyllama_mtp.drafting.depth import (
    PRIOR_RATE,
    SHARE,
    CostModel,
    Costs,
    DepthController,
    Outcomes,
    best_depth,
)

from .test_costmodel import learn

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
FALLING = (0.9, 0.8, 0.6, 0.3, 0.3, 0.3)


# -- simulation --------------------------------------------------------------------------------


@dataclass
class Fixed:
    """The same depth in every round."""

    depth: int

    def choose(self, at_most: int | None = None) -> int:
        return self.depth if at_most is None else min(self.depth, at_most)

    def update(self, n_drafted: int, outcomes: Outcomes, draft_s: float, total_s: float) -> None:
        pass


Rates = Callable[[int], Sequence[float]]


@dataclass
class Simulation:
    """A text and a machine. A draft for text position p is accepted if the text's draw there is
    below the rate of its place in the round, so every depth meets the same predictable tokens.

    Attributes:
        rates: text position -> conditional acceptance per draft position.
        noise: log-normal sigma of round times; `stalls`: share of rounds that take three times as
            long; `change`: plain steps that the first round at another size takes longer.
        slowness: text position -> factor on all times.
        depths: of the rounds so far.
    """

    costs: Costs
    rates: Rates
    seed: int = 0
    noise: float = 0.05
    stalls: float = 0.02
    change: float = 0.05
    slowness: Callable[[int], float] = lambda position: 1.0
    depths: list[int] = field(default_factory=list)

    def run(self, chooser: DepthController | Fixed, n_tokens: int) -> float:
        """Generate; the time it took, in plain steps."""
        draw = random.Random(self.seed)
        text = [draw.random() for _ in range(n_tokens + LIMIT + 1)]
        position, total = 0, 0.0
        while position < n_tokens:
            asked = chooser.choose(n_tokens - position - 1)
            rates = self.rates(position)
            holds = (text[position + i] < rates[i] for i in range(asked))
            accepted = sum(1 for _ in itertools.takewhile(bool, holds))
            factor = self._factor(draw) * self.slowness(position)
            draft_s = self.costs.draft[asked] * factor
            rest_s = self.costs.verify[asked + 1] * factor
            if self.depths and self.depths[-1] != asked:
                rest_s += self.change
            self.depths.append(asked)
            chooser.update(asked, [(asked, accepted)], draft_s, draft_s + rest_s)
            total += draft_s + rest_s
            position += accepted + 1
        return total

    def _factor(self, draw: random.Random) -> float:
        factor = math.exp(draw.gauss(0.0, self.noise))
        return 3.0 * factor if draw.random() < self.stalls else factor

    @property
    def changes(self) -> int:
        """Rounds at another depth than the one before."""
        return sum(a != b for a, b in itertools.pairwise(self.depths))


def constant(rate: float) -> Rates:
    return lambda position: (rate,) * LIMIT


#: No noise, no stalls, no price for a change.
QUIET: dict[str, Any] = {"noise": 0.0, "stalls": 0.0, "change": 0.0}


def share_of_speed(
    costs: Costs, rates: Rates, against: int, slowness: Callable[[int], float] | None = None
) -> float:
    """Speed of controllers that begin with nothing, as a share of that of a fixed depth: 1 is as
    fast. Texts of 448 tokens, total times over 40 seeds."""
    ours = fixed = 0.0
    for seed in range(40):
        machine = {"slowness": slowness} if slowness else {}
        ours += Simulation(costs, rates, seed, **machine).run(DepthController(LIMIT), 448)
        fixed += Simulation(costs, rates, seed, **machine).run(Fixed(against), 448)
    return fixed / ours


# -- the rule, step by step --------------------------------------------------------------------


def one_round(controller: DepthController, costs: Costs, share_held: float = 1.0) -> int:
    """A round in exactly the time of the table; the first share of its drafts held."""
    asked = controller.choose()
    draft_s = costs.draft[asked]
    outcomes = [(asked, int(share_held * asked))]
    controller.update(asked, outcomes, draft_s, draft_s + costs.verify[asked + 1])
    return asked


def experienced(limit: int, costs: Costs) -> DepthController:
    """A controller that knows the costs and nothing else."""
    return DepthController(limit, learn(CostModel(limit), costs))


def known(controller: DepthController) -> Costs:
    costs = controller.costs()
    assert costs
    return costs


def test_the_first_rounds_are_plain() -> None:
    controller = DepthController(LIMIT)
    assert controller.costs() is None
    assert [one_round(controller, TABLES["gpu"]) for _ in range(3)] == [0, 0, 2]
    assert known(controller).plain == 1.0


def test_costs_decide_before_any_outcome() -> None:
    costs = TABLES["gpu"]
    assert experienced(LIMIT, costs).choose() == best_depth(costs, [PRIOR_RATE] * LIMIT) > 0
    hopeless = experienced(LIMIT, TABLES["hopeless"])
    assert hopeless.choose() < 2 and hopeless.depth() == 0


def test_unknown_depths_are_approached_in_steps() -> None:
    controller = DepthController(20)
    costs = table([1.0] * 21, 0.001)
    depths = [one_round(controller, costs) for _ in range(8)]
    assert depths == [0, 0, 2, 4, 6, 8, 10, 12]


def test_no_more_than_can_be_used() -> None:
    controller = experienced(LIMIT, TABLES["gpu"])
    assert [controller.choose(most) for most in (2, 0, -1)] == [2, 0, 0]
    assert controller.choose() > 2


def test_no_depth_at_all() -> None:
    controller = DepthController(0)
    for _ in range(50):
        assert one_round(controller, Costs((0.0, 1.0), (0.0,))) == 0


def test_drafting_that_has_lost_too_much_pauses() -> None:
    costs = TABLES["gpu"]
    controller = experienced(LIMIT, costs)
    assert controller.choose() > 0
    controller.total.balance = -0.1
    depths = [one_round(controller, costs) for _ in range(12)]
    assert depths[:9] == [0] * 9 and depths[-1] > 0
    assert controller.depth() > 0


def test_gains_and_losses_against_plain_decoding() -> None:
    costs = TABLES["cpu"]
    for share_held in (0.0, 1.0):
        controller = experienced(LIMIT, costs)
        before = controller.total.balance
        depth = one_round(controller, costs, share_held)
        steps = costs.draft[depth] + costs.verify[depth + 1]
        expected = before + SHARE * steps - (steps - 1 - share_held * depth)
        assert depth == 2 and controller.total.balance == pytest.approx(expected)


def test_a_plain_round_loses_nothing_however_long() -> None:
    controller = experienced(LIMIT, TABLES["hopeless"])
    controller.probing.balance = -9.0
    before = controller.total.balance
    assert controller.choose() == 0
    controller.update(0, [(0, 0)], 0.0, 30.0)
    assert before < controller.total.balance < before + 2 * SHARE


def test_a_stall_is_charged_as_little_more_than_a_usual_round() -> None:
    costs = TABLES["cpu"]
    balances = []
    for factor in (1.0, 10.0):
        controller = experienced(LIMIT, costs)
        depth = controller.choose()
        draft_s, rest_s = factor * costs.draft[depth], factor * costs.verify[depth + 1]
        controller.update(depth, [(depth, 0)], draft_s, draft_s + rest_s)
        balances.append(controller.total.balance)
    assert 0.1 < balances[0] - balances[1] < 1.0


def test_probes_wait_for_their_allowance() -> None:
    """At depth 0 the acceptance is probed, which costs 0.64 when the draft is rejected."""
    costs = TABLES["cpu"]
    controller = experienced(LIMIT, costs)
    depths = [one_round(controller, costs, 0.0) for _ in range(400)]
    late = depths[100:]
    assert controller.depth() == 0 and set(late) <= {0, 1}
    assert 3 <= late.count(1) <= 300 * SHARE / 0.6 + 1
    controller.probing.balance = -1.0
    assert not any(one_round(controller, costs, 0.0) for _ in range(99))


def test_a_probe_that_holds_is_followed_by_the_next() -> None:
    costs = TABLES["cpu"]
    controller = experienced(LIMIT, costs)
    for _ in range(100):
        one_round(controller, costs, 0.0)
    while one_round(controller, costs) == 0:
        pass
    assert all(one_round(controller, costs) for _ in range(20))
    assert controller.depth() > 1


def test_a_depth_not_measured_lately_is_measured_in_two_rounds() -> None:
    """A plain step, above all: everything is compared with it."""
    costs = TABLES["gpu"]
    controller = experienced(LIMIT, costs)
    depths = [one_round(controller, costs) for _ in range(1000)]
    plain = [i for i, depth in enumerate(depths) if depth == 0]
    assert plain and len(plain) <= 12
    assert all(second == first + 1 for first, second in zip(plain[::2], plain[1::2], strict=True))
    assert sum(depth != LIMIT for depth in depths[10:]) <= len(plain) + 10


def test_a_depth_that_has_become_cheap_is_found() -> None:
    """Deeper rounds stop being dear: nothing but a probe can tell."""
    before, after = table((1.0, 1.3, 3.0, 3.2), 0.1), table((1.0, 1.3, 1.35, 1.4), 0.1)
    controller = experienced(3, before)
    assert {one_round(controller, before) for _ in range(100)} <= {0, 1}
    assert controller.depth() == 1
    for _ in range(900):
        one_round(controller, after)
    assert controller.depth() == 3


# -- what it achieves, by simulation -------------------------------------------------------------


def test_without_luck_it_finds_the_best_depth() -> None:
    """Every draft held, or none."""
    for name, costs in TABLES.items():
        for rate in (0.0, 1.0):
            controller = DepthController(LIMIT)
            simulation = Simulation(costs, constant(rate), **QUIET)
            simulation.run(controller, 600)
            late = simulation.depths[len(simulation.depths) // 2 :]
            assert mode(late) == best_depth(costs, [rate] * LIMIT), (name, rate)


@pytest.mark.parametrize("name", TABLES)
def test_never_much_slower_than_plain_decoding_whatever_the_text(name: str) -> None:
    """An adversary: it accepts what is drafted while the controller is convinced of depth 0, and
    rejects everything otherwise. Without noise the bound is exact, but for the round in which the
    allowance runs out."""
    costs, n_tokens = TABLES[name], 2000
    controller = DepthController(LIMIT)
    simulation = Simulation(
        costs, lambda position: (float(controller.depth() == 0),) * LIMIT, **QUIET
    )
    total = simulation.run(controller, n_tokens)
    assert any(simulation.depths)
    dearest = max(costs.draft[d] + costs.verify[d + 1] for d in {*simulation.depths})
    assert total <= n_tokens + 2.5 + SHARE * total + dearest


@pytest.mark.parametrize("name", TABLES)
def test_probing_costs_one_percent(name: str) -> None:
    """The text accepts no draft."""
    controller, n_tokens = DepthController(LIMIT), 9000
    Simulation(TABLES[name], constant(0.0), **QUIET).run(controller, 300)
    simulation = Simulation(TABLES[name], constant(0.0), **QUIET)
    total = simulation.run(controller, n_tokens)
    assert total - n_tokens < 1.05 * SHARE * total + 1.0
    assert sum(map(bool, simulation.depths)) >= 10, "but it does go on"


def test_depth_does_not_flap() -> None:
    """At 0.8 depths 2 to 4 are within 1.5 % of each other on this table."""
    simulation = Simulation(TABLES["cpu"], constant(0.8), seed=3)
    simulation.run(DepthController(LIMIT), 4000)
    assert simulation.changes < 0.1 * len(simulation.depths)


def busy(position: int) -> float:
    """Another program has the machine for a while, every now and then and at the start."""
    return 1.5 if position // 12 % 5 == 0 else 1.0


def drifting(position: int) -> float:
    """The machine changes its speed for a while, as virtual ones and hot ones do."""
    return (1.0, 1.5, 1.2, 1.9, 1.0)[position // 70 % 5]


@pytest.mark.parametrize("name", ["small batches", "experts"])
@pytest.mark.parametrize(
    "acceptance", [FALLING, (0.87, 0.85, 0.75, 0.75, 0.7, 0.7), (0.75, 0.7, 0.65, 0.6, 0.6, 0.6)]
)
@pytest.mark.parametrize(("slowness", "least"), [(None, 0.97), (drifting, 0.955), (busy, 0.92)])
def test_a_text_begun_without_experience(
    name: str, acceptance: Sequence[float], slowness: Callable[[int], float] | None, least: float
) -> None:
    """Learning included, hardly slower than the best fixed depth from the start."""
    best = best_depth(TABLES[name], acceptance)
    assert share_of_speed(TABLES[name], lambda _: acceptance, best, slowness) > least


@pytest.mark.parametrize("name", ["small batches", "experts"])
def test_where_hardly_a_draft_holds(name: str) -> None:
    assert share_of_speed(TABLES[name], constant(0.1), 0) > 0.975
