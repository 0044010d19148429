"""Two measurements cell by cell: what got slower, beyond noise and beyond a threshold; as a table
for a terminal (rich) and as Markdown.

Sample r of a cell is compared with sample r of the same cell on the other side: both have the same
text, and in one interleaved run they are measured next to each other. The figure is the estimate
from these ratios NEW / OLD (:func:`.intervals.typical_ratios`). Two files are from different times,
so their speeds depend on how fast the machine was then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import IO, Any, Literal

from pyllama_mtp.arguments import number
from pyllama_mtp.errors import UsageError
from pyllama_mtp.measure.figures import (
    DIMENSIONS,
    SPEEDS,
    Cell,
    Labels,
    averaged,
    paired_ratios,
    series_key,
    varying,
)
from pyllama_mtp.measure.intervals import CONFIDENCE, Ratio, typical_ratios
from pyllama_mtp.measure.plan import DRAFT_AXES
from pyllama_mtp.measure.table import ordered, waiting_note
from pyllama_mtp.measure.text import (
    NONE,
    UNLIMITED,
    console,
    counted,
    print_whole,
    size_name,
    terminal_table,
    to_markdown,
)

#: The least change of a median that counts, if noise does not explain it.
THRESHOLD = 0.03

Verdict = Literal["slower", "faster", "unclear", "same"]
_ROUNDING = 1e-9
#: Dimensions in which OLD and NEW usually differ.
_MAY_DIFFER = ("machine", "variant", "upstream", "patches", "backend")
_BUILD = ("variant", "upstream_commit", "series", "backend")
#: Settings that are no note of their own: the series or its size decides them.
_FOLLOWS = {"n_ctx", "draft_n_max", "synthetic_acceptance", "sampling", *DRAFT_AXES}
_VERDICTS = {"slower": "SLOWER", "faster": "faster", "unclear": "unclear", "same": ""}
_STYLES = {"slower": "bold red", "faster": "green", "unclear": "yellow", "same": ""}
#: Which columns hold words.
_WORDS = (True, False, True, False, False, False, False, False, True)


@dataclass(frozen=True)
class Change:
    """One line of a comparison: a cell, or all sizes of a series, or everything together.

    Attributes:
        figure: "prefill" or "decode".
        name: the series in words.
        n_prompt, n_context: tokens, and those in the context before; None for a line over several
            sizes.
        old, new: medians in tokens per second; None over several cells.
        ratio: estimate from the paired ratios new / old; over several cells the geometric mean.
            Above 1 is faster.
        low, high: bounds, see :func:`.typical_ratios`; None where a cell has a single pair.
        n: number of pairs.
        verdict: "slower" or "faster" if `ratio` is past the threshold and the whole interval is on
            that side of 1; "unclear" if it is past the threshold but the interval holds 1.
    """

    figure: str
    name: str
    n_prompt: int | None
    n_context: int | None
    old: float | None
    new: float | None
    ratio: float
    low: float | None
    high: float | None
    n: int
    verdict: Verdict


@dataclass(frozen=True)
class Comparison:
    """The result of :func:`compare`.

    Attributes:
        changes: lines in the order of a matrix, per figure.
        only_old, only_new: cells without a partner, in words.
        notes: other differences (machine, build, settings), and cells that were measured twice.
        threshold: part of the speed, 0 to 1.
    """

    changes: list[Change]
    only_old: list[str] = field(default_factory=list)
    only_new: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    threshold: float = THRESHOLD

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


#: The first fields of a Change, and the paired ratios of its cells.
_Line = tuple[
    tuple[str, str, int | None, int | None, float | None, float | None], list[list[float]]
]


def compare(
    old: Sequence[Cell], new: Sequence[Cell], *, threshold: float = THRESHOLD
) -> Comparison:
    """Compare the cells that both sides have.

    A line is slower if its ratio is at or past the threshold, and its whole interval below 1. So a
    comparison of a build with itself finds a change at most once in 20 times, however many cells
    there are. Choose a threshold well below the changes to be found: noise moves the estimate
    either way.

    Args:
        old, new: cells, in any order. Of a cell that was measured more than once the last counts.
        threshold: as of :func:`pyllama_mtp.bench.compare`.

    Raises:
        UsageError: no cell is on both sides, no cell has two samples, or a bad argument.
    """
    allowed = "at least 0 and below 1, such as 0.03 for 3 %"
    threshold = number("threshold", threshold, lambda share: 0 <= share < 1, allowed)
    ignored = _ignored(old, new)
    label = Labels([*old, *new], {*ignored, "n_context"})
    before, after = (  # of cells that are the same measurement the last one
        {(cell.n_prompt, series_key(cell, ignored)): cell for cell in ordered(side) if cell.samples}
        for side in (old, new)
    )
    pairs = [(before[key], after[key]) for key in before if key in after]
    only_old, only_new = (
        [
            f"{label(cell)}, prompt {size_name(cell.n_prompt, cell.n_context)}"
            for key, cell in side.items()
            if key not in other
        ]
        for side, other in ((before, after), (after, before))
    )
    if not pairs:
        raise UsageError(
            f"no cell was measured on both sides; only in OLD: {'; '.join(only_old) or 'nothing'}; "
            f"only in NEW: {'; '.join(only_new) or 'nothing'}"
        )
    notes = [
        f"measured more than once in {name}, the last counts: {counted(again, 'cell')}"
        for name, side, kept in (("OLD", old, before), ("NEW", new, after))
        if (again := sum(bool(cell.samples) for cell in side) - len(kept))
    ]
    lines = _lines(pairs, label)
    changes = [
        Change(*line, one.value, one.low, one.high, one.n, _judge(one, threshold))
        for (line, _), one in zip(lines, typical_ratios([rows for _, rows in lines]), strict=True)
    ]
    notes += _differences(pairs)
    for name, side in (("OLD", old), ("NEW", new)):
        notes += [f"{name}: {note}" for note in waiting_note(side)]
    return Comparison(changes, only_old, only_new, notes, threshold)


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


def _ignored(old: Sequence[Cell], new: Sequence[Cell]) -> set[str]:
    """The dimensions that changed between the sides: neither has several values there, or they
    share none. In all others, cells match only if they are equal."""
    several = {*varying(old), *varying(new)}
    return {
        one.name
        for one in DIMENSIONS
        if one.name in _MAY_DIFFER
        and (one.name not in several or {*map(one.value, old)}.isdisjoint(map(one.value, new)))
    }


def _lines(pairs: Sequence[tuple[Cell, Cell]], label: Labels) -> list[_Line]:
    """Lines of the cells, of all sizes of each series and of all cells."""
    lines: list[_Line] = []
    means = {id(cell) for cell in averaged(old for old, _ in pairs)}
    for figure, speed in SPEEDS.items():
        of_series: dict[str, list[list[float]]] = {}
        whole = list[list[float]]()
        for old, new in pairs:
            if row := paired_ratios(new, old, speed):
                name = label(old)
                of_series.setdefault(name, []).append(row)
                whole += [row] * (id(old) in means)
                speeds = (getattr(old, speed), getattr(new, speed))
                lines.append(((figure, name, old.n_prompt, old.n_context, *speeds), [row]))
        several = {f"{name}, all sizes": own for name, own in of_series.items() if len(own) > 1}
        if len(of_series) > 1 and whole:
            several["all cells"] = whole
        over = (None,) * 4
        lines += [((figure, name, *over), own) for name, own in several.items()]
    if not lines:
        raise UsageError("there is nothing to compare: no repeat has a speed on both sides")
    return lines


def _judge(found: Ratio, threshold: float) -> Verdict:
    if found.value <= 1 - threshold + _ROUNDING:
        return "unclear" if found.holds_one else "slower"
    if found.value >= 1 / (1 - threshold) - _ROUNDING:
        return "unclear" if found.holds_one else "faster"
    return "same"


def _differences(pairs: Sequence[tuple[Cell, Cell]]) -> list[str]:
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
        changes: dict[str, None] = {}
        for old, new in pairs:
            ours, theirs = fields(old), fields(new)
            for name, value in ours.items():
                if theirs.get(name, value) != value:  # older files lack some fields
                    changes[f"{name} {value} -> {theirs[name]}"] = None
        if changes:
            notes.append(f"different {kind}: {'; '.join(changes)}")
    return notes


# -- tables ----------------------------------------------------------------------------------------


def _table(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    headings = [
        *("figure", "prompt", "mode", "OLD tok/s", "NEW tok/s"),
        *("NEW/OLD", "interval", "pairs", "verdict"),
    ]
    rows = [
        [
            change.figure,
            NONE if change.n_prompt is None else size_name(change.n_prompt, change.n_context or 0),
            change.name,
            *(NONE if v is None else f"{v:,.1f}" for v in (change.old, change.new)),
            f"{change.ratio:.3f}",
            NONE if change.low is None else f"{change.low:.3f}-{change.high:.3f}",
            str(change.n),
            _VERDICTS[change.verdict],
        ]
        for change in comparison.changes
    ]
    return headings, rows


def _summary(comparison: Comparison) -> str:
    part = f"{100 * comparison.threshold:g} %"
    text = f"nothing got slower by {part} or more"
    if comparison.slower:
        n, of = len(comparison.slower), len(comparison.changes)
        text = f"SLOWER by {part} or more: {n} of {of} lines"
    if comparison.faster:
        text += f"; faster: {len(comparison.faster)}"
    if unclear := sum(change.verdict == "unclear" for change in comparison.changes):
        text += f"; unclear: {unclear} (past {part}, but within the noise: take more repeats)"
    return text


def _notes(comparison: Comparison, names: tuple[str, str]) -> list[str]:
    """What the figures are, what else differs, and which cells have no partner."""
    return [
        f"OLD is {names[0]}, NEW is {names[1]}; paired speeds, above 1 is faster; with "
        f"{100 * CONFIDENCE:g} % no line is called slower or faster because of noise",
        *comparison.notes,
        *(f"only in OLD: {cell}" for cell in comparison.only_old),
        *(f"only in NEW: {cell}" for cell in comparison.only_new),
    ]


def markdown(comparison: Comparison, names: tuple[str, str]) -> str:
    """The table, its notes and the outcome. `names`: of the two sides."""
    table = to_markdown(*_table(comparison), _WORDS)
    below = [f"- {note}" for note in _notes(comparison, names)]
    return "\n".join([table, "", *below, "", f"**{_summary(comparison)}**"])


def print_comparison(comparison: Comparison, names: tuple[str, str], file: IO[str]) -> None:
    """Print the same for a terminal. Nothing is cut: long lines run over the edge."""
    headings, rows = _table(comparison)
    headings = [heading.replace(" ", "\n", 1) for heading in headings]
    styles = [_STYLES[change.verdict] for change in comparison.changes]
    output = console(file, None if file.isatty() else UNLIMITED)
    print_whole(output, terminal_table(headings, rows, _WORDS, styles))
    for line in (*_notes(comparison, names), _summary(comparison)):
        output.print(line, soft_wrap=True)
