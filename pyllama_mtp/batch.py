"""What one decode call is given, checked before llama.cpp sees it, and what its codes mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from . import native
from .errors import (
    DecodeAborted,
    FatalDecodeError,
    InsufficientMemoryError,
    InvalidBatchError,
    NoKVSlotError,
    PyllamaMtpError,
    UsageError,
)
from .hidden import Floats, Hidden, HostRows, Ints, TapRows

if TYPE_CHECKING:
    from .context import Context


def decode_error(code: int, message: str) -> PyllamaMtpError:
    """The exception for a return code of ``llama_decode`` or of our shim (there is no other place).

    Args:
        code: non-zero; see ``llama_decode`` in llama.h and PYLLAMA_* in pyllama_shim.h.
        message: what the native side said about it, may be empty.
    """
    lib = native.load().lib
    why = f": {message}" if message else ""
    if code == 1:
        return NoKVSlotError(
            f"no room in the KV cache{why}. Use a longer n_ctx or a shorter prompt.", code
        )
    if code == 2:
        return DecodeAborted("the computation was interrupted", code)
    if code in (-1, lib.PYLLAMA_BATCH_REFUSED):
        return InvalidBatchError(f"llama.cpp refused the batch{why}", code)
    if code == lib.PYLLAMA_FORKED:
        return UsageError(
            f"{message}: use n_threads=1, a thread of its own, or start processes with spawn"
        )
    ran_out = code in (-2, lib.PYLLAMA_OUT_OF_MEMORY, lib.PYLLAMA_NO_ROOM)
    if ran_out or (code < -2 and native.short_of_memory(message)):
        return InsufficientMemoryError(
            f"out of memory{why}: use a smaller n_ctx, n_batch, n_ubatch or fewer threads"
        )
    return FatalDecodeError(f"decode failed with code {code}{why}", code)


@dataclass(eq=False)
class Batch:
    """Tokens of any sequences.

    Attributes:
        tokens, positions, seqs: [n] int32: ids, positions, sequence ids. Positions of a sequence
            follow on from what is in its cache.
        outputs: [n] int8, 1 where an output row (logits) is wanted.
        hidden: n rows, or [n, n_embd] float32, for a draft context only: the state that pairs with
            each token.
        chain: draft in one graph: the entries are that many steps, one after the other, each the
            same sequences again at the next position. Tokens and hidden rows of the first step
            count. 0: no chain. Draft contexts that keep greedy tokens only.
    """

    tokens: Ints
    positions: Ints
    seqs: Ints
    outputs: npt.NDArray[np.int8]
    hidden: Hidden | Floats | None = None
    chain: int = 0

    def __post_init__(self) -> None:
        for name in ("tokens", "positions", "seqs"):
            setattr(self, name, np.ascontiguousarray(getattr(self, name), dtype=np.int32))
        self.outputs = np.ascontiguousarray(self.outputs, dtype=np.int8)
        if isinstance(self.hidden, np.ndarray):
            self.hidden = HostRows(self.hidden)
        if isinstance(self.hidden, HostRows):
            self.hidden = HostRows(np.ascontiguousarray(self.hidden.data, dtype=np.float32))

    def check(self, context: Context) -> None:
        """Refuse everything that would be a GGML_ASSERT, and end the interpreter, further down.

        Raises:
            UsageError: what does not fit `context`, and what would.
        """
        n, options = len(self.tokens), context.options
        # Lists: for the few tokens of a round their minimum costs a tenth of what numpy's does.
        positions, seqs = self.positions.tolist(), self.seqs.tolist()
        if not 1 <= n <= context.n_batch:
            raise UsageError(
                f"a batch of {n} tokens; it must hold 1 to n_batch = {context.n_batch}"
            )
        if not len(positions) == len(seqs) == n:
            raise UsageError(f"{len(positions)} positions and {len(seqs)} sequences for {n} tokens")
        first, last = min(positions), max(positions)
        if first < 0 or last >= context.n_ctx:
            raise UsageError(
                f"positions {first} to {last} do not fit a context of {context.n_ctx} tokens"
            )
        if min(seqs) < 0 or max(seqs) >= options.n_seq_max:
            raise UsageError(
                f"sequences {min(seqs)} to {max(seqs)}; the context was made for "
                f"{options.n_seq_max}"
            )
        if not options.mtp_head:
            # llama.cpp warns only, for M-RoPE models; for a draft context the Drafter sees to it.
            for seq in set(seqs):
                start = min(at for at, of in zip(positions, seqs, strict=True) if of == seq)
                if start > context.past(seq):
                    raise UsageError(
                        f"a batch at position {start}; the cache ends at {context.past(seq)}"
                    )
        context.model.check_tokens(self.tokens)
        if self.outputs.shape != (n,):
            raise UsageError(f"{self.outputs.shape} output marks for {n} tokens")
        rows = int(np.count_nonzero(self.outputs))
        if rows > options.n_outputs_max:
            raise UsageError(
                f"{rows} output rows; this context was made for {options.n_outputs_max}"
            )
        self._check_hidden(context)
        if self.chain:
            self._check_chain(context)

    def _check_hidden(self, context: Context) -> None:
        hidden, shape = self.hidden, (len(self.tokens), context.model.n_embd)
        if context.options.mtp_head != (hidden is not None):
            raise UsageError("hidden rows belong to a draft context, and to every batch of one")
        if isinstance(hidden, HostRows) and hidden.data.shape != shape:
            raise UsageError(f"hidden rows of shape {hidden.data.shape}, expected {shape}")
        if hidden is not None and len(hidden) != shape[0]:
            raise UsageError(f"{len(hidden)} hidden rows for {shape[0]} tokens")

    def _check_chain(self, context: Context) -> None:
        n = len(self.tokens)
        if not (context.options.mtp_head and context.greedy) or context.options.tap != "off":
            raise UsageError(
                "a chain belongs to a draft context that keeps greedy tokens, and no hidden rows "
                "on the host"
            )
        if self.chain < 0 or n % self.chain or not self.outputs.all() or n > context.n_ubatch:
            raise UsageError(
                f"{n} tokens in a chain of {self.chain} steps: a chain is whole steps, every entry "
                f"an output, and at most n_ubatch = {context.n_ubatch} of them"
            )

    def view(self, context: Context) -> tuple[Any, list[Any]]:
        """A ``struct pyllama_batch`` on these arrays, and what must stay alive beside it."""
        ffi = context.library.ffi
        view = ffi.new("struct pyllama_batch *")

        def pointer(kind: str, array: npt.NDArray[Any]) -> Any:
            alive.append(ffi.from_buffer(kind, array))
            return alive[-1]

        alive: list[Any] = [self]
        view.n_tokens, view.n_embd = len(self.tokens), context.model.n_embd
        view.n_chain = self.chain
        view.token = pointer("int32_t[]", self.tokens)
        view.pos = pointer("int32_t[]", self.positions)
        view.seq_id = pointer("int32_t[]", self.seqs)
        view.output = pointer("int8_t[]", self.outputs)
        if isinstance(self.hidden, HostRows):
            view.hidden = pointer("float[]", self.hidden.data)
        elif isinstance(self.hidden, TapRows):
            view.hidden_ctx = self.hidden.tap.context.handle
            view.hidden_row = pointer("int32_t[]", self.hidden.index)
        return view, alive
