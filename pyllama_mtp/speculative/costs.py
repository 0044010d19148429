"""Costs and gains of a round: does drafting pay, and at which depth? Pure; no library.

A round drafts k tokens, verifies them in one pass of the target over k + 1 rows, and emits the
accepted ones and one token more (Leviathan et al. 2023, "Fast inference from transformers via
speculative decoding", https://arxiv.org/abs/2211.17192). Its speed follows from what drafting and
verifying cost here, and from how often a draft is accepted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import UsageError


@dataclass(frozen=True)
class Costs:
    """Costs of rounds, in seconds or any other unit.

    Attributes:
        verify: ``verify[n]``: one pass of the target over n rows, with everything in a round but
            drafting: sampling, rollback, sync. ``verify[1]`` is a plain decode step, ``verify[0]``
            is 0.
        draft: ``draft[k]``: drafting k tokens. ``draft[0]`` is 0.

    Raises:
        UsageError: lengths do not match, or a time is not above 0.
    """

    verify: tuple[float, ...]
    draft: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.verify) != len(self.draft) + 1 or not self.draft:
            raise UsageError(
                f"{len(self.verify)} verification and {len(self.draft)} draft costs: for depths 0 "
                "to n there must be n + 2 (of 0 to n + 1 rows) and n + 1 of them"
            )
        for name, values in (("verify", self.verify), ("draft", self.draft)):
            if values[0] != 0 or not all(0 < value < math.inf for value in values[1:]):
                raise UsageError(f"{name} costs are {values}: 0 first, then times above 0 only")

    @property
    def limit(self) -> int:
        """The greatest depth with costs."""
        return len(self.draft) - 1

    @property
    def plain(self) -> float:
        """One plain decode step."""
        return self.verify[1]


def expected_tokens(acceptance: Sequence[float], depth: int) -> float:
    """Tokens that a round of `depth` drafts emits on average: 1 + a1 + a1 a2 + ...

    The last accepted draft is followed by one token of the target's own, so with every a_i = a
    this is (1 - a^(depth + 1)) / (1 - a): Leviathan et al. 2023, equation 1.

    Args:
        acceptance: conditional, per position: acceptance[i] is the probability that draft i + 1
            is accepted, all before it being accepted.

    Raises:
        UsageError: fewer than `depth` rates, or a negative depth.
    """
    if not 0 <= depth <= len(acceptance):
        raise UsageError(f"depth is {depth}, there are acceptance rates for 0 to {len(acceptance)}")
    return tokens_by_depth(acceptance[:depth])[depth]


def posterior(
    tried: Sequence[float], held: Sequence[float], prior: float, weight: float
) -> tuple[float, ...]:
    """Estimated acceptance per position, from drafts tried and held: means of Beta posteriors.

    Args:
        prior: acceptance of the first position before any outcome; each further position has the
            estimate of the position before as its prior.
        weight: outcomes that each prior is worth.
    """
    rates: list[float] = []
    for n_tried, n_held in zip(tried, held, strict=True):
        prior = (n_held + weight * prior) / (n_tried + weight)
        rates.append(prior)
    return tuple(rates)


def tokens_by_depth(acceptance: Sequence[float]) -> list[float]:
    """:func:`expected_tokens` of each depth from 0 to ``len(acceptance)``."""
    tokens, reached = [1.0], 1.0
    for rate in acceptance:
        reached *= rate
        tokens.append(tokens[-1] + reached)
    return tokens


def round_time(costs: Costs, depth: int) -> float:
    """Time of a round of `depth` drafts, in the unit of `costs`."""
    return costs.draft[depth] + costs.verify[depth + 1]


def times_by_depth(costs: Costs, limit: int, offered: Sequence[float]) -> list[float]:
    """Mean times of rounds that ask for 0 to `limit` drafts, in the unit of `costs`.

    Args:
        offered: [limit] offered[i] is the probability that draft i + 1 is made when it is asked for
            and the one before it was made: below 1 where drafting stops at improbable drafts
            (p_min). The draft at which it stops is computed but not verified.
    """
    draft, verify, times = costs.draft, costs.verify, list[float]()
    stopped, made = 0.0, 1.0  # made: the probability that at least n drafts are
    for n in range(limit + 1):
        times.append(stopped + made * round_time(costs, n))
        if n < limit and offered[n] < 1.0:
            stopped += made * (1.0 - offered[n]) * (draft[n + 1] + verify[n + 1])
            made *= offered[n]
    return times


def speed(costs: Costs, acceptance: Sequence[float], depth: int) -> float:
    """Tokens per unit of time of rounds of `depth` drafts; depth 0 is plain decoding.

    The ratio of the means, to which a long text converges: Leviathan et al. 2023, theorem 3.8, with
    measured costs in place of their cost coefficient and free parallel verification. `acceptance`:
    see :func:`expected_tokens`.
    """
    return expected_tokens(acceptance, depth) / round_time(costs, depth)


def best_depth(costs: Costs, acceptance: Sequence[float]) -> int:
    """The fastest of the depths with costs and acceptance rates, the shallowest of equals."""
    limit = min(len(acceptance), costs.limit)
    return max(range(limit + 1), key=lambda depth: speed(costs, acceptance, depth))


def break_even(costs: Costs, depth: int) -> float | None:
    """The acceptance, the same at every position, at which `depth` is as fast as plain decoding.

    Returns:
        0 to 1, within 1e-9; 0 where a round is no dearer than a plain step; None where even
        drafts that are all accepted do not pay.
    """
    return needed_acceptance(round_time(costs, depth) / costs.plain, depth)


def needed_acceptance(wanted: float, depth: int) -> float | None:
    """The acceptance, the same at every position, at which rounds emit `wanted` tokens on average.

    Returns:
        As :func:`break_even`.
    """
    if wanted <= 1.0:
        return 0.0
    if wanted > depth + 1:
        return None
    low, high = 0.0, 1.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        if expected_tokens([middle] * depth, depth) < wanted:
            low = middle
        else:
            high = middle
    return high
