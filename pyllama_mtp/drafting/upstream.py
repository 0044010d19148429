"""Drafting in upstream's way: the MTP head in a context of its own.

So it is with the architectures whose graphs are upstream's, and with others to compare with.

Each decode of the target is followed by one of this context, which runs the whole block for the
same tokens, on hidden states that go over the host: the token at position p pairs with h_{p-1}, at
position 0 with a zero vector. The state of the last position of a batch, the carry, is kept for the
first token of the next one. A draft is a decode of one token of each sequence.

Of several MTP blocks each drafts one token: block k the k-th. Blocks share the cache's cells, and
each has its own K and V there, so every token is written by as many blocks as a round may have
drafts. A block's draft is a decode of all tokens since the newest: its K and V of the drafts before
it are not there yet.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..errors import UsageError
from ..llama.batch import Batch, Floats, Ints, State
from ..llama.context import Context
from ..llama.contextoptions import ContextOptions
from ..sampling.acceptance import Distribution
from ..sequence import Drafts, Sequence
from ..settings import Settings
from .drafter import P_MIN_CANDIDATES, HeadDrafter, top_probability

#: Tokens per graph on a CPU. The block is one layer: larger graphs cost memory (44 MiB at 512 on
#: the 0.8B shape) and are no faster.
N_UBATCH_CPU = 128


class UpstreamDrafter(HeadDrafter):
    """Drafts for all sequences of a target, in a context of its own.

    It is told what the target decodes (:meth:`decoded`), and writes the same positions. Positions
    from `n_drafted_for` of a sequence on are left over from drafting, and are removed before the
    next write. Where it is there to compare with, general patches do not apply.
    """

    def __init__(
        self, target: Context, options: ContextOptions, settings: Settings, depth: int
    ) -> None:
        """Start with empty caches. Raises UsageError and others: see :func:`.give_head`.

        Args:
            target: keeps the hidden rows of all tokens: tap="all".
            options: the target's.
            depth: most drafts per round.
        """
        info, n_ubatch = target.model.info, options.n_ubatch
        self.n_blocks = min(info.most_drafts or 1, depth)
        if not target.model.on_gpu:
            n_ubatch = min(n_ubatch, max(N_UBATCH_CPU, options.n_seq_max * self.n_blocks))
        own = replace(
            options,
            mtp_head=True,
            with_mtp=False,
            n_rs_seq=0,
            n_batch=n_ubatch,
            n_ubatch=n_ubatch,
            n_outputs_max=options.n_seq_max,
            tap="outputs",
        )
        self.patched = not info.in_trunk and target.library.has_tap
        self._target, context = target, Context(target.model, own, target=target)
        self._zero = np.zeros((1, target.model.n_embd), dtype=np.float32)
        self.contexts = (context,)
        try:
            super().__init__(context, settings)
        except BaseException:
            context.close()
            raise

    def check_images(self) -> None:
        """See :meth:`.Drafter.check_images`: this context is not told of embeddings."""
        raise UsageError(
            "images need an MTP head that drafts in the trunk's context (prompt_sync 'kv'); "
            "without one, give draft=False"
        )

    # -- in step with the target ---------------------------------------------------------------

    def _carry(self, one: Sequence) -> Floats | None:
        """The row that pairs with the next token: at position 0 the zero vector."""
        return one.carry if one.n_drafted_for else self._zero

    def reset(self, sequence: Sequence) -> None:
        """See :meth:`.Drafter.reset`."""
        self.context.remove(0, sequence.id)
        sequence.n_drafted_for, sequence.carry = 0, None

    def reach(self, sequence: Sequence, n_past: int) -> tuple[int, int]:
        """See :meth:`.Drafter.reach`: the target goes on one position earlier if the hidden state
        of the last one is not known."""
        own = sequence.n_drafted_for
        if own <= n_past:
            return own, own - (self._carry(sequence) is None)
        return n_past, max(n_past - 1, 0)

    def go_back(self, sequence: Sequence, n_past: int, carry: Floats | None = None) -> None:
        """See :meth:`.Drafter.go_back`, and :meth:`reach` for what must follow."""
        if n_past == 0:
            self.reset(sequence)
        elif n_past < sequence.n_drafted_for or carry is not None:
            sequence.n_drafted_for, sequence.carry = n_past, carry

    def save(self, sequence: Sequence) -> tuple[State | None, int, Floats | None]:
        """See :meth:`.Drafter.save`."""
        n_past, carry = sequence.n_drafted_for, sequence.carry
        if not n_past:
            return None, 0, None
        self.context.remove(n_past, sequence.id)  # what drafting has left there
        state = self.context.save_state(seq=sequence.id)
        return state, n_past, None if carry is None else carry[0]

    def load(self, sequence: Sequence, state: State, n_past: int, carry: Floats | None) -> None:
        """See :meth:`.Drafter.load`."""
        self.context.load_state(state, seq=sequence.id)
        sequence.n_drafted_for = n_past
        sequence.carry = None if carry is None else carry[None, :]

    def decoded(self, sequences: list[Sequence], kept: list[int]) -> None:
        """Write the positions that the target has just decoded and that are not in step yet.

        Rejected ones are written all the same, so that every round has a graph of one shape.
        """
        if not sequences:
            return
        hidden, firsts = self._target.hidden_rows(), list[int]()
        tokens, positions, seqs, rows = list[Ints](), list[Ints](), list[Ints](), list[Floats]()
        for one in sequences:
            start, n, skip = len(one.tokens), len(one.batch), self._begin(one)
            # The token at start+i pairs with h_{start+i-1}: row i-1, for i = 0 the carry.
            carry = self._carry(one)
            if skip == 0 and carry is not None:
                rows.append(carry)
            rows.append(hidden[one.entry + max(skip - 1, 0) : one.entry + n - 1])
            tokens.append(one.batch[skip:])
            positions.append(np.arange(start + skip, start + n, dtype=np.int32))
            seqs.append(np.full(n - skip, one.id, dtype=np.int32))
            firsts.append(start + skip)
        ids, at, of = map(np.concatenate, (tokens, positions, seqs))
        before = np.concatenate(rows)
        for block in range(self.n_blocks):
            for one, first in zip(sequences, firsts, strict=True) if block else ():
                self.context.remove(first, one.id)
            self.context.set_block(block)
            self._write(ids, at, of, before)
        for one, n_keep in zip(sequences, kept, strict=True):
            one.n_drafted_for, last = len(one.tokens) + n_keep, one.entry + n_keep
            if n_keep < len(one.batch):
                self.context.remove(one.n_drafted_for, one.id)
            one.carry = hidden[last - 1 : last].copy()

    def _begin(self, one: Sequence) -> int:
        """Make room for a pass; how many of its positions are in step already, by an earlier pass
        or draft."""
        skip = one.n_drafted_for - len(one.tokens)
        assert skip > 0 or (skip == 0 and self._carry(one) is not None), "see reach()"
        if skip < len(one.batch):
            self.context.remove(one.n_drafted_for, one.id)
        return skip

    def _write(self, ids: Ints, at: Ints, of: Ints, rows: Floats) -> None:
        """One graph at a time: llama.cpp copies the rows of a batch several times."""
        none, step = np.zeros(len(ids), dtype=np.int8), self.context.n_ubatch
        for begin in range(0, len(ids), step):
            part = slice(begin, begin + step)
            self.context.decode_batch(Batch(ids[part], at[part], of[part], none[part], rows[part]))

    # -- drafting ------------------------------------------------------------------------------

    def draft(self, sequences: list[Sequence], n_max: int, p_min: float = 0.0) -> list[Drafts]:
        """See :meth:`.HeadDrafter.draft`: one decode of the block per draft, of all sequences
        together."""
        starts, carries = zip(*map(self._begin_draft, sequences), strict=True)
        entries = [[one.newest for one in sequences], starts, [one.id for one in sequences]]
        tokens, positions, seqs = np.array(entries, dtype=np.int32)
        batch = Batch(tokens, positions, seqs, np.ones_like(seqs, np.int8), np.concatenate(carries))
        context = self.context
        drafts = [(list[int](), list[Distribution]()) for _ in sequences]
        few = self.patched and not any(one.draws for one in sequences)
        context.set_greedy(few)
        context.set_candidates(P_MIN_CANDIDATES if few and p_min > 0 else 0)
        sure = np.ones(len(sequences), dtype=bool)
        for step in range(n_max):
            context.set_block(step if self.n_blocks > 1 else 0)
            context.decode_batch(batch)
            rows = np.flatnonzero(batch.outputs).tolist()
            # Whether there is a draft depends on the head's logits only, not on what is drawn.
            if p_min > 0:
                logits = [context.candidates(i)[1] if few else context.logits(i) for i in rows]
                sure &= [top_probability(row) >= p_min for row in logits]
            if not sure.any():
                break
            for row, one, (ids, distributions) in zip(rows, sequences, drafts, strict=True):
                if one.draws and step < one.n_usable:
                    token, q = one.request.sampler.propose(context.logits(row), None)
                    distributions.append(q)
                else:
                    token = context.argmax(row)
                ids.append(token)
            # From here on the block is fed its own states, after its head norm.
            own = Batch(
                np.array([ids[-1] for ids, _ in drafts], dtype=np.int32),
                positions + step + 1,
                seqs,
                np.ones_like(seqs, np.int8),
                context.hidden_rows(),
            )
            batch = own if self.n_blocks == 1 else self._longer(batch, own)
        return [Drafts(*one) for one in drafts]

    def _longer(self, batch: Batch, more: Batch) -> Batch:
        """What the next block decodes: `batch`, which makes room for it, and a token more of each
        sequence."""
        for position, seq in [*zip(batch.positions, batch.seqs, strict=True)][: len(more.seqs)]:
            self.context.remove(int(position), int(seq))
        before = replace(batch, outputs=np.zeros_like(batch.outputs))
        names = "tokens", "positions", "seqs", "outputs", "hidden"
        return Batch(
            *(np.concatenate([getattr(before, name), getattr(more, name)]) for name in names)
        )

    def _begin_draft(self, one: Sequence) -> tuple[int, Floats]:
        """Make room for the newest token: its position, and the row that pairs with it.

        Drafting pairs it with the target's own row, so it is in step at once, unless there are more
        blocks, which may not write it. The drafts after it come from the block's own states, and
        are written again by :meth:`decoded`.
        """
        start, carry = one.n_drafted_for, self._carry(one)
        assert carry is not None, "see reach()"
        self.context.remove(start, one.id)
        if self.n_blocks == 1:
            one.n_drafted_for, one.carry = start + 1, None
        return start, carry
