"""The costs of rounds, learned from the rounds. Pure; no library.

Costs are nearly affine in the rows, so a cost that was measured seldom, or long ago, is drawn
towards a line. Three things distort a time: a stall (another program had the core); the first round
at another size, which may build a graph; and a slower machine, or a longer text, which slows all
rounds. So times count up to STALL times the expected one; the excess of first rounds is learned and
taken off; and times are relative to the pace of their moment.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from .costs import Costs

#: Rounds after which a sample counts for 1/e.
MEMORY = 200.0
#: How many samples the line is worth.
LINE = 0.5
#: A time counts up to so many times the expected one; a longer one stalled.
STALL = 1.3
#: Estimates of fewer samples may be wrong, and say nothing about the machine's pace.
SURE = 3.0
#: The share of a round's excess over the expected time that is put down to the machine's pace.
PACE = 0.15
#: Plain steps that a draft is guessed to take while only plain steps were measured; so is a further
#: row of each sequence, at most 1 for all sequences.
GUESS = 0.1
#: Seconds; no time is shorter, however coarse the clock.
TICK = 1e-9


@dataclass
class Estimate:
    """A cost at a pace of 1.

    Attributes:
        seconds: mean of the samples, the latest counting most.
        n: how many samples the mean was worth in the round of the newest one, `newest`.
    """

    seconds: float
    n: float
    newest: int

    def worth(self, now: int) -> float:
        """How many present samples the mean is worth."""
        return self.n * math.exp((self.newest - now) / MEMORY)

    def add(self, seconds: float, now: int) -> None:
        """Add a sample."""
        n = self.worth(now)
        if n < SURE and seconds * STALL < self.seconds:
            n = 0.0  # the others had stalled
        self.n, self.newest = n + 1.0, now
        self.seconds += (seconds - self.seconds) / self.n


class Line(dict[int, Estimate]):
    """Costs by count: of further rows, or of drafts."""

    def add(self, count: int, seconds: float, now: int) -> None:
        """Add a sample of round `now`."""
        if count in self:
            self[count].add(seconds, now)
        else:
            self[count] = Estimate(seconds, 1.0, now)

    def trust(self, count: int) -> float:
        """Up to how many times the expected time a time counts. A first long time may have stalled;
        a second one like it has not."""
        return STALL**2 if count in self and not self.is_sure(count) else STALL

    def is_sure(self, count: int) -> bool:
        """Whether the estimate has enough samples to show the machine's pace."""
        return count in self and self[count].n >= SURE

    def fit(self, base: float, guess: float, limit: int, now: int) -> tuple[float, list[float]]:
        """The slope of the line from `base` at 0, by least squares, with `guess` as a sample at 1;
        and estimates of counts 0 to `limit`: each a weighted mean of its samples and the line."""
        rise, squares = guess, 1.0
        samples = [(count, one.seconds, one.worth(now)) for count, one in self.items() if count]
        for count, seconds, n in samples:
            rise += n * count * (seconds - base)
            squares += n * count * count
        slope = max(rise / squares, 0.0)
        found = [base + count * slope for count in range(limit + 1)]
        for count, seconds, n in samples:
            found[count] = (n * seconds + LINE * found[count]) / (n + LINE)
        return slope, found


@dataclass
class _Rounds:
    """Rounds of one number of sequences.

    Attributes:
        verify, draft: by further rows, and by drafts, of each sequence.
        plain, row, one_draft: a plain step, and the slopes of both, at a pace of 1.
    """

    verify: Line = field(default_factory=Line)
    draft: Line = field(default_factory=Line)
    plain: float = 0.0
    row: float = 0.0
    one_draft: float = 0.0
    costs: Costs | None = None


class CostModel:
    """Costs of every depth, by the number of sequences, from rounds.

    The first guess for another number of sequences: a row costs the same, and drafting grows as a
    plain step does.

    Args:
        limit: greatest depth.

    Attributes:
        change: plain steps by which the first round at another size takes longer, lately.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.change = limit, 0.0
        self._rounds: dict[int, _Rounds] = {}
        self._pace = 1.0  # of rounds now, as a multiple of the times that are kept
        self._now = 0
        self._first_s = 0.0  # seconds of the last round, if it was the first one of its size
        self._last = (0, 0, 0)  # sequences, drafts verified and drafts computed of the last round

    def costs(self, n: int = 1) -> Costs | None:
        """Costs of depths 0 to `limit` in rounds of `n` sequences, guesses filled in; None while no
        plain step of theirs was measured."""
        return self._rounds[n].costs if n in self._rounds else None

    def worth(self, depth: int, n: int = 1) -> float:
        """How many samples the cost of `depth` rests on, the line's LINE among them."""
        one = self._rounds[n].verify.get(depth)
        return LINE + (one.worth(self._now) if one else 0.0)

    def deepest(self, n: int = 1) -> int:
        """The greatest depth that was measured."""
        return max(self._rounds[n].verify)

    def update(
        self, n_asked: int, n_drafted: int, draft_s: float, rest_s: float, n: int = 1
    ) -> None:
        """Add a round.

        Args:
            n_asked: drafts asked for. If `n_drafted` is fewer, drafting stopped at the next draft,
                which was computed all the same.
            draft_s: seconds of drafting.
            rest_s: seconds of the rest of the round.
            n: sequences in it.
        """
        self._now += 1
        known, tried = self._rounds.setdefault(n, _Rounds()), min(n_drafted + 1, n_asked)
        first, self._last = self._last != (n, n_drafted, tried), (n, n_drafted, tried)
        parts = [(known.verify, n_drafted, max(rest_s, TICK))]
        parts += [(known.draft, tried, max(draft_s, TICK))] if tried else []
        first_s, self._first_s = self._first_s, sum(part[2] for part in parts) if first else 0.0
        if known.costs:
            expected = [known.costs.verify[n_drafted + 1], known.costs.draft[tried]]
            took = sum(part[2] for part in parts)
            if first_s and not first:
                excess = max(-1.0, min((first_s - took) / known.costs.plain, 1.0))
                self.change += (excess - self.change) / 4.0
            if not first and all(line.is_sure(count) for line, count, _ in parts):
                self._pace *= max(1 / STALL, min(took / sum(expected), STALL)) ** PACE
            if first:
                built = max(self.change, 0.0) * known.costs.plain
                parts[0] = known.verify, n_drafted, max(rest_s - built, rest_s / 2)
            parts = [
                (line, count, min(seconds, line.trust(count) * usual))
                for (line, count, seconds), usual in zip(parts, expected, strict=False)
            ]
        for line, count, seconds in parts:
            line.add(count, seconds / self._pace, self._now)
        self._complete(n)

    def _complete(self, n: int) -> None:
        known, now = self._rounds[n], self._now
        if 0 not in known.verify:
            return
        # A plain step cannot take longer than a pass over more rows.
        known.plain = min(one.seconds for one in known.verify.values())
        row, draft = min(GUESS * n, 1.0) * known.plain, GUESS * known.plain
        others = [other for other, its in self._rounds.items() if other != n and its.costs]
        if others:
            near = min(others, key=lambda other: abs(math.log(other / n)))
            its = self._rounds[near]
            row, draft = its.row * n / near, its.one_draft * known.plain / its.plain
        known.row, verify = known.verify.fit(known.plain, row, self.limit, now)
        known.one_draft, drafts = known.draft.fit(0.0, draft, self.limit, now)
        pace = self._pace
        known.costs = Costs(
            (0.0, *[pace * x or TICK for x in verify]),
            (0.0, *[pace * x or TICK for x in drafts[1:]]),
        )
