"""What goes into a decode, and an output row that was kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import UsageError

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]
State = bytes | bytearray | memoryview  # of a sequence, or of its recurrent layers
SEQ = 0  # the sequence of a driver that has one


@dataclass(eq=False)
class Batch:
    """Tokens of any sequences. Raises UsageError: arrays of different lengths.

    Attributes:
        tokens, positions, seqs: [n] int32: ids, positions, sequence ids. A sequence's positions
            continue those in its cache. Of an image with M-RoPE, positions are [n, 4].
        outputs: [n] int8, 1 where an output row (logits) is wanted.
        hidden: [n, n_embd] float32, for a context of the MTP block only: the state that pairs with
            each token.
        rows: [n, n_embd] float32 embeddings of an image, in place of the tokens, which are ignored.
    """

    tokens: Ints
    positions: Ints
    seqs: Ints
    outputs: npt.NDArray[np.int8]
    hidden: Floats | None = None
    rows: Floats | None = None

    def __post_init__(self) -> None:
        self.tokens = np.ascontiguousarray(self.tokens, dtype=np.int32)
        self.positions = np.ascontiguousarray(self.positions, dtype=np.int32)
        self.seqs = np.ascontiguousarray(self.seqs, dtype=np.int32)
        self.outputs = np.ascontiguousarray(self.outputs, dtype=np.int8)
        if self.hidden is not None:
            self.hidden = np.ascontiguousarray(self.hidden, dtype=np.float32)
        if self.rows is not None:
            self.rows = np.ascontiguousarray(self.rows, dtype=np.float32)
        n, places, seqs = len(self.tokens), len(self.positions), len(self.seqs)
        if not places == seqs == n:
            raise UsageError(f"{places} positions and {seqs} sequences for {n} tokens")
        if self.outputs.shape != (n,):
            raise UsageError(f"{self.outputs.shape} output marks for {n} tokens")

    def view(self, ffi: Any, n_embd: int) -> tuple[Any, list[Any]]:
        """A ``struct pyllama_batch`` on these arrays, and objects that must outlive it."""
        view = ffi.new("struct pyllama_batch *")

        def pointer(kind: str, array: npt.NDArray[Any]) -> Any:
            alive.append(ffi.from_buffer(kind, array))
            return alive[-1]

        alive: list[Any] = [self]
        view.n_tokens, view.n_embd = len(self.tokens), n_embd
        view.token = pointer("int32_t[]", self.tokens)
        view.pos = pointer("int32_t[]", self.positions)
        if self.rows is not None:
            view.n_pos = self.positions.size // len(self.positions)
            view.embd = pointer("float[]", self.rows)
            view.n_embd_inp = self.rows.shape[1]
        view.seq_id = pointer("int32_t[]", self.seqs)
        view.output = pointer("int8_t[]", self.outputs)
        if self.hidden is not None:
            view.hidden = pointer("float[]", self.hidden)
        return view, alive


@dataclass(frozen=True, eq=False)
class KeptRow:
    """An output row after its decode, in place of the context, for samplers to choose from again.

    It has what the decode left: the best token, some best tokens with their logits, or all logits.

    Attributes:
        best: the best token; None: all logits are there.
        ids: [n] int32: some best tokens, the best one first.
        values: [n] float32: their logits; without `ids`, the logits of all tokens.
    """

    best: int | None = None
    ids: Ints | None = None
    values: Floats | None = None

    @property
    def n_candidates(self) -> int:
        """How many best tokens are there."""
        return 0 if self.ids is None else len(self.ids)

    @property
    def n_bytes(self) -> int:
        """Bytes that it takes."""
        return sum(one.nbytes for one in (self.ids, self.values) if one is not None)

    def serves(self, few: bool, n_candidates: int) -> bool:
        """Whether it has what a sampler needs: the best token or so many (`few`), or all logits."""
        return self.best is None or (few and self.n_candidates >= n_candidates)

    def argmax(self, row: int = 0) -> int:
        """See :meth:`.Context.argmax`."""
        return int(self.logits().argmax()) if self.best is None else self.best

    def check_finite(self, row: int = 0) -> None:
        """See :meth:`.Context.check_finite`: it was checked when it was kept."""

    def logits(self, row: int = 0) -> Floats:
        """See :meth:`.Context.logits`."""
        assert self.values is not None
        return self.values

    def candidates(self, row: int = 0) -> tuple[Ints, Floats]:
        """See :meth:`.Context.candidates`."""
        assert self.ids is not None
        return self.ids, self.logits()
