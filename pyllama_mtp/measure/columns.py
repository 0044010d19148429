"""The columns of a matrix, and what a cell has in each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pyllama_mtp.measure.cells import Cell, pooled_rates, sum_positions
from pyllama_mtp.measure.peers.notes import OURS
from pyllama_mtp.measure.plan import axis_name, axis_words
from pyllama_mtp.measure.ratios import Ratio, base_of, ratio_to

NONE = "-"
#: Adaptive depth may have drafted once or twice at a position; fewer drafts than this are no rate.
LEAST_DRAFTS = 20


@dataclass(frozen=True)
class Column:
    """One column of the matrix.

    Attributes:
        heading: its line breaks are for the terminal.
        text: what a cell has there, given also the no-MTP cell of its size, if there is one.
        words: words, not figures: aligned to the left.
        measured: a dash where the cell has no samples.
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


#: What has a column only if it varies: heading, and its name in the settings of a cell.
SWITCH_COLUMNS = (
    ("rows", "prompt_rows"),
    ("sync", "prompt_sync"),
    ("hidden", "hidden"),
    ("draft vocab", "draft_vocab"),
)
_SIZE = Column("prompt\ntokens", lambda cell, _: str(cell.n_prompt), measured=False)
#: Axes that have a column only if they vary.
AXIS_COLUMNS = (
    Column("class", lambda cell, _: cell.prompt_class, words=True, measured=False),
    Column("program", lambda cell, _: cell.program, words=True, measured=False),
    Column(
        "library",
        lambda cell, _: cell.variant if cell.program == OURS else NONE,
        words=True,
        measured=False,
    ),
)
_MODE = Column("mode", lambda cell, _: mode_label(cell), words=True, measured=False)
SYNC = Column("sync\n%", lambda cell, _: _percent(cell.prompt_sync_share), spare=3)
_FIGURES = (
    Column("prefill\ntok/s", lambda cell, _: _speed(cell.prefill_tps)),
    Column("vs\nno-MTP", lambda cell, base: _times(ratio_to(cell, base, "prefill_tps"))),
    SYNC,
    Column("decode\ntok/s", lambda cell, _: _speed(cell.decode_tps)),
    Column("vs\nno-MTP", lambda cell, base: _times(ratio_to(cell, base, "decode_tps"))),
    Column("elapsed\ns", lambda cell, _: f"{cell.elapsed_s:.2f}", spare=2),
    Column(
        "accepted %\nat 1,2,...",
        lambda cell, _: _percentages(shown_rates([cell])),
        words=True,
    ),
    Column(
        "tokens\n/round",
        lambda c, _: f"{c.tokens_per_round:.2f}" if c.tokens_per_round else NONE,
        spare=1,
    ),
)


#: What a round does.
_PER_ROUND = (
    Column("drafts\n/round", lambda cell, _: _per_round(cell, _drafts(cell), "{:.2f}")),
    Column(
        "draft\nms/round",
        lambda c, _: _per_round(c, sum(1e3 * s.time_s.get("draft", 0) for s in c.samples)),
    ),
    Column("looked\nup %", lambda cell, _: _percent(_looked_up_share(cell))),
)


def _drafts(cell: Cell) -> int:
    """Drafts that were verified, those from the text included."""
    return sum(cell.drafted) + sum(s.looked_up.get("drafted", 0) for s in cell.samples)


def _per_round(cell: Cell, total: float, form: str = "{:.2f}") -> str:
    return form.format(total / cell.rounds) if cell.rounds and cell.n_max else NONE


def _looked_up_share(cell: Cell) -> float | None:
    """Of the tokens after the first: drafted from earlier in the text."""
    if not cell.adaptive:
        return None
    n_decoded = sum(sample.n_generated - 1 for sample in cell.samples)
    taken = sum(sample.looked_up.get("accepted", 0) for sample in cell.samples)
    return taken / n_decoded if n_decoded else None


