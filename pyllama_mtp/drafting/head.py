"""The MTP head as a drafter: it is in the target's context, and drafts in one graph.

The head at position p takes the embedding of token x_p and the trunk's hidden state h_{p-1} (after
the final norm for Qwen3.5/3.6); its output predicts x_{p+1}. Every decode of the target writes the
head's keys and values for its tokens, and carries the last hidden state over to the next decode. So
nothing has to be kept in step, as it must be in :mod:`.upstream`.
"""

from __future__ import annotations

from itertools import takewhile

import numpy as np

from ..llama.batch import Floats, Ints
from ..llama.context import Context
from ..sequence import Drafts, Sequence
from ..settings import Settings
from .acceptance import Distribution, softmax
from .drafter import Drafter
from .headrows import Heads

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


class HeadDrafter(Drafter):
    """The head of a context with_mtp, for all its sequences.

    Attributes:
        p_min: drafting stops when each sequence has had a draft less probable than this; see
            :func:`top_probability`.
    """

    context: Context

    def __init__(self, context: Context, settings: Settings) -> None:
        """Raises UsageError and others: see :class:`.Heads`."""
        self.context, self.p_min = context, settings.p_min
        self.heads = self._heads(settings)

    def _heads(self, settings: Settings) -> Heads | None:
        return Heads(self.context, self.context.model, settings)

    def begin(self, sequence: Sequence) -> None:
        """See :meth:`.Drafter.begin`."""
        if self.heads:
            self.heads.see(sequence.request.text, sequence.counts, prompt=True)

    def accepted(self, sequences: list[Sequence]) -> None:
        """See :meth:`.Drafter.accepted`."""
        if self.heads:
            for one in sequences:
                self.heads.see(one.chosen, one.counts, prompt=False)

    def draft(self, sequences: list[Sequence], n_max: int) -> list[Drafts]:
        """See :meth:`.Drafter.draft`: 0 to `n_max` drafts, equally many for each sequence."""
        tokens = np.array([one.newest for one in sequences], dtype=np.int32)
        seqs = np.array([one.id for one in sequences], dtype=np.int32)
        if any(one.draws for one in sequences):
            ids = self._draw(sequences, tokens, seqs, n_max)
        else:
            candidates = P_MIN_CANDIDATES if self.p_min > 0 else 0
            ids = self.context.draft(tokens, seqs, n_max, candidates)
        n = self._n_probable(n_max) if self.p_min > 0 else n_max
        return [
            Drafts(column, self._distributions(i, one, n) if one.draws else [])
            for i, (one, column) in enumerate(zip(sequences, ids[:n].T.tolist(), strict=True))
        ]

    def _n_probable(self, n_max: int) -> int:
        """Steps before each sequence has had an improbable draft."""
        logits = self.context.draft_logits
        sure = np.ones(logits.shape[1], dtype=bool)

        def any_sure(step: int) -> bool:
            sure[:] &= [top_probability(row) >= self.p_min for row in logits[step]]
            return bool(sure.any())

        return len([*takewhile(any_sure, range(n_max))])

    def _draw(self, sequences: list[Sequence], tokens: Ints, seqs: Ints, n: int) -> Ints:
        """Draws from softmax(logits / temperature), by the Gumbel-max trick: the largest of
        logits / temperature - log(E), E from the standard exponential distribution."""
        temperatures = np.ones(len(sequences), dtype=np.float32)
        noise = np.zeros((n, len(sequences), self.context.n_head), dtype=np.float32)
        for i, one in enumerate(sequences):
            if one.draws:
                sampler = one.request.sampler
                temperatures[i] = sampler.sampling.temperature
                noise[:, i] = -np.log(sampler.rng.standard_exponential(noise[:, i].shape))
        return self.context.draft(tokens, seqs, n, 0, temperatures, noise)

    def _distributions(self, i: int, one: Sequence, n: int) -> list[Distribution]:
        """The distributions of the usable drafts of the sequence `one`, the `i`-th."""
        context = self.context
        scale = np.float32(1) / np.float32(one.request.sampler.sampling.temperature)
        ids = context.draft_ids
        if ids is None:
            ids = np.arange(context.n_head, dtype=np.int32)
        rows = context.draft_logits[: min(n, one.n_usable), i]
        return [softmax(ids, row * scale) for row in rows]
