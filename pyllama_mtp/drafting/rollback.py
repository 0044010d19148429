"""Taking rejected drafts back out of the target's caches.

Attention caches can drop positions. A recurrent state (Gated DeltaNet) cannot: it needs snapshots,
which llama.cpp keeps per token when the context was made with ``n_rs_seq``; or a checkpoint from
before the round, from which the accepted tokens are decoded once more.
"""

from __future__ import annotations

import numpy as np

from ..errors import FatalDecodeError, UsageError
from ..llama.batch import SEQ, Ints
from ..llama.context import Context


def go_back(target: Context, state: bytes | bytearray, n_past: int, seq: int = SEQ) -> None:
    """Cut a sequence of the target to `n_past` positions; `state` is its recurrent state there.
    Raises FatalDecodeError: llama.cpp refused."""
    target.load_state(state, recurrent_only=True, seq=seq)
    if not target.remove(n_past, seq):
        raise FatalDecodeError("llama.cpp refused to go back to its own checkpoint")


class Rollback:
    """Brackets one verification pass on the target, for one sequence.

    By removal, where recurrent layers go back to one of llama.cpp's per-token snapshots; or by
    replay. With several in a pass: all of them before it; after it all of them, before any other
    decode.
    """

    def __init__(self, target: Context, n_max: int, method: str, seq: int = SEQ) -> None:
        """Args:
        n_max: most drafts per round.
        method: "snapshot", "replay", or "auto": snapshot when the context keeps enough of them,
            or needs none because the model has no recurrent layers.

        Raises:
            UsageError: "snapshot" was asked for and the architecture keeps fewer than `n_max`.
        """
        enough = target.n_rs_seq >= n_max or not target.model.is_recurrent
        if method == "snapshot" and not enough:
            raise UsageError(
                f"{target.n_rs_seq} state snapshots per sequence are available for this "
                f"architecture, {n_max} are needed; use rollback='replay'"
            )
        self._target, self._seq = target, seq
        self._replays = method == "replay" or not enough
        self._checkpoint: bytes | bytearray = b""

    def before(self) -> None:
        """Before a verification pass: the caches hold exactly the accepted positions. A replay
        needs a copy of the recurrent state, which stays on the device."""
        if self._replays:
            self._checkpoint = self._target.save_state(True, self._seq, on_device=True)

    def after(self, tokens: Ints, start: int, n_keep: int) -> None:
        """After the pass over `tokens` at `start`: keep the first `n_keep` of them."""
        if n_keep == len(tokens):
            return
        if self._replays:
            go_back(self._target, self._checkpoint, start, self._seq)
            none = np.zeros(n_keep, dtype=np.int8)
            self._target.decode(tokens[:n_keep], start, none, seq=self._seq)
        elif not self._target.remove(start + n_keep, self._seq):
            raise FatalDecodeError(
                f"llama.cpp cannot take back {len(tokens) - n_keep} positions: "
                f"the context keeps {self._target.n_rs_seq} snapshots"
            )
