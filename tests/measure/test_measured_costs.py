"""What drafting costs: every depth in turn, medians of the rounds that count."""

from __future__ import annotations

import pytest

from pyllama_mtp.errors import UsageError
from pyllama_mtp.measure.costs import Rotation, tokens_needed


def run(rotation: Rotation, draft_s: float, rest_s: float) -> list[int]:
    """Rounds until done; the first of each two is ten times slower."""
    chosen: list[int] = []
    while not rotation.done:
        depth = rotation.choose()
        slow = 10 if len(chosen) % 2 == 0 else 1
        chosen.append(depth)
        draft = slow * draft_s * depth
        rotation.update_pooled(depth, [], draft, draft + slow * rest_s * (depth + 1))
    return chosen


def test_depths_take_turns_and_the_first_round_of_each_is_dropped() -> None:
    rotation = Rotation(2, 2)
    assert run(rotation, 1.0, 5.0) == [0, 0, 1, 1, 2, 2, 2, 2, 1, 1, 0, 0]
    assert rotation.choose() == 0
    costs = rotation.costs()
    assert costs.draft == (0.0, 1.0, 2.0) and costs.verify == (0.0, 5.0, 10.0, 15.0)


def test_medians() -> None:
    rotation = Rotation(1, 3)
    for rest in (1.0, 9.0, 2.0):
        for depth in (0, 0, 1, 1) if rest != 9.0 else (1, 1, 0, 0):
            assert rotation.choose() == depth
            rotation.update_pooled(depth, [], depth * rest, depth * rest + rest)
    assert rotation.costs().verify == (0.0, 2.0, 2.0) and rotation.costs().draft == (0.0, 2.0)


def test_a_round_cut_short_does_not_count() -> None:
    rotation = Rotation(2, 1)
    while not rotation.done:
        at_most = 1
        depth = rotation.choose(at_most)
        assert depth <= at_most
        rotation.update_pooled(depth, [], 1.0, 2.0)
    with pytest.raises(UsageError, match="longer context"):
        rotation.costs()


def test_tokens_needed_is_what_all_accepted_rounds_emit() -> None:
    rotation, emitted = Rotation(3, 2), 1
    while not rotation.done:
        depth = rotation.choose()
        emitted += depth + 1
        rotation.update_pooled(depth, [], 1.0, 2.0)
    assert emitted == tokens_needed(3, 2)
