"""From rounds to acceptance: rates per draft position, their intervals, and the verdict. Pure.

A round drafts `depth` tokens. Draft i is *judged* if all before it were accepted; the first that
the target would not have chosen ends the round.

- Conditional acceptance at position i: accepted there / judged there. What expected speed is
  computed from.
- Unconditional: rounds in which drafts 1 to i were all accepted / rounds. The probability that the
  draft there is used.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pyllama_mtp.errors import UsageError

Counts = npt.NDArray[np.int64]

#: The standard normal distribution's 97.5 % point.
Z_95 = 1.959964
#: Resamples of the bootstrap, and the seed of its draws: same rounds, same interval.
RESAMPLES, SEED = 2000, 1
#: Where the buckets of generated positions begin.
BUCKETS = (0, *(64 * 2**n for n in range(12)))

PAYS_FROM, BROKEN_BELOW, MOST_CLASSES = 0.60, 0.30, 0.75


@dataclass(frozen=True)
class Rounds:
    """The rounds of one prompt that were offered all `depth` drafts, in order.

    Attributes:
        depth: drafts per round.
        accepted: of every round, the drafts that the target chose as well, 0 to `depth`.
        ended: an end token, drafted and accepted, cut the last round: what was drafted after it was
            not judged.
    """

    depth: int
    accepted: tuple[int, ...]
    ended: bool = False

    def starts(self) -> list[int]:
        """Tokens generated before each round: the first is the prefill's."""
        gained = itertools.accumulate((n + 1 for n in self.accepted), initial=1)
        return list(gained)[: len(self.accepted)]

    def tally(self, chosen: Iterable[bool] | None = None) -> Tally:
        """Counts of all rounds, or of the chosen ones."""
        counts = Tally.empty(self.depth)
        last = len(self.accepted) - 1
        for number, (n, take) in enumerate(
            zip(self.accepted, chosen or itertools.repeat(True), strict=False)
        ):
            if not take:
                continue
            cut = n if self.ended and number == last else self.depth
            counts.held[:n] += 1
            counts.judged[: min(n + 1, cut)] += 1
            counts.known[:cut] += 1
            counts.rounds += 1
        return counts


@dataclass
class Tally:
    """Counts per position, arrays of [depth].

    Attributes:
        held: rounds in which the draft there was accepted.
        judged: rounds in which all drafts before it were, and it was compared.
        known: rounds of which it is known whether all drafts up to it are accepted.
        rounds: rounds in all.
    """

    held: Counts
    judged: Counts
    known: Counts
    rounds: int = 0

    @classmethod
    def empty(cls, depth: int) -> Tally:
        """Nothing counted."""
        held, judged, known = np.zeros((3, depth), dtype=np.int64)
        return cls(held, judged, known)


@dataclass(frozen=True)
class Rate:
    """A share with its 95 % interval; `low` and `high` are 0 to 1 like `rate`."""

    held: int
    tried: int
    rate: float
    low: float
    high: float


def wilson(held: int, tried: int, z: float = Z_95) -> tuple[float, float]:
    """Score interval of a share (Wilson 1927, "Probable inference, the law of succession, and
    statistical inference"); trials are taken as independent. 0 to 1 where nothing was tried."""
    if not tried:
        return (0.0, 1.0)
    rate = held / tried
    middle = rate + z * z / (2 * tried)
    half = z * math.sqrt(rate * (1 - rate) / tried + z * z / (4 * tried * tried))
    scale = 1 + z * z / tried
    return (max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale))


