"""Drawn drafts: the outcome is a draw from the target whatever the head's distributions are.

Shown on small Markov chains, whose every sequence has a known probability, by counting sequences.
Seeds are fixed, so a test that is green stays so; for other seeds each comparison would be red by
chance once in 1 / FALSE_ALARM times. Rules that are wrong in one place are red: see
test_a_wrong_rule_is_seen.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import pytest

from pyllama_mtp.errors import FatalDecodeError, UsageError
from pyllama_mtp.sampling import acceptance
from pyllama_mtp.sampling.acceptance import (
    Distribution,
    accept_sampled,
    draft_distribution,
    draw,
    point,
    residual,
    softmax,
)
from pyllama_mtp.settings import Sampling

from ..marks import usual
from ..regression.distributions import FALSE_ALARM_SIGMAS, chi_square, reference

Matrix = npt.NDArray[np.float64]
Rows = Callable[[int], Distribution]
Rule = Callable[[Sequence[int], Sequence[Distribution], Rows, np.random.Generator], list[int]]

N_TOKENS, N_TEXTS = 4, 2500
ALL = np.arange(N_TOKENS, dtype=np.int32)


class Number(np.random.Generator):
    """A generator that always gives the same number."""

    def __init__(self, number: float) -> None:
        super().__init__(np.random.PCG64(0))
        self._number = number

    def random(self) -> float:  # type: ignore[override]
        return self._number


LEAST, MOST = Number(0.0), Number(float(np.nextafter(1.0, 0.0)))


def of(*shares: float) -> Distribution:
    """A distribution over tokens 0, 1, ..."""
    return Distribution(np.arange(len(shares), dtype=np.int32), np.array(shares))


@dataclass
class Chains:
    """Which token follows which: p for the target, q for the head; both [from, to]."""

    p: Matrix
    q: Matrix
    targets: list[Distribution] = field(init=False)
    heads: list[Distribution] = field(init=False)

    def __post_init__(self) -> None:
        mixed = np.random.default_rng(5).permutation(ALL)
        self.targets = [Distribution(mixed, row[mixed]) for row in self.p]
        # A head may be over a part of the vocabulary: what it does not have is left out.
        self.heads = [Distribution(ALL[row > 0], row[row > 0]) for row in self.q]

    def exact(self, length: int) -> dict[tuple[int, ...], float]:
        """Probabilities of the texts after token 0."""
        found = {}
        for text in itertools.product(range(N_TOKENS), repeat=length):
            steps = itertools.pairwise((0, *text))
            found[text] = float(np.prod([self.p[a, b] for a, b in steps]))
        return found

    def text(
        self, depth: int, length: int, rng: np.random.Generator, rule: Rule = accept_sampled
    ) -> tuple[int, ...]:
        """Tokens after token 0, by rounds of `depth` drafts."""
        tokens = [0]
        while len(tokens) <= length:
            tokens += self.round(tokens[-1], depth, rng, rule)
        return tuple(tokens[1 : length + 1])

    def round(
        self, token: int, depth: int, rng: np.random.Generator, rule: Rule = accept_sampled
    ) -> list[int]:
        """Drafts after `token` from the head, and what comes of them."""
        known = [token]
        for _ in range(depth):
            known.append(draw(self.heads[known[-1]], rng))
        heads = [self.heads[token] for token in known[:-1]]
        return rule(known[1:], heads, lambda row: self.targets[known[row]], rng)


def random_rows(seed: int, flatness: float) -> Matrix:
    rng = np.random.default_rng(seed)
    return rng.dirichlet(np.full(N_TOKENS, flatness), size=N_TOKENS)


def with_zeros(matrix: Matrix, *tokens: int) -> Matrix:
    out = matrix.copy()
    out[:, tokens] = 0
    return np.asarray(out / out.sum(axis=1, keepdims=True))


P = random_rows(1, 1.5)
PEAKED = np.full((N_TOKENS, N_TOKENS), 0.02)
PEAKED[ALL, P.argmin(axis=1)] = 0.94
CASES = {
    "another": Chains(P, random_rows(2, 1.5)),
    "peaked on what the target likes least": Chains(P, PEAKED),
    "the same": Chains(P, P),
    "nearly the same": Chains(P, 0.9 * P + 0.1 * random_rows(3, 1.5)),
    "the target lacks a token": Chains(with_zeros(P, 2), random_rows(4, 1.5)),
    "the head lacks two tokens": Chains(P, with_zeros(random_rows(6, 1.5), 1, 3)),
    "nothing in common": Chains(with_zeros(P, 0, 1), with_zeros(P, 2, 3)),
    "one token, always": Chains(P, np.eye(N_TOKENS)[P.argmax(axis=1)]),
}


def compare(
    chains: Chains, depth: int, rule: Rule = accept_sampled, seed: int = 7
) -> tuple[float, float]:
    """The chi-square statistic of texts of depth + 1 tokens, and its limit."""
    rng, length = np.random.default_rng(seed), depth + 1
    counts = Counter(chains.text(depth, length, rng, rule) for _ in range(N_TEXTS))
    exact = {text: share for text, share in chains.exact(length).items() if share > 0}
    if not set(counts) <= set(exact):
        return float("inf"), 0.0
    return chi_square(
        [counts[text] for text in exact], [N_TEXTS * share for share in exact.values()]
    )


@pytest.mark.parametrize("depth", usual(3, long=[1, 2]))
@pytest.mark.parametrize("name", CASES)
def test_texts_are_as_frequent_as_the_target_has_them(name: str, depth: int) -> None:
    """Whole texts are counted, so every position given every text before it: a round accepts all,
    some or none, and the next one begins where it ended."""
    found, limit = compare(CASES[name], depth)
    assert found < limit


def no_residual(p: Distribution, q: Distribution) -> Distribution:
    return p


def residual_without_max(p: Distribution, q: Distribution) -> Distribution:
    rest = np.abs(p.probabilities - q.probabilities_of(p.ids))
    return Distribution(p.ids, rest / rest.sum())


@pytest.mark.parametrize("wrong", [no_residual, residual_without_max])
def test_a_wrong_residual_is_seen(
    monkeypatch: pytest.MonkeyPatch, wrong: Callable[..., Distribution]
) -> None:
    monkeypatch.setattr(acceptance, "residual", wrong)
    found, limit = compare(CASES["another"], 2)
    assert found > 2 * limit


def last_row_from_the_head(
    drafts: Sequence[int], heads: Sequence[Distribution], rows: Rows, rng: np.random.Generator
) -> list[int]:
    last = CASES["another"].heads[drafts[-1]]
    return accept_sampled(drafts, heads, lambda i: rows(i) if i < len(drafts) else last, rng)


def test_a_wrong_rule_is_seen() -> None:
    found, limit = compare(CASES["another"], 2, last_row_from_the_head)
    assert found > 2 * limit


def overlap(p: Matrix, q: Matrix) -> float:
    return float(np.minimum(p[0], q[0]).sum())


@pytest.mark.parametrize("name", CASES)
def test_acceptance_is_what_p_and_q_have_in_common(name: str) -> None:
    chains, rng = CASES[name], np.random.default_rng(11)
    accepted = sum(len(chains.round(0, 1, rng)) - 1 for _ in range(N_TEXTS))
    expected = overlap(chains.p, chains.q)
    error = (expected * (1 - expected) / N_TEXTS) ** 0.5
    assert abs(accepted / N_TEXTS - expected) <= FALSE_ALARM_SIGMAS * error + 1e-12


def given(*rows: Distribution) -> Rows:
    """A target of these rows."""
    return lambda row: rows[row]


def test_the_ends_of_the_random_numbers() -> None:
    """0 does not accept what the target cannot say, the largest does accept what is due."""
    p, q = of(0.0, 0.3, 0.7), of(0.5, 0.3, 0.2)
    assert accept_sampled([0], [q], given(p), LEAST) == [2], "all that is left over"
    assert accept_sampled([1], [q], given(p, point(0)), MOST) == [1, 0]
    assert accept_sampled([2], [q], given(p, point(0)), MOST) == [2, 0]
    assert [accept_sampled([], [], given(of(0.5, 0.5)), n) for n in (LEAST, MOST)] == [[0], [1]]
    spread = of(0.0, 0.5, 0.5, 0.0)
    assert (draw(spread, LEAST), draw(spread, MOST)) == (1, 2), "never one of probability 0"


def test_what_a_draft_leaves() -> None:
    p, q = of(0.1, 0.2, 0.3, 0.4), Distribution(ALL[::-1][:2], np.array([0.2, 0.8]))
    assert residual(p, q).probabilities == pytest.approx([0.1 / 0.5, 0.2 / 0.5, 0, 0.2 / 0.5])
    assert residual(p, p) is p, "nothing is left"


def test_a_draft_that_cannot_have_been_drawn() -> None:
    with pytest.raises(UsageError, match="draft 3 has probability 0"):
        accept_sampled([3], [of(0.5, 0.5)], given(of(0.5, 0.5)), LEAST)


FILTERS = {
    "none": Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0),
    "top-k": Sampling(temperature=0.7, top_k=7, top_p=1.0, min_p=0.0),
    "top-k beyond": Sampling(temperature=0.7, top_k=1000, top_p=1.0, min_p=0.0),
    "top-p": Sampling(temperature=1.3, top_k=0, top_p=0.8, min_p=0.0),
    "min-p": Sampling(temperature=1.3, top_k=0, top_p=1.0, min_p=0.1),
    "all": Sampling(temperature=0.8, top_k=20, top_p=0.95, min_p=0.05),
}


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("spread", [0.5, 3.0])
def test_filters_of_the_head(name: str, spread: float) -> None:
    """The filters that `Sampling` documents, computed by numpy in another way."""
    s = FILTERS[name]
    for seed in range(5):
        logits = np.random.default_rng(seed).normal(9, spread, 300).astype(np.float32)
        found = draft_distribution(logits, None, s)
        every = np.arange(len(logits), dtype=np.int32)
        np.testing.assert_allclose(found.probabilities_of(every), reference(logits, (), s))
        assert found.ids.dtype == np.int32
        assert found.probabilities.dtype == np.float64


def test_a_head_over_a_part_of_the_vocabulary() -> None:
    ids = np.array([3, 70, 200_000], dtype=np.int32)
    logits = np.array([1.0, 3.0, 2.0], dtype=np.float32)
    found = draft_distribution(logits, ids, replace(FILTERS["none"], top_k=2))
    assert sorted(found.ids) == [70, 200_000]
    assert found.probability(70) == pytest.approx(1 / (1 + np.exp(-1)))
    assert found.probability(3) == found.probability(5) == 0


def test_logits_that_are_extreme() -> None:
    far = softmax(ALL, np.array([1e4, -1e4, 1e4, -np.inf], dtype=np.float32))
    assert far.probabilities == pytest.approx([0.5, 0, 0.5, 0])
    for bad in (np.nan, np.inf):
        logits = np.array([0, bad, 1, 2], dtype=np.float32)
        with pytest.raises(FatalDecodeError, match="largest logit"):
            softmax(ALL, logits)
        for sampling in FILTERS.values():
            with pytest.raises(FatalDecodeError, match="largest logit"):
                draft_distribution(logits, None, sampling)
