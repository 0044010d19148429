"""A comparison as a table: for a terminal (rich) and as Markdown."""

from __future__ import annotations

from typing import IO

from pyllama_mtp.measure.compare import Change, Comparison
from pyllama_mtp.measure.joint import CONFIDENCE
from pyllama_mtp.measure.markdown import to_markdown

_NONE = "-"
_UNLIMITED = 1000
_VERDICTS = {"slower": "SLOWER", "faster": "faster", "unclear": "unclear", "same": ""}
_STYLES = {"slower": "bold red", "faster": "green", "unclear": "yellow", "same": ""}


def headings(found: Comparison) -> list[str]:
    """One per column."""
    unit = "to no-MTP" if found.ratios else "tok/s"
    return [
        *("figure", "prompt", "mode", f"OLD {unit}", f"NEW {unit}"),
        *("NEW/OLD", "interval", "pairs", "verdict"),
    ]


#: Which columns are words.
_WORDS = (True, False, True, False, False, False, False, False, True)


def row(change: Change, *, ratios: bool) -> list[str]:
    """The text of a line."""
    digits = 3 if ratios else 1
    sides = [_NONE if v is None else f"{v:,.{digits}f}" for v in (change.old, change.new)]
    return [
        change.figure,
        _NONE if change.n_prompt is None else str(change.n_prompt),
        change.name,
        *sides,
        f"{change.ratio:.3f}",
        f"{change.low:.3f}-{change.high:.3f}",
        str(change.n),
        _VERDICTS[change.verdict],
    ]


def summary(found: Comparison) -> str:
    """What came out, in a sentence."""
    part = f"{100 * found.threshold:g} %"
    if not found.slower:
        text = f"nothing got slower by {part} or more"
    else:
        text = f"SLOWER by {part} or more: {len(found.slower)} of {len(found.changes)} lines"
    if found.faster:
        text += f"; faster: {len(found.faster)}"
    unclear = sum(change.verdict == "unclear" for change in found.changes)
    if unclear:
        text += f"; unclear: {unclear} (past {part}, but within the noise: take more repeats)"
    return text


def notes(found: Comparison, names: tuple[str, str]) -> list[str]:
    """What the numbers are, what differs besides, and what could not be compared."""
    what = "ratios to no MTP" if found.ratios else "speeds"
    return [
        f"OLD is {names[0]}, NEW is {names[1]}; medians of paired {what}, above 1 is faster; the "
        f"intervals hold all at once with {100 * CONFIDENCE:g} %",
        *found.notes,
        *(f"only in OLD: {cell}" for cell in found.only_old),
        *(f"only in NEW: {cell}" for cell in found.only_new),
    ]


def markdown(found: Comparison, names: tuple[str, str]) -> str:
    """The table with its notes below, and the outcome at the end."""
    rows = [row(change, ratios=found.ratios) for change in found.changes]
    table = to_markdown(headings(found), rows, _WORDS)
    below = [f"- {note}" for note in notes(found, names)]
    return "\n".join([table, "", *below, "", f"**{summary(found)}**"])


def print_comparison(found: Comparison, names: tuple[str, str], file: IO[str]) -> None:
    """Print table, notes and outcome; nothing is cut, what is too long runs over the edge."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 0), show_edge=False)
    for heading, words in zip(headings(found), _WORDS, strict=True):
        table.add_column(
            heading.replace(" ", "\n", 1), justify="left" if words else "right", no_wrap=True
        )
    following = [*(change.figure for change in found.changes[1:]), None]
    for change, next_figure in zip(found.changes, following, strict=True):
        table.add_row(
            *row(change, ratios=found.ratios),
            style=_STYLES[change.verdict],
            end_section=next_figure not in (None, change.figure),
        )
    width = Console(width=_UNLIMITED).measure(table).maximum
    console = Console(file=file, highlight=False, markup=False)
    limit = console.width if file.isatty() else _UNLIMITED
    console = Console(file=file, width=max(limit, width), highlight=False, markup=False)
    console.print(table)
    console.print()
    for note in notes(found, names):
        console.print(note, soft_wrap=True)
    console.print(summary(found), soft_wrap=True)
