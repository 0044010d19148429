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

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..errors import UsageError
from ..llama.batch import SEQ, Batch, Floats, Ints
from ..llama.context import Context
from ..llama.contextoptions import ContextOptions
from .drafter import P_MIN_CANDIDATES, Drafts, Newest, top_probability

#: Tokens per graph on a CPU. The block is one layer: larger graphs cost memory (44 MiB at 512 on
#: the 0.8B shape) and are no faster.
N_UBATCH_CPU = 128


@dataclass(frozen=True, eq=False)
class Decoded:
    """What the target's last batch has of one sequence.

    Attributes:
        start: position of the first token.
        tokens: [n] int32 ids.
        entry: batch entry of the first token; the others follow.
        n_keep: the text goes on after this many of the tokens, at least 1; the rest was rejected.
    """

    seq: int
    start: int
    tokens: Ints
    entry: int
    n_keep: int


@dataclass(eq=False)
class InStep:
    """How far a sequence of the draft context is in step with the target.

    Attributes:
        n_past: positions 0 .. n_past-1 of its cache were written from the target's hidden states.
            Anything above is left over from drafting and is removed before the next write.
        carry: [1, n_embd] float32: h_{n_past-1}; None when the target has decoded that position but
            the drafter was not told its row.
    """

    n_past: int
    carry: Floats | None


