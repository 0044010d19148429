"""Several sequences in the two contexts of an engine: prefill one, draft, verify and keep all.

Invariant between decodes, for every place: the target's sequence holds exactly `cached`; that of
the draft context is in step with it (one place may be a few tokens behind after plain rounds); the
newest token, which the target has chosen, is in neither.

A round has equally many rows of every sequence, in one graph. llama.cpp leaves the snapshots of a
recurrent state beside it, and when a graph brings the states of its sequences together it may move
that of a sequence which is not among them without its snapshots. In one graph for all, with nothing
decoded before each sequence has gone back, none is left behind; see :meth:`.Context.rewind`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from .arguments import whole
from .batch import Batch
from .checkpoints import Checkpoint, Checkpoints, boundaries
from .engine import Engine, common_prefix
from .errors import UsageError
from .hidden import CARRY_SLOT, Hidden, HostRows
from .model import Model
from .settings import Settings
from .speculative.drafter import Drafter, Drafts, Propose
from .speculative.rollback import Rollback, go_back, make_rollback
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
        checkpoints: of the recurrent state along `cached`.
        cached: tokens that the target holds, position 0 first.
    """

    seq: int
    drafter: Drafter | None
    rollback: Rollback | None
    checkpoints: Checkpoints
    cached: list[int] = field(default_factory=list)