def bootstrap(held: Counts, tried: Counts) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Percentile intervals, 95 %, of pooled shares, by drawing whole prompts with replacement.

    Rounds of one prompt resemble each other, so prompts are what is drawn: the cluster bootstrap
    (Davison and Hinkley 1997, section 3.8; Field and Welsh 2007). It says nothing with one prompt.

    Args:
        held, tried: int64 of [prompts, positions].

    Returns:
        Low and high, float64 of [positions]; nan where nothing was tried.
    """
    prompts = len(held)
    draws = np.random.default_rng(SEED).multinomial(
        prompts, np.full(prompts, 1 / prompts), size=RESAMPLES
    )
    sums = draws @ tried
    with np.errstate(invalid="ignore"):
        shares = np.where(sums > 0, draws @ held / np.maximum(sums, 1), np.nan)
    low, high = (np.full(held.shape[1], np.nan) for _ in range(2))
    for position in np.flatnonzero(tried.sum(axis=0)):
        low[position], high[position] = np.nanquantile(shares[:, position], (0.025, 0.975))
    return low, high


def pooled(held: Counts, tried: Counts) -> list[Rate | None]:
    """The share at each position over all prompts, its interval the wider at each end of
    :func:`wilson` and :func:`bootstrap`: the first is too narrow where prompts differ, the second
    where there are few, or where everything was accepted.

    Args:
        held, tried: int64 of [prompts, positions].
    """
    if not len(held):
        return [None] * held.shape[1]
    lows, highs = bootstrap(held, tried)
    rates: list[Rate | None] = []
    for h, t, low, high in zip(held.sum(axis=0), tried.sum(axis=0), lows, highs, strict=True):
        if not t:
            rates.append(None)
            continue
        least, most = wilson(int(h), int(t))
        bounds = float(min(least, low)), float(max(most, high))
        rates.append(Rate(int(h), int(t), float(h / t), *bounds))
    return rates


@dataclass(frozen=True)
class Acceptance:
    """Acceptance of some prompts: one entry per draft position, None where nothing was judged.

    Attributes:
        prompts, rounds: how many it was measured on.
        mean_accepted: accepted drafts per round; None without rounds.
    """

    prompts: int
    rounds: int
    conditional: list[Rate | None]
    unconditional: list[Rate | None]
    mean_accepted: float | None

    @classmethod
    def of(cls, tallies: Sequence[Tally], depth: int) -> Acceptance:
        """Pooled over prompts; those without a round do not count."""
        tallies = [tally for tally in tallies if tally.rounds]

        def column(get: Callable[[Tally], Counts]) -> Counts:
            return np.array([get(tally) for tally in tallies], dtype=np.int64).reshape(-1, depth)

        held = column(lambda tally: tally.held)
        rounds = sum(tally.rounds for tally in tallies)
        return cls(
            prompts=len(tallies),
            rounds=rounds,
            conditional=pooled(held, column(lambda tally: tally.judged)),
            unconditional=pooled(held, column(lambda tally: tally.known)),
            mean_accepted=float(held.sum() / rounds) if rounds else None,
        )

    def rates(self) -> list[float]:
        """Conditional acceptance, as far as it was measured."""
        known = itertools.takewhile(lambda rate: rate is not None, self.conditional)
        return [rate.rate for rate in known if rate]


def by_position(prompts: Sequence[Rounds], depth: int) -> Iterator[tuple[int, int, Acceptance]]:
    """(first, last, acceptance) for buckets of how many tokens were generated before a round."""
    starts = [rounds.starts() for rounds in prompts]
    for begin, end in itertools.pairwise(BUCKETS):
        tallies = [
            rounds.tally(begin <= start < end for start in own)
            for rounds, own in zip(prompts, starts, strict=True)
        ]
        found = Acceptance.of(tallies, depth)
        if found.rounds:
            yield begin, end - 1, found


@dataclass(frozen=True)
class Verdict:
    """What acceptance at the first position says.

    Attributes:
        outcome: "worth it", "broken" or "between".
        reason: why, in a sentence.
    """

    outcome: str
    reason: str


def verdict(first: Mapping[str, float]) -> Verdict:
    """Is the head good enough? By a published rule of another engine with such heads.

    At least 60 % at the first position in three of four classes of prompts (factual, long thinking,
    code, instruction) make batched verification worth it; under 30 % in all of them means that the
    head, or how it is fed, is broken: greedy text is right either way, so nothing else shows it.
    The rule leaves out what lies between; there, costs decide. With another number of classes,
    three quarters of them are asked for.

    Args:
        first: acceptance at the first draft position, 0 to 1, by class.

    Raises:
        UsageError: no class.
    """
    if not first:
        raise UsageError("no class has a judged draft; there is nothing to give a verdict on")
    good = [name for name, rate in first.items() if rate >= PAYS_FROM]
    classes = f"{len(first)} class{'' if len(first) == 1 else 'es'}"
    reached = f"{len(good)} of {classes} reach {PAYS_FROM:.0%} at the first position"
    if len(good) >= MOST_CLASSES * len(first):
        return Verdict(
            "worth it", f"{reached}: by that rule of thumb batched verification is worth it"
        )
    if max(first.values()) < BROKEN_BELOW:
        return Verdict(
            "broken",
            f"no class reaches {BROKEN_BELOW:.0%} at the first position: the head, or what it is "
            "fed, is broken",
        )
    return Verdict(
        "between",
        f"{reached}; three quarters are asked for, and under {BROKEN_BELOW:.0%} everywhere would "
        "mean a broken head: between the two, what the costs say decides",
    )
