"""Drafting, and catching up, for several sequences in one decode each.

A :class:`.drafter.Drafter` per sequence keeps the books; which row pairs with which token is
written there. All of them are on one draft context, whose sequences share a cache.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..batch import Batch
from ..hidden import Hidden, Ints, TapRows, joined
from .drafter import P_MIN_CANDIDATES, Drafter, Drafts, Propose


@dataclass(frozen=True, eq=False)
class Newest:
    """Where the drafts of one sequence begin, and how they are chosen.

    Attributes:
        token: the newest one, which the target has chosen and not decoded yet.
        n_usable: drafts that can be of use; what follows them is drafted for the sake of others.
        propose: draws the usable ones from the head's logits; None: the best tokens.
    """

    drafter: Drafter
    token: int
    n_usable: int
    propose: Propose | None = None


def draft_together(sequences: Sequence[Newest], n_max: int, p_min: float = 0.0) -> list[Drafts]:
    """Drafts for what follows the newest token of each sequence.

    Args:
        sequences: at least one.
        n_max: most drafts, at least 1.
        p_min: stop when each sequence has met a draft less probable than this; see
            :func:`.drafter.top_probability`.

    Returns:
        0 to n_max drafts for each sequence, equally many.
    """
    drafters = [one.drafter for one in sequences]
    begun = [drafter.begin_draft() for drafter in drafters]
    hidden = joined([carry for _, carry in begun])
    newest = np.array([one.token for one in sequences], dtype=np.int32)
    starts = np.array([start for start, _ in begun], dtype=np.int32)
    seqs = np.array([drafter.seq for drafter in drafters], dtype=np.int32)
    context, drawn = drafters[0].context, any(one.propose for one in sequences)
    sure = np.ones(len(seqs), dtype=bool)

    def any_sure(first_row: int) -> bool:
        """Whether a sequence has met no improbable draft, that of the rows from here included."""
        rows = range(first_row, first_row + len(seqs))
        sure[:] &= [drafters[0].is_probable(row, p_min) for row in rows]
        return bool(sure.any())

    context.set_greedy(not drawn)
    context.set_candidates(P_MIN_CANDIDATES if p_min > 0 and not drawn else 0)
    if drafters[0].chained:
        chains = context.draft_chains(newest, starts, seqs, hidden, n_max)
        steps = itertools.takewhile(lambda step: any_sure(step * len(seqs)), range(n_max))
        n = len(list(steps))
        return [Drafts(ids[:n]) for ids in chains]
    on_device, ones = isinstance(hidden, TapRows), np.ones(len(seqs), dtype=np.int8)
    drafts = [Drafts() for _ in sequences]
    for step in range(n_max):
        context.decode_batch(Batch(newest, starts + step, seqs, ones, hidden))
        if not any_sure(0):
            break
        for row, (one, made) in enumerate(zip(sequences, drafts, strict=True)):
            if one.propose and step < one.n_usable:
                token, q = one.propose(context.logits(row), context.draft_ids)
                made.distributions.append(q)
            else:
                token = context.argmax(row)
            made.tokens.append(token)
        newest = np.array([made.tokens[-1] for made in drafts], dtype=np.int32)
        # From here on the block is fed its own states, after its head norm.
        hidden = context.hidden(on_device)
    return drafts


def sync_together(
    drafters: Sequence[Drafter],
    tokens: Ints,
    starts: Sequence[int],
    hidden: Hidden,
    n_keep: Sequence[int],
) -> None:
    """Write the positions that the target has just decoded, in one decode.

    Args:
        drafters: one per sequence.
        tokens: [n_seqs, n] ids that the target decoded, from position starts[i] on.
        hidden: n_seqs * n rows, sequence by sequence: the target's.
        n_keep: how many of its n tokens each sequence keeps, at least 1; the rest was rejected.

    Raises:
        UsageError: see :meth:`.drafter.Drafter.sync`.
    """
    n = tokens.shape[1]
    own = [hidden.part(i * n, (i + 1) * n) for i in range(len(drafters))]
    # Equally many of each are in step: the newest token if drafts were made, else none.
    skips = [drafter.begin_sync(start, n) for drafter, start in zip(drafters, starts, strict=True)]
    new = [n - skip for skip in skips]
    ids = np.concatenate([row[skip:] for row, skip in zip(tokens, skips, strict=True)])
    positions = np.concatenate(
        [np.arange(start + skip, start + n) for start, skip in zip(starts, skips, strict=True)]
    )
    seqs = np.repeat(np.array([drafter.seq for drafter in drafters], dtype=np.int32), new)
    rows = joined(
        [
            drafter.paired(part, skip, n)
            for drafter, part, skip in zip(drafters, own, skips, strict=True)
        ]
    )
    if len(ids):
        none = np.zeros(len(ids), dtype=np.int8)
        drafters[0].context.decode_batch(Batch(ids, positions, seqs, none, rows))
    for drafter, start, part, kept in zip(drafters, starts, own, n_keep, strict=True):
        drafter.end_sync(start, n, part, kept)
