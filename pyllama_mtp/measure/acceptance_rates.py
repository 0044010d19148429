"""From rounds to acceptance: rates per draft position, their intervals, and the verdict. Pure.

A round drafts `depth` tokens. Draft i is *judged* if all before it were accepted; the first that
the target would not have chosen ends the round.

- Conditional acceptance at position i: accepted there / judged there. Expected speed is computed
  from it.
- Unconditional acceptance at position i: rounds in which drafts 1 to i were all accepted / rounds,
  the probability that the draft there is used.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pyllama_mtp.errors import UsageError

Counts = npt.NDArray[np.int64]

#: The standard normal distribution's 97.5 % point.
Z_95 = 1.959964
#: Resamples of the bootstrap, and its seed: the same rounds give the same interval.
RESAMPLES, SEED = 2000, 1
#: First positions of the buckets of generated tokens.
BUCKETS = (0, *(64 * 2**n for n in range(12)))

PAYS_FROM, BROKEN_BELOW, MOST_CLASSES = 0.60, 0.30, 0.75


@dataclass(frozen=True)
class Rounds:
    """The rounds of one prompt that were offered all `depth` drafts, in order.

    Attributes:
        depth: drafts per round.
        accepted: drafts that the target chose as well in each round, 0 to `depth`.
        ended: an accepted end token cut the last round; the drafts after it were not judged.
    """

    depth: int
    accepted: tuple[int, ...]
    ended: bool = False

    def starts(self) -> list[int]:
        """Tokens generated before each round, the prefill's token included."""
        gained = itertools.accumulate((n + 1 for n in self.accepted), initial=1)
        return list(gained)[: len(self.accepted)]

    def tally(self, chosen: Iterable[bool] | None = None) -> Tally:
        """Counts of all rounds, or of the chosen ones."""
        held, judged, known = np.zeros((3, self.depth), dtype=np.int64)
        rounds, last = 0, len(self.accepted) - 1
        taken = zip(self.accepted, chosen or itertools.repeat(True), strict=False)
        for number, (n, take) in enumerate(taken):
            if take:
                cut = n if self.ended and number == last else self.depth
                held[:n] += 1
                judged[: min(n + 1, cut)] += 1
                known[:cut] += 1
                rounds += 1
        return Tally(held, judged, known, rounds)


@dataclass(frozen=True)
class Tally:
    """Counts per position, arrays of [depth].

    Attributes:
        held: rounds in which the draft was accepted.
        judged: rounds in which all drafts before it were accepted, and it was compared.
        known: rounds of which it is known whether all drafts up to it are accepted.
        rounds: rounds in all.
    """

    held: Counts
    judged: Counts
    known: Counts
    rounds: int


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
    statistical inference") of independent trials. (0, 1) where nothing was tried."""
    if not tried:
        return (0.0, 1.0)
    rate = held / tried
    middle = rate + z * z / (2 * tried)
    half = z * math.sqrt(rate * (1 - rate) / tried + z * z / (4 * tried * tried))
    scale = 1 + z * z / tried
    return (max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale))


def bootstrap(held: Counts, tried: Counts) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Percentile intervals, 95 %, of pooled shares, by drawing whole prompts with replacement.

    Rounds of one prompt resemble each other, so prompts are drawn, not rounds: the cluster
    bootstrap (Davison and Hinkley 1997, section 3.8; Field and Welsh 2007). With one prompt the
    interval has no width.

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
    """The share at each position over all prompts, None where nothing was tried. Each end of its
    interval is the wider of :func:`wilson`, which is too narrow where prompts differ, and
    :func:`bootstrap`, which is too narrow with few prompts, or where everything was accepted.

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
        prompts, rounds: their numbers.
        mean_accepted: accepted drafts per round; None without rounds.
    """

    prompts: int
    rounds: int
    conditional: list[Rate | None]
    unconditional: list[Rate | None]
    mean_accepted: float | None

    @classmethod
    def of(cls, tallies: Sequence[Tally], depth: int) -> Acceptance:
        """Pooled over prompts; prompts without a round do not count."""
        rows = [(one.held, one.judged, one.known) for one in tallies if one.rounds]
        held, judged, known = np.array(rows, dtype=np.int64).reshape(-1, 3, depth).swapaxes(0, 1)
        rounds = sum(tally.rounds for tally in tallies)
        return cls(
            prompts=len(rows),
            rounds=rounds,
            conditional=pooled(held, judged),
            unconditional=pooled(held, known),
            mean_accepted=float(held.sum() / rounds) if rounds else None,
        )

    def rates(self) -> list[float]:
        """Conditional acceptance up to the first position where nothing was judged."""
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
    """`outcome`: "worth it", "broken" or "between". `reason`: a sentence."""

    outcome: str
    reason: str


def verdict(first: Mapping[str, float]) -> Verdict:
    """Judge the head by a rule that another engine with such heads has published.

    Batched verification is worth it with at least 60 % at the first position in three of four
    classes of prompts (factual, long thinking, code, instruction), or in three quarters of another
    number of classes. Under 30 % in all of them the head, or how it is fed, is broken; nothing else
    shows it, because greedy text is right either way. In between, costs decide.

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
