"""How many drafts a round should have, 0 included: costs, acceptance, and the choice. Pure.

A round drafts k tokens, verifies them in one pass of the target over k + 1 rows, and emits the
accepted ones and one token more (Leviathan et al. 2023, "Fast inference from transformers via
speculative decoding", https://arxiv.org/abs/2211.17192). Its speed follows from what drafting and
verifying cost here (:class:`Costs`, measured when contexts are made, see
:mod:`pyllama_mtp.calibration`), and from how often a draft is accepted
(:class:`AcceptanceTracker`). :class:`DepthController` uses the depth with the highest expected
speed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ..errors import UsageError

Floats: TypeAlias = npt.NDArray[np.float64]

# -- what a round costs and gives ------------------------------------------------------------------


@dataclass(frozen=True)
class Costs:
    """Costs of rounds, in seconds or any other unit.

    Attributes:
        verify: ``verify[n]``: one pass of the target over n rows, with everything in a round but
            drafting: sampling, rollback, sync. ``verify[1]`` is a plain decode step, ``verify[0]``
            is 0.
        draft: ``draft[k]``: drafting k tokens. ``draft[0]`` is 0.

    Raises:
        UsageError: lengths do not match, or a time is not above 0.
    """

    verify: tuple[float, ...]
    draft: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.verify) != len(self.draft) + 1 or not self.draft:
            raise UsageError(
                f"{len(self.verify)} verification and {len(self.draft)} draft costs: for depths 0 "
                "to n there must be n + 2 (of 0 to n + 1 rows) and n + 1 of them"
            )
        for name, values in (("verify", self.verify), ("draft", self.draft)):
            if values[0] != 0 or not all(0 < value < math.inf for value in values[1:]):
                raise UsageError(f"{name} costs are {values}: 0 first, then times above 0 only")

    @property
    def limit(self) -> int:
        """The greatest depth with costs."""
        return len(self.draft) - 1

    @property
    def plain(self) -> float:
        """One plain decode step."""
        return self.verify[1]


def tokens_by_depth(acceptance: Sequence[float]) -> list[float]:
    """Tokens that a round emits on average, by its drafts, from 0 to ``len(acceptance)`` of them:
    1 + a1 + a1 a2 + ...

    The last accepted draft is followed by one token of the target's own, so with every a_i = a
    this is (1 - a^(depth + 1)) / (1 - a): Leviathan et al. 2023, equation 1.

    Args:
        acceptance: conditional, per position: acceptance[i] is the probability that draft i + 1
            is accepted, all before it being accepted.
    """
    return [*accumulate((1.0, *accumulate(acceptance, mul)))]


def round_time(costs: Costs, depth: int) -> float:
    """Time of a round of `depth` drafts, in the unit of `costs`."""
    return costs.draft[depth] + costs.verify[depth + 1]


def times_by_depth(costs: Costs, limit: int, offered: Sequence[float]) -> list[float]:
    """Mean times of rounds that ask for 0 to `limit` drafts, in the unit of `costs`.

    Args:
        offered: [limit] offered[i] is the probability that draft i + 1 is made when it is asked for
            and the one before it was made: below 1 where drafting stops at improbable drafts
            (p_min). The draft at which it stops is computed but not verified.
    """
    draft, verify, times = costs.draft, costs.verify, list[float]()
    stopped, made = 0.0, 1.0  # made: the probability that at least n drafts are
    for n in range(limit + 1):
        times.append(stopped + made * round_time(costs, n))
        if n < limit and offered[n] < 1.0:
            stopped += made * (1.0 - offered[n]) * (draft[n + 1] + verify[n + 1])
            made *= offered[n]
    return times


def speed(costs: Costs, acceptance: Sequence[float], depth: int) -> float:
    """Tokens per unit of time of rounds of `depth` drafts; depth 0 is plain decoding.

    The ratio of the means, to which a long text converges: Leviathan et al. 2023, theorem 3.8, with
    measured costs in place of their cost coefficient and free parallel verification. `acceptance`:
    see :func:`tokens_by_depth`.
    """
    return tokens_by_depth(acceptance)[depth] / round_time(costs, depth)


def best_depth(costs: Costs, acceptance: Sequence[float]) -> int:
    """The fastest of the depths with costs and acceptance rates, the shallowest of equals."""
    limit = min(len(acceptance), costs.limit)
    return max(range(limit + 1), key=lambda depth: speed(costs, acceptance, depth))


def break_even(costs: Costs, depth: int) -> float | None:
    """The acceptance, the same at every position, at which `depth` is as fast as plain decoding.

    Returns:
        0 to 1; 0 where a round is no dearer than a plain step; None where even drafts that are all
        accepted do not pay.
    """
    wanted = round_time(costs, depth) / costs.plain
    if wanted <= 1.0:
        return 0.0
    if wanted > depth + 1:
        return None
    # The only positive root of a^depth + ... + a + 1 - wanted.
    roots = np.roots([1.0] * depth + [1.0 - wanted])
    return min(1.0, float(max(roots[np.isreal(roots)].real)))


# -- costs, as rounds show them --------------------------------------------------------------------

#: Natural logarithms, standard deviations, of what rounds take to what was measured: of all depths
#: alike (the machine's pace, the context's length), and of a depth to the one before it.
PACE, DEPTH = 0.2, 0.12
#: How far both go in a round, and how far a round is from the mean of its depth.
PACE_DRIFT, DEPTH_DRIFT, NOISE = 0.03, 0.005, 0.08
#: A round that took longer than this above what was expected has stalled.
STALL = 0.4


class CostModel:
    """Seconds of rounds by number of sequences and depth: measured before, learned as rounds come.

    The measured costs are those of rounds whose drafts were made up, in a short context. So each
    may be wrong, a depth's like its neighbours'; and a busy machine, or a longer text, slows all
    rounds. Both are learned from whole rounds by a Kalman filter (Kalman 1960, "A new approach to
    linear filtering and prediction problems"), whose state is, by depth, the natural logarithm of
    what a round takes to what was measured. A round of one depth tells of the others, too: of the
    pace if it was run shortly before or after them, and of its neighbours' costs.

    Args:
        measured: by number of sequences, 1 and the greatest number among them; for numbers between,
            costs are interpolated.
    """

    def __init__(self, measured: Mapping[int, Costs]) -> None:
        self._measured = dict(sorted(measured.items()))
        self._known = dict(self._measured)
        self._seen = set[tuple[int, int]]()
        depths = np.arange(self.costs().limit + 1)
        self._alike, self._steps = np.ones((len(depths),) * 2), np.minimum.outer(depths, depths)
        self._states: dict[int, tuple[Floats, Floats]] = {}  # of n sequences: means, covariance

    def costs(self, n: int = 1) -> Costs:
        """As measured, of rounds of `n` sequences."""
        if n not in self._known:
            self._known[n] = self._between(n)
        return self._known[n]

    def _between(self, n: int) -> Costs:
        counts, measured = [*self._measured], self._measured.values()

        def mixed(times: Iterable[tuple[float, ...]]) -> tuple[float, ...]:
            return tuple(float(np.interp(n, counts, of)) for of in zip(*times, strict=True))

        return Costs(mixed(one.verify for one in measured), mixed(one.draft for one in measured))

    def _state(self, n: int) -> tuple[Floats, Floats]:
        if n not in self._states:
            covariance = PACE**2 * self._alike + DEPTH**2 * self._steps
            self._states[n] = np.zeros(len(covariance)), covariance
        return self._states[n]

    def factors(self, n: int = 1) -> list[float]:
        """By depth: of the measured costs of a round of `n` sequences."""
        return list(map(float, np.exp(self._state(n)[0])))

    def doubts(self, depth: int, n: int = 1) -> list[float]:
        """By depth: natural logarithm, deviation, of its cost to that of `depth`; 0: rounds
        of it would tell less than those of `depth` do."""
        covariance = self._state(n)[1]
        own = covariance.diagonal()
        apart = np.maximum(own + own[depth] - 2.0 * covariance[depth], 0.0)
        return list(map(float, np.where(own > own[depth], np.sqrt(apart), 0.0)))

    def plain(self, n: int = 1) -> float:
        """Seconds of a plain step now."""
        return self.costs(n).plain * math.exp(self._state(n)[0][0])

    def learned(self) -> dict[int, Costs]:
        """Costs by number of sequences, as rounds have corrected them; {}: no round has. A pace
        slower than measured is this text's or this moment's; a faster one is the machine's."""
        costs = dict(self._measured)
        for n in costs.keys() & self._states.keys():
            factors = np.exp(self._state(n)[0])
            factors /= max(factors[0], 1.0)
            verify = np.multiply(costs[n].verify[1:], factors)
            draft = np.multiply(costs[n].draft, factors)
            costs[n] = Costs((0.0, *verify.tolist()), tuple(draft.tolist()))
        return costs if costs != self._measured else {}

    def update(self, n_tried: int, n_drafted: int, total_s: float, n: int = 1) -> None:
        """Add a round of `n` sequences: drafts computed, drafts verified of each, seconds. The
        first one of a depth does not count: its graphs are built."""
        if (n, n_drafted) not in self._seen:
            self._seen.add((n, n_drafted))
            return
        costs, (mean, covariance) = self.costs(n), self._state(n)
        usual = costs.draft[n_tried] + costs.verify[n_drafted + 1]
        off = math.log(max(total_s, 1e-9) / usual) - float(mean[n_drafted])
        covariance += PACE_DRIFT**2 * self._alike + DEPTH_DRIFT**2 * self._steps
        gain = covariance[n_drafted] / (covariance[n_drafted, n_drafted] + NOISE**2)
        mean += gain * min(max(off, -STALL), STALL)
        covariance -= np.outer(gain, covariance[n_drafted])


# -- acceptance, and the choice --------------------------------------------------------------------

#: A draft's acceptance before any outcome, and how many outcomes that prior is worth.
PRIOR_RATE, PRIOR_WEIGHT = 0.75, 3.0
#: Rounds after which an outcome counts for 1/e.
MEMORY = 48.0
#: The part of the time that may be lost by trying other depths than that which seems the fastest.
SHARE = 0.01

#: For each sequence of a round: how many drafts it could use, and how many of them held.
Outcomes: TypeAlias = Sequence[tuple[int, int]]


class AcceptanceTracker:
    """Conditional acceptance of drafts, per position; old rounds fade.

    Each rate is the mean of a Beta posterior, whose prior is the rate of the position before: a
    position never reached has the rate of the last position reached.

    Args:
        limit: positions.
        rate: prior of the first position.
    """

    def __init__(self, limit: int, rate: float = PRIOR_RATE) -> None:
        self._prior = rate
        self._tried, self._held = [0.0] * limit, [0.0] * limit

    def update(self, n_tried: int, n_held: int) -> None:
        """Add a round that tried positions 1 to `n_tried`: the first `n_held` held, the next did
        not. For a round that tried none, nothing fades."""
        if not n_tried:
            return
        kept = 1.0 - 1.0 / MEMORY
        n_reached = min(n_tried, n_held + 1)
        for i in range(len(self._tried)):
            self._tried[i] = kept * self._tried[i] + (i < n_reached)
            self._held[i] = kept * self._held[i] + (i < min(n_held, n_reached))

    def rates(self, more: float = 0.0) -> list[float]:
        """Estimated conditional acceptance of each position, and so many deviations `more`."""
        rates, rate = list[float](), self._prior
        for tried, held in zip(self._tried, self._held, strict=True):
            weight = tried + PRIOR_WEIGHT
            rate = (held + PRIOR_WEIGHT * rate) / weight
            rates.append(min(1.0, rate + more * math.sqrt(rate * (1.0 - rate) / (weight + 1.0))))
        return rates


class DepthController:
    """Chooses the depth of each round: :meth:`choose` before it, :meth:`update` after it.

    Serves one generation after the other, and rounds of any number of sequences. The cost of a
    depth depends on the number of sequences; acceptance does not. Deterministic: the same outcomes
    and times give the same depths.

    A round has the depth of the highest expected speed. Of other depths nothing would be learned
    any more. So whenever SHARE of the time so far covers what was lost by it, a round tries one
    that would be the fastest if it cost a standard deviation less (:meth:`.CostModel.doubts`), or
    any drafts where there are none. A round of drafts that loses nothing is followed by the next at
    once, and so text that has become predictable is noticed. Where drafts would pay if acceptance
    were a standard deviation higher, no more counts as lost than was expected.

    Args:
        costs: by number of sequences, see :class:`CostModel`, up to the greatest depth.
        has_head: False: only n-grams draft.
    """

    def __init__(self, costs: Mapping[int, Costs], has_head: bool = True) -> None:
        self.costs, self._has_head = CostModel(costs), has_head
        self.limit = limit = self.costs.costs().limit
        self._accepted, self._offered = AcceptanceTracker(limit), AcceptanceTracker(limit, rate=1.0)
        self._spare = 0.0  # plain steps that trying other depths may lose; not above 0
        self._asked = 0
        self._lost = 0.0  # plain steps that this round loses, as far as is known before it
        self._tries = False  # whether it has drafts where none seem to pay

    def depth(self, n_sequences: int = 1) -> int:
        """The depth of the highest expected speed in rounds of so many sequences."""
        steps, tokens = self._forecast(n_sequences)
        return max(range(len(steps)), key=lambda depth: tokens[depth] / steps[depth])

    def _forecast(self, n: int) -> tuple[list[float], list[float]]:
        """By depth: plain steps that a round takes, and tokens that it gives each sequence."""
        if not self._has_head:
            return [1.0], [1.0]
        costs, factors = self.costs.costs(n), self.costs.factors(n)
        plain = costs.plain * factors[0]
        times = times_by_depth(costs, self.limit, self._offered.rates())
        steps = [time * factor / plain for time, factor in zip(times, factors, strict=True)]
        return steps, tokens_by_depth(self._accepted.rates())

    def choose(self, at_most: int | None = None, n_sequences: int = 1) -> int:
        """Drafts to ask of each sequence in the next round, 0 to `limit`.

        Args:
            at_most: most drafts that can be used before the text or the context ends.
        """
        steps, tokens = self._forecast(n_sequences)
        speeds = [n / time for n, time in zip(tokens, steps, strict=True)]
        asked = best = speeds.index(max(speeds))
        if self._spare >= 0.0 and best == 0 < self.limit:
            asked = min(range(1, len(steps)), key=lambda depth: steps[depth] - tokens[depth])
        elif self._spare >= 0.0:
            doubts = self.costs.doubts(best, n_sequences)
            hoped = [speed * math.exp(doubt) for speed, doubt in zip(speeds, doubts, strict=True)]
            asked = hoped.index(max(hoped))
        self._asked = asked if at_most is None else max(0, min(asked, at_most))
        self._lost = steps[self._asked] - tokens[self._asked] / speeds[best]
        self._tries = best == 0 < self._asked
        if self._tries:
            tokens = tokens_by_depth(self._accepted.rates(1.0))
            if all(n <= time for n, time in zip(tokens, steps, strict=True)):
                self._lost = math.inf  # the outcome tells
        return self._asked

    def update(self, n_drafted: int, outcomes: Outcomes, total_s: float, n_behind: int = 0) -> None:
        """Learn from a round, of the depth chosen last, or of n-gram drafts alone.

        Args:
            n_drafted: drafts verified of each sequence; fewer than asked for if p_min stopped
                drafting.
            outcomes: for each sequence, at least one: how many drafts it could use, at most as many
                as were asked for, and how many of them held.
            total_s: seconds of the whole round, drafting included.
            n_behind: of the verified drafts, n-gram drafts behind those of the head, which
                `outcomes` leave out; all of them: :meth:`lookup_depth` chose instead.
        """
        if n_drafted == n_behind > 0:
            self.costs.update(0, n_drafted, total_s)
            return
        n = len(outcomes)
        for n_usable, n_held in outcomes:
            self._accepted.update(n_usable, n_held)
        self._offered.update(self._asked, n_drafted - n_behind)
        n_tried = min(n_drafted - n_behind + 1, self._asked)
        costs, factors = self.costs.costs(n), self.costs.factors(n)
        usual = (costs.draft[n_tried] + costs.verify[n_drafted + 1]) * factors[n_drafted]
        steps = min(total_s, usual * math.exp(STALL)) / self.costs.plain(n)
        lost = self._lost
        if self._tries:
            lost = min(lost, steps - 1.0 - sum(n_held for _, n_held in outcomes) / n)
        self._spare = min(0.0, self._spare + SHARE * steps - lost)
        self.costs.update(n_tried, n_drafted, total_s, n)

    def lookup_depth(self, rates: Sequence[float], at_most: int, n_head: int = 0) -> int:
        """How many n-gram drafts, which cost nothing to make, the next round of one sequence should
        verify, instead of a round that :meth:`choose` chooses, or behind its drafts; 0: none.

        Args:
            rates: conditional acceptance of these drafts, per position.
            at_most: most drafts that can be used, those of the head included.
            n_head: drafts of the head before them; 0: they stand in place of these.
        """
        steps, tokens = self._forecast(1)
        best, chosen = max(n / time for n, time in zip(tokens, steps, strict=True)), 0
        if n_head:
            best, rates = 0.0, [*self._accepted.rates()[:n_head], *rates]
        costs, n_most = self.costs.costs(), max(0, min(self.limit, at_most, len(rates)))
        for depth, n_tokens in enumerate(tokens_by_depth(rates[:n_most])):
            pace = n_tokens * costs.plain / (costs.draft[n_head] + costs.verify[depth + 1])
            if depth >= max(n_head, 1) and pace > best:
                chosen, best = depth - n_head, pace
        return chosen

    def why_fewer(self, n_sequences: int) -> str:
        """Why rounds of so many sequences have no drafts, or fewer than those of one; "": they have
        as many."""
        depth, alone = self.depth(n_sequences), self.depth()
        if not self._has_head or (depth and depth >= alone):
            return ""
        why = f"{depth} of {alone} drafts pay here" if depth else "drafts do not pay here"
        return f"{n_sequences} sequence{'' if n_sequences == 1 else 's'}: {why}"
