"""N-gram drafts: repeat what followed the same tokens earlier, in this text or in a past one.

Edits, code and tables repeat the prompt. Such drafts cost nothing to make; how often they hold is
learned for every length of match, whether they are used or not. Prompt lookup decoding (Saxena
2023). A long match is followed for as long as it holds, though the newest tokens may have come
again since. Where an edit ends it, the copy goes on near the place that it left.
"""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import dataclass

from ..sampling.acceptance import point
from ..sequence import NO_DRAFTS, Drafts, Sequence, common_prefix
from .depth import AcceptanceTracker
from .drafter import Drafter

#: Least length of a match, and the most tokens that are compared.
LEAST, MOST = 3, 16
#: A match that was followed for so long is a copy.
COPY = 32
#: Kinds of matches by length: the least length, and the first draft's acceptance before any outcome
#: was seen. Those shorter than LEAST are near the place where a copy was left.
KINDS = ((1, 0.3), (2, 0.5), (LEAST, 0.3), (5, 0.5), (8, 0.7), (MOST, 0.8))
#: How far from that place a copy may go on, and for how many tokens it is looked for.
NEAR = 64
#: Tokens of past texts that are kept, at least; twice as many at most.
PAST = 32768
#: Between past texts.
END = -1


@dataclass(frozen=True)
class Match:
    """An earlier occurrence of the newest tokens.

    Attributes:
        follows: index, in its text, of the token after the occurrence.
        length: tokens that are the same, 1 to MOST; more where it was followed.
        past: it is in the past texts.
    """

    follows: int
    length: int
    past: bool = False


def same_at_end(text: list[int], end: int, newest: list[int]) -> int:
    """How many of the newest tokens stand in the text before `end`."""
    n, most = 0, min(end, len(newest))
    while n < most and text[end - 1 - n] == newest[-1 - n]:
        n += 1
    return n


class Index:
    """A text, and where in it each run of LEAST tokens occurred last.

    Attributes:
        tokens: the text.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget the text."""
        self.tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}

    def add(self, tokens: list[int]) -> None:
        """Continue the text with `tokens`."""
        text, after = self.tokens, self._after
        for token in tokens:
            if len(text) >= LEAST and token != END:
                after[tuple(text[-LEAST:])] = len(text)
            text.append(token)

    def after(self, newest: list[int]) -> int | None:
        """The index after the last occurrence of the last LEAST of these tokens."""
        return self._after.get(tuple(newest[-LEAST:]))


class PastTexts(Index):
    """Texts that were left, one after the other, with END between them."""

    def keep(self, text: list[int]) -> None:
        """Add a text; the oldest are forgotten."""
        self.add([END, *text[-PAST:]])
        if len(self.tokens) > 2 * PAST:
            kept = self.tokens[-PAST:]
            self.clear()
            self.add(kept)