def matrix_columns(cells: Sequence[Cell], *, per_round: bool = False) -> list[Column]:
    """The columns of a table of these cells: class, program, library, a switch and an axis have one
    if they vary; `per_round`: with those of what a round does."""
    axes = [
        axis for axis in AXIS_COLUMNS if len({axis.text(cell, None) for cell in cells} - {NONE}) > 1
    ]
    switches = [
        _switch_column(heading, name)
        for heading, name in SWITCH_COLUMNS
        if len(switch_values(cells, name)) > 1
    ]
    switches += [axis_column(name) for name in varied_axes(cells)]
    return [_SIZE, *axes, _MODE, *switches, *_FIGURES, *(_PER_ROUND if per_round else ())]


def _switch_column(heading: str, name: str) -> Column:
    def text(cell: Cell, _: Cell | None) -> str:
        return switch_value(cell, name).removesuffix("-norm")

    heading = {"hidden": "hidden\nnorm", "draft vocab": "draft\nvocab"}.get(heading, heading)
    return Column(heading, text, words=True, measured=False)


def varied_axes(cells: Iterable[Cell]) -> list[str]:
    """Names of the axes on which these cells have several values."""
    found: dict[str, set[str]] = {}
    for cell in cells:
        for name, value in cell.axes.items():
            found.setdefault(name, set()).add(axis_words(value))
    return [name for name, values in found.items() if len(values) > 1]


def axis_column(name: str) -> Column:
    def text(cell: Cell, _: Cell | None) -> str:
        return axis_words(cell.axes[name]) if name in cell.axes else NONE

    return Column(axis_name(name), text, words=True, measured=False)


def switch_value(cell: Cell, name: str) -> str:
    """The value of a switch with MTP; for the sync of the prompt, what "auto" came down to."""
    if not cell.n_max or cell.program != OURS:
        return NONE
    used = cell.samples[-1].prompt_sync if name == "prompt_sync" and cell.samples else ""
    return used or str(cell.settings.get(name, NONE))


def switch_values(cells: Iterable[Cell], name: str) -> list[str]:
    """The different values of a switch among the cells with MTP, in their order.

    "auto" is not one beside others: a cell without samples does not know what it comes down to
    (of the draft vocabulary it is one).
    """
    ours = (cell for cell in cells if cell.n_max and cell.program == OURS)
    values = list(dict.fromkeys(switch_value(cell, name) for cell in ours))
    if name == "draft_vocab":
        return values
    return [value for value in values if value != "auto"] or values


def matrix_rows(cells: Sequence[Cell], columns: Sequence[Column] | None = None) -> list[list[str]]:
    """One row of text per cell; `columns`: None is all that :func:`matrix_columns` has."""
    columns = matrix_columns(cells) if columns is None else columns
    bases = [base_of(cell, cells) for cell in cells]
    pairs = [*zip(cells, bases, strict=True)]
    return [[column.value(cell, base) for column in columns] for cell, base in pairs]


def mode_label(cell: Cell) -> str:
    """The mode with its depth, and a mark when the acceptance was imposed."""
    if not cell.n_max:
        return "no-MTP"
    depth = "auto" if cell.adaptive else cell.n_max
    return f"MTP {depth}" + (" SYNTHETIC" if cell.synthetic_acceptance else "")


def shown_rates(cells: Iterable[Cell]) -> list[float | None]:
    """Acceptance by draft position of cells of one series, total over total; None: not shown.

    Of adaptive depth a rate needs `LEAST_DRAFTS` drafts. A fixed depth drafts at every position in
    every round, so its positions are all as well known as the first.
    """
    cells = list(cells)
    drafted = sum_positions(cell.drafted for cell in cells)
    rates = pooled_rates(sum_positions(cell.accepted for cell in cells), drafted)
    least = LEAST_DRAFTS if any(cell.adaptive for cell in cells) else 0
    return [rate if n >= least else None for rate, n in zip(rates, drafted, strict=True)]


def _speed(value: float | None) -> str:
    if value is None:
        return NONE
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


def _times(ratio: Ratio | None) -> str:
    return f"{ratio.value:.2f}x" if ratio else NONE


def _percent(share: float | None) -> str:
    return NONE if share is None else f"{100 * share:.1f}"


def _percentages(rates: Sequence[float | None]) -> str:
    """Rates per position: '91 81 74'."""
    return " ".join(NONE if rate is None else f"{100 * rate:.0f}" for rate in rates) or NONE
