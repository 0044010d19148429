"""What rounds cost, learned from the rounds themselves. Pure; no library.

Three things make a time doubtful: stalls (another program had the core), the rebuild of a graph in
the first round at a new size, and a machine, or a growing text, that slows all rounds down. Hence
means that believe a stall up to a limit only, steady samples in place of unsteady ones, and times
held against the pace of their moment.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .costs import Costs

#: A new sample counts for at least 1 / (WEIGHT + 1) of an estimate.
WEIGHT = 16
#: Natural logarithm of how far above the usual a time is believed: beyond it, something stalled. So
#: far below an estimate of fewer than SURE samples, a time shows that these had stalled.
STALL, SURE = 0.3, 3
#: Share of what a round takes more than usual that is put down to the machine's pace.
PACE = 0.15
#: Rounds after which a sample is not believed any more.
MOST_AGE = 200
#: Guesses, in plain steps, while nothing but plain steps was measured: a further row, and a draft.
ROW_GUESS, DRAFT_GUESS = 0.2, 0.1
#: A count's only sample is believed up to this multiple of what the other counts suggest, and
#: forgotten after so many rounds: a stall must not rule a depth out for good.
LONE_TRUST, LONE_AGE = 1.2, 30
#: A plain step that seems dearer than a pass over more rows by this factor was a stall.
STALLED = 1.15
#: Seconds; no time is shorter, however coarse the clock.
TICK = 1e-9


@dataclass
class Estimate:
    """What something costs at a pace of 1.

    Attributes:
        seconds: mean of the samples, the latest ones counting most.
        n: how many there were, at most WEIGHT.
        newest: the round of the last one.
        steady: whether a sample without the rebuild of a graph is among them.
    """

    seconds: float
    n: int
    newest: int
    steady: bool

    def add(self, seconds: float, now: int, steady: bool) -> None:
        """One more sample. An unsteady one counts only until there is a steady one."""
        if self.steady and not steady:
            return
        off = math.log(seconds / self.seconds)
        if steady != self.steady or (self.n < SURE and off < -STALL):
            self.seconds, self.n, self.steady = seconds, 1, steady
        else:
            self.seconds *= math.exp(min(off, STALL) / (self.n + 1))
            self.n = min(self.n + 1, WEIGHT)
        self.newest = now


class Times(dict[int, Estimate]):
    """Times of something done to a varying count (rows, drafts), by count."""

    def add(self, count: int, seconds: float, now: int, steady: bool = True) -> None:
        """One sample, of round `now`. `steady`: False: it may hold the rebuild of a graph."""
        known = self.get(count)
        if known and now - known.newest <= MOST_AGE:
            known.add(seconds, now, steady)
        else:
            self[count] = Estimate(seconds, 1, now, steady)


def interpolated(points: Mapping[int, float], count: int, slope: float) -> float:
    """The value at `count`: a known one, else on the line between its known neighbours.

    Args:
        points: known values, one at a count no greater than `count` among them.
        slope: growth per count beyond the greatest known count.
    """
    if count in points:
        return points[count]
    known = sorted(points)
    after = bisect.bisect(known, count)
    below = known[after - 1]
    if after == len(known):
        return points[below] + (count - below) * slope
    above = known[after]
    share = (count - below) / (above - below)
    return points[below] + share * (points[above] - points[below])


def completed(
    sure: Mapping[int, float],
    lone: Mapping[int, float],
    counts: Iterable[int],
    guess: float,
) -> tuple[float, ...]:
    """Values of `counts`, those not known from their neighbours.

    Args:
        sure: known values, that of the least count among them.
        lone: values that rest on one sample; believed up to LONE_TRUST times what the others
            suggest.
        guess: growth per count while only one value is known; beyond the greatest known one it is
            the mean growth.
    """

    def slope(points: Mapping[int, float]) -> float:
        least, most = min(points), max(points)
        if least == most:
            return guess
        return max(0.0, points[most] - points[least]) / (most - least)

    samples = {**lone, **sure}
    points = dict(samples)
    for count in lone.keys() - sure.keys():
        others = {other: value for other, value in samples.items() if other != count}
        believable = LONE_TRUST * interpolated(others, count, slope(others))
        points[count] = min(samples[count], believable)
    rise = slope(points)
    return tuple(interpolated(points, count, rise) for count in counts)


class CostModel:
    """Costs of every depth, from calibration and rounds.

    Args:
        limit: greatest depth.
        calibration: costs measured earlier, up to any depth. The estimates start there, until
            there are steady samples.

    Attributes:
        costs: of depths 0 to `limit`, those not measured filled in; None while no plain step is
            known. A further row, or draft, is taken to cost as much as the mean one so far.
    """

    def __init__(self, limit: int, calibration: Costs | None = None) -> None:
        self.limit = limit
        self._verify, self._draft = Times(), Times()
        self._pace = 1.0  # what rounds take now, as a multiple of the times that are kept
        self._rounds = self._last_rows = self._last_tried = 0
        self._first_s = 0.0  # of the last round, if it was the first one of its rows
        self._rebuild_s: float | None = None  # what such a round takes longer, as seen so far
        if calibration:
            depths = range(min(limit, calibration.limit) + 1)
            for depth in [*depths, *depths]:  # twice: it is more than one sample of one round
                self._verify.add(depth + 1, calibration.verify[depth + 1], 0, steady=False)
                if depth:
                    self._draft.add(depth, calibration.draft[depth], 0, steady=False)
        self.costs = self._completed()

    @property
    def plain_is_doubtful(self) -> bool:
        """Whether a plain step seems dearer than a pass over more rows, which it cannot be."""
        own = self._verify.get(1)
        return own is not None and own.seconds > STALLED * self._plain()

    def update(self, n_asked: int, n_drafted: int, draft_s: float, rest_s: float) -> None:
        """One round.

        Args:
            n_asked: drafts asked for. When `n_drafted` is fewer, drafting stopped at the next one,
                which was computed all the same.
            draft_s: seconds of drafting.
            rest_s: seconds of the rest of the round.
        """
        self._rounds += 1
        rows, tried = n_drafted + 1, min(n_drafted + 1, n_asked)
        draft_s, rest_s = max(draft_s, TICK), max(rest_s, TICK)
        same_rows, same_tried = rows == self._last_rows, tried == self._last_tried
        rest_s = self._without_rebuild(rest_s, same_rows)
        usual = self._usual(rows, tried)
        if usual and same_rows and same_tried:
            off = math.log((rest_s + (draft_s if tried else 0.0)) / (usual * self._pace))
            self._pace *= math.exp(PACE * max(-STALL, min(off, STALL)))
        if tried:
            self._draft.add(tried, draft_s / self._pace, self._rounds, same_tried)
        self._verify.add(rows, rest_s / self._pace, self._rounds, same_rows)
        self._last_rows, self._last_tried = rows, tried
        self.costs = self._completed()

    def _without_rebuild(self, rest_s: float, same_rows: bool) -> float:
        """The seconds of a round without what the rebuild of a graph has taken in rounds before."""
        first_s, self._first_s = self._first_s, 0.0 if same_rows else rest_s
        if not same_rows:
            return max(rest_s - (self._rebuild_s or 0.0), rest_s / 2)
        if first_s:
            seen = min(max(first_s - rest_s, 0.0), rest_s)
            self._rebuild_s = seen if self._rebuild_s is None else (self._rebuild_s + seen) / 2
        return rest_s

    def _usual(self, rows: int, tried: int) -> float | None:
        """Seconds of such a round at a pace of 1; None: not known for sure."""
        parts = [self._verify.get(rows), *([self._draft.get(tried)] if tried else [])]
        known = [one.seconds for one in parts if one and one.steady]
        return sum(known) if len(known) == len(parts) else None

    def _plain(self) -> float:
        """A plain step: its own estimate, or that of more rows lately, which cannot be cheaper."""
        return min(
            estimate.seconds
            for rows, estimate in self._verify.items()
            if rows == 1 or self._rounds - estimate.newest <= MOST_AGE
        )

    def _completed(self) -> Costs | None:
        if 1 not in self._verify:
            return None
        plain = self._plain()
        sure, lone = self._known(self._verify)
        rows = range(1, self.limit + 2)
        verify = completed({**sure, 1: plain}, lone, rows, ROW_GUESS * plain)
        sure, lone = self._known(self._draft)
        counts = range(self.limit + 1)
        draft = completed({**sure, 0: 0.0}, lone, counts, DRAFT_GUESS * plain)
        pace = self._pace
        return Costs((0.0, *(pace * x for x in verify)), tuple(pace * x for x in draft))

    def _known(self, times: Times) -> tuple[dict[int, float], dict[int, float]]:
        """What rests on more than one sample, and what on a single one; what is old is left out."""
        sure, lone = {}, {}
        for count, estimate in times.items():
            age = self._rounds - estimate.newest
            if estimate.n > 1 and age <= MOST_AGE:
                sure[count] = estimate.seconds
            elif estimate.n == 1 and age <= LONE_AGE:
                lone[count] = estimate.seconds
        return sure, lone
