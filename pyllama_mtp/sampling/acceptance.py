"""Which drafts are accepted. Pure; no library.

Best tokens of the head: as long as they are the target's own choice. Drafts that are drawn: by
rejection sampling (Leviathan et al. 2023, "Fast inference from transformers via speculative
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
from ..settings import Sampling

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int32]
Entries = npt.NDArray[np.int64]

GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True, eq=False)
class Distribution:
    """Probabilities of some tokens; every other token has none.

    Attributes:
        ids: [n] int32, n at least 1, in any order, each token once.
        probabilities: [n] float64, from 0 to 1; their sum is 1.
    """

    ids: Ints
    probabilities: Doubles

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


def accept_best(
    drafts: Sequence[int],
    sample_row: Callable[[int], int],
    ends: Callable[[int], bool] = lambda token: False,
) -> list[int]:
    """Accept drafts as long as the target's own choice is the draft.

    Row i holds the target's logits after drafts[:i]. Each row is sampled as plain decoding would
    sample it, so the tokens are the target's own draw whatever the drafts are: greedy output equals
    plain greedy output, and at temperature > 0 the distribution is the target's. (Leviathan et al.
    2023, section 2.3, for a deterministic draft: accepting x with probability p(x) and otherwise
    drawing from p without x is the same as drawing from p and comparing.)

    Args:
        drafts: drafted token ids.
        sample_row: samples row i, 0 <= i <= len(drafts); called in order, up to the first row that
            differs from its draft.
        ends: True for a token after which nothing may follow (end of turn): sampling stops.

    Returns:
        The target's choice: the accepted drafts, then one token more, in place of the first
        rejected draft or after the last one.
    """
    tokens: list[int] = []
    for row in range(len(drafts) + 1):
        token = sample_row(row)
        tokens.append(token)
        if ends(token) or row == len(drafts) or token != drafts[row]:
            break
    return tokens


def accept_sampled(
    drafts: Sequence[int],
    draft_distributions: Sequence[Distribution],
    target_distribution: Callable[[int], Distribution],
    rng: np.random.Generator,
    ends: Callable[[int], bool] = lambda token: False,
    chosen: Callable[[int], None] = lambda token: None,
) -> list[int]:
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
        UsageError: a draft of probability 0.
    """
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
            return tokens
    tokens.append(draw(target_distribution(len(drafts)), rng))
    chosen(tokens[-1])
    return tokens


class SyntheticAcceptance:
    """Acceptance at imposed rates, for speed measurements on models without trained weights.

    Outcomes follow the golden-ratio sequence (Weyl 1916), not a random one: after n rounds, the
    share accepted at each position is within a few n-ths of its rate. So a run of fifty rounds
    measures the rate asked for, not luck.

    Args:
        rates: unconditional, per position: rates[i] is the probability that drafts 0..i are all
            accepted, so they do not increase (upstream's ``--spec-synth-rates`` has this meaning).
    """

    def __init__(self, rates: Sequence[float]) -> None:
        self.rates = tuple(rates)
        self._rounds = 0

    def accept(self, drafts: Sequence[int], sample_row: Callable[[int], int]) -> list[int]:
        """As :func:`accept_best`, with an imposed outcome; as many rows are sampled."""
        self._rounds += 1
        level = (self._rounds * GOLDEN) % 1.0
        n = sum(1 for rate in self.rates[: len(drafts)] if level < rate)
        last = [sample_row(row) for row in range(n + 1)][-1]
        return [*drafts[:n], last]


def draft_distribution(logits: Floats, ids: Ints | None, sampling: Sampling) -> Distribution:
    """The head's distribution, filtered in llama.cpp's order: top-k, top-p, min-p, temperature.

    The closer it is to the target's, the more drafts are accepted, so both have the same filters: a
    token that a filter removes from the target's is never accepted.

    Args:
        logits: [n] float32: of one row of the head.
        ids: [n] int32: their tokens; None: 0 to n - 1.
        sampling: has the filters, and a temperature that is not greedy.

    Raises:
        FatalDecodeError: see :func:`softmax`.
    """
    best = float(logits.max())
    _refuse_faulty(best)
    entries = _largest(logits, sampling.top_k)
    scores = logits[entries].astype(np.float64) - best
    if sampling.top_p < 1:
        kept = _nucleus(scores, sampling.top_p)
        entries, scores = entries[kept], scores[kept]
    if sampling.min_p > 0:
        enough = scores >= np.log(sampling.min_p)
        entries, scores = entries[enough], scores[enough]
    tokens = entries.astype(np.int32) if ids is None else ids[entries]
    return softmax(tokens, scores / sampling.temperature)


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
