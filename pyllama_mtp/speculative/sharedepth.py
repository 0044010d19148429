"""One draft depth per round for all live sequences. Pure; no library.

A round of n sequences at depth d verifies n * (d + 1) rows, so what a depth costs depends on n, and
the depth that pays falls with it: where one sequence leaves a machine waiting for memory, many keep
it computing, and a rejected row is no longer free. Hence a controller for every n. How often drafts
are accepted is the text's and the head's doing, and is known to all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from .costs import Costs
from .depth import AcceptanceTracker, DepthController


class SharedDepth:
    """Chooses the depth of each round, by the number of sequences in it.

    Args:
        limit: greatest depth.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._trackers = AcceptanceTracker(limit), AcceptanceTracker(limit, rate=1.0)
        self._by_count: dict[int, DepthController] = {}
        self._last: DepthController | None = None

    def choose(self, n_sequences: int, at_most: int | None = None) -> int:
        """Drafts per sequence in the next round of so many sequences, 0 to `limit`.

        Args:
            at_most: no more than this many can be used.
        """
        return self.controller(n_sequences).choose(at_most)

    def controller(self, n_sequences: int) -> DepthController:
        """What chooses for the next round, which has so many sequences."""
        controller = self._controller(n_sequences)
        if self._last is not None and self._last is not controller:
            self._last.close_run()
        self._last = controller
        return controller

    def close_run(self) -> None:
        """What follows is not what was decided on: another text, or other rounds in between."""
        if self._last is not None:
            self._last.close_run()

    def update(
        self,
        n_sequences: int,
        n_drafted: int,
        outcomes: Sequence[tuple[int, int]],
        draft_s: float,
        total_s: float,
    ) -> None:
        """The outcome of the round that was chosen last.

        Args:
            n_drafted: drafts verified of each sequence.
            outcomes, draft_s, total_s: see :meth:`.depth.DepthController.update_pooled`.
        """
        self._controller(n_sequences).update_pooled(n_drafted, outcomes, draft_s, total_s)

    def costs(self, n_sequences: int) -> Costs | None:
        """Costs of rounds of so many sequences, as now believed; None while nothing is known."""
        found = self._by_count.get(n_sequences)
        return found.costs if found else None

    def _controller(self, n_sequences: int) -> DepthController:
        if n_sequences not in self._by_count:
            self._by_count[n_sequences] = DepthController(self.limit, trackers=self._trackers)
        return self._by_count[n_sequences]
