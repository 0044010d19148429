"""The graph nodes of a decode, by name, operation and shape; and what nodes cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import UsageError

if TYPE_CHECKING:
    from .native import Library

#: Nodes that one decode may have; a 64-layer model has about 4,000 per graph.
CAPACITY = 200_000
#: Different costs that a :class:`NodeTimes` may have; a mixture of experts has about 100.
COSTS = 2000


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
    """Records nodes by llama.cpp's evaluation callback; nothing is computed differently."""

    def __init__(self, library: Library) -> None:
        ffi = library.ffi
        self._text = library.text
        self._nodes = ffi.new("struct pyllama_node[]", CAPACITY)
        self.data = ffi.new("struct pyllama_trace *", {"node": self._nodes, "capacity": CAPACITY})
        self.callback = library.lib.pyllama_trace_node

    def clear(self) -> None:
        """Forget the recorded nodes."""
        self.data.n = 0

    def nodes(self) -> list[Node]:
        """The nodes. Raises UsageError if there were too many to record."""
        if self.data.n > CAPACITY:
            raise UsageError(f"{self.data.n} graph nodes in one decode; {CAPACITY} can be recorded")
        return [
            Node(self._text(n.name), self._text(n.op), tuple(n.ne))
            for n in self._nodes[0 : self.data.n]
        ]


@dataclass(frozen=True)
class Cost:
    """The cost of nodes of one kind.

    Attributes:
        op: ggml's operation, such as "MUL_MAT".
        tensor: the weights that they read, without the layer ("ffn_up.weight"); without weights,
            llama.cpp's name of the node ("conv_input"), or "".
        n: nodes.
        s: seconds.
    """

    op: str
    tensor: str
    n: int
    s: float


class NodeTimes:
    """Adds up the costs of nodes between :meth:`start` and :meth:`stop`; each node is then computed
    by itself.

    For contexts that are made with it; see :attr:`.ContextOptions.times`. One thread at a time.
    """

    def __init__(self, library: Library) -> None:
        ffi = library.ffi
        self._text = library.text
        self._costs = ffi.new("struct pyllama_cost[]", COSTS)
        self.data = ffi.new("struct pyllama_times *", {"cost": self._costs, "capacity": COSTS})
        self.callback = library.lib.pyllama_time_node

    def start(self) -> None:
        """Begin to measure, from zero."""
        self.data.n, self.data.on = 0, True

    def stop(self) -> list[Cost]:
        """Stop, and return the costs. Raises UsageError if there are too many kinds of nodes."""
        self.data.on = False
        if self.data.n > COSTS:
            raise UsageError(f"{self.data.n} kinds of graph nodes; {COSTS} can be measured")
        return [
            Cost(self._text(c.op), self._text(c.name), c.n, c.ns / 1e9)
            for c in self._costs[0 : self.data.n]
        ]
