"""Checkpoints of the recurrent state along a prompt, and where a prompt is cut to take them.

Attention caches drop positions; the recurrent state of a hybrid model cannot go back. A later
prompt that shares only a part of the text continues from the closest checkpoint, not from token 0.
The engine saves and restores the states.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .llama.devicestates import on_host

if TYPE_CHECKING:
    from .llama.batch import Floats, KeptRow, State
    from .llama.devicestates import DeviceState

#: Tokens at a prompt's end that the next prompt may not share: a chat template's opening of the
#: answer, an empty thinking part.
TAIL = 64
#: The same for a prompt that ends with such an opening only.
SHORT_TAIL = 16
#: Processing a last graph of fewer tokens again is no slower than cutting it.
LONG_GRAPH = 64
#: Tokens before the end of what two prompts share at which a third may part: words that two
#: questions happen to begin with.
ALIKE = 8
#: Least tokens of a part that is cut off where prompts may part.
LEAST_PART = 32


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """The recurrent state after the first `n_past` tokens of a text.

    Attributes:
        n_past: tokens that the state has seen, at least 1; the next position to process.
        state: of ``Context.save_checkpoint()`` there.
        carry: the hidden state from which upstream's way drafts on; see :mod:`.upstream`.
        row: of a prompt's end, what the first token was chosen from.
    """

    n_past: int
    state: State | DeviceState
    carry: Floats | None = None
    row: KeptRow | None = None

    def on_host(self) -> Checkpoint:
        """The same with the state on the host."""
        return replace(self, state=on_host(self.state))

    @property
    def n_bytes(self) -> int:
        """Bytes of host memory that it takes."""
        return len(self.state) + (self.row.n_bytes if self.row else 0)


class Checkpoints:
    """At most `limit` checkpoints of one text, thinned out away from its end; 0 keeps none.

    When there is one too many, the checkpoint goes whose removal leaves the smallest relative gap:
    ``(next - previous) / (newest - previous)``, with position 0 before the first; the newest always
    stays. This serves the three ways in which a chat goes on:

    - The next prompt extends this one, from the newest checkpoint.
    - The next prompt differs shortly before the end (templates drop the thinking part). The last
      checkpoint before the newest has the ratio 1, the largest possible, so it goes last, and the
      checkpoints before it are dense.
    - An early message was edited, d tokens before the end, so that d tokens must be processed again
      anyway. Gaps that grow with the distance from the end keep the additional tokens in proportion
      to d, at every d; even gaps would waste checkpoints.

    The checkpoint where another text parted from this one stays as well, of three or more: it is
    the end of what many texts begin with, such as a system message.

    Attributes:
        kept: by `n_past`, ascending.
        parting: `n_past` of that checkpoint; 0: none.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.parting = limit, 0
        self.kept: list[Checkpoint] = []

    @property
    def positions(self) -> list[int]:
        """`n_past` of every checkpoint, in ascending order."""
        return [checkpoint.n_past for checkpoint in self.kept]

    @property
    def n_bytes(self) -> int:
        """Bytes of host memory that the checkpoints take."""
        return sum(checkpoint.n_bytes for checkpoint in self.kept)

    def add(self, checkpoint: Checkpoint) -> None:
        """Keep a checkpoint of the cache's end, in place of checkpoints there or further on, whose
        tokens the cache no longer holds."""
        self.drop_above(checkpoint.n_past - 1)
        if not self.limit:
            return
        self.kept.append(checkpoint)
        if len(self.kept) > self.limit:
            del self.kept[self._most_dispensable()]

    def survivors(self, positions: Sequence[int]) -> set[int]:
        """Which of `positions`, ascending, would be kept after all were added; the rest need not be
        saved."""
        trial = Checkpoints(self.limit)
        trial.kept, trial.parting = [*self.kept], self.parting
        for n_past in positions:
            trial.add(Checkpoint(n_past, b""))
        return set(positions).intersection(trial.positions)

    def _most_dispensable(self) -> int:
        at = [0, *self.positions]
        newest = at[-1]

        def relative_gap(i: int) -> float:  # of the checkpoint at[i], were it gone
            if at[i] == self.parting and self.limit > 2:
                return math.inf
            return (at[i + 1] - at[i - 1]) / (newest - at[i - 1])

        return min(range(1, len(at) - 1), key=relative_gap) - 1

    def closest(self, n_past: int, need_carry: bool) -> Checkpoint | None:
        """The last checkpoint that a new prompt can start from, or None: start at token 0.

        Args:
            n_past: tokens that the prompt shares with the text.
            need_carry: leave out checkpoints without a carry.
        """
        for checkpoint in reversed(self.kept[: bisect_right(self.positions, n_past)]):
            if checkpoint.carry is not None or not need_carry:
                return checkpoint
        return None

    def take(self, others: Iterable[Checkpoint]) -> None:
        """Have those of another text, which is now this text."""
        self.clear()
        for checkpoint in others:
            self.add(checkpoint)

    def drop_above(self, n_past: int) -> None:
        """Drop the checkpoints after the first `n_past` tokens, to which the text was cut."""
        del self.kept[bisect_right(self.positions, n_past) :]

    def clear(self) -> None:
        """Drop all: the text is gone."""
        self.kept.clear()
        self.parting = 0


