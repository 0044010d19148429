"""Which drafts are accepted. Pure functions; no library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True)
class Verdict:
    """Outcome of one round.

    Attributes:
        tokens: the target's choice: the accepted drafts, then one token more, in place of the first
            rejected draft or after the last one.
        n_accepted: ``len(tokens) - 1``.
    """

    tokens: list[int]

    @property
    def n_accepted(self) -> int:
        """Drafts accepted."""
        return len(self.tokens) - 1


def accept(
    drafts: Sequence[int],
    sample_row: Callable[[int], int],
    ends: Callable[[int], bool] = lambda token: False,
) -> Verdict:
    """Accept drafts as long as the target's own choice is the draft.

    Row i holds the target's logits after drafts[:i]. Each row is sampled as plain decoding would
    sample it, so the tokens are the target's own draw whatever the drafts are: greedy output equals
    plain greedy output, and at temperature > 0 the distribution is the target's. (Leviathan et al.
    2023, section 2.3, for a deterministic draft: accepting x with probability p(x) and otherwise
    drawing from p without x is the same as drawing from p and comparing.)

    Args:
        drafts: drafted token ids.
        sample_row: samples row i, 0 <= i <= len(drafts); called in order, up to the first row that
            differs from its draft.
        ends: True for a token after which nothing may follow (end of turn): sampling stops.
    """
    tokens: list[int] = []
    for row in range(len(drafts) + 1):
        token = sample_row(row)
        tokens.append(token)
        if ends(token) or row == len(drafts) or token != drafts[row]:
            break
    return Verdict(tokens)


class SyntheticAcceptance:
    """Acceptance at imposed rates, for speed measurements on models without trained weights.

    Outcomes follow the golden-ratio sequence (Weyl 1916), not a random one: after n rounds, the
    share accepted at each position is within a few n-ths of its rate. So a run of fifty rounds
    measures the rate asked for, not luck.

    Args:
        rates: unconditional, per position: rates[i] is the probability that drafts 0..i are all
            accepted, so they do not increase (upstream's ``--spec-synth-rates`` has this meaning).
    """

    def __init__(self, rates: Sequence[float]) -> None:
        self.rates = tuple(rates)
        self._rounds = 0

    def accept(self, drafts: Sequence[int], sample_row: Callable[[int], int]) -> Verdict:
        """As :func:`accept`, with an imposed outcome; as many rows are sampled."""
        self._rounds += 1
        level = (self._rounds * GOLDEN) % 1.0
        n = sum(1 for rate in self.rates[: len(drafts)] if level < rate)
        last = [sample_row(row) for row in range(n + 1)][-1]
        return Verdict([*drafts[:n], last])
