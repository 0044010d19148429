"""What a round drafts: tokens of the head, what followed earlier in the text, or nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..settings import Settings
from .depth import DepthController
from .drafter import Drafts
from .ngram import Match, NgramLookup


class DepthChoice(Protocol):
    """Chooses how many drafts the head makes in each round; see :class:`.DepthController`."""

    def choose(self, at_most: int | None = None, n_sequences: int = 1) -> int:
        """Drafts per sequence of the next round."""

    def update_pooled(
        self,
        n_drafted: int,
        outcomes: Sequence[tuple[int, int]],
        draft_s: float,
        total_s: float,
    ) -> None:
        """The outcome of the round."""


class DraftChoice:
    """Chooses before each round of one or several sequences, and learns from its outcome.

    Attributes:
        depths: chooses the depth; None: it is fixed.
        lookups: the texts by sequence, for drafts from them; empty: the head's only. Used beside a
            DepthController, which knows what they are worth, and by a sequence that is alone.
    """

    def __init__(self, settings: Settings, n_sequences: int = 1, head: bool = True) -> None:
        """Args:
        head: there is an MTP head; False: drafts come from the text only.
        """
        self._head = head
        self.depths: DepthChoice | None = None
        self.lookups: list[NgramLookup] = []
        self._match: Match | None = None
        if settings.draft_n_max == "auto":
            self.depths = DepthController(settings.depth_limit)
            if settings.ngram and settings.synthetic_acceptance is None:
                self.lookups = [NgramLookup(settings.depth_limit) for _ in range(n_sequences)]

    @property
    def plain_s(self) -> float | None:
        """Seconds of a plain step of one sequence; None: not measured."""
        costs = self.depths.costs() if isinstance(self.depths, DepthController) else None
        return costs.plain if costs else None

    def begin(self, seq: int, prompt: Sequence[int]) -> None:
        """What is drafted from here on for a sequence follows `prompt`."""
        if self.lookups:
            self.lookups[seq].begin(prompt)

    def look_up(self, newest: Sequence[tuple[int, int]], at_most: int) -> list[int]:
        """Drafts for what follows the newest token of a sequence that is alone, from its text, if
        they promise more than the head's; empty: ask for :meth:`depth`.

        Args:
            newest: (sequence, newest token) of all that are drafted for.
            at_most: no more than this many can be used; 0 where several sequences are in a round.
        """
        self._match = None
        if not self.lookups:
            return []
        for seq, token in newest:
            self.lookups[seq].add([token])
        if at_most < 1 or not isinstance(self.depths, DepthController):
            return []
        lookup = self.lookups[newest[0][0]]
        self._match = match = lookup.find()
        if not match:
            return []
        n = self.depths.lookup_depth(lookup.rates(match), at_most)
        return lookup.drafts(match, n)

    def depth(self, n_sequences: int, usable: int, room: int) -> int:
        """How many tokens the head drafts for each of so many sequences.

        Args:
            usable: no more than this many can be accepted: the texts end.
            room: as many as there is room for. A fixed depth keeps to it while any draft is of
                use, so that the last rounds find their graphs.
        """
        if not self._head:
            return 0
        if self.depths:
            return self.depths.choose(usable, n_sequences)
        return room if usable > 0 else 0

    def learn(
        self,
        drafts: Drafts,
        outcomes: Sequence[tuple[int, int, Sequence[int]]],
        draft_s: float,
        total_s: float,
    ) -> None:
        """The outcome of the round.

        Args:
            drafts: of one of the sequences; each had equally many.
            outcomes: for each sequence its number, how many drafts it could have used, and what the
                target chose: the accepted drafts and one token more.
            draft_s: seconds of drafting.
            total_s: seconds of the whole round, drafting included.
        """
        n_drafted = len(drafts.tokens)
        if drafts.forced and len(outcomes) == 1:
            pass  # it says nothing of the head, nor what rows with logits cost
        elif drafts.looked_up and isinstance(self.depths, DepthController):
            n_accepted = len(outcomes[0][2]) - 1
            self.depths.update_lookup(n_drafted, n_accepted, total_s)
        elif self.depths:
            held = [(usable, len(tokens) - 1) for _, usable, tokens in outcomes]
            self.depths.update_pooled(n_drafted, held, draft_s, total_s)
        if self.lookups:
            for seq, _, tokens in outcomes:
                if self._match:
                    self.lookups[seq].learn(self._match, tokens)
                self.lookups[seq].add(tokens[:-1])  # the last one comes with the next round
