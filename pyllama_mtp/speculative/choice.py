"""What a round drafts: tokens of the head, what followed earlier in the text, or nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..settings import Settings
from .depth import DepthController
from .drafter import Drafts
from .ngram import Match, NgramLookup


class DepthChoice(Protocol):
    """Chooses how many drafts the head makes in each round; see :class:`.depth.DepthController`."""

    def choose(self, at_most: int | None = None) -> int:
        """Drafts of the next round."""

    def update(self, n_drafted: int, n_accepted: int, draft_s: float, total_s: float) -> None:
        """The outcome of the round."""


class DraftChoice:
    """Chooses before each round, and learns from its outcome.

    Attributes:
        depths: chooses the depth; None: as many drafts as can be used.
        lookup: the text, for drafts from it; None: the head's only. Used beside a DepthController,
            which knows what they are worth.
    """

    def __init__(self, settings: Settings) -> None:
        self.depths: DepthChoice | None = None
        self.lookup: NgramLookup | None = None
        self._match: Match | None = None
        if settings.draft_n_max == "auto":
            self.depths = DepthController(settings.depth_limit)
            if settings.ngram and settings.synthetic_acceptance is None:
                self.lookup = NgramLookup(settings.depth_limit)

    def begin(self, prompt: Sequence[int]) -> None:
        """What is drafted from here on follows `prompt`."""
        if isinstance(self.depths, DepthController):
            self.depths.close_run()
        if self.lookup:
            self.lookup.begin(prompt)

    def look_up(self, token: int, at_most: int) -> list[int]:
        """Drafts for what follows `token`, the newest one, from the text, if they promise more than
        the head's; empty: ask for :meth:`depth`."""
        if not self.lookup:
            return []
        self.lookup.add([token])
        self._match = match = self.lookup.find()
        if not match or not isinstance(self.depths, DepthController):
            return []
        n = self.depths.lookup_depth(self.lookup.rates(match), at_most)
        return self.lookup.drafts(match, n)

    def depth(self, at_most: int) -> int:
        """How many tokens the head drafts."""
        return self.depths.choose(at_most) if self.depths else at_most

    def learn(self, drafts: Drafts, tokens: Sequence[int], draft_s: float, total_s: float) -> None:
        """The outcome of the round.

        Args:
            tokens: what the target chose: the accepted drafts and one token more.
            draft_s: seconds of drafting.
            total_s: seconds of the whole round, drafting included.
        """
        n_drafted, n_accepted = len(drafts.tokens), len(tokens) - 1
        if drafts.looked_up and isinstance(self.depths, DepthController):
            self.depths.update_lookup(n_drafted, n_accepted, total_s)
        elif self.depths:
            self.depths.update(n_drafted, n_accepted, draft_s, total_s)
        if self.lookup:
            if self._match:
                self.lookup.learn(self._match, tokens)
            self.lookup.add(tokens[:-1])  # the last one comes with the next round
