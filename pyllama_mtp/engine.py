"""The contexts of a generation, with places for 1..n sequences.

Invariant between decodes, for every place: its sequence holds exactly `cached`; the newest token,
which the target has chosen, is not in it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from .checkpoints import Checkpoint, Checkpoints, boundaries
from .drafting.choice import DraftChoice
from .drafting.drafter import Drafter
from .drafting.headrows import Heads
from .drafting.rollback import Rollback, go_back
from .drafting.upstream import Decoded, UpstreamDrafter
from .errors import FatalDecodeError
from .llama import native
from .llama.context import Context
from .llama.model import Model
from .llama.owned import Exclusive
from .llama.trace import NodeTimes
from .resolved import Resolved
from .telemetry import PHASES, Telemetry, timed


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading tokens are the same."""
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


@dataclass(eq=False)
class Place:
    """Room for one sequence in the contexts.

    Attributes:
        seq: the sequence's number there.
        rollback: None where nothing is drafted.
        checkpoints: of the recurrent state along `cached`.
        cached: tokens that the target holds, position 0 first.
        drafting: whether the present text is drafted for.
        used: when the place was last given a text.
    """

    seq: int
    rollback: Rollback | None
    checkpoints: Checkpoints
    cached: list[int] = field(default_factory=list)
    drafting: bool = False
    used: float = 0.0


