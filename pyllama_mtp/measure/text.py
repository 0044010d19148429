"""Words and tables that several outputs share: Markdown, and tables for a terminal (rich)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

#: Stands in a table where there is no figure.
NONE = "-"
#: Characters per line where no terminal sets a limit.
UNLIMITED = 1000


def counted(n: int, noun: str) -> str:
    """ "1 cell" or "3 cells"."""
    return f"{n} {noun}{'' if n == 1 else 's'}"


def speed_words(value: float) -> str:
    """Tokens per second: "68.5" or "1,234"."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


def percent(share: float) -> str:
    """A share of 1, in words of a sentence."""
    return f"{100 * share:.0f} %"


def to_markdown(
    headings: Sequence[str], rows: Iterable[Sequence[str]], words: Iterable[bool] = ()
) -> str:
    """A table in Markdown. `words`: for each column, whether it holds words, which are aligned to
    the left; columns beyond these hold figures."""
    left = zip_longest(words, headings, fillvalue="")
    rule = [":--" if is_left else "--:" for is_left, _ in left]
    escaped = ([cell.replace("|", "\\|") for cell in row] for row in rows)
    return "\n".join("| " + " | ".join(line) + " |" for line in [headings, rule, *escaped])


def terminal_table(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    words: Iterable[bool],
    styles: Iterable[str] = (),
    grouped: bool = False,
    **options: Any,
) -> Table:
    """A table for a terminal. `words`: as of :func:`to_markdown`; `styles`: of the rows, if any;
    `grouped`: a line where the first column changes."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, **options)
    for left, heading in zip_longest(words, headings, fillvalue=""):
        table.add_column(heading, justify="left" if left else "right", no_wrap=True)
    for row, following, style in zip_longest(rows, rows[1:], styles):
        ends = grouped and following is not None and following[0] != row[0]
        table.add_row(*row, style=style, end_section=ends)
    return table


def width_of(table: Table) -> int:
    """Characters that a table needs per line."""
    return console(None, UNLIMITED).measure(table).maximum


def print_whole(output: Console, table: Table) -> None:
    """Print a table; in a console that is too narrow its lines run over the edge."""
    usual = output.width
    output.width = max(usual, width_of(table))
    output.print(table)
    output.width = usual


def console(file: IO[str] | None, width: int | None = None, plain: bool = False) -> Console:
    """A console that prints text as it is. `width`: None is the terminal's; `plain`: no colours.

    In a notebook rich would show the text there, and leave the file empty.
    """
    from rich.console import Console

    return Console(
        file=file,
        width=width,
        highlight=False,
        markup=False,
        emoji=False,
        force_jupyter=False,
        force_terminal=False if plain else None,
    )
