"""Several sequences in the two contexts of an engine: prefill one, draft, verify and keep all.

Invariant between rounds, for every place: the target's sequence holds exactly `cached`; that of the
draft context is in step with it; the newest token, which the target has chosen, is in neither.

A round has equally many rows of every sequence, in one graph. llama.cpp leaves the snapshots of a
recurrent state beside it, and when a graph brings the states of its sequences together it may move
that of a sequence which is not among them without its snapshots. In one graph for all, with nothing
decoded before each sequence has gone back, none is left behind; see :meth:`.Context.rewind`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from .batch import Batch
from .engine import Engine
from .errors import UsageError
from .model import Model
from .settings import Settings
from .speculative.drafter import Drafter, Drafts, Propose
from .speculative.rollback import Rollback, make_rollback
from .speculative.sharedepth import SharedDepth
from .speculative.together import Newest, draft_together, sync_together
from .telemetry import Telemetry

#: llama.cpp's LLAMA_MAX_SEQ.
MOST_SEQUENCES = 256


@dataclass(eq=False)
class Place:
    """Room for one sequence in both contexts.

    Attributes:
        seq: its number there.
        drafter, rollback: None without MTP.
        cached: tokens that the target holds, position 0 first.
    """

    seq: int
    drafter: Drafter | None
    rollback: Rollback | None
    cached: list[int] = field(default_factory=list)


class BatchEngine:
    """Places for `n_sequences` sequences, and what is done with them together.

    Attributes:
        engine: owner of the contexts, and of `turn` and `intact`, which mean the same here.
        places: one per sequence.
        n_ctx: tokens that each has room for.
        depths: chooses the draft depth of each round; None: it is fixed.
    """

    def __init__(self, model: Model, settings: Settings, n_sequences: int) -> None:
        """Raises UsageError, InsufficientMemoryError: see :class:`.engine.Engine`."""
        if not 1 <= n_sequences <= MOST_SEQUENCES:
            raise UsageError(f"n_sequences is {n_sequences}, it must be from 1 to {MOST_SEQUENCES}")
        if settings.prompt_rows != "last":
            raise UsageError("prompt_rows 'all' is for measurements with one sequence; use 'last'")
        # Nothing goes back to a checkpoint here: a place starts with an empty sequence.
        self.engine = Engine(model, replace(settings, checkpoints=0), n_sequences)
        self.n_ctx = self.engine.target.n_ctx // n_sequences
        self.places = [self._place(seq) for seq in range(n_sequences)]
        limit = settings.depth_limit
        self.depths = SharedDepth(limit) if settings.draft_n_max == "auto" else None
        self._batch = np.zeros((0, 0), dtype=np.int32)

    def _place(self, seq: int) -> Place:
        engine, first = self.engine, self.engine.drafter
        if not first:
            return Place(seq, None, None)
        target, settings = engine.target, engine.settings
        drafter = Drafter(first.context, target if engine.on_device else None, first.chained, seq)
        rollback = make_rollback(target, settings.depth_limit, settings.rollback, seq)
        return Place(seq, drafter, rollback)

    def begin(self) -> int:
        """Empty all places for a new generation. The turn: it changes when another one begins."""
        if not self.engine.intact:
            self.engine.reset()
        for place in self.places:
            self.release(place)
        self.engine.turn += 1
        self.engine.start_counting()
        return self.engine.turn

    def release(self, place: Place) -> None:
        """Empty a place."""
        self.engine.target.remove(0, place.seq)
        if place.drafter:
            place.drafter.reset()
        place.cached = []

    def room(self, place: Place) -> int:
        """Tokens that the place can still take, the newest one included."""
        return self.n_ctx - len(place.cached)

    def prefill(self, place: Place, prompt: Sequence[int], telemetry: Telemetry) -> int:
        """Bring an empty place to the end of `prompt`, token ids, at least one.

        Returns:
            The batch entry of the last decode that holds the last token's logits.
        """
        engine, target = self.engine, self.engine.target
        engine.intact = False
        target.set_snapshots(False)  # nobody goes back within a prompt
        telemetry.n_prompt = len(prompt)
        for begin in range(0, len(prompt), target.n_batch):
            chunk = np.array(prompt[begin : begin + target.n_batch], dtype=np.int32)
            outputs = np.zeros(len(chunk), dtype=np.int8)
            outputs[-1] = begin + len(chunk) == len(prompt)
            target.decode(chunk, begin, outputs, seq=place.seq)
            if place.drafter:
                with telemetry.timed("prompt_sync"):
                    place.drafter.sync(chunk, begin, target.hidden(engine.on_device))
        place.cached = list(prompt)
        engine.intact = True
        return len(chunk) - 1

    # -- one round -----------------------------------------------------------------------------

    def draft(
        self,
        places: Sequence[Place],
        tokens: Sequence[int],
        n_max: int,
        n_usable: Sequence[int],
        proposes: Sequence[Propose | None],
    ) -> list[Drafts]:
        """Up to `n_max` drafts for what follows the newest token of each place, equally many; for
        `n_usable` and `proposes` see :class:`.together.Newest`."""
        given = zip(places, tokens, n_usable, proposes, strict=True)
        sequences = [
            Newest(place.drafter, token, usable, propose)
            for place, token, usable, propose in given
            if place.drafter
        ]
        if not sequences or n_max < 1:
            return [Drafts() for _ in places]
        self.engine.intact = False
        return draft_together(sequences, n_max, self.engine.settings.p_min)

    def verify(
        self, places: Sequence[Place], tokens: Sequence[int], drafts: Sequence[Drafts]
    ) -> int:
        """One pass of the target over the newest token and the drafts of each place; every entry is
        an output.

        Args:
            drafts: equally many for each.

        Returns:
            Rows of each place: its row r is batch entry i * rows + r, i its index in `places`.
        """
        engine, target = self.engine, self.engine.target
        engine.intact = False
        rows = [[token, *made.tokens] for token, made in zip(tokens, drafts, strict=True)]
        self._batch = np.array(rows, dtype=np.int32)
        n_rows = self._batch.shape[1]
        target.set_snapshots(n_rows > 1)
        for place in places:
            if place.rollback and n_rows > 1:
                place.rollback.before()
        steps = np.arange(n_rows, dtype=np.int32)
        positions = np.array([len(place.cached) + steps for place in places], dtype=np.int32)
        seqs = np.repeat(np.array([place.seq for place in places], dtype=np.int32), n_rows)
        ones = np.ones(self._batch.size, dtype=np.int8)
        target.decode_batch(Batch(self._batch.ravel(), positions.ravel(), seqs, ones))
        target.synchronize()
        return n_rows

    def keep(
        self, places: Sequence[Place], n_accepted: Sequence[int], telemetry: Telemetry
    ) -> None:
        """Keep the newest token and the first `n_accepted` drafts of each place; drop the rest."""
        engine, batch = self.engine, self._batch
        with telemetry.timed("sync"):
            starts, n_keep = [len(place.cached) for place in places], [n + 1 for n in n_accepted]
            drafters = [place.drafter for place in places if place.drafter]
            if drafters:
                hidden = engine.target.hidden(engine.on_device)
                sync_together(drafters, batch, starts, hidden, n_keep)
            for place, row, start, n in zip(places, batch, starts, n_keep, strict=True):
                if place.rollback and len(row) > 1:
                    place.rollback.after(row, start, n)
                place.cached += row[:n].tolist()
            engine.intact = True