def partings(start: int, stop: int, shared: int, turns: Sequence[int] | None = None) -> list[int]:
    """Where a later prompt may leave this one: ALIKE tokens before the end of what an earlier
    prompt shared.

    In a chat also: at the end of the last turn but one, before the last message; TAIL tokens before
    the opening of the answer, for another question after the same text; and before this opening,
    which the template adds to the last turn, or SHORT_TAIL tokens before the end.

    Args:
        start, stop: see :func:`boundaries`.
        shared: tokens that an earlier prompt shared.
        turns: of a chat: positions after tokens that end a turn, ascending, all below `stop`.
    """
    if stop - start < LONG_GRAPH:
        return []
    at = [shared - ALIKE]
    if turns is not None:
        closed = bool(turns) and stop - turns[-1] < TAIL
        opening = turns[-1] if closed else stop - SHORT_TAIL
        at += [turn for turn in turns if turn < opening][-1:]
        guess = opening - TAIL
        if guess >= start + 2 * TAIL and not any(guess - TAIL <= cut < opening for cut in at):
            at.append(guess)
        at.append(opening)
    chosen = [start]
    for cut in sorted(at):
        if cut - chosen[-1] >= LEAST_PART and cut < stop:
            chosen.append(cut)
    return chosen[1:]


def boundaries(
    start: int, stop: int, n_batch: int, n_ubatch: int, partings: Sequence[int] = ()
) -> list[int]:
    """Where the prefill of positions [start, stop) is cut into decode calls, for a checkpoint each.

    One cut is the last graph boundary before `stop`, so that a prompt that differs just before the
    end finds a checkpoint at most n_ubatch tokens back. If that is less than TAIL tokens before the
    end, which a template may drop, one graph earlier is a cut too.

    All cuts but `stop` are whole graphs away from `start`, or from the last parting, so the graphs,
    of n_ubatch tokens, are as few as in a single call, and one more for a parting. (n_batch is
    rounded down to whole graphs. For a rollback, llama.cpp keeps the last n_rs_seq + 1 tokens of a
    call in one graph; that moves a boundary, and adds none.)

    Args:
        start: first position to process.
        stop: one past the last; above `start`.
        n_batch: most tokens per call.
        n_ubatch: tokens per graph; llama.cpp takes n_batch if that is less.
        partings: further cuts, ascending, between `start` and `stop`.

    Returns:
        The ends of the calls, ascending; the last is `stop`.
    """
    n_ubatch = min(n_ubatch, n_batch)
    step = n_batch // n_ubatch * n_ubatch
    cuts = {stop, *partings}
    for end in (*partings, stop):
        first, start = start, end
        cuts.update(range(first + step, end, step))
    last = first + (stop - first - 1) // n_ubatch * n_ubatch
    further = (last, last - n_ubatch) if stop - last < TAIL else (last,)
    return sorted(cuts.union(cut for cut in further if cut > first))
