"""Contexts that record the graph nodes of each decode, by llama.cpp's evaluation callback; nothing
is computed differently."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pyllama_mtp import Model
from pyllama_mtp.llama import native
from pyllama_mtp.llama.context import Context
from pyllama_mtp.llama.contextoptions import ContextOptions

#: Nodes that one decode may have; a 64-layer model has about 4,000 per graph.
CAPACITY = 200_000


@dataclass(frozen=True)
class Node:
    """A graph node: llama.cpp's name, such as "mtp_attn_out-6", ggml's operation, such as
    "MUL_MAT", and shape, columns first."""

    name: str
    op: str
    shape: tuple[int, int, int, int]

    @property
    def rows(self) -> int:
        """Tokens, in a two-dimensional tensor."""
        return self.shape[1]


@dataclass(frozen=True)
class _Options(ContextOptions):
    record: Any = None

    def fill(self, lib: Any, params: Any) -> None:
        super().fill(lib, params)
        params.cb_eval, params.cb_eval_user_data = lib.pyllama_trace_node, self.record


class Traced(Context):
    def __init__(self, model: Model, options: ContextOptions, target: Context | None = None):
        ffi = native.load().ffi
        self._nodes = ffi.new("struct pyllama_node[]", CAPACITY)
        places = {"node": self._nodes, "capacity": CAPACITY}
        self._record = ffi.new("struct pyllama_trace *", places)
        super().__init__(model, _Options(**vars(options), record=self._record), target)

    def _decode(self, *arguments: Any) -> None:
        self._record.n = 0
        super()._decode(*arguments)

    def nodes(self) -> list[Node]:
        """Those of the last decode, and of drafts after it, in order."""
        n, text = self._record.n, self.library.text
        assert n <= CAPACITY
        return [Node(text(one.name), text(one.op), tuple(one.ne)) for one in self._nodes[0:n]]
