"""Taking rejected drafts back out of the target's caches.

Attention caches can drop positions. A recurrent state (Gated DeltaNet) cannot: it needs snapshots,
which llama.cpp keeps per token when the context was made with ``n_rs_seq``; or a checkpoint from
before the round, from which the accepted tokens are decoded once more.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from ..errors import FatalDecodeError, UsageError
from ..llama.batch import Ints
from ..llama.context import SEQ, Context


def go_back(target: Context, state: bytes | bytearray, n_past: int, seq: int = SEQ) -> None:
    """Cut a sequence of the target to `n_past` positions; `state` is its recurrent state there.
    Raises FatalDecodeError: llama.cpp refused."""
    target.load_state(state, recurrent_only=True, seq=seq)
    if not target.remove(n_past, seq):
        raise FatalDecodeError("llama.cpp refused to go back to its own checkpoint")


class Rollback(Protocol):
    """Brackets one verification pass on the target, for one sequence.

    With several in a pass: all of them before it; after it all of them, before any other decode.
    """

    def before(self) -> None:
        """Before a verification pass: the caches hold exactly the accepted positions."""

    def after(self, tokens: Ints, start: int, n_keep: int) -> None:
        """After the pass over `tokens` at `start`: keep the first `n_keep` of them."""


class SnapshotRollback:
    """By removal; recurrent layers go back to one of llama.cpp's per-token snapshots."""

    def __init__(self, target: Context, seq: int = SEQ) -> None:
        self._target, self._seq = target, seq

    def before(self) -> None:
        """Nothing: the snapshots are made during the pass."""

    def after(self, tokens: Ints, start: int, n_keep: int) -> None:
        """Remove the rejected positions; the state goes back to the last kept one's snapshot."""
        if n_keep < len(tokens) and not self._target.remove(start + n_keep, self._seq):
            raise FatalDecodeError(
                f"llama.cpp cannot take back {len(tokens) - n_keep} positions: "
                f"the context keeps {self._target.n_rs_seq} snapshots"
            )


class ReplayRollback:
    """By a checkpoint of the recurrent state before the pass; kept tokens are decoded again."""

    def __init__(self, target: Context, seq: int = SEQ) -> None:
        self._target, self._seq = target, seq
        self._checkpoint: bytes | bytearray = b""

    def before(self) -> None:
        """Copy the recurrent state; the copy stays on the device."""
        self._checkpoint = self._target.save_state(True, self._seq, on_device=True)

    def after(self, tokens: Ints, start: int, n_keep: int) -> None:
        """Restore the checkpoint and decode the kept tokens once more, without output rows."""
        if n_keep == len(tokens):
            return
        go_back(self._target, self._checkpoint, start, self._seq)
        none = np.zeros(n_keep, dtype=np.int8)
        self._target.decode(tokens[:n_keep], start, none, seq=self._seq)


def make_rollback(target: Context, n_max: int, method: str, seq: int = SEQ) -> Rollback:
    """The rollback of a sequence for up to `n_max` drafts per round.

    Args:
        method: "snapshot", "replay", or "auto": snapshot when the context keeps enough of them, or
            needs none because the model has no recurrent layers.

    Raises:
        UsageError: "snapshot" was asked for and the architecture keeps fewer than `n_max`.
    """
    enough = target.n_rs_seq >= n_max or not target.model.is_recurrent
    if method == "snapshot" and not enough:
        raise UsageError(
            f"{target.n_rs_seq} state snapshots per sequence are available for this architecture, "
            f"{n_max} are needed; use rollback='replay'"
        )
    use_replay = method == "replay" or not enough
    return ReplayRollback(target, seq) if use_replay else SnapshotRollback(target, seq)
