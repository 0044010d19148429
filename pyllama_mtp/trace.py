"""What a decode computes: the nodes of its graph, by name, operation and shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .errors import UsageError

if TYPE_CHECKING:
    from .native import Library

#: Nodes that one decode may have; a 64-layer model has about 4,000 per graph.
CAPACITY = 200_000


@dataclass(frozen=True)
class Node:
    """A graph node.

    Attributes:
        name: llama.cpp's name for it, such as "result_output" or "mtp_attn_out-6".
        op: ggml's operation, such as "MUL_MAT".
        shape: ggml's order: columns first, then rows.
    """

    name: str
    op: str
    shape: tuple[int, int, int, int]

    @property
    def rows(self) -> int:
        """The second dimension: tokens, in a two-dimensional tensor."""
        return self.shape[1]


class Trace:
    """Records nodes by llama.cpp's evaluation callback, which only looks at the graph."""

    def __init__(self, library: Library) -> None:
        ffi = library.ffi
        self._text = library.text
        self._nodes = ffi.new("struct pyllama_node[]", CAPACITY)
        self.data = ffi.new("struct pyllama_trace *", {"node": self._nodes, "capacity": CAPACITY})
        self.callback = library.lib.pyllama_trace_node

    def clear(self) -> None:
        """Forget what was recorded."""
        self.data.n = 0

    def nodes(self) -> list[Node]:
        """Raises UsageError when there were too many to record."""
        if self.data.n > CAPACITY:
            raise UsageError(f"{self.data.n} graph nodes in one decode; {CAPACITY} can be recorded")
        return [
            Node(self._text(n.name), self._text(n.op), tuple(n.ne))
            for n in self._nodes[0 : self.data.n]
        ]
