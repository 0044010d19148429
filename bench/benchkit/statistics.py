"""Medians, spreads and ratios of interleaved samples. Pure functions.

Round r measures both sides one after the other, so sample r of one side is paired with sample r of
the other: what slows the machine down for a while slows both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any


@dataclass(frozen=True)
class Spread:
    """Median and range of raw samples."""

    median: float
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        """Raises ValueError without a sample."""
        if not samples:
            raise ValueError("no samples")
        return cls(median(samples), min(samples), max(samples), len(samples))


@dataclass(frozen=True)
class Ratio:
    """Ours over theirs.

    Attributes:
        of_medians: median of ours / median of theirs. This is the figure to quote.
        paired: the ratio of every round; its spread says how far to trust `of_medians`.
    """

    of_medians: float
    paired: Spread

    @classmethod
    def of(cls, ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
        """Of paired samples; rounds that only one side finished count for the median alone.

        Raises:
            ValueError: a side has no sample, or one that is not above 0.
        """
        if not ours or not theirs:
            raise ValueError("no samples")
        if min(*ours, *theirs) <= 0:
            raise ValueError("a rate must be above 0")
        paired = [a / b for a, b in zip(ours, theirs, strict=False)]
        return cls(median(ours) / median(theirs), Spread.of(paired))

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)


def expected_tokens_per_round(rates: Sequence[float]) -> float:
    """Tokens that a verification pass gains on average: one, and every draft that is accepted.

    Args:
        rates: unconditional acceptance per draft position (drafts 0..i are all accepted).
    """
    return 1.0 + sum(rates)
