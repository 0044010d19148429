"""Ratios between two cells, from paired samples, and how far to trust their median.

What is measured in one repeat stands next to each other in time, so sample r of one cell is
compared with sample r of the other: what slows the machine for a while slows both, and is gone from
their ratio. The figure to quote is the median of these ratios, not the ratio of two medians.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from statistics import median
from typing import TYPE_CHECKING, Literal

from pyllama_mtp.errors import UsageError

if TYPE_CHECKING:
    from pyllama_mtp.measure.cells import Cell, Sample

#: What of a sample can be compared: speeds in tokens per second, the whole time in seconds.
Figure = Literal["prefill_tps", "decode_tps", "elapsed_s"]

#: Least probability, 0 to 1, with which an interval holds the true median, where n allows it.
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Ratio:
    """The median of n paired ratios, and an interval that holds the true median.

    Attributes:
        median: the figure to quote.
        low, high: bounds of the interval; two of the ratios themselves.
        n: number of pairs.
        confidence: probability, 0 to 1, that the interval holds the true median. Below 0.95 with
            less than 6 pairs, whose whole range is the widest interval there is (0.75 with 3).
    """

    median: float
    low: float
    high: float
    n: int
    confidence: float

    @property
    def scatter(self) -> float:
        """The farther bound's distance from the median, as a part of the median."""
        return max(self.median - self.low, self.high - self.median) / self.median


def paired_ratios(cell: Cell, base: Cell, figure: Figure) -> list[float]:
    """cell / base of every repeat that both have a sample of, in the order of the repeats.

    For `elapsed_s` this is a ratio of times: below 1 is faster. Samples without a rate (0: nothing
    was decoded) are left out. Cells of schema 1 do not say their repeats; sample i is repeat i.

    What one thread on a CPU waited for its core is left out on both sides, if both know it: it says
    what other programs did, and not what the drafts cost. (Of several threads it is not known how
    long all of them stood still when one of them waited, so there nothing is left out.)
    """
    own = without_waiting(cell) and without_waiting(base)
    ours, theirs = _by_repeat(cell, figure, own), _by_repeat(base, figure, own)
    return [ours[repeat] / theirs[repeat] for repeat in sorted(ours) if repeat in theirs]


def without_waiting(cell: Cell) -> bool:
    """Whether ratios of this cell can leave out the time that its thread waited for a core."""
    threads = cell.settings.get("n_threads") or cell.machine.get("cores")
    return threads == 1 and cell.backend == "CPU" and all(one.waited_s for one in cell.samples)


def _by_repeat(cell: Cell, figure: Figure, own: bool) -> dict[int, float]:
    repeats = cell.repeats or range(len(cell.samples))
    figures = [_figure(sample, figure, own) for sample in cell.samples]
    return {repeat: value for repeat, value in zip(repeats, figures, strict=True) if value > 0}


def _figure(sample: Sample, figure: Figure, own: bool) -> float:
    """The figure; with `own`, as it was without the time spent waiting for a core."""
    value = float(getattr(sample, figure))
    if not own:
        return value
    waited = sample.waited_s
    if figure == "elapsed_s":
        return value - sum(waited.values())
    phase, seconds = figure.removesuffix("_tps"), sample.prefill_s
    if phase == "decode":
        seconds = sample.decode_s
    rest = seconds - waited.get(phase, 0.0)
    return value * seconds / rest if rest > 0 else 0.0


def median_ratio(ratios: Sequence[float], confidence: float = CONFIDENCE) -> Ratio:
    """The median with its distribution-free confidence interval.

    The interval is between the k-th smallest and the k-th largest ratio. The true median lies
    below the k-th smallest of n independent values if fewer than k of them lie below it, each with
    probability 1/2; so the interval holds it with probability 1 - 2 P(Binomial(n, 1/2) < k). Taken
    is the largest k with at least `confidence`, or else 1. Source: W. J. Conover, Practical
    Nonparametric Statistics, 3rd ed., section 3.2; H. A. David and H. N. Nagaraja, Order
    Statistics, 3rd ed., section 7.1.

    Raises:
        UsageError: no ratio, or one that is not above 0.
    """
    if not ratios:
        raise UsageError("no repeat was measured on both sides, so there is no ratio")
    if min(ratios) <= 0:
        raise UsageError(f"a ratio of speeds must be above 0, not {min(ratios)}")
    ordered, n = sorted(ratios), len(ratios)
    rank = max((k for k in range(1, (n + 1) // 2 + 1) if _coverage(n, k) >= confidence), default=1)
    return Ratio(median(ordered), ordered[rank - 1], ordered[n - rank], n, _coverage(n, rank))


def _coverage(n: int, rank: int) -> float:
    """1 - 2 P(Binomial(n, 1/2) < rank), exact up to one rounding; 0 for a single value."""
    return max(0.0, 1 - 2 * sum(comb(n, hits) for hits in range(rank)) / (1 << n))


def base_of(cell: Cell, cells: Sequence[Cell]) -> Cell | None:
    """The cell without MTP that `cell` is compared with; None if none was measured.

    It has the same model, program, library variant, prompt size, class and number of generated
    tokens, and the same run. Where several fit (files of schema 1 know no runs), the closest in
    `cells` is taken.
    """
    fitting = [
        number
        for number, other in enumerate(cells)
        if not other.n_max and other.samples and _setting(other) == _setting(cell)
    ]
    if not fitting:
        return None
    own = next((number for number, other in enumerate(cells) if other is cell), 0)
    return cells[min(fitting, key=lambda number: abs(number - own))]


def _setting(cell: Cell) -> tuple[object, ...]:
    return (
        *(cell.run, cell.model, cell.program, cell.variant),
        *(cell.prompt_class, cell.n_prompt, cell.max_tokens),
    )
