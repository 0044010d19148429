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

import numpy as np
import numpy.typing as npt

from pyllama_mtp.measure.acceptance_record import PromptResult

Counts = npt.NDArray[np.int64]
#: Counts of a prompt, and the number of its rounds; see :func:`tally`.
Tally = tuple[Counts, int]

#: The standard normal distribution's 97.5 % point.
Z_95 = 1.959964
#: Resamples of the bootstrap, and its seed: the same rounds give the same interval.
RESAMPLES, SEED = 2000, 1
#: First positions of the buckets of generated tokens.
BUCKETS = (0, *(64 * 2**n for n in range(12)))

PAYS_FROM, BROKEN_BELOW, MOST_CLASSES = 0.60, 0.30, 0.75


def tally(result: PromptResult, depth: int, chosen: Iterable[bool] = ()) -> Tally:
    """Counts of all rounds of a prompt, or of the `chosen` ones, and the number of rounds.

    Returns:
        int64 of [3, depth], by position: rounds in which the draft was accepted; in which all those
        before it were accepted, and it was compared; and of which it is known whether all up to it
        are accepted.
    """
    counts = np.zeros((3, depth), dtype=np.int64)
    held, judged, known = counts
    rounds, last = 0, len(result.accepted) - 1
    taken = chosen or itertools.repeat(True)
    for number, (n, take) in enumerate(zip(result.accepted, taken, strict=False)):
        if take:
            cut = n if result.ended and number == last else depth
            held[:n] += 1
            judged[: min(n + 1, cut)] += 1
            known[:cut] += 1
            rounds += 1
    return counts, rounds


@dataclass(frozen=True)
class Rate:
    """A share with its 95 % interval; `low` and `high` are 0 to 1 like `rate`."""

    held: int
    tried: int
    rate: float
    low: float
    high: float


def wilson(held: int, tried: int) -> tuple[float, float]:
    """Score interval of a share (Wilson 1927, "Probable inference, the law of succession, and
    statistical inference") of independent trials; `tried` is 1 or more."""
    rate, z = held / tried, Z_95
    middle = rate + z * z / (2 * tried)
    half = z * math.sqrt(rate * (1 - rate) / tried + z * z / (4 * tried * tried))
    scale = 1 + z * z / tried
    return (max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale))


def pooled(held: Counts, tried: Counts) -> list[Rate | None]:
    """The share at each position over all prompts, None where nothing was tried.

    Each end of its interval is the wider of two. :func:`wilson` is too narrow where prompts differ.
    Percentiles, 95 %, of shares of prompts drawn with replacement are too narrow with few prompts,
    or where everything was accepted. Rounds of one prompt resemble each other, so whole prompts are
    drawn: the cluster bootstrap (Davison and Hinkley 1997, section 3.8; Field and Welsh 2007).

    Args:
        held, tried: int64 of [prompts, positions].
    """
    prompts = len(held)
    if not prompts:
        return [None] * held.shape[1]
    draws = np.random.default_rng(SEED).multinomial(
        prompts, np.full(prompts, 1 / prompts), size=RESAMPLES
    )
    sums = draws @ tried
    shares = np.where(sums > 0, draws @ held / np.maximum(sums, 1), np.nan)
    rates: list[Rate | None] = []
    for h, t, drawn in zip(held.sum(axis=0), tried.sum(axis=0), shares.T, strict=True):
        if not t:
            rates.append(None)
            continue
        low, high = np.nanquantile(drawn, (0.025, 0.975))
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
        rows = [counts for counts, n in tallies if n]
        held, judged, known = np.array(rows, dtype=np.int64).reshape(-1, 3, depth).swapaxes(0, 1)
        rounds = sum(n for _, n in tallies)
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


@dataclass(frozen=True)
class Bucket:
    """Acceptance of the rounds before which `first` to `last` tokens had been generated."""

    first: int
    last: int
    acceptance: Acceptance


def by_position(results: Sequence[PromptResult], depth: int) -> Iterator[Bucket]:
    """Acceptance by how many tokens were generated before a round, the prefill's included."""
    starts = [
        list(itertools.accumulate((n + 1 for n in one.accepted), initial=1)) for one in results
    ]
    for begin, end in itertools.pairwise(BUCKETS):
        tallies = [
            tally(result, depth, [begin <= start < end for start in own])
            for result, own in zip(results, starts, strict=True)
        ]
        found = Acceptance.of(tallies, depth)
        if found.rounds:
            yield Bucket(begin, end - 1, found)


@dataclass(frozen=True)
class Verdict:
    """`outcome`: "worth it", "broken" or "between". `reason`: a sentence."""

    outcome: str
    reason: str


def verdict(first: Mapping[str, float]) -> Verdict | None:
    """Judge the head by a rule that another engine with such heads has published. None: no class.

    Batched verification is worth it with at least 60 % at the first position in three of four
    classes of prompts (factual, long thinking, code, instruction), or in three quarters of another
    number of classes. Under 30 % in all of them the head, or how it is fed, is broken; nothing else
    shows it, because greedy text is right either way. In between, costs decide.

    Args:
        first: acceptance at the first draft position, 0 to 1, by class.
    """
    if not first:
        return None
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
