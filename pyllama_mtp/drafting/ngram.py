"""N-gram drafts: repeat what followed the same tokens earlier in the text.

Edits, code and tables repeat the prompt. Such drafts cost nothing to make; how often they hold is
learned for every length of match, whether they are used or not. Prompt lookup decoding (Saxena
2023).
"""

from __future__ import annotations

from dataclasses import dataclass

from ..sampling.acceptance import point
from ..sequence import Drafts, Sequence
from .depth import AcceptanceTracker
from .drafter import Drafter

#: Least length of a match, and the most tokens that are compared.
LEAST, MOST = 3, 16
#: Kinds of matches by length: the least length, and the first draft's acceptance before any outcome
#: was seen.
KINDS = ((LEAST, 0.3), (5, 0.5), (8, 0.7), (MOST, 0.8))


@dataclass(frozen=True)
class Match:
    """An earlier occurrence of the newest tokens.

    Attributes:
        follows: index in the text of the token after the occurrence.
        length: tokens that are the same, LEAST to MOST.
    """

    follows: int
    length: int


class NgramLookup:
    """The text, and where in it each run of LEAST tokens occurred last.

    Args:
        limit: most drafts per round.

    Attributes:
        tokens: the text so far, the newest token included.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}
        self._trusts = [AcceptanceTracker(limit, prior) for _, prior in KINDS]

    def begin(self, prompt: list[int]) -> None:
        """Begin a text with `prompt`; if it continues the last text, only the new part is read."""
        n = len(self.tokens)
        if self.tokens != list(prompt[:n]):
            self.tokens, self._after, n = [], {}, 0
        self.add(prompt[n:])

    def add(self, tokens: list[int]) -> None:
        """Continue the text with `tokens`."""
        text, after = self.tokens, self._after
        for token in tokens:
            if len(text) >= LEAST:
                after[tuple(text[-LEAST:])] = len(text)
            text.append(token)

    def find(self) -> Match | None:
        """The last earlier occurrence of the newest tokens, or None."""
        text = self.tokens
        follows = self._after.get(tuple(text[-LEAST:]))
        if follows is None:
            return None
        length = LEAST
        while length < min(MOST, follows) and text[follows - 1 - length] == text[-1 - length]:
            length += 1
        return Match(follows, length)

    def drafts(self, match: Match, n: int) -> list[int]:
        """`n` tokens from after the match. At the end of the text, the drafts themselves go on: a
        loop is drafted for as long as it lasts."""
        text, out = self.tokens, list[int]()
        for i in range(match.follows, match.follows + n):
            out.append(text[i] if i < len(text) else out[i - len(text)])
        return out

    def rates(self, match: Match) -> list[float]:
        """[limit] conditional acceptance per position of drafts after this match."""
        return self._trust(match).rates()

    def learn(self, match: Match, actual: list[int]) -> None:
        """Compare the match's drafts with `actual`, the model's tokens after the newest token: at
        least one, not in the text yet."""
        drafts = self.drafts(match, min(len(actual), self.limit))
        n_held = next(
            (i for i, (a, b) in enumerate(zip(drafts, actual, strict=False)) if a != b), len(drafts)
        )
        self._trust(match).update(len(drafts), n_held)

    def _trust(self, match: Match) -> AcceptanceTracker:
        kind = max(i for i, (least, _) in enumerate(KINDS) if match.length >= least)
        return self._trusts[kind]


class NgramDrafter(Drafter):
    """N-gram drafts for a sequence that is alone in its round.

    Attributes:
        texts: by sequence.
    """

    def __init__(self, limit: int, n_sequences: int) -> None:
        self.texts = [NgramLookup(limit) for _ in range(n_sequences)]
        self._match: Match | None = None

    def reset(self, sequence: Sequence) -> None:
        """See :meth:`.Drafter.reset`: a round may have broken off."""
        self._match = None

    def begin(self, sequence: Sequence) -> None:
        """See :meth:`.Drafter.begin`."""
        self.texts[sequence.id].begin([*sequence.request.text, *sequence.chosen])

    def rates(self, sequence: Sequence) -> list[float]:
        """Conditional acceptance, per position, of the drafts that there are; empty: none."""
        text = self.texts[sequence.id]
        self._match = text.find()
        return text.rates(self._match) if self._match else []

    def draft(self, sequences: list[Sequence], n_max: int, p_min: float = 0.0) -> list[Drafts]:
        """`n_max` drafts after the match that :meth:`rates` has found, which has no probability."""
        (one,) = sequences
        assert self._match
        tokens = self.texts[one.id].drafts(self._match, n_max)
        return [Drafts(tokens, [point(t) for t in tokens] if one.draws else [], looked_up=True)]

    def accepted(self, sequences: list[Sequence]) -> None:
        """See :meth:`.Drafter.accepted`. Learn from the match, whether it was drafted or not."""
        for one in sequences:
            text = self.texts[one.id]
            if self._match:
                text.learn(self._match, one.chosen)
            text.add(one.chosen)
        self._match = None
