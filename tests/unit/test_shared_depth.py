"""One depth for several sequences: it follows what a round of so many of them costs.

Round times are SIMULATED from a made-up machine: this tests the logic and says nothing about the
speed of any model or machine.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from pyllama_mtp.drafting.acceptance import SyntheticAcceptance
from pyllama_mtp.drafting.depth import DepthController

LIMIT = 4
RATES = (0.8, 0.64, 0.51, 0.41)  # unconditional
#: Rows that the machine computes while it waits for the weights, and the time of a further one.
FREE_ROWS, ROW, DRAFT = 8, 0.125, 0.05


def verify_s(rows: int) -> float:
    return 1.0 + ROW * max(0, rows - FREE_ROWS)


def speed(n: int, depth: int) -> float:
    """Tokens per second of n sequences at a fixed depth."""
    return n * (1 + sum(RATES[:depth])) / (verify_s(n * (depth + 1)) + DRAFT * depth)


def run(
    depths: DepthController, n: int, n_rounds: int, seed: int = 0
) -> tuple[float, Counter[int]]:
    """Rounds of n sequences: tokens per second, and how often each depth was used."""
    draw, judges = random.Random(seed), [SyntheticAcceptance(RATES) for _ in range(n)]
    seconds, tokens, used = 0.0, 0, Counter[int]()
    for _ in range(n_rounds):
        depth = depths.choose(n_sequences=n)
        used[depth] += 1
        held = [len(judge.accept([0] * depth, lambda row: 0)) - 1 for judge in judges]
        noise = 1.0 + 0.02 * draw.random()
        draft_s = DRAFT * depth * noise
        total_s = draft_s + verify_s(n * (depth + 1)) * noise
        depths.update(depth, [(depth, one) for one in held], draft_s, total_s)
        seconds, tokens = seconds + total_s, tokens + sum(held) + n
    return tokens / seconds, used


@pytest.mark.parametrize("n", [1, 2, 4, 8, 16])
def test_as_fast_as_the_best_depth(n: int) -> None:
    found, used = run(DepthController(LIMIT), n, 400)
    best = max(range(LIMIT + 1), key=lambda depth: speed(n, depth))
    assert found > 0.95 * speed(n, best)
    assert speed(n, used.most_common(1)[0][0]) > 0.97 * speed(n, best)


def test_with_many_drafting_stops() -> None:
    assert max(speed(16, depth) for depth in range(1, LIMIT + 1)) < speed(16, 0)
    assert speed(1, 3) > 2 * speed(1, 0)
    depths = DepthController(LIMIT)
    assert run(depths, 1, 200)[1][0] < 20
    assert run(depths, 16, 200)[1][0] > 160
    assert run(depths, 1, 200)[1][0] < 20, "what 16 cost is not what one costs"


def test_outcomes_of_all_sequences_count() -> None:
    """Drafting pays where all of them hold, and not where those of one of two sequences do."""
    depths = []
    for share in (1, 0):
        controller = DepthController(LIMIT)
        for _ in range(200):
            depth = controller.choose(n_sequences=2)
            outcomes = [(depth, depth), (depth, share * depth)]
            controller.update(depth, outcomes, DRAFT * depth, 1.0 + 0.65 * depth)
        depths.append(controller.depth(2))
    assert depths == [LIMIT, 0]


def test_a_round_yields_the_mean() -> None:
    """Against plain decoding: half the sequences gain a token, half none, in a round that costs as
    much as one and a half plain ones. Nothing is lost or gained."""
    controller = DepthController(2)
    for _ in range(2):
        controller.choose(n_sequences=4)
        controller.update(0, [(0, 0)] * 4, 0.0, 1.0)
    before = controller.total.balance
    assert controller.choose(n_sequences=4) == 1
    controller.update(1, [(1, 1), (1, 0)] * 2, 0.2, 1.5)
    assert controller.total.balance == pytest.approx(before, abs=0.05)
