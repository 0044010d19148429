"""Which drafts are accepted, with which probability when it is imposed, and how likely one is."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from pyllama_mtp.drafting.drafter import top_probability
from pyllama_mtp.sampling.acceptance import (
    SyntheticAcceptance,
    accept_best,
    accept_sampled,
    point,
)

Ends = Callable[[int], bool]
Rule = Callable[[list[int], "Rows", Ends], list[int]]


class Rows:
    """What the target would choose at each row; remembers which rows were sampled, and when tokens
    came."""

    def __init__(self, *choices: int) -> None:
        self.choices, self.asked, self.log = choices, list[int](), list[str]()

    def __call__(self, row: int) -> int:
        self.asked.append(row)
        self.log.append(f"row {row}")
        return self.choices[row]


def sampled(drafts: list[int], rows: Rows, ends: Ends) -> list[int]:
    """Of distributions that are certain."""
    heads, rng = [point(token) for token in drafts], np.random.default_rng(0)
    chosen = lambda token: rows.log.append(f"token {token}")  # noqa: E731
    tokens = accept_sampled(drafts, heads, lambda row: point(rows(row)), rng, ends, chosen)
    in_order = [word for i, token in enumerate(tokens) for word in (f"row {i}", f"token {token}")]
    assert rows.log == in_order, "a token is known before the next row is asked"
    return tokens


BOTH = pytest.mark.parametrize("accept", [accept_best, sampled])


@BOTH
@pytest.mark.parametrize(
    ("drafts", "choices", "tokens"),
    [
        ([], [7], [7]),
        ([1, 2, 3], [1, 2, 3, 9], [1, 2, 3, 9]),  # all accepted, and one token more
        ([1, 2, 3], [5, 2, 3, 9], [5]),  # first rejected: what matches later is worth nothing
        ([1, 2, 3], [1, 6, 3, 9], [1, 6]),
        ([1, 2, 3], [1, 2, 8, 9], [1, 2, 8]),
        ([4], [4, 4], [4, 4]),
    ],
)
def test_the_targets_choice_is_emitted(
    accept: Rule, drafts: list[int], choices: list[int], tokens: list[int]
) -> None:
    rows = Rows(*choices)
    assert accept(drafts, rows, lambda token: False) == tokens
    assert rows.asked == list(range(len(tokens))), "each row once, in order, and no further"


@BOTH
def test_nothing_follows_an_end_token(accept: Rule) -> None:
    rows, ends = Rows(1, 99, 3, 4), (99).__eq__
    assert accept([1, 99, 3], rows, ends) == [1, 99]
    assert rows.asked == [0, 1]
    assert accept([1, 2], Rows(99, 2, 3), ends) == [99], "in place of a draft"


@pytest.mark.parametrize("rounds", [50, 1000])
def test_imposed_rates(rounds: int) -> None:
    """Unconditional, per position, and met within a few rounds however short the run is."""
    rates = (0.84, 0.76, 0.67, 0.1)
    imposed = SyntheticAcceptance(rates)
    counts = [0] * len(rates)
    for _ in range(rounds):
        rows = Rows(10, 11, 12, 13, 14)
        tokens = imposed.accept([1, 2, 3, 4], rows)
        n = len(tokens) - 1
        assert tokens == [*[1, 2, 3, 4][:n], 10 + n]
        assert rows.asked == list(range(n + 1)), "the cost of a real round"
        for position in range(n):
            counts[position] += 1
    for count, rate in zip(counts, rates, strict=True):
        assert abs(count - rounds * rate) <= 3


def test_imposed_rates_at_the_ends() -> None:
    always = SyntheticAcceptance((1.0, 1.0))
    assert always.accept([1, 2], Rows(0, 0, 5)) == [1, 2, 5]
    assert always.accept([], Rows(5)) == [5]
    assert always.accept([1], Rows(0, 5)) == [1, 5], "fewer drafts than rates"
    assert SyntheticAcceptance((0.0, 0.0)).accept([1, 2], Rows(5)) == [5]


def test_probability_among_the_best() -> None:
    """Softmax over the ten best; the others do not count."""
    logits = np.log(np.array([0.01] * 9 + [0.6] + [0.009] * 9, dtype=np.float32))
    assert top_probability(logits) == pytest.approx(0.6 / 0.69)
    assert top_probability(logits[7:10]) == pytest.approx(0.6 / 0.62), "fewer tokens"


def test_probability_of_large_and_of_equal_logits() -> None:
    assert top_probability(np.full(50, 3e38, dtype=np.float32)) == pytest.approx(0.1)
    assert top_probability(np.array([1e4, -1e4, 0], dtype=np.float32)) == pytest.approx(1.0)
