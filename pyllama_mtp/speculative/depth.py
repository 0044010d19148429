"""How many tokens to draft next: learned from the rounds themselves, 0 included. Pure; no library.

The controller keeps what rounds cost (:mod:`.costmodel`) and how often drafts are accepted, and
uses the depth with the highest expected speed (:mod:`.costs`). What it does not know it tries out,
at a bounded price: an :class:`Allowance` says how much time may be lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .costmodel import CostModel
from .costs import Costs, expected_tokens, round_time, speed

#: A draft's acceptance before anything is known, and how many outcomes that belief is worth.
PRIOR_RATE, PRIOR_WEIGHT = 0.7, 3.0
#: Rounds after which an outcome counts for 1/e; the same for the outcomes that are looked at for a
#: change of text; and by how many standard deviations these must be off for the rest to be dropped.
MEMORY, RECENT_MEMORY, SURPRISE = 64.0, 8.0, 2.0

#: Plain rounds at the start when nothing was calibrated.
PLAIN_ROUNDS = 2
#: What a change of depth is taken to cost (graphs are rebuilt), in plain steps: another depth is
#: used once staying has cost as much.
CHANGE = 0.1
#: A depth not measured for FRESH rounds is measured again, SPACING rounds after the last such
#: probe, if it seems CLOSE to the best speed, as a share of it; one whose cost is a mere guess, if
#: it seems to be within WORTH of it.
FRESH, SPACING, CLOSE, WORTH = 200, 32, 0.98, 0.95
#: A depth whose cost is a mere guess is at most so far beyond the deepest one that was seen.
STRIDE = 2
#: Part of all time that probes may lose, and drafting against plain decoding.
SHARE = 0.01
#: A round is charged at most so many times what it usually takes: a stall is nobody's loss.
STALL = 1.3
#: Stands for a depth of the last round where its drafts came from elsewhere.
LOOKED_UP = 1_000
#: Most plain rounds that are decided on at once, while no probe can be afforded anyway: a decision
#: costs time, too, which counts where a step takes less than a millisecond.
MOST_RUN = 16
#: Going back to plain rounds is charged with at most so many plain steps.
MOST_BACK = 2.0


@dataclass
class _Counts:
    tried: float = 0.0
    held: float = 0.0

    def fade(self, memory: float) -> None:
        self.tried *= 1.0 - 1.0 / memory
        self.held *= 1.0 - 1.0 / memory

    def add(self, held: bool) -> None:
        self.tried += 1.0
        self.held += held

    def contradicts(self, rate: float) -> bool:
        """Whether `rate` is improbable given these outcomes (binomial, normal approximation)."""
        rate = min(max(rate, 0.05), 0.95)
        off = self.held - self.tried * rate
        return off * off > SURPRISE**2 * self.tried * rate * (1.0 - rate)


class AcceptanceTracker:
    """How often a draft is accepted, per position, all before it being accepted; old rounds fade.

    Per position the mean of a Beta posterior, whose prior is the rate of the position before: a
    position that was never reached gets the rate of the last one that was. When recent outcomes
    contradict a rate, the text has changed and the older ones are dropped.

    Args:
        limit: positions.
        rate, weight: prior of the first position, and how many outcomes any prior is worth.
    """

    def __init__(self, limit: int, rate: float = PRIOR_RATE, weight: float = PRIOR_WEIGHT) -> None:
        self._rate, self._weight = rate, weight
        self._all = [_Counts() for _ in range(limit)]
        self._recent = [_Counts() for _ in range(limit)]

    def update(self, n_tried: int, n_held: int) -> None:
        """A round tried positions 1 to `n_tried`; the first `n_held` held, the next one did not.

        A round that tried none says nothing, and nothing fades.
        """
        if not n_tried:
            return
        reached = range(min(n_tried, n_held + 1))
        for counts, memory in ((self._all, MEMORY), (self._recent, RECENT_MEMORY)):
            for one in counts:
                one.fade(memory)
            for position in reached:
                counts[position].add(position < n_held)
        rates = self.rates()
        for position in reached:
            if self._recent[position].contradicts(rates[position]):
                self._all[position] = replace(self._recent[position])

    def rates(self) -> tuple[float, ...]:
        """Estimated conditional rate of each position."""
        rate, rates = self._rate, []
        for counts in self._all:
            rate = (counts.held + self._weight * rate) / (counts.tried + self._weight)
            rates.append(rate)
        return tuple(rates)


@dataclass
class Allowance:
    """Time that may be lost, in plain decode steps.

    Attributes:
        balance: what is left; below 0 it is overdrawn.
        most: gains are saved up to this.
    """

    balance: float
    most: float

    def count(self, steps: float, lost: float) -> None:
        """A round took `steps`, and lost `lost` (below 0: gained) against what it is held to."""
        self.balance = min(self.most, self.balance + SHARE * steps - lost)


@dataclass
class _Run:
    """Plain rounds decided on at once: how many are left, how many were made, in which time.

    Attributes:
        back: they come after a round of another kind, so that graphs may have to be rebuilt.
        after_head: with drafts of the head.
        back_s: the first round's seconds, if `back`.
    """

    left: int = 0
    n: int = 0
    seconds: float = 0.0
    back: bool = False
    after_head: bool = False
    back_s: float = 0.0


class DepthController:
    """Chooses the depth of each round: :meth:`choose` before it, :meth:`update` after it.

    Serves any number of generations, one after the other. Deterministic: the same outcomes and
    times give the same depths.

    The rule. The depth in use is the one with the highest expected speed; another one is taken as
    soon as staying has cost as much as a change. Rounds at other depths (probes) are made while
    `probing` covers them, which counts what they lose against the depth in use: to measure a depth
    that may be faster and was not measured lately (two rounds, the first one rebuilds graphs), and
    at depth 0 to learn the acceptance (one round). A probe whose drafts are accepted loses little
    or nothing, so the next one follows at once, and text that has become predictable is noticed.
    Whatever is believed, `total` counts what drafting has lost against plain decoding; when it is
    overdrawn, rounds are plain until it has recovered.

    Args:
        limit: greatest depth.
        calibration: costs measured earlier; None: the first rounds are plain, to know one cost.
        trackers: acceptance of drafts, and how often they are made (p_min), where controllers of
            the same text share what they know; None: its own.

    Attributes:
        depth: the depth in use.
        rounds, probes: how many there were; plain rounds are counted when a run of them is over.
        probing, total: see above.
    """

    def __init__(
        self,
        limit: int,
        calibration: Costs | None = None,
        trackers: tuple[AcceptanceTracker, AcceptanceTracker] | None = None,
    ) -> None:
        self.limit = limit
        self.depth = self.rounds = self.probes = 0
        self.probing = Allowance(balance=1.5, most=2.0)
        self.total = Allowance(balance=2.5, most=20.0)
        self._model = CostModel(limit, calibration)
        own = AcceptanceTracker(limit), AcceptanceTracker(limit, rate=1.0)
        self._accepted, self._offered = trackers or own
        self._plain_rounds = 0 if calibration else PLAIN_ROUNDS
        self._deepest = calibration.limit if calibration else 0  # depth whose cost was seen
        #: By depth, the last round that followed another one of that depth.
        self._measured = dict.fromkeys(range(self._deepest + 1), 0)
        self._missed = 0.0  # plain steps lost by staying at the depth in use
        self._asked, self._repeated = -1, False
        self._probe: int | None = None
        self._probe_rounds = self._last_measuring = 0
        self._price = 0.0  # plain steps that the cheapest probe would lose
        self._run = _Run()
        self._pace = 1.0  # tokens per plain step of the depth in use
        self._back = 0.0  # plain steps that going back to plain rounds has cost lately
        self._looked_up = 0  # most drafts from elsewhere whose verification was seen

    @property
    def costs(self) -> Costs | None:
        """The costs as now believed; None before the first round without calibration."""
        return self._model.costs

    @property
    def acceptance(self) -> tuple[float, ...]:
        """Conditional acceptance per position, as now believed. A draft that was asked for and not
        made (p_min) counts as not accepted."""
        return self._accepted.rates()

    def choose(self, at_most: int | None = None) -> int:
        """Drafts to ask for in the next round, 0 to `limit`.

        Args:
            at_most: no more than this many can be used: the text or the context ends.
        """
        if self._run.left:
            return 0
        before, self._asked = self._asked, 0
        costs = self.costs
        if costs and self.rounds >= self._plain_rounds:
            self._asked = self._pick(costs)
        if at_most is not None and at_most < self._asked:
            self._asked, self._probe, self._probe_rounds = max(at_most, 0), None, 0
        self._repeated = self._asked == before
        self._run.back, self._run.after_head = before > 0, 0 < before < LOOKED_UP
        return self._asked

    def _pick(self, costs: Costs) -> int:
        accepted, offered = self._accepted.rates(), self._offered.rates()
        reach = min(self.limit, self._deepest + STRIDE)
        steps = [round_time(costs, depth, offered) / costs.plain for depth in range(reach + 1)]
        speeds = [expected_tokens(accepted, depth) / steps[depth] for depth in range(reach + 1)]
        best = max(range(reach + 1), key=speeds.__getitem__)
        if best == self.depth:
            self._missed = 0.0
        else:
            self._missed += steps[self.depth] * (speeds[best] / speeds[self.depth] - 1.0)
            if self._missed > CHANGE:
                self.depth, self._missed = best, 0.0
        plain = self.depth == 0 or self.total.balance < 0
        self._pace = 1.0 if plain else speeds[self.depth]
        if self._probe_rounds == 0:
            self._probe = self._start_probe(speeds, steps)
        if self._probe is not None:
            return self._probe
        if plain:
            self._run = _Run(self._rounds_to_wait())
        return 0 if plain else self.depth

    def _rounds_to_wait(self) -> int:
        """Plain rounds before another decision can be of use: until what is missing is earned."""
        if self.depth:
            missing = -self.total.balance
        else:
            missing = self._price - min(self.probing.balance, self.total.balance)
        return max(1, min(MOST_RUN, int(missing / SHARE)))

    def _start_probe(self, speeds: Sequence[float], steps: Sequence[float]) -> int | None:
        """The depth of a probe that begins now, None for no probe.

        Args:
            speeds, steps: by depth: expected tokens per plain step, plain steps per round.
        """
        current = speeds[self.depth]
        others = [depth for depth in range(len(speeds)) if depth != self.depth]
        candidates: list[int] = []
        if self.rounds - self._last_measuring >= SPACING:
            candidates = [
                depth for depth in others if self._worth_measuring(depth, speeds[depth] / current)
            ]
        n_rounds = 2 if candidates else 1
        if not candidates and self.depth == 0:
            candidates = others
        self._price = 0.0
        if not candidates:
            return None
        lost = {depth: steps[depth] * (1.0 - speeds[depth] / current) for depth in candidates}
        depth = min(candidates, key=lost.__getitem__)
        self._price = n_rounds * lost[depth]
        if self._price > min(self.probing.balance, self.total.balance):
            return None
        self._probe_rounds = n_rounds
        if n_rounds == 2:
            self._last_measuring = self.rounds
        return depth

    def _worth_measuring(self, depth: int, ratio: float) -> bool:
        """Whether `depth` may be better than it seems; it seems `ratio` times as fast as the best.

        A plain step is measured again in any case: everything is compared with it.
        """
        last = self._measured.get(depth)
        if depth == 0 and self._model.plain_is_doubtful:
            return True
        if last is None:
            return ratio >= WORTH
        return self.rounds - last > FRESH and (depth == 0 or ratio >= CLOSE)

    def update(self, n_drafted: int, n_accepted: int, draft_s: float, total_s: float) -> None:
        """The outcome of the round that was chosen last.

        Args:
            n_drafted: drafts verified; fewer than asked for where p_min stopped drafting.
            n_accepted: how many of them held.
            draft_s: seconds of drafting.
            total_s: seconds of the whole round, drafting included.
        """
        self.update_pooled(n_drafted, [(self._asked, n_accepted)], draft_s, total_s)

    def update_pooled(
        self,
        n_drafted: int,
        outcomes: Sequence[tuple[int, int]],
        draft_s: float,
        total_s: float,
    ) -> None:
        """The outcome of the round that was chosen last, in which several sequences took part.

        All costs are those of a round of so many sequences: a controller must always get rounds of
        equally many. A plain step then yields a token for each of them, and what a round yields is
        the mean.

        Args:
            n_drafted: drafts verified of each sequence.
            outcomes: for each sequence, at least one: how many drafts it could have used, at most
                as many as were asked for, and how many of them held.
            draft_s, total_s: see :meth:`update`.
        """
        run = self._run
        if run.left:
            if run.back and not run.n:
                run.back_s = total_s
            run.left, run.n, run.seconds = run.left - 1, run.n + 1, run.seconds + total_s
            if not run.left:
                self._end_run(run)
            return
        self.rounds += 1
        self._deepest = max(self._deepest, self._asked)
        if self._repeated and self.rounds > self._plain_rounds:
            self._measured[self._asked] = self.rounds
        self._model.update(self._asked, n_drafted, draft_s, total_s - draft_s)
        for n_usable, n_held in outcomes:
            self._accepted.update(n_usable, n_held)
        self._offered.update(self._asked, n_drafted)
        if self.costs:
            n_tokens = 1.0 + sum(n_held for _, n_held in outcomes) / len(outcomes)
            self._account(self.costs, n_drafted, n_tokens, total_s)

    def close_run(self) -> None:
        """Plain rounds that were decided on are over: another kind follows, or another text."""
        run = self._run
        if run.left:
            run.left = 0
            if run.n:
                self._end_run(run)

    def _end_run(self, run: _Run) -> None:
        """The plain rounds of `run` are made: their mean counts as one time. What going back to
        plain rounds has cost is a loss, which those before it have made."""
        steady = self._repeated or run.n > 1
        self.rounds += run.n
        if steady:
            self._measured[0] = self.rounds
        self._repeated = True
        if run.back and run.n > 1:
            self._model.update(0, 0, 0.0, (run.seconds - run.back_s) / (run.n - 1))
        else:
            self._model.update(0, 0, 0.0, run.seconds / run.n)
        if self.costs:
            steps = min(run.seconds / self.costs.plain, STALL * run.n)
            lost = min(max(run.back_s / self.costs.plain - 1.0, 0.0), MOST_BACK)
            if run.back_s:
                self._back += (lost - self._back) / 4
            self.total.count(steps, lost)
            self.probing.count(steps, lost if run.after_head else 0.0)

    def lookup_depth(self, rates: Sequence[float], at_most: int) -> int:
        """How many drafts that cost nothing to make, such as those of an earlier occurrence, are
        worth verifying in the next round, in place of what :meth:`choose` would have; 0: none.

        Unless the last round had such drafts, what it costs to go back is part of the price.

        Args:
            rates: conditional acceptance of these drafts, per position.
            at_most: no more than this many can be used.
        """
        costs = self.costs
        if not costs or self.rounds < self._plain_rounds or self.total.balance < 0:
            return 0
        reach = max(0, min(self.limit, 2 * max(self._deepest, self._looked_up) + 1, at_most))
        change = 0.0 if self._asked == LOOKED_UP else self._back * costs.plain
        chosen, best, tokens, reached = 0, self._pace / costs.plain, 1.0, 1.0
        for depth, rate in enumerate(rates[:reach], start=1):
            reached *= rate
            tokens += reached
            pace = tokens / (costs.verify[depth + 1] + change)
            if pace > best:
                chosen, best = depth, pace
        return chosen

    def update_lookup(self, n_drafted: int, n_accepted: int, total_s: float) -> None:
        """The outcome of a round with drafts that :meth:`lookup_depth` asked for.

        Args:
            n_drafted: drafts verified, at least 1.
            n_accepted: how many of them held.
            total_s: seconds of the round.
        """
        self.close_run()
        self.rounds += 1
        self._asked = LOOKED_UP
        self._looked_up = max(self._looked_up, n_drafted)
        self._model.update(0, n_drafted, 0.0, total_s)
        if self.costs:
            steps = min(total_s, STALL * self.costs.verify[n_drafted + 1]) / self.costs.plain
            self.total.count(steps, steps - 1.0 - n_accepted)
            self.probing.count(steps, 0.0)

    def _account(self, costs: Costs, n_drafted: int, n_tokens: float, total_s: float) -> None:
        """Hold the round against plain decoding, and a probe against the depth in use."""
        made = min(n_drafted + 1, self._asked)
        usual = costs.draft[made] + costs.verify[n_drafted + 1]
        steps = min(total_s, STALL * usual) / costs.plain
        self.total.count(steps, steps - n_tokens if self._asked else 0.0)
        if self._probe is None:
            self.probing.count(steps, 0.0)
            return
        pace = speed(costs, self._accepted.rates(), self.depth, self._offered.rates())
        self.probing.count(steps, steps - n_tokens / (pace * costs.plain))
        self._probe_rounds -= 1
        self.probes += 1