class NgramLookup(Index):
    """The text of a sequence, and the drafts that it and the past texts give.

    Args:
        limit: most drafts per round.
        past: texts that were left, also by other sequences.

    Attributes:
        tokens: the text so far, the newest token included.
    """

    def __init__(self, limit: int, past: PastTexts | None = None) -> None:
        super().__init__()
        self.limit, self.past = limit, PastTexts() if past is None else past
        self._match: Match | None = None  # what the text follows now
        self._left: Match | None = None  # the last copy that an edit ended, and where that was
        self._left_at = 0
        self._trusts = {
            (least, past): AcceptanceTracker(limit, prior / 2 if past else prior)
            for least, prior in KINDS
            for past in (False, True)
        }

    def begin(self, prompt: list[int]) -> None:
        """Begin a text with `prompt`; if it continues the last text, only the new part is read."""
        n = common_prefix(self.tokens, prompt)
        if n < len(self.tokens):
            self.past.keep(self.tokens[n:])
            self.clear()
        self._match = self._left = None
        self.add(prompt[len(self.tokens) :])

    def add(self, tokens: list[int]) -> None:
        """Continue the text with `tokens`."""
        super().add(tokens)
        before, self._match = self._match, self._followed(tokens)
        if before and before.length >= COPY and not self._match:
            n = common_prefix(self.drafts(before, len(tokens)), tokens)
            self._left = Match(before.follows + n, before.length, before.past)
            self._left_at = len(self.tokens)

    @property
    def copying(self) -> bool:
        """Whether the text is a copy, but for edits."""
        left = self._left is not None and len(self.tokens) - self._left_at < NEAR
        return left or (self._match is not None and self._match.length >= COPY)

    def find(self, drafts: Several[int] = ()) -> Match | None:
        """An earlier occurrence of the newest tokens, or None: the copy that goes on; the longest
        of those last in this text and near the place that a copy left; or that in past texts.

        Args:
            drafts: guesses, which are taken as the newest tokens of the text.
        """
        match, newest = self._followed(drafts), [*self.tokens[-MOST:], *drafts][-MOST:]
        if match is None or match.length < COPY:
            matches = filter(None, (self._last(newest, False), match, self._nearest(newest)))
            longest = max(matches, key=lambda one: one.length, default=None)
            match = longest or self._last(newest, True)
        if not drafts:
            self._match = match
        return match

    def _source(self, match: Match) -> list[int]:
        return self.past.tokens if match.past else self.tokens

    def _followed(self, tokens: Several[int]) -> Match | None:
        """What the text follows after these tokens, if it follows it still."""
        match, n = self._match, len(tokens)
        if match is None or self._source(match)[match.follows : match.follows + n] != list(tokens):
            return None
        return Match(match.follows + n, match.length + n, match.past)

    def _last(self, newest: list[int], past: bool) -> Match | None:
        index = self.past if past else self
        follows = index.after(newest)
        if follows is None:
            return None
        return Match(follows, same_at_end(index.tokens, follows, newest), past)

    def _nearest(self, newest: list[int]) -> Match | None:
        """Where the copy that was left may go on: after the newest tokens, LEAST of them or as many
        as there are, nearest to that place."""
        left = self._left
        if left is None or not self.copying:
            return None
        source = self._source(left)
        ends = range(max(1, left.follows - NEAR), min(len(source), left.follows + NEAR))

        def worth(end: int) -> tuple[int, int]:
            return same_at_end(source, end, newest[-LEAST:]), -abs(end - left.follows)

        end = max(ends, key=worth, default=0)
        length = same_at_end(source, end, newest)
        return Match(end, length, left.past) if length else None

    def drafts(self, match: Match, n: int, before: Several[int] = ()) -> list[int]:
        """`n` tokens from after the match, or those before the end of a past text. At the end of
        the present text, the drafts themselves go on: a loop is drafted for as long as it lasts.

        Args:
            before: drafts between the text and these.
        """
        if match.past:
            tokens = self.past.tokens[match.follows : match.follows + n]
            return tokens[: tokens.index(END)] if END in tokens else tokens
        text, out = self.tokens, [*before]
        for i in range(match.follows, match.follows + n):
            out.append(text[i] if i < len(text) else out[i - len(text)])
        return out[len(before) :]

    def rates(self, match: Match) -> list[float]:
        """Conditional acceptance per position of the drafts after this match, at most [limit]."""
        n = len(self.drafts(match, self.limit)) if match.past else self.limit
        return self._trust(match).rates()[:n]

    def learn(self, match: Match, actual: list[int], before: Several[int] = ()) -> None:
        """Compare the match's drafts with `actual`, the model's tokens after the newest token and
        the drafts `before`: at least one, not in the text yet."""
        drafts = self.drafts(match, min(len(actual), self.limit), before)
        self._trust(match).update(len(drafts), common_prefix(drafts, actual))

    def _trust(self, match: Match) -> AcceptanceTracker:
        return self._trusts[max(n for n, _ in KINDS if match.length >= n), match.past]


class NgramDrafter(Drafter):
    """N-gram drafts for a sequence that is alone in its round.

    Attributes:
        texts: by sequence; `past`: those that were left.
    """

    def __init__(self, limit: int, n_sequences: int) -> None:
        self.past = PastTexts()
        self.texts = [NgramLookup(limit, self.past) for _ in range(n_sequences)]
        #: Of the round, and the head's drafts before each.
        self._matches: list[tuple[Match, list[int]]] = []

    def reset(self, sequence: Sequence) -> None:
        """See :meth:`.Drafter.reset`: a round may have broken off."""
        self._matches.clear()

    def forget(self) -> None:
        """Forget all texts, but not how far they were to be trusted."""
        for text in (*self.texts, self.past):
            text.clear()

    def begin(self, sequence: Sequence) -> None:
        """See :meth:`.Drafter.begin`."""
        self.texts[sequence.id].begin([*sequence.request.text, *sequence.chosen])

    def rates(self, sequence: Sequence, head: Drafts = NO_DRAFTS) -> list[float]:
        """Conditional acceptance, per position, of the drafts that there are; empty: none.

        Args:
            head: drafts of the head, behind which these are to come.
        """
        text = self.texts[sequence.id]
        match = text.find(head.tokens)
        if match:
            self._matches.append((match, head.tokens))
        return text.rates(match) if match else []

    def draft(self, sequences: list[Sequence], n_max: int, p_min: float = 0.0) -> list[Drafts]:
        """`n_max` drafts after the match that :meth:`rates` has found, which has no probability."""
        return [self.behind(one, NO_DRAFTS, n_max) for one in sequences]

    def behind(self, sequence: Sequence, head: Drafts, n: int) -> Drafts:
        """The head's drafts, and `n` more after the match that :meth:`rates` has found."""
        more = self.texts[sequence.id].drafts(self._matches[-1][0], n, head.tokens)
        points = [point(token) for token in more] if sequence.draws else []
        return Drafts([*head.tokens, *more], [*head.distributions, *points], len(more))

    def accepted(self, sequences: list[Sequence]) -> None:
        """See :meth:`.Drafter.accepted`. Learn from the matches, whether drafted or not."""
        for one in sequences:
            text = self.texts[one.id]
            for match, before in self._matches:
                n = len(before)
                if one.chosen[:n] == before and len(one.chosen) > n:
                    text.learn(match, one.chosen[n:], before)
            text.add(one.chosen)
        self._matches.clear()
