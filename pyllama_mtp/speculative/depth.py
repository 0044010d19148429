"""The number of drafts per round, 0 included, learned from the rounds. Pure; no library.

The controller learns the costs of rounds (:mod:`.costmodel`) and how often drafts are accepted, and
uses the depth with the highest expected speed (:mod:`.costs`). It tries out unknown depths at a
bounded price: an :class:`Allowance` says how much time may be lost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from .costmodel import LINE, STALL, CostModel
from .costmodel import MEMORY as COST_MEMORY
from .costs import Costs, posterior, times_by_depth, tokens_by_depth

#: A draft's acceptance before any outcome, and how many outcomes that prior is worth.
PRIOR_RATE, PRIOR_WEIGHT = 0.7, 3.0
#: Rounds after which an outcome counts for 1/e; the same for recent outcomes, which show when the
#: text changes; and the standard deviations between both at which older outcomes are dropped.
MEMORY, RECENT_MEMORY, SURPRISE = 64.0, 8.0, 2.0

#: For each sequence of a round: how many drafts it could use, and how many of them held.
Outcomes: TypeAlias = Sequence[tuple[int, int]]

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

    Attributes:
        probing, total: see above.
    """

    #: Whether rounds may draft what followed the same tokens earlier in the text.
    looks_up = True

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.probing = Allowance(balance=0.0, most=0.0)
        self.total = Allowance(balance=2.5, most=20.0)
        self._model = CostModel(limit)
        self._accepted, self._offered = AcceptanceTracker(limit), AcceptanceTracker(limit, rate=1.0)
        self._uses = {1: _Use()}
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
        if costs and use.rounds % COST_MEMORY >= 2:
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
        if not costs or self._uses[1].rounds < 2 or self.total.balance < 0:
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
