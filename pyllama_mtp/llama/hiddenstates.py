"""Hidden states of a text, without logits, from a context of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from .batch import Floats
from .context import Context
from .contextoptions import ContextOptions, padded
from .model import Model
from .native import Owned

#: Where hidden states are taken: after the model's final norm, or before it.
POINTS = ("post-norm", "pre-norm")
ROWS = ("all", "last")


class HiddenStates(Owned):
    """Computes hidden states in a context of its own, which is made when it is first needed.

    The graph stores the rows in a tap where it computes them (`need_embd_pre_norm`), so no token
    has to be an output: the LM head does not run, and no logits are copied.
    """

    def __init__(self, model: Model, options: ContextOptions) -> None:
        """Args:
        options: of a session's context, for batches, threads, caches and RoPE.
        """
        self._model = model
        self._options = replace(
            options,
            need_embd_pre_norm=True,
            with_mtp=False,
            tap="off",
            n_outputs_max=1,
            n_rs_seq=0,
            n_seq_max=1,
            unified=False,
        )
        self._context: Context | None = None

    def of(self, tokens: Sequence[int], point: str, rows: str) -> Floats:
        """See :meth:`.Session.hidden_states`, for checked arguments."""
        context = self._room_for(len(tokens))
        context.clear()
        context.set_tap_point(point)
        ids, parts = np.array(tokens, dtype=np.int32), list[Floats]()
        for start in range(0, len(ids), context.n_batch):
            chunk = ids[start : start + context.n_batch]
            context.decode(chunk, start, np.zeros(len(chunk), dtype=np.int8))
            found = context.hidden_rows()
            if rows == "last":
                parts = [found[-1:].copy()]
            else:
                parts.append(found.copy())  # the next decode overwrites them
        return np.concatenate(parts)

    def _room_for(self, n_tokens: int) -> Context:
        """The context, made anew where it is too short, or was lost in a failure."""
        if self._context and not self._context.closed and self._context.n_ctx >= n_tokens:
            return self._context
        self.close()
        n_ctx = padded(n_tokens)
        n_batch = min(self._options.n_batch, n_ctx)
        n_ubatch = min(self._options.n_ubatch, n_batch)
        options = replace(self._options, n_ctx=n_ctx, n_batch=n_batch, n_ubatch=n_ubatch)
        self._context = Context(self._model, options)
        return self._context

    def close(self) -> None:
        """Free the context. May be called again."""
        context, self._context = self._context, None
        if context:
            context.close()
