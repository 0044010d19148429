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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ..errors import UsageError

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


def expected_tokens(acceptance: Sequence[float], depth: int) -> float:
    """Tokens that a round of `depth` drafts emits on average: 1 + a1 + a1 a2 + ...

    The last accepted draft is followed by one token of the target's own, so with every a_i = a
    this is (1 - a^(depth + 1)) / (1 - a): Leviathan et al. 2023, equation 1.

    Args:
        acceptance: conditional, per position: acceptance[i] is the probability that draft i + 1
            is accepted, all before it being accepted.

    Raises:
        UsageError: fewer than `depth` rates, or a negative depth.
    """
    if not 0 <= depth <= len(acceptance):
        raise UsageError(f"depth is {depth}, there are acceptance rates for 0 to {len(acceptance)}")
    return tokens_by_depth(acceptance[:depth])[depth]


def tokens_by_depth(acceptance: Sequence[float]) -> list[float]:
    """:func:`expected_tokens` of each depth from 0 to ``len(acceptance)``."""
    tokens, reached = [1.0], 1.0
    for rate in acceptance:
        reached *= rate
        tokens.append(tokens[-1] + reached)
    return tokens


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
    see :func:`expected_tokens`.
    """
    return expected_tokens(acceptance, depth) / round_time(costs, depth)


def best_depth(costs: Costs, acceptance: Sequence[float]) -> int:
    """The fastest of the depths with costs and acceptance rates, the shallowest of equals."""
    limit = min(len(acceptance), costs.limit)
    return max(range(limit + 1), key=lambda depth: speed(costs, acceptance, depth))


def break_even(costs: Costs, depth: int) -> float | None:
    """The acceptance, the same at every position, at which `depth` is as fast as plain decoding.

    Returns:
        0 to 1, within 1e-9; 0 where a round is no dearer than a plain step; None where even
        drafts that are all accepted do not pay.
    """
    return needed_acceptance(round_time(costs, depth) / costs.plain, depth)


def needed_acceptance(wanted: float, depth: int) -> float | None:
    """The acceptance, the same at every position, at which rounds emit `wanted` tokens on average.

    Returns:
        As :func:`break_even`.
    """
    if wanted <= 1.0:
        return 0.0
    if wanted > depth + 1:
        return None
    low, high = 0.0, 1.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        if expected_tokens([middle] * depth, depth) < wanted:
            low = middle
        else:
            high = middle
    return high


# -- costs, as rounds show them --------------------------------------------------------------------

#: Rounds after which a time counts for 1/e: for the pace of the machine, and for the correction of
#: a depth's cost; and the rounds that a measured cost is worth against such corrections.
PACE_MEMORY, COST_MEMORY, COST_WEIGHT = 4.0, 64.0, 4.0
#: Natural logarithm; a round that took longer than this above what was expected has stalled.
STALL = 0.4
#: Natural logarithms: corrections of a cost after some rounds, or a machine faster than it was,
#: that contradict the measurement; a slower one leaves it in doubt.
CONTRADICTION, SOME_ROUNDS = 0.2, 16
#: Plain steps that a draft, and a further row of each sequence, take where nothing was measured.
GUESS = 0.1


def guessed_costs(limit: int) -> Costs:
    """Costs of depths 0 to `limit`, in plain steps, where they cannot be measured."""
    verify = (1.0 + GUESS * n for n in range(limit + 1))
    return Costs((0.0, *verify), tuple(GUESS * n for n in range(limit + 1)))


class CostModel:
    """Seconds of rounds by number of sequences and depth: measured before, checked as rounds come.

    A machine that is busy, or a longer text, slows all rounds: their common pace follows within a
    few rounds. What a depth costs beside that is corrected slowly: where memory is slower than it
    was, passes over few rows take longer, and those over many, which wait for products, do not.

    Args:
        limit: greatest depth.
        measured: by number of sequences, 1 and the greatest number among them; for numbers between,
            costs are interpolated. None: guesses, in plain steps.
    """

    def __init__(self, limit: int, measured: Mapping[int, Costs] | None = None) -> None:
        self._measured = dict(sorted((measured or {1: guessed_costs(limit)}).items()))
        self._known = dict(self._measured)
        self._pace, self._paces = 0.0, 0.0  # a natural logarithm; rounds that it rests on
        self._off: dict[tuple[int, int], tuple[float, float]] = {}  # sums of logarithms, and rounds

    def costs(self, n: int = 1) -> Costs:
        """As measured, of rounds of `n` sequences."""
        if n not in self._known:
            self._known[n] = self._between(n)
        return self._known[n]

    def _between(self, n: int) -> Costs:
        counts = [*self._measured]
        low = max((count for count in counts if count < n), default=counts[0])
        high = min((count for count in counts if count > n), default=counts[-1])
        share = (n - low) / (high - low) if high > low else 0.0
        one, other = self._measured[low], self._measured[high]

        def mixed(a: Sequence[float], b: Sequence[float]) -> tuple[float, ...]:
            return tuple(x + share * (y - x) for x, y in zip(a, b, strict=True))

        return Costs(mixed(one.verify, other.verify), mixed(one.draft, other.draft))

    def factor(self, depth: int, n: int = 1) -> float:
        """Of the measured cost of a round, at the pace of the measurement."""
        return math.exp(self._correction(n, depth))

    def doubt(self, depth: int, n: int = 1) -> float:
        """Natural logarithm: how much faster than :meth:`factor` says a round may be, because the
        machine is not what it was when costs were measured, and few such rounds were seen since."""
        _, count = self._off.get((n, depth), (0.0, 0.0))
        return max(abs(self._pace) - CONTRADICTION, 0.0) * COST_WEIGHT / (count + COST_WEIGHT)

    def plain(self, n: int = 1) -> float:
        """Seconds of a plain step now."""
        return self.costs(n).plain * self.factor(0, n) * math.exp(self._pace)

    def update(self, n_tried: int, n_drafted: int, total_s: float, n: int = 1) -> None:
        """Add a round of `n` sequences: drafts computed, drafts verified of each, seconds. The
        first one of a depth does not count: its graphs are built."""
        if (n, n_drafted) not in self._off:
            self._off[n, n_drafted] = 0.0, 0.0
            return
        costs = self.costs(n)
        usual = costs.draft[n_tried] + costs.verify[n_drafted + 1]
        off = math.log(max(total_s, 1e-9) / usual)
        known = self._correction(n, n_drafted)
        if self._paces:
            off = known + min(max(off - known, self._pace - STALL), self._pace + STALL)
        self._paces = min(self._paces + 1.0, PACE_MEMORY)
        self._pace += (off - known - self._pace) / self._paces
        total, count = self._off.get((n, n_drafted), (0.0, 0.0))
        kept = 1.0 - 1.0 / COST_MEMORY
        self._off[n, n_drafted] = kept * total + off - self._pace, kept * count + 1.0

    def _correction(self, n: int, depth: int) -> float:
        total, count = self._off.get((n, depth), (0.0, 0.0))
        return total / (count + COST_WEIGHT)

    @property
    def contradicted(self) -> bool:
        """Whether rounds have shown that the costs were measured in a bad moment."""
        seen = [key for key, (_, count) in self._off.items() if count >= SOME_ROUNDS]
        wrong = any(abs(self._correction(*key)) > CONTRADICTION for key in seen)
        return wrong or (bool(seen) and self._pace < -CONTRADICTION)


# -- acceptance, and the choice --------------------------------------------------------------------

#: A draft's acceptance before any outcome, and how many outcomes that prior is worth.
PRIOR_RATE, PRIOR_WEIGHT = 0.75, 2.5
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

    def rates(self) -> list[float]:
        """Estimated conditional acceptance of each position."""
        rates, rate = list[float](), self._prior
        for tried, held in zip(self._tried, self._held, strict=True):
            rate = (held + PRIOR_WEIGHT * rate) / (tried + PRIOR_WEIGHT)
            rates.append(rate)
        return rates


class DepthController:
    """Chooses the depth of each round: :meth:`choose` before it, :meth:`update` after it.

    Serves one generation after the other, and rounds of any number of sequences. The cost of a
    depth depends on the number of sequences; acceptance does not. Deterministic: the same outcomes
    and times give the same depths.

    A round has the depth of the highest expected speed. Of other depths nothing would be learned
    any more. So whenever SHARE of the time so far covers what was lost by it, a round tries one
    that may be faster for all that is known (:meth:`.CostModel.doubt`), or any drafts where there
    are none. A round that loses nothing is followed by the next at once, and so text that has
    become predictable is noticed.

    Args:
        limit: greatest depth.
        costs: by number of sequences, see :class:`CostModel`.
        has_head: False: only n-grams draft.
    """

    def __init__(
        self, limit: int, costs: Mapping[int, Costs] | None = None, has_head: bool = True
    ) -> None:
        self.limit = limit
        self.costs = CostModel(limit, costs)
        self._has_head, self._measured = has_head, costs is not None
        self._accepted, self._offered = AcceptanceTracker(limit), AcceptanceTracker(limit, rate=1.0)
        self._spare = 0.0  # plain steps that trying other depths may lose; not above 0
        self._asked, self._given_up = 0, 0.0  # by a round that tries: tokens per plain step; or 0

    @property
    def plain_s(self) -> float | None:
        """Seconds of a plain step of one sequence; None: not measured."""
        return self.costs.plain() if self._measured else None

    def depth(self, n_sequences: int = 1) -> int:
        """The depth of the highest expected speed in rounds of so many sequences."""
        steps, tokens = self._forecast(n_sequences)
        return max(range(len(steps)), key=lambda depth: tokens[depth] / steps[depth])

    def _forecast(self, n: int) -> tuple[list[float], list[float]]:
        """By depth: plain steps that a round takes, and tokens that it gives each sequence."""
        if not self._has_head:
            return [1.0], [1.0]
        costs, factor = self.costs.costs(n), self.costs.factor
        plain = costs.plain * factor(0, n)
        times = times_by_depth(costs, self.limit, self._offered.rates())
        steps = [time * factor(depth, n) / plain for depth, time in enumerate(times)]
        return steps, tokens_by_depth(self._accepted.rates())

    def choose(self, at_most: int | None = None, n_sequences: int = 1) -> int:
        """Drafts to ask of each sequence in the next round, 0 to `limit`.

        Args:
            at_most: most drafts that can be used before the text or the context ends.
        """
        steps, tokens = self._forecast(n_sequences)
        speeds = [n / time for n, time in zip(tokens, steps, strict=True)]
        asked = best = speeds.index(max(speeds))
        if self._spare >= 0.0:
            asked = self._other(best, steps, tokens, n_sequences)
        self._asked = asked if at_most is None else max(0, min(asked, at_most))
        self._given_up = 0.0 if self._asked == best else speeds[best]
        return self._asked

    def _other(self, usual: int, steps: Sequence[float], tokens: Sequence[float], n: int) -> int:
        """A depth that is worth a try; `usual`: there is none."""
        if usual == 0 < self.limit:
            return min(range(1, len(steps)), key=lambda depth: steps[depth] - tokens[depth])

        def hoped(depth: int) -> float:
            return tokens[depth] / steps[depth] * math.exp(self.costs.doubt(depth, n))

        doubted = (depth for depth in range(len(steps)) if self.costs.doubt(depth, n))
        return max((usual, *doubted), key=hoped)

    def update(self, n_drafted: int, outcomes: Outcomes, total_s: float) -> None:
        """Learn from a round, of the depth chosen last.

        Args:
            n_drafted: drafts verified of each sequence; fewer than asked for if p_min stopped
                drafting.
            outcomes: for each sequence, at least one: how many drafts it could use, at most as many
                as were asked for, and how many of them held.
            total_s: seconds of the whole round, drafting included.
        """
        n = len(outcomes)
        for n_usable, n_held in outcomes:
            self._accepted.update(n_usable, n_held)
        self._offered.update(self._asked, n_drafted)
        n_tried = min(n_drafted + 1, self._asked)
        costs = self.costs.costs(n)
        usual = (costs.draft[n_tried] + costs.verify[n_drafted + 1]) / costs.plain
        steps = min(total_s / self.costs.plain(n), usual * math.exp(STALL))
        n_tokens = 1.0 + sum(n_held for _, n_held in outcomes) / n
        lost = steps - n_tokens / self._given_up if self._given_up else 0.0
        self._spare = min(0.0, self._spare + SHARE * steps - lost)
        self.costs.update(n_tried, n_drafted, total_s, n)

    def lookup_depth(self, rates: Sequence[float], at_most: int) -> int:
        """How many n-gram drafts, which cost nothing to make, the next round of one sequence should
        verify, instead of a round that :meth:`choose` chooses; 0: none.

        Args:
            rates: conditional acceptance of these drafts, per position.
            at_most: most drafts that can be used.
        """
        steps, tokens = self._forecast(1)
        best, chosen = max(n / time for n, time in zip(tokens, steps, strict=True)), 0
        costs, n_most = self.costs.costs(), max(0, min(self.limit, at_most, len(rates)))
        for depth, n_tokens in enumerate(tokens_by_depth(rates[:n_most])):
            pace = n_tokens * costs.plain / costs.verify[depth + 1]
            if depth and pace > best:
                chosen, best = depth, pace
        return chosen

    def update_lookup(self, n_drafted: int, n_accepted: int, total_s: float) -> None:
        """Learn from a round with n-gram drafts, as many as :meth:`lookup_depth` chose.

        Args:
            n_drafted: drafts verified, at least 1.
            n_accepted: how many of them held.
            total_s: seconds of the round.
        """
        self.costs.update(0, n_drafted, total_s)

    def why_fewer(self, n_sequences: int) -> str:
        """Why rounds of so many sequences have no drafts, or fewer than those of one; "": they have
        as many."""
        depth, alone = self.depth(n_sequences), self.depth()
        if not self._has_head or (depth and depth >= alone):
            return ""
        why = f"{depth} of {alone} drafts pay here" if depth else "drafts do not pay here"
        return f"{n_sequences} sequence{'' if n_sequences == 1 else 's'}: {why}"
