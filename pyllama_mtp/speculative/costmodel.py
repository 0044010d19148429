"""What rounds cost, learned from the rounds themselves. Pure; no library.

Three things make a time doubtful: stalls (another program had the core), the rebuild of a graph in
the first round at a new size, and age (attention gets dearer as the text grows). Hence quartiles,
steady samples before unsteady ones, and old samples dropped.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .costs import Costs

#: Samples of one count that are kept.
KEPT = 17
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


@dataclass(frozen=True)
class Estimate:
    """What something costs now: `seconds`, from `n` samples, the last one of round `newest`."""

    seconds: float
    n: int
    newest: int


@dataclass(frozen=True)
class _Sample:
    seconds: float
    round: int
    steady: bool


class RecentTimes:
    """Times of something done to a varying count (rows, drafts).

    Attributes:
        estimates: by count. The lower quartile of its recent samples, which is the least one of up
            to four: slow rounds are common, and come in a row, fast ones are not.
    """

    def __init__(self) -> None:
        self.estimates: dict[int, Estimate] = {}
        self._samples: dict[int, list[_Sample]] = {}

    def add(self, count: int, seconds: float, now: int, steady: bool = True) -> None:
        """One sample.

        Args:
            now: number of the round.
            steady: False: the time may hold a graph's rebuild. Such a sample counts only as long
                as its count has no steady one.
        """
        kept = [
            sample
            for sample in self._samples.get(count, ())
            if now - sample.round <= MOST_AGE and (sample.steady or not steady)
        ]
        if steady or not any(sample.steady for sample in kept):
            kept.append(_Sample(seconds, now, steady))
        self._samples[count] = kept = kept[-KEPT:]
        ordered = sorted(sample.seconds for sample in kept)
        quartile = ordered[(len(ordered) - 1) // 4]
        self.estimates[count] = Estimate(quartile, len(kept), kept[-1].round)


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
        self._verify, self._draft = RecentTimes(), RecentTimes()
        self._rounds = self._last_rows = self._last_tried = 0
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
        own = self._verify.estimates.get(1)
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
        if tried:
            steady = tried == self._last_tried
            self._draft.add(tried, max(draft_s, TICK), self._rounds, steady)
        self._verify.add(rows, max(rest_s, TICK), self._rounds, rows == self._last_rows)
        self._last_rows, self._last_tried = rows, tried
        self.costs = self._completed()

    def _plain(self) -> float:
        """A plain step: its own estimate, or that of more rows lately, which cannot be cheaper."""
        return min(
            estimate.seconds
            for rows, estimate in self._verify.estimates.items()
            if rows == 1 or self._rounds - estimate.newest <= MOST_AGE
        )

    def _completed(self) -> Costs | None:
        if 1 not in self._verify.estimates:
            return None
        plain = self._plain()
        sure, lone = self._known(self._verify)
        rows = range(1, self.limit + 2)
        verify = completed({**sure, 1: plain}, lone, rows, ROW_GUESS * plain)
        sure, lone = self._known(self._draft)
        counts = range(self.limit + 1)
        draft = completed({**sure, 0: 0.0}, lone, counts, DRAFT_GUESS * plain)
        return Costs((0.0, *verify), draft)

    def _known(self, times: RecentTimes) -> tuple[dict[int, float], dict[int, float]]:
        """What rests on more than one sample, and what on a single one; what is old is left out."""
        sure, lone = {}, {}
        for count, estimate in times.estimates.items():
            age = self._rounds - estimate.newest
            if estimate.n > 1 and age <= MOST_AGE:
                sure[count] = estimate.seconds
            elif estimate.n == 1 and age <= LONE_AGE:
                lone[count] = estimate.seconds
        return sure, lone
