"""Acceptance of drafts that are drawn, by rejection sampling. Pure; no library.

Speculative sampling (Leviathan et al. 2023, "Fast inference from transformers via speculative
decoding", https://arxiv.org/abs/2211.17192, section 2.3 and algorithm 1; Chen et al. 2023,
https://arxiv.org/abs/2302.01318, algorithm 2). A draft x, drawn from the head's q, is accepted with
probability min(1, p(x) / q(x)), p being the target's; for a rejected draft, the token is drawn in
proportion to max(p - q, 0). The outcome is a draw from p, whatever q is:
min(p, q) + (1 - sum min(p, q)) max(p - q, 0) / sum max(p - q, 0) = p. A draft is accepted with
probability sum min(p, q); the best token of q, offered as the only draft, with p of that token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..errors import FatalDecodeError, UsageError
from .acceptance import Verdict

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int32]
Entries = npt.NDArray[np.int64]

#: A temperature below this is greedy, as in settings.Sampling.
GREEDY_BELOW = 1e-5
#: How far from 1 probabilities may sum up to.
TOLERANCE = 1e-6


@dataclass(frozen=True, eq=False)
class Distribution:
    """Probabilities of some tokens; every other token has none.

    Attributes:
        ids: [n] int32, n at least 1, in any order, each token once.
        probabilities: [n] float64, from 0 to 1; their sum is 1.

    Raises:
        UsageError: lengths differ, no token, or the probabilities are negative or do not sum to 1.
    """

    ids: Ints
    probabilities: Doubles

    def __post_init__(self) -> None:
        shape = np.shape(self.ids)
        if len(shape) != 1 or not shape[0] or np.shape(self.probabilities) != shape:
            raise UsageError(
                f"{shape} tokens and {np.shape(self.probabilities)} probabilities: a distribution "
                "has as many of both, in one dimension, and at least one"
            )
        total = float(self.probabilities.sum())  # a NaN among them makes it NaN
        if not abs(total - 1.0) <= TOLERANCE or self.probabilities.min() < 0:
            raise UsageError(
                f"probabilities from {self.probabilities.min()} that sum to {total}: they must be "
                "0 or above and sum to 1"
            )

    def probability(self, token: int) -> float:
        """Probability of one token."""
        return float(self.probabilities[self.ids == token].sum())

    def probabilities_of(self, ids: Ints) -> Doubles:
        """[m] float64: probabilities of [m] int32 tokens."""
        order = np.argsort(self.ids, kind="stable")  # quick where they are sorted already
        at = np.searchsorted(self.ids, ids, sorter=order)
        at = order[np.minimum(at, len(order) - 1)]
        return np.where(self.ids[at] == ids, self.probabilities[at], 0.0)


def point(token: int) -> Distribution:
    """The distribution of a token that is certain."""
    return Distribution(np.array([token], dtype=np.int32), np.ones(1))


def softmax(ids: Ints, logits: npt.NDArray[np.floating]) -> Distribution:
    """The distribution with p proportional to exp(logit), computed in float64.

    Args:
        ids: [n] int32.
        logits: [n]; minus infinity is probability 0.

    Raises:
        FatalDecodeError: a NaN, plus infinity, or minus infinity only.
    """
    best = float(logits.max())
    _refuse_faulty(best)
    weights = np.exp(logits.astype(np.float64) - best)
    return Distribution(ids, weights / weights.sum())


def _refuse_faulty(best: float) -> None:
    """`best`: the largest logit; numpy gives NaN for it where there is one."""
    if not np.isfinite(best):
        raise FatalDecodeError(f"the largest logit is {best}: damaged weights, or a kernel bug")


def draw(distribution: Distribution, rng: np.random.Generator) -> int:
    """A token of the distribution, by one number of `rng`; never one of probability 0."""
    upto = np.cumsum(distribution.probabilities)
    at = int(np.searchsorted(upto, rng.random() * upto[-1], side="right"))
    return int(distribution.ids[at])


def residual(p: Distribution, q: Distribution) -> Distribution:
    """The distribution for the token after a rejected draft from `q`: max(p - q, 0), scaled; `p`
    where p and q are the same, and only rounding rejects."""
    rest = np.maximum(p.probabilities - q.probabilities_of(p.ids), 0.0)
    total = float(rest.sum())
    return Distribution(p.ids, rest / total) if total > 0 else p


def accept_sampled(
    drafts: Sequence[int],
    draft_distributions: Sequence[Distribution],
    target_distribution: Callable[[int], Distribution],
    rng: np.random.Generator,
    ends: Callable[[int], bool] = lambda token: False,
    chosen: Callable[[int], None] = lambda token: None,
) -> Verdict:
    """Accept drafts so that the tokens are a draw from the target's distributions.

    Args:
        drafts: drafts[i] was drawn from draft_distributions[i]. How many drafts there are may
            depend on those distributions and on drafts before the last one, but not on what was
            drawn last: to drop a draft because it came out improbable changes the distribution.
        draft_distributions: the head's, after drafts[:i].
        target_distribution: the target's of row i, after drafts[:i], 0 <= i <= len(drafts); called
            in order, up to the first rejected draft.
        rng: takes one number for each draft looked at, and one where a token is drawn.
        ends: True for a token after which nothing may follow; rows after it are not asked for.
        chosen: called with each token of the outcome before the next row is asked for: a
            repetition penalty must know the token.

    Raises:
        UsageError: a draft of probability 0, or another number of distributions than of drafts.
    """
    if len(drafts) != len(draft_distributions):
        raise UsageError(f"{len(drafts)} drafts and {len(draft_distributions)} distributions")
    tokens: list[int] = []
    for row, (draft, q) in enumerate(zip(drafts, draft_distributions, strict=True)):
        p, share = target_distribution(row), q.probability(draft)
        if share <= 0.0:
            raise UsageError(f"draft {draft} has probability 0 in its own distribution")
        # The number is below 1, so a draft with p >= q is always accepted, and below p = 0 never.
        held = rng.random() * share < p.probability(draft)
        token = draft if held else draw(residual(p, q), rng)
        tokens.append(token)
        chosen(token)
        if not held or ends(token):
            return Verdict(tokens)
    tokens.append(draw(target_distribution(len(drafts)), rng))
    chosen(tokens[-1])
    return Verdict(tokens)


def draft_distribution(
    logits: Floats,
    ids: Ints | None,
    temperature: float,
    *,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> Distribution:
    """The head's distribution, filtered in llama.cpp's order: top-k, top-p, min-p, temperature.

    The closer it is to the target's, the more drafts are accepted, so both have the same filters: a
    token that a filter removes from the target's is never accepted.

    Args:
        logits: [n] float32: of one row of the head.
        ids: [n] int32: their tokens; None: 0 to n - 1.
        temperature: 0 or above; 0 gives the best token alone, the first of equals.
        top_k, top_p, min_p: see :class:`pyllama_mtp.settings.Sampling`.

    Raises:
        FatalDecodeError: see :func:`softmax`.
    """
    best = float(logits.max())
    _refuse_faulty(best)
    if temperature < GREEDY_BELOW:
        token = int(logits.argmax())
        return point(token if ids is None else int(ids[token]))
    entries = _largest(logits, top_k)
    scores = logits[entries].astype(np.float64) - best
    if top_p < 1:
        kept = _nucleus(scores, top_p)
        entries, scores = entries[kept], scores[kept]
    if min_p > 0:
        enough = scores >= np.log(min_p)
        entries, scores = entries[enough], scores[enough]
    tokens = entries.astype(np.int32) if ids is None else ids[entries]
    return softmax(tokens, scores / temperature)


def _largest(logits: Floats, top_k: int) -> Entries:
    """[k] int64: entries of the `top_k` largest logits, in any order; 0 is all of them."""
    n = len(logits)
    if not 0 < top_k < n:
        return np.arange(n, dtype=np.int64)
    return np.argpartition(logits, n - top_k)[-top_k:].astype(np.int64)


def _nucleus(scores: Doubles, top_p: float) -> Entries:
    """[k] int64: entries of the smallest set of the probability `top_p` (Holtzman et al. 2020,
    https://arxiv.org/abs/1904.09751), the largest of the [n] float64 logits first."""
    share = np.exp(scores - scores.max())
    share /= share.sum()
    # Only these need sorting: the others have less than 1 - top_p together.
    likely = np.flatnonzero(share >= (1.0 - top_p) / len(share))
    likely = likely[np.argsort(-share[likely], kind="stable")]
    return likely[: int(np.searchsorted(np.cumsum(share[likely]), top_p)) + 1].astype(np.int64)
