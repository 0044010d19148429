"""A draft vocabulary that follows the text.

A draft vocabulary is the best part of a ranking, and no ranking knows the present text: tokens of
names, of another language or of code may be missing, and are then never drafted. So tokens of the
text that the vocabulary lacks take the rows of its least likely tokens, in place. The text does not
change: the model verifies over its whole vocabulary.

The clock algorithm, as for pages of memory (Corbato 1969), decides which rows are replaced: a hand
goes round over the rows of the ranking's lower half, the least likely first, and takes the next row
whose token has not occurred since the hand last passed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from ..llama.context import Context
from ..llama.drafthead import DraftHead, replace_draft_rows
from ..models.draftvocab import Ids
from ..settings import Settings
from ..telemetry import Telemetry

#: Most rows that are replaced for a prompt, and after a round. On the 0.8B shape a row takes 2 us
#: as it is in the file, 10 us in q4_0 and 70 us in q4_k.
MOST_PER_PROMPT, MOST_PER_ROUND = 1024, 16


def follows(settings: Settings, head: DraftHead) -> bool:
    """Whether a draft head follows the text."""
    # Text at imposed acceptance means nothing. Draws from a head depend on its rows, and so on the
    # past, on which the text of a seed must not depend.
    means_nothing = settings.synthetic_acceptance is not None or settings.draft_sampling
    return settings.draft_follow and head.ranked is not None and not means_nothing


class Following:
    """Has the draft head of a context follow the text of all its sequences together."""

    def __init__(self, context: Context, head: DraftHead) -> None:
        """Args:
        head: the present head of `context`; with `file` and `ranked`.
        """
        assert head.file and head.ranked is not None
        self._context, self._file = context, head.file
        n = len(head.ids)
        self._slots = np.full(context.model.n_vocab, -1, dtype=np.int32)
        self._slots[head.ids] = np.arange(n)
        self._loose: list[int] = self._slots[head.ranked[: n // 2 - 1 : -1]].tolist()
        self._hand = 0
        self._used = np.zeros(n, dtype=bool)  # by slot: its token has occurred since the hand

    def see(self, tokens: Sequence[int], telemetries: Sequence[Telemetry], prompt: bool) -> None:
        """Continue the text.

        Args:
            telemetries: count the tokens.
            prompt: the tokens are a prompt's, not the target's choice in a round.
        """
        began = time.perf_counter()
        ids = np.asarray(tokens, dtype=np.int32)
        slots = self._slots[ids]
        outside = ids[slots < 0]
        self._used[slots[slots >= 0]] = True
        most = min(MOST_PER_PROMPT if prompt else MOST_PER_ROUND, len(self._loose))
        wanted = _most_frequent(outside, most) if len(outside) else outside
        if len(wanted):
            self._replace(wanted)
        seconds = time.perf_counter() - began
        for telemetry in telemetries:
            count = telemetry.draft_vocab
            if not prompt:
                count["tokens"] += len(ids)
                count["outside"] += len(outside)
            count["replaced"] += len(wanted)
            count["seconds"] += seconds

    def _replace(self, ids: Ids) -> None:
        """Give these tokens, which have no rows, the rows of other tokens."""
        slots = np.array([self._next_slot() for _ in ids], dtype=np.int32)
        assert self._context.draft_ids is not None
        dropped = self._context.draft_ids[slots]
        replace_draft_rows(self._context, slots, ids, self._file.rows(ids))
        self._slots[dropped] = -1
        self._slots[ids] = slots

    def _next_slot(self) -> int:
        """The next row to replace; it counts as used."""
        while True:
            slot = self._loose[self._hand]
            self._hand = (self._hand + 1) % len(self._loose)
            if not self._used[slot]:
                self._used[slot] = True
                return slot
            self._used[slot] = False


def _most_frequent(ids: Ids, most: int) -> Ids:
    """Up to `most` different ids: the most frequent; of equals, the ids that occurred last."""
    found, last, counts = np.unique(ids[::-1], return_index=True, return_counts=True)
    return found[np.lexsort((last, -counts))][:most]