class BatchEngine:
    """Places for `n_sequences` sequences, and what is done with them together.

    Attributes:
        engine: owner of the contexts, and of `turn` and `intact`, which mean the same here.
        places: one per sequence.
        n_ctx: tokens that each has room for.
        depths: chooses the draft depth of each round; None: it is fixed.
    """

    def __init__(
        self, model: Model, settings: Settings, n_sequences: int, n_checkpoints: int = 0
    ) -> None:
        """Make the contexts.

        Args:
            n_checkpoints: most checkpoints of each place, for prompts that share a part only of
                what the place holds.

        Raises:
            UsageError, InsufficientMemoryError: see :class:`.engine.Engine`.
        """
        allowed = f"from 1 to {MOST_SEQUENCES}"
        n_sequences = whole("n_sequences", n_sequences, 1, MOST_SEQUENCES, allowed)
        if settings.prompt_rows != "last":
            raise UsageError("prompt_rows 'all' is for measurements with one sequence; use 'last'")
        # The checkpoints of an engine are its first sequence's; here places have their own.
        total = n_checkpoints * n_sequences
        self.engine = Engine(model, replace(settings, checkpoints=0), n_sequences, total)
        self.n_ctx = self.engine.target.n_ctx // n_sequences
        self._n_checkpoints = n_checkpoints if model.is_recurrent else 0
        self._behind: Place | None = None  # the place whose draft cache is
        self.places = [self._place(seq) for seq in range(n_sequences)]
        used = self.engine.settings
        self.depths = SharedDepth(used.depth_limit) if used.draft_n_max == "auto" else None
        self._batch = np.zeros((0, 0), dtype=np.int32)

    def _place(self, seq: int) -> Place:
        engine, first = self.engine, self.engine.drafter
        checkpoints = Checkpoints(self._n_checkpoints)
        if not first:
            return Place(seq, None, None, checkpoints)
        target, settings = engine.target, engine.settings
        drafter = Drafter(first.context, target if engine.on_device else None, first.chained, seq)
        rollback = make_rollback(target, settings.depth_limit, settings.rollback, seq)
        return Place(seq, drafter, rollback, checkpoints)

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
        if self._behind is place:
            self._behind = None
        self.engine.target.remove(0, place.seq)
        if place.drafter:
            place.drafter.reset()
        place.checkpoints.clear()
        place.cached = []

    def room(self, place: Place) -> int:
        """Tokens that the place can still take, the newest one included."""
        return self.n_ctx - len(place.cached)

    # -- prefill -------------------------------------------------------------------------------

    def reusable(self, place: Place, prompt: Sequence[int]) -> int:
        """How many tokens of `prompt` need no processing in this place, thanks to what it holds."""
        shared = min(common_prefix(place.cached, prompt), len(prompt) - 1)
        if shared == len(place.cached):
            return shared
        if not self.engine.model.is_recurrent:
            return max(0, shared - 1) if place.drafter else shared
        checkpoint = place.checkpoints.closest(shared, need_carry=place.drafter is not None)
        return checkpoint.n_past if checkpoint else 0

    def enter(self, place: Place, prompt: Sequence[int], telemetry: Telemetry) -> None:
        """Cut a place down to what it can use for `prompt`, token ids, at least one;
        :meth:`prefill` follows."""
        self.catch_up()
        self.engine.intact = False
        start = self.reusable(place, prompt)
        telemetry.n_prompt, telemetry.n_cached = len(prompt), start
        if start == 0:
            self.release(place)
        elif start < len(place.cached):
            self._cut(place, start)
        self.engine.intact = True

    def _cut(self, place: Place, start: int) -> None:
        """Keep the first `start` tokens, a number that :meth:`reusable` gave."""
        target, drafter = self.engine.target, place.drafter
        place.checkpoints.drop_above(start)
        checkpoint = place.checkpoints.closest(start, need_carry=drafter is not None)
        if checkpoint and checkpoint.n_past == start:
            go_back(target, checkpoint.state, start, place.seq)
            if drafter and checkpoint.carry is not None:
                drafter.n_past, drafter.carry = start, self._put_back(checkpoint.carry, place.seq)
        else:  # attention only: the target computes one row again, which nobody has kept
            target.remove(start, place.seq)
            if drafter:
                drafter.truncate(start + 1)
        del place.cached[start:]

    def _put_back(self, carry: Hidden, seq: int) -> Hidden:
        target = self.engine.target
        if self.engine.on_device and target.tap:
            return target.tap.write(CARRY_SLOT + seq, carry.to_host()[0])
        return carry

    def prefill(self, place: Place, prompt: Sequence[int], telemetry: Telemetry) -> int | None:
        """Process the next part of `prompt`, which begins with what the place holds: one decode.

        Rounds of other places may come between the parts.

        Returns:
            None while something is left; then the batch entry that holds the last token's logits.
        """
        engine, target = self.engine, self.engine.target
        self.catch_up()
        engine.intact = False
        target.set_snapshots(False)  # nobody goes back within a prompt
        telemetry.n_prompt = len(prompt)
        begin = len(place.cached)
        cuts = self._cuts(begin, len(prompt))
        end = cuts[0]
        chunk = np.array(prompt[begin:end], dtype=np.int32)
        outputs = np.zeros(len(chunk), dtype=np.int8)
        outputs[-1] = end == len(prompt)
        target.decode(chunk, begin, outputs, seq=place.seq)
        if place.drafter:
            with telemetry.timed("prompt_sync"):
                place.drafter.sync(chunk, begin, target.hidden(engine.on_device))
        place.cached += prompt[begin:end]
        if end in place.checkpoints.survivors(cuts):
            self._checkpoint(place)
        engine.intact = True
        return len(chunk) - 1 if end == len(prompt) else None

    def _cuts(self, start: int, stop: int) -> list[int]:
        target = self.engine.target
        if self._n_checkpoints:
            return boundaries(start, stop, target.n_batch, target.n_ubatch)
        return [*range(start + target.n_batch, stop, target.n_batch), stop]

    def _checkpoint(self, place: Place) -> None:
        """Of where the place ends now. The hidden row is kept on the host: a tap has few slots."""
        carry = place.drafter.carry if place.drafter else None
        row = HostRows(carry.to_host().copy()) if carry is not None else None
        state = self.engine.target.save_state(recurrent_only=True, seq=place.seq)
        place.checkpoints.add(Checkpoint(len(place.cached), state, row))

    def catch_up(self) -> None:
        """Bring the draft cache in step with the target's after plain rounds of one place."""
        place, self._behind = self._behind, None
        if place and place.drafter and self.engine.intact:
            self.engine.intact = False
            place.drafter.catch_up()
            self.engine.intact = True

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
        self._catch_up_unless(places)
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
        self._catch_up_unless(places)
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

    def _catch_up_unless(self, places: Sequence[Place]) -> None:
        """A place whose draft cache is behind may stay so in rounds that it has to itself."""
        if self._behind and (len(places) > 1 or places[0] is not self._behind):
            self.catch_up()

    def keep(
        self, places: Sequence[Place], n_accepted: Sequence[int], telemetry: Telemetry
    ) -> None:
        """Keep the newest token and the first `n_accepted` drafts of each place; drop the rest."""
        engine, batch = self.engine, self._batch
        with telemetry.timed("sync"):
            starts, n_keep = [len(place.cached) for place in places], [n + 1 for n in n_accepted]
            if len(places) == 1:
                self._sync_one(places[0], n_keep[0])
            elif places[0].drafter:
                drafters = [place.drafter for place in places if place.drafter]
                hidden = engine.target.hidden(engine.on_device)
                sync_together(drafters, batch, starts, hidden, n_keep)
            for place, row, start, n in zip(places, batch, starts, n_keep, strict=True):
                if place.rollback and len(row) > 1:
                    place.rollback.after(row, start, n)
                place.cached += row[:n].tolist()
            engine.intact = True

    def _sync_one(self, place: Place, n_keep: int) -> None:
        """As an engine with one sequence does: plain rounds are synced together, later."""
        engine, drafter, row = self.engine, place.drafter, self._batch[0]
        if not drafter:
            return
        if len(row) == 1 and engine.on_device and engine.target.tap:
            drafter.sync_later(int(row[0]), len(place.cached), engine.target.tap.first_row())
            self._behind = place
        else:
            hidden = engine.target.hidden(engine.on_device)
            drafter.sync(row, len(place.cached), hidden, n_keep)
            self._behind = None
