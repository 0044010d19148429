"""The interface of drafters, which guess how sequences go on; and the MTP head as a drafter.

:mod:`.upstream` has the head in a context of its own, and :mod:`.ngram` what followed the same
words earlier. :mod:`.choice` says whose drafts a round has, how many, and which tokens a grammar
forces.
"""

from __future__ import annotations

import numpy as np

from ..llama.batch import Floats, Ints, State
from ..llama.context import Context
from ..llama.drafts import compute_drafts, draft_logits
from ..sampling.acceptance import Distribution, softmax
from ..sequence import NO_DRAFTS, Drafts, Sequence
from ..settings import Settings
from .head import give_head


class Drafter:
    """Drafts nothing, and has nothing to keep in step.

    Attributes:
        context: where drafts are computed; None: nowhere.
        contexts: those beside the target's.
        n_blocks: MTP blocks in use of a head in a context of its own, of as many as there are
            drafts; 1: one for all drafts; 0: no such context.
    """

    context: Context | None = None
    contexts: tuple[Context, ...] = ()
    n_blocks = 0

    def begin(self, sequence: Sequence) -> None:
        """The prompt of a sequence is processed: it is drafted for from now on."""

    def draft(self, sequences: list[Sequence], n_max: int, p_min: float = 0.0) -> list[Drafts]:
        """Up to `n_max` drafts, at least 1, of what follows the newest token of each sequence.

        Args:
            p_min: drafting stops when each sequence has had a draft less probable than this; see
                :func:`top_probability`.
        """
        return [NO_DRAFTS for _ in sequences]

    def to_come(self, sequences: list[Sequence], n: int) -> bool:
        """Whether the verification itself can make `n` drafts, probable or not, for each of these
        sequences, whose samplers take any token."""
        return False

    def decoded(self, sequences: list[Sequence], kept: list[int]) -> None:
        """The target has just decoded `batch` of each sequence. The first `kept` tokens of it, at
        least 1, are text, and the rest was rejected."""

    def accepted(self, sequences: list[Sequence]) -> None:
        """The texts go on with `chosen` of each sequence."""

    # -- the cache of a sequence, beside the target's ------------------------------------------

    def check_images(self) -> None:
        """Raise UsageError unless the drafter can go on after an image."""

    def reset(self, sequence: Sequence) -> None:
        """Forget a sequence."""

    def reach(self, sequence: Sequence, n_past: int) -> tuple[int, int]:
        """How drafting can go on in a text of which the target holds `n_past` positions.

        Returns:
            The positions that can be kept, at most `n_past`, and where the target must go on.
        """
        return n_past, n_past

    def go_back(self, sequence: Sequence, n_past: int, carry: Floats | None = None) -> None:
        """Keep at most the positions below `n_past`; `carry` is the state of the last one, if a
        checkpoint has it."""

    def save(self, sequence: Sequence) -> tuple[State | None, int, Floats | None]:
        """What :meth:`load` needs, for a file: the cache, the positions in it, [n_embd] float32."""
        return None, 0, None

    def load(self, sequence: Sequence, state: State, n_past: int, carry: Floats | None) -> None:
        """Put back what :meth:`save` gave."""


# -- the MTP head in the target's context --------------------------------------------------------

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
    """The head of a context with_mtp, for all its sequences: drafts in one graph.

    The head at position p takes the embedding of token x_p and the trunk's hidden state h_{p-1}
    (after the final norm for Qwen3.5/3.6); its output predicts x_{p+1}. Every decode of the target
    writes the head's keys and values for its tokens, and carries the last hidden state over to the
    next decode. So nothing has to be kept in step, as it must be in :mod:`.upstream`.

    Attributes:
        patched: patches that are general apply, draft heads among them.
    """

    context: Context
    patched = True

    def __init__(self, context: Context, settings: Settings) -> None:
        """Raises UsageError and others: see :func:`.give_head`."""
        self.context = context
        context.set_draft_window(settings.draft_window)
        self._following = give_head(context, settings) if self.patched else None

    def begin(self, sequence: Sequence) -> None:
        """See :meth:`.Drafter.begin`."""
        if self._following:
            self._following.see(sequence.request.text, sequence.counts, prompt=True)

    def accepted(self, sequences: list[Sequence]) -> None:
        """See :meth:`.Drafter.accepted`."""
        if self._following:
            for one in sequences:
                self._following.see(one.chosen, one.counts, prompt=False)

    def draft(self, sequences: list[Sequence], n_max: int, p_min: float = 0.0) -> list[Drafts]:
        """See :meth:`.Drafter.draft`: 0 to `n_max` drafts, equally many for each sequence."""
        tokens = np.array([one.newest for one in sequences], dtype=np.int32)
        seqs = np.array([one.id for one in sequences], dtype=np.int32)
        if any(one.draws for one in sequences):
            ids = self._draw(sequences, tokens, seqs, n_max)
        else:
            candidates = P_MIN_CANDIDATES if p_min > 0 else 0
            ids = compute_drafts(self.context, tokens, seqs, n_max, candidates)
        n = self._n_probable(p_min) if p_min > 0 else n_max
        return [
            Drafts(column, self._distributions(i, one, n) if one.draws else [])
            for i, (one, column) in enumerate(zip(sequences, ids[:n].T.tolist(), strict=True))
        ]

    def to_come(self, sequences: list[Sequence], n: int) -> bool:
        """See :meth:`.Drafter.to_come`. On a CPU there is nothing to gain, and workers are to hold
        what was reserved, which has no graphs for several sequences."""
        model, several = self.context.model, self.context.options.n_seq_max > 1
        return (
            model.on_gpu
            and not (several and model.rpc_servers)
            and not any(one.draws for one in sequences)
            and self.context.can_draft_and_decode(len(sequences), n)
        )

    def _n_probable(self, p_min: float) -> int:
        """Steps before each sequence has had an improbable draft."""
        logits = draft_logits(self.context)
        probable = [[top_probability(row) >= p_min for row in step] for step in logits]
        return int(np.logical_and.accumulate(probable).any(axis=1).sum())

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
        return compute_drafts(self.context, tokens, seqs, n, 0, temperatures, noise)

    def _distributions(self, i: int, one: Sequence, n: int) -> list[Distribution]:
        """The distributions of the usable drafts of the sequence `one`, the `i`-th."""
        context = self.context
        scale = np.float32(1) / np.float32(one.request.sampler.sampling.temperature)
        ids = context.draft_ids
        if ids is None:
            ids = np.arange(context.n_head, dtype=np.int32)
        rows = draft_logits(context)[: min(n, one.n_usable), i]
        return [softmax(ids, row * scale) for row in rows]
