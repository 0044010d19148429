"""The interface of drafters: what guesses how sequences go on.

The MTP head in the target's context (:mod:`.head`), the head in a context of its own
(:mod:`.upstream`), and what followed the same words earlier (:mod:`.ngram`). :mod:`.choice` says
whose drafts a round has, how many, and which tokens a grammar forces.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..llama.batch import Floats
from ..sequence import NO_DRAFTS, Drafts, Sequence

if TYPE_CHECKING:
    from ..llama.context import Context
    from .headrows import Heads


class Drafter:
    """Drafts nothing, and has nothing to keep in step.

    Attributes:
        context: where drafts are computed; None: nowhere.
        contexts: those beside the target's.
        p_min: see :class:`.Settings`.
        heads: the rows of the LM head that drafts come from, if they can be chosen.
        n_blocks: MTP blocks in use of a head in a context of its own, of as many as there are
            drafts; 1: one for all drafts; 0: no such context.
    """

    context: Context | None = None
    contexts: tuple[Context, ...] = ()
    p_min = 0.0
    heads: Heads | None = None
    n_blocks = 0

    def begin(self, sequence: Sequence) -> None:
        """The prompt of a sequence is processed: it is drafted for from now on."""

    def draft(self, sequences: list[Sequence], n_max: int) -> list[Drafts]:
        """Up to `n_max` drafts, at least 1, of what follows the newest token of each sequence."""
        return [NO_DRAFTS for _ in sequences]

    def decoded(self, sequences: list[Sequence], kept: list[int]) -> None:
        """The target has just decoded `batch` of each sequence. The first `kept` tokens of it, at
        least 1, are text, and the rest was rejected."""

    def accepted(self, sequences: list[Sequence]) -> None:
        """The texts go on with `chosen` of each sequence."""

    # -- the cache of a sequence, beside the target's ------------------------------------------

    def check_images(self) -> None:
        """Raise UsageError unless the drafter can go on after an image."""

    def reset(self, sequence: Sequence) -> None:
        """Forget a sequence."""

    def reach(self, sequence: Sequence, n_past: int) -> tuple[int, int]:
        """How drafting can go on in a text of which the target holds `n_past` positions.

        Returns:
            The positions that can be kept, at most `n_past`, and where the target must go on.
        """
        return n_past, n_past

    def go_back(self, sequence: Sequence, n_past: int, carry: Floats | None = None) -> None:
        """Keep at most the positions below `n_past`; `carry` is the state of the last one, if a
        checkpoint has it."""

    def save(self, sequence: Sequence) -> tuple[bytearray | None, int, Floats | None]:
        """What :meth:`load` needs, for a file: the cache, the positions in it, [n_embd] float32."""
        return None, 0, None

    def load(
        self, sequence: Sequence, state: bytes | bytearray, n_past: int, carry: Floats | None
    ) -> None:
        """Put back what :meth:`save` gave."""