class Engine:
    """The target's context, a drafter if the model has an MTP head, and places for sequences.

    An exception, Ctrl-C among them, may come anywhere between the start of a prefill or round and
    its end. The engine is then not intact, and the next generation starts from empty caches.

    Attributes:
        places: one per sequence.
        n_ctx: tokens that each place has room for.
        intact: False between the start of a prefill or round and its end.
        settings, depth, prompt_sync: see :class:`.Resolved`.
        upstream: the drafter, if drafting is upstream's, which must be kept in step.
        chats: prompts are likely to come again, as they are or with another end.
        choice: chooses what each round drafts.
        heads: the draft head, if drafts are made and the library can have one.
        turn: changes with every generation and reset; a generation whose turn is over has been
            overtaken.
        times: seconds of the current round, by phase.
        alone: held while a thread changes the contents; other threads are refused meanwhile.
    """

    def __init__(
        self,
        model: Model,
        resolved: Resolved,
        times: NodeTimes | None = None,
        chats: bool = False,
    ) -> None:
        """Raises UsageError, InsufficientMemoryError: see :class:`Context`.

        Args:
            resolved: see :meth:`.Settings.resolve`.
            times: see :attr:`.ContextOptions.times`.
            chats: see the attribute.
        """
        settings, n_sequences, depth = resolved.settings, resolved.n_sequences, resolved.depth
        self.model, self.settings, self.depth = model, settings, depth
        self.turn = 0
        self.alone = Exclusive("a session")
        self.intact = True
        self.chats = chats
        self.times = dict.fromkeys(PHASES, 0.0)
        self._outputs_before = 0
        self.choice = DraftChoice(settings, depth, n_sequences, model.has_mtp)
        self.prompt_sync = resolved.prompt_sync
        options = replace(resolved.target, times=times)
        self.heads: Heads | None = None
        self.target = Context(model, options)
        self.n_ctx = self.target.n_ctx // n_sequences
        self.drafter: Drafter | UpstreamDrafter | None = None
        self.upstream: UpstreamDrafter | None = None
        try:
            if self.prompt_sync == "full":
                self.drafter = self.upstream = UpstreamDrafter(self.target, options, depth)
                if self.upstream.patched:
                    self.heads = Heads(self.upstream.context, model, settings)
            elif self.prompt_sync:
                self.drafter = Drafter(self.target)
                self.heads = Heads(self.target, model, settings)
                if self.heads:
                    fixed = settings.draft_n_max != "auto"
                    depths = (0, depth) if fixed else range(depth + 1)
                    self.target.reserve_rounds(n_sequences, depths)
            self.places = [self._place(seq) for seq in range(n_sequences)]
        except BaseException:
            self.close()
            raise

    def _place(self, seq: int) -> Place:
        s, rollback = self.settings, None
        if self.depth:
            rollback = Rollback(self.target, self.depth, s.rollback, seq)
        return Place(seq, rollback, Checkpoints(s.checkpoints if self.model.is_recurrent else 0))

    def close(self) -> None:
        """Free the contexts. May be called again."""
        for context in reversed(self._contexts()):
            context.close()

    def begin(self) -> int:
        """Start a generation, from empty caches if the last computation broke off; its turn."""
        if not self.intact:
            self.reset()
        self._outputs_before = self._output_bytes()  # refused if the contexts are closed
        self.turn += 1
        return self.turn

    def reset(self) -> None:
        """Empty the caches and all places."""
        for context in self._contexts():
            context.clear()
        for place in self.places:
            self.release(place)
        self.intact = True
        self.turn += 1

    def release(self, place: Place) -> None:
        """Empty a place."""
        self.target.remove(0, place.seq)
        if self.upstream:
            self.upstream.reset(place.seq)
        place.checkpoints.clear()
        place.cached = []

    def room(self, place: Place) -> int:
        """Tokens that the place can still take, the newest one included."""
        return self.n_ctx - len(place.cached)

    # -- prefill -------------------------------------------------------------------------------

    def reusable(self, place: Place, prompt: Sequence[int], drafting: bool = True) -> int:
        """How many leading tokens of `prompt` this place need not process again."""
        return self._plan(place, prompt, drafting)[1]

    def _plan(
        self, place: Place, prompt: Sequence[int], drafting: bool
    ) -> tuple[int, int, Checkpoint | None]:
        """How many tokens `prompt` shares with the place, the position to process it from, and the
        checkpoint to go back to for that, if one is needed."""
        shared = min(common_prefix(place.cached, prompt), len(prompt) - 1)
        goal = start = shared
        if drafting and self.upstream:  # its cache may end earlier than the target's
            goal, start = self.upstream.reach(place.seq, shared)
        back = len(place.cached) - start
        can_cut = start > 0 and back <= self.target.rewind(place.seq)
        if back == 0 or can_cut:
            return shared, start, None
        checkpoint = place.checkpoints.closest(goal, drafting and self.upstream is not None)
        return shared, checkpoint.n_past if checkpoint else 0, checkpoint

    def enter(
        self, place: Place, prompt: Sequence[int], telemetry: Telemetry, drafting: bool = True
    ) -> None:
        """Cut a place down to the tokens that it can use for `prompt`; :meth:`prefill` follows.

        Args:
            prompt: token ids, at least one.
            drafting: False: the answer will not be drafted for.
        """
        self.intact = False
        place.used = time.monotonic()
        place.drafting = drafting and self.depth > 0
        shared, start, checkpoint = self._plan(place, prompt, drafting)
        telemetry.n_prompt, telemetry.n_cached = len(prompt), start
        telemetry.n_left = len(prompt) - start
        place.checkpoints.drop_above(shared)
        if self.upstream:
            self.upstream.truncate(place.seq, shared)
        if start == 0:
            self.release(place)
        elif checkpoint:
            go_back(self.target, checkpoint.state, start, place.seq)
            if place.drafting and self.upstream and checkpoint.carry is not None:
                self.upstream.resume(place.seq, start, checkpoint.carry)
        elif start < len(place.cached) and not self.target.remove(start, place.seq):
            raise FatalDecodeError(f"llama.cpp refused to go back to position {start}")
        del place.cached[start:]
        self.intact = True

    def prefill(self, place: Place, prompt: Sequence[int], telemetry: Telemetry) -> int | None:
        """Process the next part of `prompt`, which begins with the place's tokens: one decode.

        Rounds of other places may come between the parts.

        Returns:
            None while something is left; then the batch entry that holds the last token's logits.
        """
        target = self.target
        self.intact = False
        self.follow(place.drafting)
        target.set_snapshots(False)  # nobody goes back within a prompt token by token
        start = len(place.cached)
        cuts = self._cuts(start, len(prompt))
        end = cuts[0]
        chunk = np.array(prompt[start:end], dtype=np.int32)
        outputs = np.zeros(len(chunk), dtype=np.int8)
        outputs[-1] = end == len(prompt)
        if self.settings.prompt_rows == "all":
            outputs[:] = 1
        target.decode(chunk, start, outputs, seq=place.seq)
        if place.drafting and self.upstream:
            with timed(telemetry.time_s, "prompt_sync"):
                self.upstream.decoded([Decoded(place.seq, start, chunk, 0, len(chunk))])
        place.cached += prompt[start:end]
        telemetry.n_left = len(prompt) - end
        if end in place.checkpoints.survivors(cuts):
            state = target.save_state(recurrent_only=True, seq=place.seq)
            upstream = self.upstream if place.drafting else None
            carry = upstream.sequences[place.seq].carry if upstream else None
            place.checkpoints.add(Checkpoint(end, state, carry))
        self.intact = True
        return len(chunk) - 1 if end == len(prompt) else None

    def _cuts(self, start: int, stop: int) -> list[int]:
        target = self.target
        if self.places[0].checkpoints.limit:
            return boundaries(start, stop, target.n_batch, target.n_ubatch, self.chats)
        return [*range(start + target.n_batch, stop, target.n_batch), stop]

    def follow(self, drafting: bool) -> None:
        """Whether the target's next decodes are of texts that are drafted for: upstream's drafter
        then needs their hidden rows."""
        if self.upstream:
            self.target.set_tap(drafting)

    # -- drafts, and figures -------------------------------------------------------------------

    def begin_drafting(self, place: Place, prompt: Sequence[int], *counts: Telemetry) -> None:
        """The prompt of a place is processed: drafts are chosen from now on."""
        if place.drafting:
            self.choice.begin(place.seq, prompt)
            self.see(place, prompt, *counts, prompt=True)

    def see(
        self, place: Place, tokens: Sequence[int], *counts: Telemetry, prompt: bool = False
    ) -> None:
        """The text of a place goes on with `tokens`, for :class:`.Heads`."""
        if self.heads and place.drafting:
            with timed(self.times, "sync"):
                self.heads.see(tokens, counts, prompt)

    def synchronize(self) -> None:
        """Wait until every decode has finished."""
        for context in self._contexts():
            context.synchronize()

    def _contexts(self) -> list[Context]:
        return [self.target, *([self.upstream.context] if self.upstream else [])]

    def _output_bytes(self) -> int:
        return sum(context.output_bytes for context in self._contexts())

    def count_traffic(self, telemetry: Telemetry) -> None:
        """Note the bytes copied since :meth:`begin`, and how the MTP head was kept in step."""
        if any(context.closed for context in self._contexts()):
            return
        telemetry.output_bytes = self._output_bytes() - self._outputs_before
        if self.drafter and any(place.drafting for place in self.places):
            telemetry.prompt_sync = self.prompt_sync

    def memory(self, device: Any = None) -> dict[str, int]:
        """Bytes in use, by purpose.

        weights; target_context (caches, states and snapshots, the MTP head's among them, and a
        draft head); target_compute (graph buffers); draft_context and draft_compute, if drafting is
        upstream's; checkpoints.

        Args:
            device: as for :meth:`.Context.memory`.
        """
        target = self.target.memory(device)
        draft = {"context": 0, "compute": 0}
        if self.upstream:
            draft = self.upstream.context.memory(device)
        on_host = device is None or device == native.load().ffi.NULL
        return {
            "weights": target["model"],
            "target_context": target["context"],
            "target_compute": target["compute"],
            "draft_context": draft["context"],
            "draft_compute": draft["compute"],
            "checkpoints": sum(p.checkpoints.n_bytes for p in self.places) if on_host else 0,
        }
