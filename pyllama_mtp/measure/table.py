"""Cells and telemetry as tables: for a terminal (rich), as Markdown, and as plain lines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import IO, TYPE_CHECKING, Literal

from pyllama_mtp.measure.cells import Cell

if TYPE_CHECKING:
    from rich.table import Table

    from pyllama_mtp import Telemetry

#: One heading per column; the line breaks are for the terminal.
HEADINGS = (
    "prompt\ntokens",
    "mode",
    "prefill\ntok/s",
    "vs\nno-MTP",
    "decode\ntok/s",
    "vs\nno-MTP",
    "elapsed\ns",
    "accepted %\nat 1, 2, ...",
    "tokens\n/round",
)
_TEXT_COLUMNS = {1, 7}
_NONE = "-"
_UNLIMITED = 1000


def matrix_rows(cells: Sequence[Cell]) -> list[list[str]]:
    """One row of text per cell, in the columns of :data:`HEADINGS`."""
    plain = {cell.n_prompt: cell for cell in cells if cell.n_max == 0 and cell.samples}
    rows = []
    for cell in cells:
        row = [str(cell.n_prompt), mode_label(cell)]
        if cell.samples:
            base = plain.get(cell.n_prompt)
            row += [
                _speed(cell.prefill_tps),
                _ratio(cell.prefill_tps, base.prefill_tps if base else None),
                _speed(cell.decode_tps),
                _ratio(cell.decode_tps, base.decode_tps if base else None),
                f"{cell.elapsed_s:.2f}",
                _percentages(cell.acceptance_per_position),
                f"{cell.tokens_per_round:.2f}" if cell.tokens_per_round else _NONE,
            ]
        else:
            row += [_NONE] * (len(HEADINGS) - 2)
        rows.append(row)
    return rows


def mode_label(cell: Cell) -> str:
    """The mode with its depth, and a mark when the acceptance was imposed."""
    if not cell.n_max:
        return "no-MTP"
    return f"MTP {cell.n_max}" + (" SYNTHETIC" if cell.synthetic_acceptance else "")


def matrix_notes(cells: Sequence[Cell]) -> list[str]:
    """What the numbers are, below the table: build, machine, how measured, what was skipped."""
    if not cells:
        return ["nothing was measured"]
    first = cells[0]
    cores = first.machine.get("cores")
    notes = [
        f"model {first.model}; {first.variant} build of llama.cpp {first.upstream_commit[:9]}, "
        f"patches {first.series[:12] or _NONE}, {first.backend}",
        f"{', '.join([str(first.machine.get('cpu')), *first.machine.get('devices', ())])}, "
        f"{cores} core{'' if cores == 1 else 's'}; "
        f"{first.max_tokens} tokens generated; medians of {_counts(cells)}, interleaved; "
        "acceptance and tokens per round are totals over totals",
    ]
    imposed = max((cell.synthetic_acceptance or [] for cell in cells), key=len)
    if imposed:
        notes.append(synthetic_warning(imposed))
    notes += [
        f"skipped: {cell.n_prompt} {mode_label(cell)}: {cell.skipped}"
        for cell in cells
        if cell.skipped
    ]
    return notes


def synthetic_warning(imposed: Sequence[float]) -> str:
    """The sentence that goes with every output made under imposed acceptance."""
    values = ", ".join(f"{rate:g}" for rate in imposed)
    return (
        f"SYNTHETIC ACCEPTANCE {values}: the driver accepted drafts at these rates whatever the "
        "model said; speed is meaningful, text and acceptance are not"
    )


def _counts(cells: Iterable[Cell]) -> str:
    numbers = sorted({len(cell.samples) for cell in cells if cell.samples})
    many = numbers and numbers[-1] != 1
    return " or ".join(map(str, numbers or [0])) + (" samples" if many else " sample")


def _speed(value: float | None) -> str:
    if value is None:
        return _NONE
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


def _ratio(value: float | None, base: float | None) -> str:
    return f"{value / base:.2f}x" if value is not None and base else _NONE


def _percentages(rates: Sequence[float | None]) -> str:
    """Rates per position: '91 81 74'."""
    return " ".join(_NONE if rate is None else f"{100 * rate:.0f}" for rate in rates) or _NONE


def matrix_table(cells: Sequence[Cell]) -> Table:
    """The matrix for a terminal; a line between prompt sizes."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 1))
    for number, heading in enumerate(HEADINGS):
        justify: Literal["left", "right"] = "left" if number in _TEXT_COLUMNS else "right"
        table.add_column(heading, justify=justify, no_wrap=True)
    rows = matrix_rows(cells)
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        table.add_row(*row, end_section=following is not None and following[0] != row[0])
    return table


def print_matrix(cells: Sequence[Cell], file: IO[str], width: int | None = None) -> None:
    """Print table and notes; nothing is cut, in a narrow terminal lines run over its edge.

    Args:
        cells: what to show.
        file: where to; colours and lines are used when it is a terminal.
        width: in characters; None is the terminal's, or no limit where `file` is none.
    """
    from rich.console import Console

    if width is None and not file.isatty():
        width = _UNLIMITED
    console = Console(file=file, width=width, highlight=False, markup=False)
    if cells:
        table = matrix_table(cells)
        needed = Console(width=_UNLIMITED).measure(table).maximum
        Console(file=file, width=max(console.width, needed)).print(table)
    for note in matrix_notes(cells):
        console.print(note)


def markdown_table(cells: Sequence[Cell]) -> str:
    """The matrix as a Markdown table with its notes below."""
    headings = [heading.replace("\n", " ") for heading in HEADINGS]
    rule = [":--" if number in _TEXT_COLUMNS else "--:" for number in range(len(HEADINGS))]
    lines = [headings, rule, *matrix_rows(cells)]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return table + "\n\n" + "\n".join(f"- {note}" for note in matrix_notes(cells))


def telemetry_lines(telemetry: Telemetry) -> list[str]:
    """One generation's figures as lines of text; drafts one line per position."""
    cached = f", {telemetry.n_cached} of them cached" if telemetry.n_cached else ""
    lines = [
        f"prompt     {telemetry.n_prompt} tokens{cached}; prefill {telemetry.prefill_s:.3f} s, "
        f"{_speed(telemetry.prefill_tps)} tok/s",
        f"generated  {telemetry.n_generated} tokens; decode {telemetry.decode_s:.3f} s, "
        f"{_speed(telemetry.decode_tps)} tok/s; elapsed {telemetry.elapsed_s:.3f} s",
    ]
    if telemetry.drafted:
        lines.append(
            f"rounds     {telemetry.rounds}; {telemetry.tokens_per_round:.2f} tokens per round, "
            f"{telemetry.mean_accepted_length:.2f} accepted drafts per round"
        )
        counts = zip(telemetry.drafted, telemetry.accepted, strict=True)
        for position, (drafted, accepted) in enumerate(counts, start=1):
            rate = f"{accepted / drafted:.2f}" if drafted else _NONE
            lines.append(f"draft {position}    {rate} = {accepted} accepted of {drafted}")
    spent = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in telemetry.time_s.items())
    return [*lines, f"time       {spent}"] if spent else lines
