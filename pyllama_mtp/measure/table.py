"""Cells as tables: for a terminal (rich), and as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

from pyllama_mtp.measure.cells import Cell, pooled_rates, sum_positions
from pyllama_mtp.measure.markdown import to_markdown
from pyllama_mtp.measure.peers.notes import OURS, peer_notes
from pyllama_mtp.measure.plan import axis_name, axis_words
from pyllama_mtp.measure.ratios import Figure, Ratio, base_of, by_cpu_time, ratio_to
from pyllama_mtp.measure.verdict import matrix_verdicts, summaries

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_NONE = "-"
_UNLIMITED = 1000
_WAITED_MUCH = 0.03
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
        return self.text(cell, base) if cell.samples or not self.measured else _NONE


#: What has a column only if it varies: heading, and its name in the settings of a cell.
_SWITCHES = (
    ("rows", "prompt_rows"),
    ("sync", "prompt_sync"),
    ("hidden", "hidden"),
    ("draft vocab", "draft_vocab"),
)
_SIZE = Column("prompt\ntokens", lambda cell, _: str(cell.n_prompt), measured=False)
#: Axes that have a column only if they vary.
_AXES = (
    Column("class", lambda cell, _: cell.prompt_class, words=True, measured=False),
    Column("program", lambda cell, _: cell.program, words=True, measured=False),
    Column(
        "library",
        lambda cell, _: cell.variant if cell.program == OURS else _NONE,
        words=True,
        measured=False,
    ),
)
_MODE = Column("mode", lambda cell, _: mode_label(cell), words=True, measured=False)
_SYNC = Column("sync\n%", lambda cell, _: _percent(cell.prompt_sync_share), spare=3)
_FIGURES = (
    Column("prefill\ntok/s", lambda cell, _: _speed(cell.prefill_tps)),
    Column("vs\nno-MTP", lambda cell, base: _times(ratio_to(cell, base, "prefill_tps"))),
    _SYNC,
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
        lambda c, _: f"{c.tokens_per_round:.2f}" if c.tokens_per_round else _NONE,
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
    return form.format(total / cell.rounds) if cell.rounds and cell.n_max else _NONE


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
    axes = [axis for axis in _AXES if len({axis.text(cell, None) for cell in cells} - {_NONE}) > 1]
    switches = [
        _switch_column(heading, name)
        for heading, name in _SWITCHES
        if len(switch_values(cells, name)) > 1
    ]
    switches += [_axis_column(name) for name in varied_axes(cells)]
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


def _axis_column(name: str) -> Column:
    def text(cell: Cell, _: Cell | None) -> str:
        return axis_words(cell.axes[name]) if name in cell.axes else _NONE

    return Column(axis_name(name), text, words=True, measured=False)


def switch_value(cell: Cell, name: str) -> str:
    """The value of a switch with MTP; for the sync of the prompt, what "auto" came down to."""
    if not cell.n_max or cell.program != OURS:
        return _NONE
    used = cell.samples[-1].prompt_sync if name == "prompt_sync" and cell.samples else ""
    return used or str(cell.settings.get(name, _NONE))


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


def matrix_notes(cells: Sequence[Cell], columns: Sequence[Column] | None = None) -> list[str]:
    """What the numbers are, below the table: build, machine, how measured, what was skipped."""
    columns = matrix_columns(cells) if columns is None else columns
    if not cells:
        return ["nothing was measured"]
    first = cells[0]
    cores = first.machine.get("cores")
    threads = first.settings.get("n_threads")
    builds = {
        f"{cell.variant} build of llama.cpp {cell.upstream_commit[:9]}, patches "
        f"{cell.series[:12] or _NONE}, {cell.backend}": None
        for cell in cells
        if cell.program == OURS
    }
    notes = [
        f"model {first.model}; {'; '.join(builds)}",
        f"{', '.join([str(first.machine.get('cpu')), *first.machine.get('devices', ())])}, "
        f"{cores} core{'' if cores == 1 else 's'}"
        f"{f', {threads} used' if threads else ''}; "
        f"{first.max_tokens} tokens generated; medians of {_counts(cells)}, interleaved; "
        "acceptance and tokens per round are totals over totals",
        *example_note(cells),
        *_ratio_note(cells),
        *waiting_note(cells),
        *_adaptive_note(cells),
        *few_drafts_note(cells),
        *matrix_verdicts(cells),
    ]
    settled = [(heading, switch_values(cells, name)) for heading, name in _SWITCHES]
    alike = [
        f"{heading} {values[0]}"
        for heading, values in settled
        if len(values) == 1 and values[0] not in (_NONE, "auto")
    ]
    if alike:
        notes.append(f"all with MTP: {', '.join(alike)}")
    if _SYNC in columns and any(cell.prompt_sync_share is not None for cell in cells):
        notes.append(
            "sync %: the part of the prefill's time that goes to the MTP block; on a GPU, of the "
            "host's time"
        )
    notes += map(synthetic_warning, imposed(cells))
    notes += peer_notes(cells)
    notes += [
        f"skipped: {cell.n_prompt} {_row_label(cell, cells)}: {cell.skipped}"
        for cell in cells
        if cell.skipped
    ]
    return notes


def example_note(cells: Sequence[Cell]) -> list[str]:
    """What the synthetic model of a first look is, if it is among them."""
    from pyllama_mtp.models.synth import EXAMPLE_NAME

    if all(cell.model != EXAMPLE_NAME for cell in cells):
        return []
    return [
        f"{EXAMPLE_NAME}: random weights and an MTP head made to draft well. Its speed is that of "
        "a real model of this shape; its text is nonsense, its acceptance no real head's"
    ]


def _ratio_note(cells: Sequence[Cell]) -> list[str]:
    """What the ratios are, and how far to trust them."""
    worst: dict[Figure, Ratio] = {}
    figures: tuple[Figure, ...] = ("prefill_tps", "decode_tps")
    for cell in cells:
        for figure in figures:
            ratio = ratio_to(cell, base_of(cell, cells), figure) if cell.n_max else None
            if ratio and (figure not in worst or ratio.scatter > worst[figure].scatter):
                worst[figure] = ratio
    if not worst:
        return []
    note = "vs no-MTP: Hodges-Lehmann estimate of the ratios within a repeat"
    if all(by_cpu_time(cell) for cell in cells if cell.program == OURS):
        note += ", by the CPU time of the one thread"
    if all(ratio.n > 1 for ratio in worst.values()):
        bounds = [
            f"{100 * ratio.scatter:.1f} % ({figure.removesuffix('_tps')})"
            for figure, ratio in worst.items()
        ]
        sure = 100 * min(ratio.confidence for ratio in worst.values())
        note += f"; {sure:.0f} % confidence intervals reach at most {', '.join(bounds)} from it"
    return [note]


def waiting_note(cells: Sequence[Cell]) -> list[str]:
    """That other programs kept the machine busy, if they did."""
    waited = [
        (
            sum(sample.waited_s.values()),
            sample.elapsed_s * (cell.settings.get("n_threads") or cores),
        )
        for cell in cells
        if (cores := cell.machine.get("cores"))
        for sample in cell.samples
        if sample.waited_s
    ]
    share = sum(part for part, _ in waited) / (sum(whole for _, whole in waited) or 1.0)
    if share < _WAITED_MUCH:
        return []
    return [
        f"threads waited for a core {100 * share:.0f} % of the time: other programs are running. "
        "Close them, or use fewer --threads, and figures scatter less"
    ]


def _adaptive_note(cells: Sequence[Cell]) -> list[str]:
    """What adaptive depth did."""
    samples = [sample for cell in cells if cell.adaptive for sample in cell.samples]
    rounds = sum(sample.rounds for sample in samples)
    if not rounds:
        return []
    looked_up = sum_positions(
        [sample.looked_up.get(name, 0) for name in ("rounds", "drafted")] for sample in samples
    )
    drafted = looked_up[1] + sum(sum(sample.drafted) for sample in samples)
    return [
        "MTP auto: as many drafts per round as pay, which every sample learns anew; "
        f"{drafted / rounds:.1f} on average, from earlier in the text in "
        f"{100 * looked_up[0] / rounds:.0f} % of the rounds"
    ]


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


def few_drafts_note(cells: Iterable[Cell]) -> list[str]:
    """That positions have no rate for too few drafts, if some have none."""
    few = (n < LEAST_DRAFTS for cell in cells if cell.adaptive for n in cell.drafted)
    if not any(few):
        return []
    return [f"accepted %: MTP auto has a dash where it drafted fewer than {LEAST_DRAFTS} times"]


def _row_label(cell: Cell, cells: Sequence[Cell]) -> str:
    """The mode, and those switches of the cell that vary."""
    varied = [name for _, name in _SWITCHES if cell.n_max and len(switch_values(cells, name)) > 1]
    axes = [axis.text(cell, None) for axis in _AXES if axis in matrix_columns(cells)]
    more = [_axis_column(name).text(cell, None) for name in varied_axes(cells)]
    switches = [switch_value(cell, name) for name in varied]
    return " ".join([*axes, mode_label(cell), *switches, *more])


def imposed(cells: Iterable[Cell]) -> list[Sequence[float]]:
    """The imposed acceptance rates of these cells: all values of an axis, or else the longest."""
    rates = {tuple(cell.axes.get("synthetic_acceptance") or ()): None for cell in cells}
    longest = max((cell.synthetic_acceptance or [] for cell in cells), key=len, default=[])
    return [one for one in rates if one] or ([longest] if longest else [])


def synthetic_warning(rates: Sequence[float]) -> str:
    """The sentence that goes with every output made under imposed acceptance."""
    values = ", ".join(f"{rate:g}" for rate in rates)
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


def _times(ratio: Ratio | None) -> str:
    return f"{ratio.value:.2f}x" if ratio else _NONE


def _percent(share: float | None) -> str:
    return _NONE if share is None else f"{100 * share:.1f}"


def _percentages(rates: Sequence[float | None]) -> str:
    """Rates per position: '91 81 74'."""
    return " ".join(_NONE if rate is None else f"{100 * rate:.0f}" for rate in rates) or _NONE


def matrix_table(
    cells: Sequence[Cell], columns: Sequence[Column] | None = None, *, tight: bool = False
) -> Table:
    """The matrix for a terminal; a line between prompt sizes. `tight`: little space between."""
    from rich import box
    from rich.table import Table

    columns = matrix_columns(cells) if columns is None else columns
    padding = (0, 0, 0, 0 if tight else 1)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=padding, show_edge=not tight)
    for column in columns:
        table.add_column(column.heading, justify="left" if column.words else "right", no_wrap=True)
    rows = matrix_rows(cells, columns)
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        table.add_row(*row, end_section=following is not None and following[0] != row[0])
    return table


def print_matrix(
    cells: Sequence[Cell],
    file: IO[str],
    width: int | None = None,
    *,
    plain: bool = False,
    complete: str = "--format markdown",
    per_round: bool = False,
) -> None:
    """Print a table of each model with its notes, then what MTP gains. In a narrow terminal the
    columns that can be spared are left out, and named; nothing is cut, what is still too long runs
    over the edge.

    Args:
        cells: what to show.
        file: where to; colours and lines are used when it is a terminal.
        width: in characters; None is the terminal's, or no limit where `file` is none.
        plain: no colours, whatever the environment says.
        complete: what has all columns, in words.
        per_round: see :func:`matrix_columns`.
    """
    if width is None and not file.isatty():
        width = _UNLIMITED
    console = _console(file, width, plain)
    for part in by_model(cells):
        columns = matrix_columns(part, per_round=per_round)
        _print_table(part, columns, file, console, plain, complete)
    for text in summaries(cells):
        console.print(f"\n{text}", style="bold")


def by_model(cells: Sequence[Cell]) -> list[Sequence[Cell]]:
    """The cells of each model, in their order; all of none is one part."""
    models = dict.fromkeys(cell.model for cell in cells)
    return [[cell for cell in cells if cell.model == model] for model in models] or [cells]


def _print_table(
    cells: Sequence[Cell],
    columns: list[Column],
    file: IO[str],
    console: Console,
    plain: bool,
    complete: str,
) -> None:
    if cells:
        spared = []
        tight = _width(cells, columns, tight=False) > console.width
        while (needed := _width(cells, columns, tight=tight)) > console.width:
            least = max(columns, key=lambda column: column.spare)
            if not least.spare:
                break
            columns.remove(least)
            spared.append(least.name)
        table = matrix_table(cells, columns, tight=tight)
        _console(file, max(console.width, needed), plain).print(table)
        if tight:  # without an edge
            console.print()
        if spared:
            console.print(
                f"left out in this narrow terminal: {', '.join(spared)}; {complete} has all"
            )
    for note in matrix_notes(cells, columns):
        console.print(note)


def _width(cells: Sequence[Cell], columns: Sequence[Column], *, tight: bool) -> int:
    table = matrix_table(cells, columns, tight=tight)
    return _console(None, _UNLIMITED).measure(table).maximum


def _console(file: IO[str] | None, width: int | None, plain: bool = False) -> Console:
    """To print to a file; in a notebook rich would show it there, and leave the file empty."""
    from rich.console import Console

    return Console(
        file=file,
        width=width,
        highlight=False,
        markup=False,
        force_jupyter=False,
        force_terminal=False if plain else None,
    )


def markdown_table(cells: Sequence[Cell], *, per_round: bool = False) -> str:
    """What MTP gains, then the matrix as a Markdown table of each model with its notes below."""
    tables = [_markdown_table(part, per_round) for part in by_model(cells)]
    return "\n\n".join([*summaries(cells), *tables])


def _markdown_table(cells: Sequence[Cell], per_round: bool) -> str:
    columns = matrix_columns(cells, per_round=per_round)
    headings = [column.name for column in columns]
    words = (column.words for column in columns)
    table = to_markdown(headings, matrix_rows(cells, columns), words)
    return table + "\n\n" + "\n".join(f"- {note}" for note in matrix_notes(cells))