class UpstreamDrafter:
    """Drafts for all sequences of a target, in a context of its own.

    It is told what the target decodes (:meth:`decoded`), and writes the same positions.

    Attributes:
        context: of the MTP head.
        sequences: by sequence number.
        n_blocks: that are in use, of several as many as there are drafts; 1: one for all drafts.
        patched: patches that are general apply. Not where upstream's way is there to compare with.
    """

    def __init__(self, target: Context, options: ContextOptions, depth: int) -> None:
        """Start with empty caches.

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
        self._target, self.context = target, Context(target.model, own, target=target)
        self.patched = not info.in_trunk and target.library.has_tap
        self._zero = np.zeros((1, target.model.n_embd), dtype=np.float32)
        self.sequences = [InStep(0, self._zero) for _ in range(options.n_seq_max)]

    # -- in step with the target ---------------------------------------------------------------

    def reset(self, seq: int = SEQ) -> None:
        """Forget a sequence: the next token is at position 0 and pairs with the zero vector."""
        self.context.remove(0, seq)
        self.sequences[seq] = InStep(0, self._zero)

    def reach(self, seq: int, n_past: int) -> tuple[int, int]:
        """How drafting can go on in a text of which the target holds `n_past` positions.

        Returns:
            The positions that this cache can keep, at most `n_past`, and where the target must go
            on: one position earlier if the hidden state of the last one is not known.
        """
        one = self.sequences[seq]
        if one.n_past <= n_past:
            return one.n_past, one.n_past - (one.carry is None)
        return n_past, max(n_past - 1, 0)

    def truncate(self, seq: int, n_past: int) -> None:
        """Keep at most the positions below `n_past`; see :meth:`reach` for what must follow."""
        if n_past == 0:
            self.reset(seq)
        elif n_past < self.sequences[seq].n_past:
            self.sequences[seq] = InStep(n_past, None)

    def resume(self, seq: int, n_past: int, carry: Floats) -> None:
        """Keep positions below `n_past`; `carry` is h_{n_past-1}, [1, n_embd] float32."""
        self.sequences[seq] = InStep(n_past, carry)

    def save(self, seq: int) -> tuple[bytearray | None, int, Floats | None]:
        """What :meth:`load` needs, for a file: the cache, the positions in it, [n_embd] float32."""
        own = self.sequences[seq]
        if not own.n_past:
            return None, 0, None
        self.context.remove(own.n_past, seq)  # what drafting has left there
        carry = own.carry[0] if own.carry is not None else None
        return self.context.save_state(seq=seq), own.n_past, carry

    def load(self, seq: int, state: bytes | bytearray, n_past: int, carry: Floats | None) -> None:
        """Put back what :meth:`save` gave."""
        self.context.load_state(state, seq=seq)
        self.sequences[seq] = InStep(n_past, None if carry is None else carry[None, :])

    def decoded(self, passes: Sequence[Decoded]) -> None:
        """Write the positions that the target has just decoded and that are not in step yet.

        Rejected ones are written all the same, so that every round has a graph of one shape.

        Raises:
            UsageError: a gap: a pass begins above `n_past`, or the row for `n_past` is not known.
        """
        if not passes:
            return
        hidden = self._target.hidden_rows()
        skips = [self._begin(one) for one in passes]
        tokens, positions, seqs, rows = list[Ints](), list[int](), list[int](), list[Floats]()
        for one, skip in zip(passes, skips, strict=True):
            n, first = len(one.tokens), one.entry
            # The token at start+i pairs with h_{start+i-1}: row i-1, for i = 0 the carry.
            carry = self.sequences[one.seq].carry
            if skip == 0 and carry is not None:
                rows.append(carry)
            rows.append(hidden[first + max(skip - 1, 0) : first + n - 1])
            tokens.append(one.tokens[skip:])
            positions += range(one.start + skip, one.start + n)
            seqs += [one.seq] * (n - skip)
        at, of = np.array(positions, dtype=np.int32), np.array(seqs, dtype=np.int32)
        ids, before = np.concatenate(tokens), np.concatenate(rows)
        for block in range(self.n_blocks):
            if block:
                for one, skip in zip(passes, skips, strict=True):
                    self.context.remove(one.start + skip, one.seq)
            self.context.set_block(block)
            self._write(ids, at, of, before)
        for one in passes:
            n_past, last = one.start + one.n_keep, one.entry + one.n_keep
            if one.n_keep < len(one.tokens):
                self.context.remove(n_past, one.seq)
            self.resume(one.seq, n_past, hidden[last - 1 : last].copy())

    def _begin(self, one: Decoded) -> int:
        """Make room for a pass; how many of its positions are in step already, by an earlier pass
        or draft."""
        own = self.sequences[one.seq]
        skip = own.n_past - one.start
        if skip < 0 or (skip == 0 and own.carry is None):
            raise UsageError(
                f"the draft cache ends at position {own.n_past}; it cannot continue at {one.start}"
            )
        if skip < len(one.tokens):
            self.context.remove(own.n_past, one.seq)
        return skip

    def _write(self, ids: Ints, at: Ints, of: Ints, rows: Floats) -> None:
        """One graph at a time: llama.cpp copies the rows of a batch several times."""
        none, step = np.zeros(len(ids), dtype=np.int8), self.context.n_ubatch
        for begin in range(0, len(ids), step):
            part = slice(begin, begin + step)
            self.context.decode_batch(Batch(ids[part], at[part], of[part], none[part], rows[part]))

    # -- drafting ------------------------------------------------------------------------------

    def draft(self, newest: Sequence[Newest], n_max: int, p_min: float = 0.0) -> list[Drafts]:
        """See :meth:`.Drafter.draft`: one decode of the block per draft, of all sequences together.

        Raises:
            UsageError: the row that pairs with a newest token is not known.
        """
        starts, carries = zip(*[self._begin_draft(one.seq) for one in newest], strict=True)
        entries = [[one.token for one in newest], starts, [one.seq for one in newest]]
        tokens, positions, seqs = np.array(entries, dtype=np.int32)
        batch = Batch(tokens, positions, seqs, np.ones_like(seqs, np.int8), np.concatenate(carries))
        context, drafts = self.context, [Drafts() for _ in newest]
        few = self.patched and not any(one.sampler for one in newest)
        context.set_greedy(few)
        context.set_candidates(P_MIN_CANDIDATES if few and p_min > 0 else 0)
        sure = np.ones(len(newest), dtype=bool)
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
            for row, one, made in zip(rows, newest, drafts, strict=True):
                if one.sampler and step < one.n_usable:
                    token, q = one.sampler.propose(context.logits(row), None)
                    made.distributions.append(q)
                else:
                    token = context.argmax(row)
                made.tokens.append(token)
            # From here on the block is fed its own states, after its head norm.
            own = Batch(
                np.array([made.tokens[-1] for made in drafts], dtype=np.int32),
                positions + step + 1,
                seqs,
                np.ones_like(seqs, np.int8),
                context.hidden_rows(),
            )
            batch = own if self.n_blocks == 1 else self._longer(batch, own)
        return drafts

    def _longer(self, batch: Batch, more: Batch) -> Batch:
        """What the next block decodes: `batch`, which makes room for it, and a token more of each
        sequence."""
        for position, seq in [*zip(batch.positions, batch.seqs, strict=True)][: len(more.seqs)]:
            self.context.remove(int(position), int(seq))
        assert batch.hidden is not None and more.hidden is not None
        return Batch(
            np.concatenate([batch.tokens, more.tokens]),
            np.concatenate([batch.positions, more.positions]),
            np.concatenate([batch.seqs, more.seqs]),
            np.concatenate([np.zeros_like(batch.outputs), more.outputs]),
            np.concatenate([batch.hidden, more.hidden]),
        )

    def _begin_draft(self, seq: int) -> tuple[int, Floats]:
        """Make room for the newest token: its position, and the row that pairs with it.

        Drafting pairs it with the target's own row, so it is in step at once, unless there are more
        blocks, which may not write it. The drafts after it come from the block's own states, and
        are written again by :meth:`decoded`.
        """
        own = self.sequences[seq]
        if own.carry is None:
            raise UsageError("the hidden state of the last position is not known")
        self.context.remove(own.n_past, seq)
        if self.n_blocks == 1:
            self.sequences[seq] = InStep(own.n_past + 1, None)
        return own.n_past, own.carry
