"""A comparison as a table: for a terminal (rich) and as Markdown."""

from __future__ import annotations

from typing import IO

from pyllama_mtp.measure.compare import Change, Comparison
from pyllama_mtp.measure.joint import CONFIDENCE
from pyllama_mtp.measure.text import (
    NONE,
    UNLIMITED,
    console,
    print_whole,
    terminal_table,
    to_markdown,
)

_VERDICTS = {"slower": "SLOWER", "faster": "faster", "unclear": "unclear", "same": ""}
_STYLES = {"slower": "bold red", "faster": "green", "unclear": "yellow", "same": ""}
#: Which columns hold words.
_WORDS = (True, False, True, False, False, False, False, False, True)


def _headings(found: Comparison) -> list[str]:
    unit = "to no-MTP" if found.ratios else "tok/s"
    return [
        *("figure", "prompt", "mode", f"OLD {unit}", f"NEW {unit}"),
        *("NEW/OLD", "interval", "pairs", "verdict"),
    ]


def _row(change: Change, ratios: bool) -> list[str]:
    digits = 3 if ratios else 1
    sides = [NONE if v is None else f"{v:,.{digits}f}" for v in (change.old, change.new)]
    return [
        change.figure,
        NONE if change.n_prompt is None else str(change.n_prompt),
        change.name,
        *sides,
        f"{change.ratio:.3f}",
        f"{change.low:.3f}-{change.high:.3f}",
        str(change.n),
        _VERDICTS[change.verdict],
    ]


def _summary(found: Comparison) -> str:
    """The outcome in a sentence."""
    part = f"{100 * found.threshold:g} %"
    text = f"nothing got slower by {part} or more"
    if found.slower:
        text = f"SLOWER by {part} or more: {len(found.slower)} of {len(found.changes)} lines"
    if found.faster:
        text += f"; faster: {len(found.faster)}"
    if unclear := sum(change.verdict == "unclear" for change in found.changes):
        text += f"; unclear: {unclear} (past {part}, but within the noise: take more repeats)"
    return text


def _notes(found: Comparison, names: tuple[str, str]) -> list[str]:
    """What the figures are, what else differs, and which cells have no partner."""
    what = "ratios to no MTP" if found.ratios else "speeds"
    return [
        f"OLD is {names[0]}, NEW is {names[1]}; medians of paired {what}, above 1 is faster; the "
        f"intervals hold all at once with {100 * CONFIDENCE:g} %",
        *found.notes,
        *(f"only in OLD: {cell}" for cell in found.only_old),
        *(f"only in NEW: {cell}" for cell in found.only_new),
    ]


def markdown(found: Comparison, names: tuple[str, str]) -> str:
    """The table, its notes and the outcome. `names`: of the two sides."""
    rows = [_row(change, found.ratios) for change in found.changes]
    table = to_markdown(_headings(found), rows, _WORDS)
    below = [f"- {note}" for note in _notes(found, names)]
    return "\n".join([table, "", *below, "", f"**{_summary(found)}**"])


def print_comparison(found: Comparison, names: tuple[str, str], file: IO[str]) -> None:
    """Print the same for a terminal. Nothing is cut: long lines run over the edge."""
    headings = [heading.replace(" ", "\n", 1) for heading in _headings(found)]
    table = terminal_table(headings, _WORDS, padding=(0, 0, 0, 0), show_edge=False)
    following = [*(change.figure for change in found.changes[1:]), None]
    for change, next_figure in zip(found.changes, following, strict=True):
        table.add_row(
            *_row(change, found.ratios),
            style=_STYLES[change.verdict],
            end_section=next_figure not in (None, change.figure),
        )
    output = console(file, None if file.isatty() else UNLIMITED)
    print_whole(output, table)
    output.print()
    for line in (*_notes(found, names), _summary(found)):
        output.print(line, soft_wrap=True)
