"""How many drafts a round should have, 0 included: costs, acceptance, and the choice. Pure.

A round drafts k tokens, verifies them in one pass of the target over k + 1 rows, and emits the
accepted ones and one token more (Leviathan et al. 2023, "Fast inference from transformers via
speculative decoding", https://arxiv.org/abs/2211.17192). Its speed follows from what drafting and
verifying cost here (:class:`Costs`, which :class:`CostModel` learns from the rounds), and from how
often a draft is accepted (:class:`AcceptanceTracker`). :class:`DepthController` uses the depth with
the highest expected speed. It tries out unknown depths at a bounded price: an :class:`Allowance`
says how much time may be lost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
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


def posterior(
    tried: Sequence[float], held: Sequence[float], prior: float, weight: float
) -> tuple[float, ...]:
    """Estimated acceptance per position, from drafts tried and held: means of Beta posteriors.

    Args:
        prior: acceptance of the first position before any outcome; each further position has the
            estimate of the position before as its prior.
        weight: outcomes that each prior is worth.
    """
    rates: list[float] = []
    for n_tried, n_held in zip(tried, held, strict=True):
        prior = (n_held + weight * prior) / (n_tried + weight)
        rates.append(prior)
    return tuple(rates)


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


# -- costs, learned from the rounds ----------------------------------------------------------------

# Costs are nearly affine in the rows, so a cost that was measured seldom, or long ago, is drawn
# towards a line. Three things distort a time: a stall (another program had the core); the first
# round at another size, which may build a graph; and a slower machine, or a longer text, which
# slows all rounds. So times count up to STALL times the expected one; the excess of first rounds
# is learned and taken off; and times are relative to the pace of their moment.

#: Rounds after which a sample counts for 1/e.
COST_MEMORY = 200.0
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
        return self.n * math.exp((self.newest - now) / COST_MEMORY)

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


# -- acceptance, and the choice --------------------------------------------------------------------

#: A draft's acceptance before any outcome, and how many outcomes that prior is worth.
PRIOR_RATE, PRIOR_WEIGHT = 0.7, 3.0
#: Rounds after which an outcome counts for 1/e; the same for recent outcomes, which show when the
#: text changes; and the standard deviations between both at which older outcomes are dropped.
MEMORY, RECENT_MEMORY, SURPRISE = 64.0, 8.0, 2.0

#: For each sequence of a round: how many drafts it could use, and how many of them held.
Outcomes: TypeAlias = Sequence[tuple[int, int]]

#: Plain rounds at first, and from time to time.
PLAIN = 2
#: Depths that were never used are tried up to so far beyond the deepest one used.
STRIDE = 2
#: The part by which a guessed cost may be too high. A cost that was measured seldom, or long ago,
#: gets a part of this benefit of the doubt.
DOUBT = 0.07
#: The cost of a change of depth, in plain steps: the depth changes once staying has cost as much.
CHANGE = 0.1
#: The part of all time that may be lost: by drafting, against plain decoding; and, where plain
#: decoding seems best, by trying drafts.
SHARE = 0.01


class _Counts:
    """Outcomes per position: how many drafts were tried, and how many held; older outcomes fade.

    Args:
        limit: positions.
        memory: rounds after which an outcome counts for 1/e.
    """

    def __init__(self, limit: int, memory: float) -> None:
        self._kept = 1.0 - 1.0 / memory
        self.tried, self.held = [0.0] * limit, [0.0] * limit

    def add(self, n_reached: int, n_held: int) -> None:
        """One more round."""
        kept = self._kept
        self.tried = [kept * n for n in self.tried]
        self.held = [kept * n for n in self.held]
        for position in range(n_reached):
            self.tried[position] += 1.0
        for position in range(n_held):
            self.held[position] += 1.0

    def contradicts(self, position: int, rate: float) -> bool:
        """Whether `rate` is improbable given these outcomes (binomial, normal approximation)."""
        rate, tried = min(max(rate, 0.05), 0.95), self.tried[position]
        off = self.held[position] - tried * rate
        return off * off > SURPRISE**2 * tried * rate * (1.0 - rate)


class AcceptanceTracker:
    """Conditional acceptance of drafts, per position; old rounds fade.

    Each rate is the mean of a Beta posterior, whose prior is the rate of the position before: a
    position never reached has the rate of the last position reached. When recent outcomes
    contradict a rate, the text has changed and older outcomes are dropped.

    Args:
        limit: positions.
        rate: prior of the first position.
    """

    def __init__(self, limit: int, rate: float = PRIOR_RATE) -> None:
        self._rate = rate
        self._all, self._recent = _Counts(limit, MEMORY), _Counts(limit, RECENT_MEMORY)
        self._rates = self._posterior()

    def update(self, n_tried: int, n_held: int) -> None:
        """Add a round that tried positions 1 to `n_tried`: the first `n_held` held, the next did
        not. For a round that tried none, nothing fades.
        """
        if not n_tried:
            return
        n_reached = min(n_tried, n_held + 1)
        n_held = min(n_held, n_reached)
        for counts in (self._all, self._recent):
            counts.add(n_reached, n_held)
        rates, recent = self._posterior(), self._recent
        changed = [i for i in range(n_reached) if recent.contradicts(i, rates[i])]
        for i in changed:
            self._all.tried[i], self._all.held[i] = recent.tried[i], recent.held[i]
        self._rates = self._posterior() if changed else rates

    def rates(self) -> tuple[float, ...]:
        """Estimated conditional acceptance of each position."""
        return self._rates

    def _posterior(self) -> tuple[float, ...]:
        return posterior(self._all.tried, self._all.held, self._rate, PRIOR_WEIGHT)


@dataclass
class Allowance:
    """Time that may be lost, in plain decode steps.

    Attributes:
        balance: the time left; below 0 the allowance is overdrawn.
        most: the balance grows up to this.
    """

    balance: float
    most: float

    def count(self, steps: float, lost: float) -> None:
        """Add a round that took `steps` and lost `lost` of them (below 0: gained)."""
        self.balance = min(self.most, self.balance + SHARE * steps - lost)


@dataclass
class _Use:
    """Rounds of one number of sequences: the depth in use, plain steps lost by staying at it, and
    the rounds so far."""

    depth: int = 0
    missed: float = 0.0
    rounds: int = 0


class DepthController:
    """Chooses the depth of each round: :meth:`choose` before it, :meth:`update` after it.

    Serves one generation after the other, and rounds of any number of sequences. The cost of a
    depth depends on the number of sequences; acceptance does not. Deterministic: the same outcomes
    and times give the same depths.

    The rule. Each depth has an expected speed, raised by a doubt if its cost was measured seldom or
    long ago (an upper confidence bound). The fastest depth is taken as soon as staying at the depth
    in use has cost as much as a change. If that is depth 0, a probe, a round with drafts, is made
    whenever `probing` covers its possible loss. A probe whose drafts hold loses nothing, so the
    next one follows at once, and text that has become predictable is noticed. `total` counts the
    loss of drafting against plain decoding; while it is overdrawn, rounds are plain. The first two
    rounds are plain, because all others are compared with them and the first may build a graph; so
    are two rounds from time to time.

    Args:
        limit: greatest depth.
        costs: that are known already, of rounds of one sequence; None: none are.

    Attributes:
        probing, total: see above.
    """

    #: Whether rounds may draft what followed the same tokens earlier in the text.
    looks_up = True

    def __init__(self, limit: int, costs: CostModel | None = None) -> None:
        self.limit = limit
        self.probing = Allowance(balance=0.0, most=0.0)
        self.total = Allowance(balance=2.5, most=20.0)
        self._model = costs or CostModel(limit)
        self._accepted, self._offered = AcceptanceTracker(limit), AcceptanceTracker(limit, rate=1.0)
        self._uses = {1: _Use(rounds=PLAIN if costs else 0)}
        self._asked, self._is_probe, self._looked_up = 0, False, False
        self._pace = 1.0  # tokens per plain step of the depth in use

    def costs(self, n_sequences: int = 1) -> Costs | None:
        """Estimated costs of rounds of so many sequences; None while nothing is known."""
        return self._model.costs(n_sequences)

    def depth(self, n_sequences: int = 1) -> int:
        """The depth in use in rounds of so many sequences."""
        return self._uses[n_sequences].depth if n_sequences in self._uses else 0

    def choose(self, at_most: int | None = None, n_sequences: int = 1) -> int:
        """Drafts to ask of each sequence in the next round, 0 to `limit`.

        Args:
            at_most: most drafts that can be used before the text or the context ends.
        """
        use, costs = self._uses.setdefault(n_sequences, _Use()), self.costs(n_sequences)
        asked = 0
        if costs and use.rounds % COST_MEMORY >= PLAIN:
            asked = self._pick(use, costs, n_sequences)
        self._asked = asked if at_most is None else max(0, min(asked, at_most))
        self._is_probe = self._asked > 0 == use.depth
        return self._asked

    def _pick(self, use: _Use, costs: Costs, n: int) -> int:
        accepted, offered = self._accepted.rates(), self._offered.rates()
        depths = range(min(self.limit, self._model.deepest(n) + STRIDE) + 1)
        steps = [time / costs.plain for time in times_by_depth(costs, depths[-1], offered)]
        tokens = tokens_by_depth(accepted)
        doubts = [DOUBT * math.sqrt(LINE / self._model.worth(depth, n)) for depth in depths]
        hoped = [tokens[depth] / steps[depth] / (1.0 - doubts[depth]) for depth in depths]
        best = max(depths, key=hoped.__getitem__)
        use.missed += steps[use.depth] * (hoped[best] / hoped[use.depth] - 1.0)
        if best == use.depth or use.missed > CHANGE:
            use.depth, use.missed = best, 0.0
        self._pace = 1.0
        if self.total.balance < 0:
            return 0
        if use.depth == 0 < depths[-1] and self.probing.balance >= 0:
            return min(depths[1:], key=lambda depth: steps[depth] - tokens[depth])
        self._pace = tokens[use.depth] / steps[use.depth]
        return use.depth

    def update(self, n_drafted: int, outcomes: Outcomes, draft_s: float, total_s: float) -> None:
        """Learn from a round, of the depth chosen last.

        Args:
            n_drafted: drafts verified of each sequence; fewer than asked for if p_min stopped
                drafting.
            outcomes: for each sequence, at least one: how many drafts it could use, at most as many
                as were asked for, and how many of them held.
            draft_s: seconds of drafting.
            total_s: seconds of the whole round, drafting included.
        """
        n = len(outcomes)
        for n_usable, n_held in outcomes:
            self._accepted.update(n_usable, n_held)
        self._offered.update(self._asked, n_drafted)
        self._looked_up = False
        n_tokens = 1.0 + sum(n_held for _, n_held in outcomes) / n
        self._count(n, self._asked, n_drafted, n_tokens, draft_s, total_s)

    def lookup_depth(self, rates: Sequence[float], at_most: int) -> int:
        """How many n-gram drafts, which cost nothing to make, the next round of one sequence should
        verify, instead of a round that :meth:`choose` chooses; 0: none.

        Unless the last round had n-gram drafts, the price includes that of a change.

        Args:
            rates: conditional acceptance of these drafts, per position.
            at_most: most drafts that can be used.
        """
        costs = self.costs()
        if not costs or self._uses[1].rounds < PLAIN or self.total.balance < 0:
            return 0
        reach = max(0, min(self.limit, 2 * self._model.deepest() + 1, at_most))
        change = 0.0 if self._looked_up else self._model.change * costs.plain
        chosen, best, tokens, reached = 0, self._pace / costs.plain, 1.0, 1.0
        for depth, rate in enumerate(rates[:reach], start=1):
            reached *= rate
            tokens += reached
            pace = tokens / (costs.verify[depth + 1] + change)
            if pace > best:
                chosen, best = depth, pace
        return chosen

    def update_lookup(self, n_drafted: int, n_accepted: int, total_s: float) -> None:
        """Learn from a round with n-gram drafts, as many as :meth:`lookup_depth` chose.

        Args:
            n_drafted: drafts verified, at least 1.
            n_accepted: how many of them held.
            total_s: seconds of the round.
        """
        self._is_probe, self._looked_up = False, True
        self._count(1, 0, n_drafted, 1.0 + n_accepted, 0.0, total_s)

    def _count(
        self, n: int, asked: int, n_drafted: int, n_tokens: float, draft_s: float, total_s: float
    ) -> None:
        """Learn the cost of a round of `n` sequences, and compare the round, which gave each of
        them `n_tokens` on average, with plain decoding."""
        self._uses.setdefault(n, _Use()).rounds += 1
        self._model.update(asked, n_drafted, draft_s, total_s - draft_s, n)
        costs = self.costs(n)
        if costs:
            usual = costs.draft[min(n_drafted + 1, asked)] + costs.verify[n_drafted + 1]
            steps = min(total_s, STALL * usual) / costs.plain
            lost = steps - n_tokens if asked or n_drafted else 0.0
            self.total.count(steps, lost)
            self.probing.count(steps, lost if self._is_probe else 0.0)
