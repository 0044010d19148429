"""The columns of a matrix, and what a cell has in each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pyllama_mtp.measure.cells import OURS, Cell, pooled_rates, sum_positions
from pyllama_mtp.measure.plan import SWITCHES, axis_name, axis_words
from pyllama_mtp.measure.ratios import Figure, base_of, ratio_to
from pyllama_mtp.measure.text import NONE, speed_words

#: At adaptive depth, a position with fewer drafts than this has no acceptance rate.
LEAST_DRAFTS = 20


@dataclass(frozen=True)
class Column:
    """One column of the matrix.

    Attributes:
        heading: its line breaks are for the terminal.
        text: what a cell has there, given also the no-MTP cell of its size, if there is one.
        words: it holds words, not figures: aligned to the left.
        measured: a cell without samples has a dash there.
        spare: left out where the terminal is too narrow, the highest number first; 0: never.
    """

    heading: str
    text: Callable[[Cell, Cell | None], str]
    words: bool = False
    measured: bool = True
    spare: int = 0

    @property
    def name(self) -> str:
        """The heading on one line."""
        return self.heading.replace("\n", " ")

    def value(self, cell: Cell, base: Cell | None) -> str:
        """The text of one row."""
        return self.text(cell, base) if cell.samples or not self.measured else NONE


def mode_words(cell: Cell) -> str:
    """ "no-MTP", "MTP 3" or "MTP auto"."""
    return f"MTP {'auto' if cell.adaptive else cell.n_max}" if cell.n_max else "no-MTP"


def synthetic_mark(cell: Cell) -> str:
    """Stands after the mode where acceptance was imposed; else ""."""
    return " SYNTHETIC" if cell.n_max and cell.synthetic_acceptance else ""


def mode_label(cell: Cell) -> str:
    """The mode with its mark of imposed acceptance."""
    return mode_words(cell) + synthetic_mark(cell)


def _named(heading: str, text: Callable[[Cell], str]) -> Column:
    """A column of words that a cell has before it is measured."""
    return Column(heading, lambda cell, _: text(cell), words=True, measured=False)


def _ratio(figure: Figure) -> Column:
    def text(cell: Cell, base: Cell | None) -> str:
        ratio = ratio_to(cell, base, figure)
        return f"{ratio.value:.2f}x" if ratio else NONE

    return Column("vs\nno-MTP", text)


_SIZE = Column("prompt\ntokens", lambda cell, _: str(cell.n_prompt), measured=False)
#: These have a column only if they vary.
AXIS_COLUMNS = (
    _named("class", lambda cell: cell.prompt_class),
    _named("program", lambda cell: cell.program),
    _named("library", lambda cell: cell.variant if cell.program == OURS else NONE),
)
SYNC = Column("sync\n%", lambda cell, _: _percent(cell.prompt_sync_share), spare=3)
_FIGURES = (
    Column("prefill\ntok/s", lambda cell, _: _speed(cell.prefill_tps)),
    _ratio("prefill_tps"),
    SYNC,
    Column("decode\ntok/s", lambda cell, _: _speed(cell.decode_tps)),
    _ratio("decode_tps"),
    Column("elapsed\ns", lambda cell, _: f"{cell.elapsed_s:.2f}", spare=2),
    Column("accepted %\nat 1,2,...", lambda cell, _: rates_words([cell]), words=True),
    Column(
        "tokens\n/round",
        lambda c, _: f"{c.tokens_per_round:.2f}" if c.tokens_per_round else NONE,
        spare=1,
    ),
)
_PER_ROUND = (
    Column("drafts\n/round", lambda cell, _: _per_round(cell, _drafts(cell))),
    Column(
        "draft\nms/round",
        lambda c, _: _per_round(c, sum(1e3 * s.time_s.get("draft", 0) for s in c.samples)),
    ),
    Column("looked\nup %", lambda cell, _: _percent(_looked_up_share(cell))),
)


def _drafts(cell: Cell) -> int:
    """Drafts that were verified, n-gram drafts included."""
    return sum(cell.drafted) + sum(s.looked_up.get("drafted", 0) for s in cell.samples)


def _per_round(cell: Cell, total: float) -> str:
    return f"{total / cell.rounds:.2f}" if cell.rounds and cell.n_max else NONE


def _looked_up_share(cell: Cell) -> float | None:
    """Share of accepted n-gram drafts among the tokens after the first; None at fixed depth."""
    if not cell.adaptive:
        return None
    n_decoded = sum(sample.n_generated - 1 for sample in cell.samples)
    taken = sum(sample.looked_up.get("accepted", 0) for sample in cell.samples)
    return taken / n_decoded if n_decoded else None


def matrix_columns(cells: Sequence[Cell], *, per_round: bool = False) -> list[Column]:
    """The columns of a table of these cells. Class, program, library, switches and axes have one
    if they vary. `per_round`: add what a round does."""
    axes = [
        axis for axis in AXIS_COLUMNS if len({axis.text(cell, None) for cell in cells} - {NONE}) > 1
    ]
    varied = [_switch_column(name) for name in SWITCHES if len(switch_values(cells, name)) > 1]
    varied += map(axis_column, varied_axes(cells))
    more = _PER_ROUND if per_round else ()
    return [_SIZE, *axes, _named("mode", mode_label), *varied, *_FIGURES, *more]


def _switch_column(name: str) -> Column:
    heading = {"hidden": "hidden\nnorm", "draft_vocab": "draft\nvocab"}.get(name, axis_name(name))
    return _named(heading, lambda cell: switch_value(cell, name).removesuffix("-norm"))


def varied_axes(cells: Iterable[Cell]) -> list[str]:
    """Names of the axes on which these cells have several values."""
    found: dict[str, set[str]] = {}
    for cell in cells:
        for name, value in cell.axes.items():
            found.setdefault(name, set()).add(axis_words(value))
    return [name for name, values in found.items() if len(values) > 1]


def axis_column(name: str) -> Column:
    """The column of an axis of the plan."""
    return _named(axis_name(name), lambda cell: axis_of(cell, name) or NONE)


def axis_of(cell: Cell, name: str) -> str:
    """The value of a cell on an axis of the plan, in words; "" where it has none."""
    return axis_words(cell.axes[name]) if name in cell.axes else ""


def switch_value(cell: Cell, name: str) -> str:
    """The value of a switch with MTP; for `prompt_sync` what "auto" came down to."""
    if not cell.n_max or cell.program != OURS:
        return NONE
    used = cell.samples[-1].prompt_sync if name == "prompt_sync" and cell.samples else ""
    return used or str(cell.settings.get(name, NONE))


def switch_values(cells: Iterable[Cell], name: str) -> list[str]:
    """The different values of a switch among the cells with MTP, in their order.

    "auto" does not count beside other values, except for the draft vocabulary: a cell without
    samples does not know what "auto" comes down to.
    """
    ours = (cell for cell in cells if cell.n_max and cell.program == OURS)
    values = list(dict.fromkeys(switch_value(cell, name) for cell in ours))
    if name == "draft_vocab":
        return values
    return [value for value in values if value != "auto"] or values


def matrix_rows(cells: Sequence[Cell], columns: Sequence[Column] | None = None) -> list[list[str]]:
    """One row of text per cell; `columns`: None is all that :func:`matrix_columns` has."""
    columns = matrix_columns(cells) if columns is None else columns
    pairs = [(cell, base_of(cell, cells)) for cell in cells]
    return [[column.value(cell, base) for column in columns] for cell, base in pairs]


def shown_rates(cells: Iterable[Cell]) -> list[float | None]:
    """Acceptance by draft position of cells of one series, total over total; None: not shown.

    At adaptive depth a rate needs `LEAST_DRAFTS` drafts. A fixed depth drafts at every position in
    every round, so all its positions have as many drafts as the first.
    """
    cells = list(cells)
    drafted = sum_positions(cell.drafted for cell in cells)
    rates = pooled_rates(sum_positions(cell.accepted for cell in cells), drafted)
    least = LEAST_DRAFTS if any(cell.adaptive for cell in cells) else 0
    return [rate if n >= least else None for rate, n in zip(rates, drafted, strict=True)]


def rates_words(cells: Iterable[Cell]) -> str:
    """:func:`shown_rates` in per cent: "91 81 74"."""
    rates = shown_rates(cells)
    return " ".join(NONE if rate is None else f"{100 * rate:.0f}" for rate in rates) or NONE


def _speed(value: float | None) -> str:
    return NONE if value is None else speed_words(value)


def _percent(share: float | None) -> str:
    return NONE if share is None else f"{100 * share:.1f}"
