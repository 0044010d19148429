"""The MTP head as a drafter: it is in the target's context, and drafts in one graph.

The head at position p takes the embedding of token x_p and the trunk's hidden state h_{p-1} (after
the final norm for Qwen3.5/3.6); its output predicts x_{p+1}. Every decode of the target writes the
head's keys and values for its tokens, and carries the last hidden state over to the next decode. So
nothing has to be kept in step, as it must be in :mod:`.upstream`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np

from ..llama.batch import Floats, Ints
from ..llama.context import Context
from .acceptance import Distribution, softmax
from .sampling import Sampler

#: Candidates among which a draft's probability is taken, as in upstream's draft-mtp (top_k = 10).
P_MIN_CANDIDATES = 10


def top_probability(logits: Floats) -> float:
    """Probability of the best of the P_MIN_CANDIDATES best tokens: softmax over their logits.

    Args:
        logits: [n] float32: of all tokens, or of the best.
    """
    k = min(P_MIN_CANDIDATES, len(logits))
    best = np.partition(logits, len(logits) - k)[-k:].astype(np.float64)
    return float(1.0 / np.exp(best - best.max()).sum())


@dataclass
class Drafts:
    """Drafts of one round for one sequence.

    Attributes:
        tokens: their ids.
        distributions: of the draw of each draft; empty where drafts are the head's best tokens.
        looked_up: n-gram drafts, not the head's; see :mod:`.ngram`.
        forced: the grammar allows no other tokens, so all are accepted.
    """

    tokens: list[int] = field(default_factory=list)
    distributions: list[Distribution] = field(default_factory=list)
    looked_up: bool = False
    forced: bool = False


@dataclass(frozen=True, eq=False)
class Newest:
    """Where the drafts of one sequence begin, and how they are chosen.

    Attributes:
        token: the newest token, which the target has chosen and not decoded yet.
        n_usable: drafts that can be accepted; further drafts are made for other sequences' sake.
        sampler: draws the drafts, at its temperature; None: drafts are the best tokens.
    """

    seq: int
    token: int
    n_usable: int
    sampler: Sampler | None = None


class Drafter:
    """Drafts for all sequences of a context with_mtp."""

    def __init__(self, context: Context) -> None:
        self.context = context

    def draft(self, newest: Sequence[Newest], n_max: int, p_min: float = 0.0) -> list[Drafts]:
        """Drafts for what follows the newest token of each sequence.

        Args:
            newest: at least one.
            n_max: most drafts, at least 1.
            p_min: stop when each sequence has had a draft less probable than this; see
                :func:`top_probability`.

        Returns:
            0 to n_max drafts for each sequence, equally many.
        """
        tokens = np.array([one.token for one in newest], dtype=np.int32)
        seqs = np.array([one.seq for one in newest], dtype=np.int32)
        if any(one.sampler for one in newest):
            ids = self._draw(newest, tokens, seqs, n_max)
        else:
            candidates = P_MIN_CANDIDATES if p_min > 0 else 0
            ids = self.context.draft(tokens, seqs, n_max, candidates)
        n = self._n_probable(n_max, p_min) if p_min > 0 else n_max
        made = [Drafts(column) for column in ids[:n].T.tolist()]
        for i, (one, drafts) in enumerate(zip(newest, made, strict=True)):
            if one.sampler:
                drafts.distributions = self._distributions(i, one, n)
        return made

    def _n_probable(self, n_max: int, p_min: float) -> int:
        """Steps before each sequence has had an improbable draft."""
        logits = self.context.draft_logits
        sure = np.ones(logits.shape[1], dtype=bool)

        def any_sure(step: int) -> bool:
            sure[:] &= [top_probability(row) >= p_min for row in logits[step]]
            return bool(sure.any())

        return len([*takewhile(any_sure, range(n_max))])

    def _draw(self, newest: Sequence[Newest], tokens: Ints, seqs: Ints, n: int) -> Ints:
        """Draws from softmax(logits / temperature), by the Gumbel-max trick: the largest of
        logits / temperature - log(E), E from the standard exponential distribution."""
        temperatures = np.ones(len(newest), dtype=np.float32)
        noise = np.zeros((n, len(newest), self.context.n_head), dtype=np.float32)
        for i, one in enumerate(newest):
            if one.sampler:
                temperatures[i] = one.sampler.sampling.temperature
                drawn = one.sampler.rng.standard_exponential(noise[:, i].shape)
                noise[:, i] = -np.log(drawn)
        return self.context.draft(tokens, seqs, n, 0, temperatures, noise)

    def _distributions(self, i: int, one: Newest, n: int) -> list[Distribution]:
        """The distributions of the usable drafts of sequence `i`."""
        assert one.sampler
        context, scale = self.context, np.float32(1) / np.float32(one.sampler.sampling.temperature)
        ids = context.draft_ids
        if ids is None:
            ids = np.arange(context.n_head, dtype=np.int32)
        rows = context.draft_logits[: min(n, one.n_usable), i]
        return [softmax(ids, row * scale) for row in rows]
