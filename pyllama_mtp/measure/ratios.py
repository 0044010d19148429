"""Ratios between two cells, from paired samples, and how far to trust them.

Samples of one repeat are measured next to each other in time, so sample r of one cell is compared
with sample r of the other: a machine that is slow for a while slows both, and their ratio stays.
The figure to quote is the Hodges-Lehmann estimate of these ratios. Ratios of decode speeds differ
from text to text by more than the noise, so that their median rests on one or two of them; the
estimate takes all, and a stray ratio moves it as little.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Literal

from pyllama_mtp.errors import UsageError
from pyllama_mtp.measure.plan import PLAIN_AXES

if TYPE_CHECKING:
    from pyllama_mtp.measure.cells import Cell, Sample

#: The fields of a sample that are compared: tokens per second, and the whole time in seconds.
Figure = Literal["prefill_tps", "decode_tps", "elapsed_s"]
#: The speeds among them, by the names that users give and see.
SPEEDS: dict[str, Figure] = {"prefill": "prefill_tps", "decode": "decode_tps"}

#: Least probability, 0 to 1, with which an interval holds the true ratio, where n allows it.
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Ratio:
    """An estimate from n paired ratios, and an interval that holds the true ratio.

    Attributes:
        value: the figure to quote.
        low, high: bounds of the interval.
        n: number of pairs.
        confidence: probability, 0 to 1, that the interval holds the true ratio. Below 0.95 with
            fewer than 6 pairs, whose whole range is the widest interval there is (0.75 with 3).
    """

    value: float
    low: float
    high: float
    n: int
    confidence: float

    @property
    def scatter(self) -> float:
        """The farther bound's distance from the value, as a part of it."""
        return max(self.value - self.low, self.high - self.value) / self.value


def paired_ratios(cell: Cell, base: Cell, figure: Figure) -> list[float]:
    """cell / base of every repeat that both have a sample of, in the order of the repeats.

    For `elapsed_s` this is a ratio of times: below 1 is faster. Samples without a rate (0: nothing
    was decoded) are left out.

    With one thread on a CPU, speeds are by its CPU time, if both cells know it; what other programs
    and other guests of the machine took of the core does not count then. (Several threads wait for
    each other, at work or spinning, so their CPU time says little.)
    """
    by_cpu = by_cpu_time(cell) and by_cpu_time(base)
    ours, theirs = _by_repeat(cell, figure, by_cpu), _by_repeat(base, figure, by_cpu)
    return [ours[repeat] / theirs[repeat] for repeat in sorted(ours) if repeat in theirs]


def by_cpu_time(cell: Cell) -> bool:
    """Whether ratios of this cell can use CPU time: it is known, of one thread, on a CPU."""
    threads = cell.settings.get("n_threads") or cell.machine.get("cores")
    return threads == 1 and cell.backend == "CPU" and all(one.cpu_s for one in cell.samples)


def _by_repeat(cell: Cell, figure: Figure, by_cpu: bool) -> dict[int, float]:
    figures = [_figure(sample, figure, by_cpu) for sample in cell.samples]
    return {repeat: value for repeat, value in zip(cell.repeats, figures, strict=True) if value > 0}


def _figure(sample: Sample, figure: Figure, by_cpu: bool) -> float:
    """The figure; `by_cpu`: with CPU time in place of wall clock."""
    value = float(getattr(sample, figure))
    if not by_cpu:
        return value
    if figure == "elapsed_s":
        return sum(sample.cpu_s.values())
    phase = figure.removesuffix("_tps")
    spent = sample.cpu_s.get(phase, 0.0)
    return value * float(getattr(sample, f"{phase}_s")) / spent if spent > 0 else 0.0


def typical_ratio(ratios: Sequence[float]) -> Ratio:
    """The Hodges-Lehmann estimate of the ratios with its exact confidence interval.

    On a logarithmic scale: the median of the means of all pairs of ratios, each with itself too
    (Walsh averages). The interval is between the k-th smallest and the k-th largest of these means.
    Where the logarithms scatter symmetrically about the true one, this holds it with probability
    1 - 2 P(T < k), T being Wilcoxon's signed-rank statistic. Taken is the largest k with at least
    `CONFIDENCE`, or else 1, which is the range of the ratios. Source: M. Hollander, D. A. Wolfe and
    E. Chicken, Nonparametric Statistical Methods, 3rd ed., sections 3.2 and 3.3.

    Raises:
        UsageError: no ratio, or one that is not above 0.
    """
    if not ratios:
        raise UsageError("no repeat was measured on both sides, so there is no ratio")
    if min(ratios) <= 0:
        raise UsageError(f"a ratio of speeds must be above 0, not {min(ratios)}")
    n = len(ratios)
    # sqrt(a * b) is the mean of the logarithms; sqrt(a * a) must be a to the last digit.
    means = sorted(
        a if i == j else math.sqrt(a * b)
        for i, a in enumerate(ratios)
        for j, b in enumerate(ratios[: i + 1])
    )
    coverage = _coverages(n)
    rank = max((k for k, held in coverage.items() if held >= CONFIDENCE), default=1)
    return Ratio(median(means), means[rank - 1], means[-rank], n, coverage[rank])


def ratio_to(cell: Cell, base: Cell | None, figure: Figure) -> Ratio | None:
    """The typical ratio of a cell to `base`; None where no repeat was measured in both."""
    paired = paired_ratios(cell, base, figure) if base else []
    return typical_ratio(paired) if paired else None


def ratio_to_plain(cell: Cell, cells: Sequence[Cell], figure: Figure) -> Ratio | None:
    """The typical ratio of a cell with MTP to its cell without; None where there is none."""
    return ratio_to(cell, base_of(cell, cells), figure) if cell.n_max else None


def _coverages(n: int) -> dict[int, float]:
    """By rank k, from 1 to the middle: 1 - 2 P(T < k), T the signed-rank statistic of n values."""
    ways = [1, *[0] * (n * (n + 1) // 2)]  # subsets of the ranks 1 to n by their sum
    for number in range(1, n + 1):
        for total in reversed(range(number, len(ways))):
            ways[total] += ways[total - number]
    below = itertools.accumulate(ways[: (len(ways) + 1) // 2])
    return {rank: max(0.0, 1 - 2 * sums / (1 << n)) for rank, sums in enumerate(below, start=1)}


def base_of(cell: Cell, cells: Sequence[Cell]) -> Cell | None:
    """The cell without MTP that `cell` is compared with; None if none was measured.

    Both have the same run, model, program, library variant, prompt size and class, number of
    generated tokens, and values on the axes that matter without MTP. Where several cells fit, the
    closest in `cells` is taken.
    """
    own = next((number for number, other in enumerate(cells) if other is cell), 0)
    fitting = [
        (abs(number - own), number)
        for number, other in enumerate(cells)
        if not other.n_max and other.samples and _setting(other) == _setting(cell)
    ]
    return cells[min(fitting)[1]] if fitting else None


def _setting(cell: Cell) -> tuple[object, ...]:
    return (
        *(cell.run, cell.model, cell.program, cell.variant),
        *(cell.prompt_class, cell.n_prompt, cell.max_tokens),
        *(str(cell.axes.get(name)) for name in PLAIN_AXES),
    )
