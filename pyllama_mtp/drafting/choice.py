"""What a round drafts: the head's tokens, n-gram drafts, or nothing."""

from __future__ import annotations

from collections.abc import Sequence

from ..settings import Settings
from .depth import DepthController
from .drafter import Drafts
from .ngram import Match, NgramLookup


class DraftChoice:
    """Chooses before each round of one or several sequences, and learns from its outcome.

    Attributes:
        depths: chooses the depth; None: the depth is fixed.
        lookups: the texts by sequence, for n-gram drafts, which a lone sequence uses; empty: no
            n-gram drafts.
    """

    def __init__(
        self, settings: Settings, depth: int, n_sequences: int = 1, head: bool = True
    ) -> None:
        """Args:
        depth: most drafts per round.
        head: there is an MTP head; False: n-gram drafts only.
        """
        self._head = head
        self.depths: DepthController | None = None
        self.lookups: list[NgramLookup] = []
        self._match: Match | None = None
        if settings.draft_n_max == "auto":
            self.depths = DepthController(depth)
            if settings.ngram and settings.synthetic_acceptance is None:
                self.lookups = [NgramLookup(depth) for _ in range(n_sequences)]

    @property
    def plain_s(self) -> float | None:
        """Seconds of a plain step of one sequence; None: not measured."""
        costs = self.depths.costs() if self.depths else None
        return costs.plain if costs else None

    def begin(self, seq: int, prompt: Sequence[int]) -> None:
        """Begin a sequence's text with `prompt`."""
        if self.lookups:
            self.lookups[seq].begin(prompt)

    def look_up(self, newest: Sequence[tuple[int, int]], at_most: int) -> list[int]:
        """N-gram drafts after the newest token of a lone sequence, if they promise more than the
        head's; empty: ask for :meth:`depth`.

        Args:
            newest: (sequence, newest token) of all sequences that are drafted for.
            at_most: most drafts that can be used; 0 for a round of several sequences.
        """
        self._match = None
        if not self.lookups:
            return []
        for seq, token in newest:
            self.lookups[seq].add([token])
        if at_most < 1 or not (self.depths and self.depths.looks_up):
            return []
        lookup = self.lookups[newest[0][0]]
        self._match = match = lookup.find()
        if not match:
            return []
        n = self.depths.lookup_depth(lookup.rates(match), at_most)
        return lookup.drafts(match, n)

    def depth(self, n_sequences: int, usable: int, room: int) -> int:
        """How many tokens the head drafts for each of `n_sequences`.

        Args:
            usable: most drafts that can be accepted before the texts end.
            room: most drafts that the contexts have room for. A fixed depth drafts as many while
                any draft is usable, so that the last rounds find their graphs.
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
            drafts: of one of the sequences; all had equally many.
            outcomes: for each sequence its number, how many drafts it could use, and the target's
                choice: the accepted drafts and one token more.
            draft_s: seconds of drafting.
            total_s: seconds of the whole round, drafting included.
        """
        n_drafted, held = len(drafts.tokens), [(n, len(tokens) - 1) for _, n, tokens in outcomes]
        # A forced round says nothing of the head, nor of the cost of output rows.
        forced = drafts.forced and len(outcomes) == 1
        if self.depths and drafts.looked_up:
            self.depths.update_lookup(n_drafted, held[0][1], total_s)
        elif self.depths and not forced:
            self.depths.update(n_drafted, held, draft_s, total_s)
        if self.lookups:
            for seq, _, tokens in outcomes:
                if self._match:
                    self.lookups[seq].learn(self._match, tokens)
                self.lookups[seq].add(tokens[:-1])  # the last one comes with the next round
