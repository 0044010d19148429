"""Two measurements cell by cell: what got slower, beyond noise and beyond a threshold.

Sample r of a cell is compared with sample r of the same cell on the other side: both have the same
text, and in one interleaved run they are measured next to each other. The figure is the median of
these ratios, NEW / OLD. Two files are from different times, so their speeds depend on how fast the
machine was then; ratios to no MTP do not: `ratios=True` compares these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from math import exp, log
from statistics import median
from typing import Any, Literal

from pyllama_mtp.errors import UsageError
from pyllama_mtp.measure import series
from pyllama_mtp.measure.cells import Cell
from pyllama_mtp.measure.joint import Interval, joint_intervals
from pyllama_mtp.measure.ratios import Figure, base_of, paired_ratios
from pyllama_mtp.measure.text import counted

#: The least change of a median that counts, if noise does not explain it.
THRESHOLD = 0.03

Verdict = Literal["slower", "faster", "unclear", "same"]
FIGURES: dict[str, Figure] = {"prefill": "prefill_tps", "decode": "decode_tps"}
_ROUNDING = 1e-9
#: Dimensions in which OLD and NEW usually differ.
_MAY_DIFFER = ("machine", "variant", "upstream", "patches", "backend")
_BUILD = ("variant", "upstream_commit", "series", "backend")
#: Settings that are no note of their own: the series or its size decides them.
_FOLLOWS = {"n_ctx", "draft_n_max", "synthetic_acceptance", "sampling"}


@dataclass(frozen=True)
class Change:
    """One line of a comparison: a cell, or all sizes of a series, or everything together.

    Attributes:
        figure: "prefill" or "decode".
        name: the series in words.
        n_prompt: tokens; None for a line over several sizes.
        old, new: medians in tokens per second, or ratios to no MTP; None over several cells.
        ratio: median of the paired ratios new / old; over several cells the geometric mean of
            their medians. Above 1 is faster.
        low, high: bounds that hold for all lines of the comparison at once; see `joint_intervals`.
        n: number of pairs.
        verdict: "slower" or "faster" if `ratio` is past the threshold and the whole interval is on
            that side of 1; "unclear" if it is past the threshold but the interval holds 1.
    """

    figure: str
    name: str
    n_prompt: int | None
    old: float | None
    new: float | None
    ratio: float
    low: float
    high: float
    n: int
    verdict: Verdict


@dataclass(frozen=True)
class Comparison:
    """The result of :func:`compare`.

    Attributes:
        changes: lines in the order of the old cells, per figure.
        only_old, only_new: cells without a partner, in words.
        notes: other differences (machine, build, settings), and cells that were measured twice.
        threshold: part of the speed, 0 to 1.
        ratios: ratios to no MTP were compared, not speeds.
    """

    changes: list[Change]
    only_old: list[str] = field(default_factory=list)
    only_new: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    threshold: float = THRESHOLD
    ratios: bool = False

    @property
    def slower(self) -> list[Change]:
        """The lines that got slower; empty if nothing did."""
        return [change for change in self.changes if change.verdict == "slower"]

    @property
    def faster(self) -> list[Change]:
        """The lines that got faster."""
        return [change for change in self.changes if change.verdict == "faster"]

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {**asdict(self), "slower": len(self.slower), "faster": len(self.faster)}


@dataclass(frozen=True)
class _Line:
    """A line without its verdict; `rows`: of the matrix of logarithms of paired ratios."""

    figure: str
    name: str
    rows: tuple[int, ...]
    n_prompt: int | None = None
    old: float | None = None
    new: float | None = None


def compare(
    old: Sequence[Cell],
    new: Sequence[Cell],
    *,
    threshold: float = THRESHOLD,
    figures: Sequence[str] = ("prefill", "decode"),
    ratios: bool = False,
) -> Comparison:
    """Compare the cells that both sides have.

    A line is slower if its median ratio is at or past the threshold, and its whole interval below
    1. The intervals hold together, so a comparison of a build with itself finds a change at most
    once in 20 times, however many cells there are; ``tests/report/test_compare_rates.py`` checks
    that, and how surely a change of 5 % is found, on simulated noise. Choose a threshold well below
    the changes to be found: noise moves the median either way.

    Args:
        old, new: cells, in any order. Of a cell that was measured more than once the last counts.
        threshold, figures, ratios: as of :func:`pyllama_mtp.bench.compare`.

    Raises:
        UsageError: no cell is on both sides, no cell has two samples, or a bad argument.
    """
    if not 0 <= threshold < 1:
        raise UsageError(f"the threshold must be at least 0 and below 1 (100 %), not {threshold}")
    if not figures or set(figures) - set(FIGURES):
        raise UsageError(f"figures must be some of {', '.join(FIGURES)}, not {figures!r}")
    matched = _Matched(old, new)
    lines, rows = _lines(matched, figures, ratios)
    intervals = joint_intervals(
        rows, [_pool(lines, row) for row in range(len(rows))], [line.rows for line in lines]
    )
    changes = [
        _judge(line, rows, interval, threshold)
        for line, interval in zip(lines, intervals, strict=True)
    ]
    notes = [*matched.notes, *_differences(matched.pairs)]
    return Comparison(changes, matched.only_old, matched.only_new, notes, threshold, ratios)


def of_variants(cells: Iterable[Cell], old: str, new: str) -> tuple[list[Cell], list[Cell]]:
    """The cells of two library variants, for :func:`compare`.

    Raises:
        UsageError: a variant has no cell; the message names those that have.
    """
    cells = list(cells)
    sides = [[cell for cell in cells if cell.variant == name] for name in (old, new)]
    there = ", ".join(dict.fromkeys(cell.variant for cell in cells)) or "none at all"
    for name, side in zip((old, new), sides, strict=True):
        if not side:
            raise UsageError(f"there are no cells of the variant {name}; there are: {there}")
    if old == new:
        raise UsageError(f"the variants to compare are both {old}; there are: {there}")
    return sides[0], sides[1]


def _tells_apart(name: str, old: Sequence[Cell], new: Sequence[Cell]) -> bool:
    """Whether cells match only if they are equal in this dimension: a side has several values, and
    both sides share some. Otherwise the dimension is what changed between the sides."""
    if not any(name in series.varying(side) for side in (old, new)):
        return False
    value = next(dimension.value for dimension in series.DIMENSIONS if dimension.name == name)
    return not {value(cell) for cell in old}.isdisjoint(value(cell) for cell in new)


class _Matched:
    """The cells that are the same measurement on both sides. Raises UsageError without any."""

    def __init__(self, old: Sequence[Cell], new: Sequence[Cell]) -> None:
        self.everything = (old, new)
        self.notes: list[str] = []
        ignored = {name for name in _MAY_DIFFER if not _tells_apart(name, old, new)}
        before, after = self._by_key(old, ignored, "OLD"), self._by_key(new, ignored, "NEW")
        self.label = series.Labels([*old, *new], ignored)
        self.pairs = [(before[key], after[key]) for key in before if key in after]
        self.only_old = [self._words(before[key]) for key in before if key not in after]
        self.only_new = [self._words(after[key]) for key in after if key not in before]
        if not self.pairs:
            raise UsageError(
                "no cell was measured on both sides; only in OLD: "
                f"{'; '.join(self.only_old) or 'nothing'}; only in NEW: "
                f"{'; '.join(self.only_new) or 'nothing'}"
            )

    def _by_key(self, side: Sequence[Cell], ignored: set[str], name: str) -> dict[Any, Cell]:
        found: dict[Any, Cell] = {}
        again = 0
        for cell in side:
            if not cell.samples:
                continue
            key = (
                cell.n_prompt,
                *(d.value(cell) for d in series.DIMENSIONS if d.name not in ignored),
            )
            again += key in found
            found[key] = cell
        if again:
            cells = counted(again, "cell")
            self.notes.append(f"measured more than once in {name}, the last counts: {cells}")
        return found

    def _words(self, cell: Cell) -> str:
        return f"{self.label(cell)}, prompt {cell.n_prompt}"


def _lines(
    matched: _Matched, figures: Sequence[str], ratios: bool
) -> tuple[list[_Line], list[list[float]]]:
    lines: list[_Line] = []
    rows: list[list[float]] = []
    for figure in figures:
        measure = _against_no_mtp if ratios else _speeds
        cells: list[tuple[str, int]] = []
        for old, new in matched.pairs:
            found = measure(old, new, FIGURES[figure], matched.everything)
            if found is None:
                continue
            logarithms, medians = found
            cells.append((matched.label(old), len(rows)))
            lines.append(_Line(figure, cells[-1][0], (len(rows),), old.n_prompt, *medians))
            rows.append(logarithms)
        lines += _summaries(figure, cells, everything=not ratios)
    if not lines:
        wanted = "a cell with MTP beside one without" if ratios else "a speed"
        raise UsageError(
            f"there is nothing to compare: no repeat has {wanted} on both sides"
            + ("; compare the speeds, without --ratios" if ratios else "")
        )
    return lines, rows


def _summaries(figure: str, cells: Sequence[tuple[str, int]], *, everything: bool) -> list[_Line]:
    """Lines of all sizes of each series, and of all cells. Ratios to no MTP have no line of all
    cells: those of one size share the samples without MTP, so their noise does not average out."""
    names = list(dict.fromkeys(name for name, _ in cells))
    by_name = {name: tuple(row for other, row in cells if other == name) for name in names}
    found = [
        _Line(figure, f"{name}, all sizes", rows) for name, rows in by_name.items() if len(rows) > 1
    ]
    if everything and len(names) > 1:
        found.append(_Line(figure, "all cells", tuple(row for _, row in cells)))
    return found


_Found = tuple[list[float], tuple[float, float]]
_Sides = tuple[Sequence[Cell], Sequence[Cell]]


def _speeds(old: Cell, new: Cell, figure: Figure, _: _Sides) -> _Found | None:
    paired = paired_ratios(new, old, figure)
    if not paired:
        return None
    return [log(ratio) for ratio in paired], (_median(old, figure), _median(new, figure))


def _median(cell: Cell, figure: Figure) -> float:
    speeds: list[float] = [getattr(sample, figure) for sample in cell.samples]
    return median(speed for speed in speeds if speed > 0)


def _against_no_mtp(old: Cell, new: Cell, figure: Figure, sides: _Sides) -> _Found | None:
    """Ratios to no MTP of both sides, in the order of the repeats."""
    if not old.n_max:
        return None
    found = []
    for cell, side in ((old, sides[0]), (new, sides[1])):
        base = base_of(cell, side)
        paired = paired_ratios(cell, base, figure) if base else []
        if not paired:
            return None
        found.append(paired)
    theirs, ours = found
    logarithms = [log(b / a) for a, b in zip(theirs, ours, strict=False)]
    return logarithms, (median(theirs), median(ours))


def _pool(lines: Sequence[_Line], row: int) -> str:
    """The pool of a row: prefill and decode have noise of their own."""
    return next(line.figure for line in lines if row in line.rows)


def _judge(
    line: _Line, rows: Sequence[Sequence[float]], interval: Interval, threshold: float
) -> Change:
    ratio, low, high = (exp(value) for value in (interval.center, interval.low, interval.high))
    verdict: Verdict = "same"
    slower = ratio <= 1 - threshold + _ROUNDING
    faster = ratio >= 1 / (1 - threshold) - _ROUNDING
    if slower or faster:
        beyond_noise = high < 1 if slower else low > 1
        verdict = ("slower" if slower else "faster") if beyond_noise else "unclear"
    return Change(
        *(line.figure, line.name, line.n_prompt, line.old, line.new),
        *(ratio, low, high, sum(len(rows[row]) for row in line.rows)),
        verdict,
    )


def _differences(pairs: Sequence[tuple[Cell, Cell]]) -> list[str]:
    """Notes on other differences between the sides."""
    kinds: dict[str, Callable[[Cell], dict[str, Any]]] = {
        "machine": lambda cell: cell.machine,
        "build": lambda cell: {name: getattr(cell, name)[:12] for name in _BUILD},
        "settings": lambda cell: {
            name: value for name, value in cell.settings.items() if name not in _FOLLOWS
        },
        "sampling": lambda cell: cell.settings.get("sampling") or {},
    }
    notes = []
    for kind, fields in kinds.items():
        found: dict[str, None] = {}
        for old, new in pairs:
            ours, theirs = fields(old), fields(new)
            for name in [*ours, *(name for name in theirs if name not in ours)]:
                if name not in ours or name not in theirs:
                    continue  # a field that the older file lacks
                if ours[name] != theirs[name]:
                    found[f"{name} {ours[name]} -> {theirs[name]}"] = None
        if found:
            notes.append(f"different {kind}: {'; '.join(found)}")
    return notes
