"""The MTP head as a drafter: keeps its cache in step with the target, and drafts.

Which row pairs with which token. The MTP block at position p takes the embedding of token x_p and
the trunk's hidden state h_{p-1} (after the final norm for Qwen3.5/3.6); position 0 takes a zero
vector. Its output predicts x_{p+1}. The hidden state of the last position of one batch is therefore
carried over to the first token of the next one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ..context import SEQ, Context
from ..errors import UsageError
from ..hidden import CARRY_SLOT, Floats, Hidden, HostRows, Ints, TapRows
from .rejection import Distribution

#: (logits, ids of a draft head or None) -> a draft, and what it was drawn from.
Propose = Callable[[Floats, Ints | None], tuple[int, Distribution]]

#: Tokens whose sync may be put off. Their rows stay in the tap while twice as many further tokens
#: (LLAMA_MTP_SHORT) are decoded: those that are put off as well, and a verification's.
MOST_LATER = 32

#: Candidates among which a draft's probability is taken, as in upstream's draft-mtp (top_k = 10).
P_MIN_CANDIDATES = 10


def top_probability(logits: Floats, k: int = P_MIN_CANDIDATES) -> float:
    """Probability of the best token among the k best ones: softmax over their logits.

    Args:
        logits: [n] float32: of all tokens, or of the k best.
    """
    k = min(k, len(logits))
    best = np.partition(logits, len(logits) - k)[-k:].astype(np.float64)
    return float(1.0 / np.exp(best - best.max()).sum())


@dataclass
class Drafts:
    """Drafts of one round.

    Attributes:
        tokens: their ids.
        distributions: what each was drawn from; none where they are the head's best tokens.
        looked_up: they are from the text itself, not from the head; see :mod:`.ngram`.
    """

    tokens: list[int] = field(default_factory=list)
    distributions: list[Distribution] = field(default_factory=list)
    looked_up: bool = False


class Drafter:
    """Owns a sequence of the draft context: which positions are in step with the target.

    Attributes:
        n_past: positions 0 .. n_past-1 of the draft cache were written from the target's hidden
            states. Anything above is left over from drafting and is removed before the next write.
            Positions put off by :meth:`sync_later` follow.
    """

    def __init__(
        self,
        context: Context,
        target: Context | None = None,
        chained: bool = False,
        seq: int = SEQ,
    ) -> None:
        """Start with empty caches.

        Args:
            target: the context whose tap gives the hidden rows; None when they come as arrays.
            chained: draft in one graph; see llama_mtp_set_chain() in llama-mtp.h.
            seq: the sequence, in both contexts. Others than SEQ draft by :mod:`.together` only.
        """
        self.context = context
        self.chained = chained
        self.seq = seq
        self.n_past = 0
        zeros = HostRows(np.zeros((1, context.model.n_embd), dtype=np.float32))
        self._zero: Hidden = target.tap.zero() if target and target.tap else zeros
        self._later: list[tuple[int, int]] = []  # tokens from n_past on, and their rows
        # h_{n_past-1}; None when the target has decoded that position but we were not told its row.
        self.carry: Hidden | None = self._zero

    def reset(self) -> None:
        """Forget everything: the next token is at position 0 and pairs with the zero vector."""
        self.context.remove(0, self.seq)
        self.n_past = 0
        self.carry = self._zero
        self._later = []

    def truncate(self, n_past: int) -> None:
        """Keep positions below `n_past`. The row that pairs with the next token is then unknown
        (unless nothing was cut), so the next :meth:`sync` must start one position earlier."""
        assert not self._later
        if n_past == 0:
            self.reset()
        elif n_past < self.n_past:
            self.n_past = n_past
            self.carry = None

    def resume(self, n_past: int, carry: Hidden) -> None:
        """Keep positions below `n_past`; `carry` is h_{n_past-1}."""
        self.n_past = n_past
        self.carry = carry.keep(CARRY_SLOT + self.seq)

    def sync(self, tokens: Ints, start: int, hidden: Hidden, n_keep: int | None = None) -> None:
        """Write the positions that the target has just decoded and that are not in step yet.

        Args:
            tokens: [n] ids that the target decoded at positions start .. start+n-1.
            hidden: n rows: row i is the target's h_{start+i}.
            n_keep: the text goes on after this many of them; the others were rejected. They are
                written all the same, so that every round has a graph of one shape.

        Raises:
            UsageError: a gap: `start` lies above `n_past`, or the row for `n_past` is not known.
        """
        if self._later:  # written with what follows them
            self._check_follows(start)
            before, start, rows = self._taken()
            tokens, hidden = np.concatenate([before, tokens]), hidden.after(rows)
            n_keep = None if n_keep is None else n_keep + len(before)
        n = len(tokens)
        skip = self.begin_sync(start, n)
        # One graph at a time: llama.cpp copies the rows of a batch several times.
        for begin in range(skip, n, self.context.n_ubatch):
            end = min(begin + self.context.n_ubatch, n)
            outputs = np.zeros(end - begin, dtype=np.int8)
            paired = self.paired(hidden, begin, end)
            self.context.decode(tokens[begin:end], start + begin, outputs, paired, self.seq)
        self.end_sync(start, n, hidden, n if n_keep is None else n_keep)

    def sync_later(self, token: int, start: int, row: int) -> None:
        """:meth:`sync` that may wait for the next draft, so that several plain decode steps are
        caught up with in one decode.

        Args:
            token: the target has decoded it at `start`.
            row: of the target's tap, where its hidden state is.
        """
        rows = np.array([row], dtype=np.int32)
        if self.n_past > start:  # the newest token is in step, but nothing came of it (p_min)
            self.sync(np.array([token], dtype=np.int32), start, self._of_tap(rows))
            return
        if len(self._later) == MOST_LATER:
            self.catch_up()
        self._later.append((token, row))

    def catch_up(self) -> None:
        """Write what :meth:`sync_later` has put off; before the target decodes more than MOST_LATER
        tokens at once."""
        if self._later:
            self.sync(*self._taken())

    def _taken(self) -> tuple[Ints, int, Hidden]:
        """What was put off, which is then forgotten: tokens, where they start, their rows."""
        tokens, rows = np.array(self._later, dtype=np.int32).T.copy()
        self._later = []
        return tokens, self.n_past, self._of_tap(rows)

    def _check_follows(self, start: int) -> None:
        end = self.n_past + len(self._later)
        if start != end:
            raise UsageError(f"the draft cache goes on at position {end}, not at {start}")

    def _of_tap(self, rows: Ints) -> Hidden:
        assert isinstance(self._zero, TapRows)
        return TapRows(self._zero.tap, rows)

    def begin_sync(self, start: int, n: int) -> int:
        """Make room for positions start .. start+n-1; how many of them are in step already, by an
        earlier sync or draft. Raises UsageError: see :meth:`sync`."""
        skip = self.n_past - start
        if skip < 0 or (skip == 0 and self.carry is None):
            raise UsageError(
                f"the draft cache ends at position {self.n_past}; it cannot continue at {start}"
            )
        if skip < n:
            self.context.remove(self.n_past, self.seq)
        return skip

    def end_sync(self, start: int, n: int, hidden: Hidden, n_keep: int) -> None:
        """`n` positions from `start` are written, `hidden` has their rows; keep `n_keep`, >= 1."""
        if n_keep < n:
            self.context.remove(start + n_keep, self.seq)
        self.resume(start + n_keep, hidden.part(n_keep - 1, n_keep))

    def paired(self, hidden: Hidden, begin: int, end: int) -> Hidden:
        """Rows for tokens begin .. end-1 of a batch with rows `hidden`: the token at start+i pairs
        with h_{start+i-1}: row i-1 of the batch, the carry for i = 0."""
        if begin > 0:
            return hidden.part(begin - 1, end - 1)
        assert self.carry is not None
        return hidden.part(0, end - 1).after(self.carry)

    def begin_draft(self) -> tuple[int, Hidden]:
        """Make room for the newest token: its position, which then counts as in step, and the row
        that pairs with it. Raises UsageError when that row is not known."""
        self.catch_up()
        if self.carry is None:
            raise UsageError("the hidden state of the last position is not known; sync first")
        carry, self.carry = self.carry, None
        start, self.n_past = self.n_past, self.n_past + 1
        self.context.remove(start, self.seq)
        return start, carry

    def draft(
        self, token: int, n_max: int, p_min: float = 0.0, propose: Propose | None = None
    ) -> Drafts:
        """Drafts for the tokens after `token`, which the target has chosen for position `n_past`
        and not decoded yet.

        Args:
            n_max: most drafts, at least 1.
            p_min: stop at a draft less probable than this; see :func:`top_probability`.
            propose: draws a draft from the head's logits; None: the best token.
        """
        start, carry = self.begin_draft()
        # The entry at `start` pairs `token` with the target's own row: it is in step at once.
        # Those after it come from the block's own states, and are written again by a sync.
        self.context.set_greedy(propose is None)
        self.context.set_candidates(P_MIN_CANDIDATES if p_min > 0 and propose is None else 0)
        if self.chained and propose is None:
            tokens = self.context.draft_chain(token, start, carry, n_max)
            sure = itertools.takewhile(lambda row: self.is_probable(row, p_min), range(n_max))
            return Drafts(tokens[: len(list(sure))])
        return self._draft_stepwise(token, start, carry, n_max, p_min, propose)

    def is_probable(self, row: int, p_min: float) -> bool:
        """Whether the head's best token of `row` is as probable as p_min asks."""
        if p_min == 0:
            return True
        context = self.context
        logits = context.candidates(row)[1] if context.greedy else context.logits(row)
        return top_probability(logits) >= p_min

    def _draft_stepwise(
        self,
        token: int,
        start: int,
        hidden: Hidden,
        n_max: int,
        p_min: float,
        propose: Propose | None,
    ) -> Drafts:
        drafts, context = Drafts(), self.context
        ones = np.ones(1, dtype=np.int8)
        for position in range(start, start + n_max):
            context.decode(np.array([token], dtype=np.int32), position, ones, hidden)
            # Whether there is a draft depends on the head's logits only, not on what is drawn.
            if not self.is_probable(0, p_min):
                break
            if propose:
                token, q = propose(context.logits(0), context.draft_ids)
                drafts.distributions.append(q)
            else:
                token = context.argmax(0)
            drafts.tokens.append(token)
            # From here on the block is fed its own state, after its head norm.
            hidden = context.hidden(on_device=isinstance(self._zero, TapRows))
        return drafts
