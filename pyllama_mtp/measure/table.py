"""Cells as tables with notes below: for a terminal (rich), and as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import IO, TYPE_CHECKING

from pyllama_mtp.measure.cells import OURS, Cell, sum_positions
from pyllama_mtp.measure.columns import (
    AXIS_COLUMNS,
    LEAST_DRAFTS,
    SYNC,
    Column,
    axis_column,
    matrix_columns,
    matrix_rows,
    mode_label,
    mode_words,
    switch_value,
    switch_values,
    varied_axes,
)
from pyllama_mtp.measure.peers import PEERS
from pyllama_mtp.measure.plan import SWITCHES, axis_name, axis_words
from pyllama_mtp.measure.ratios import SPEEDS, Ratio, by_cpu_time, ratio_to, ratio_to_plain
from pyllama_mtp.measure.series import machine_words
from pyllama_mtp.measure.text import (
    NONE,
    UNLIMITED,
    console,
    print_whole,
    terminal_table,
    to_markdown,
    width_of,
)
from pyllama_mtp.measure.verdict import matrix_verdicts, summaries

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_WAITED_MUCH = 0.03


def matrix_notes(cells: Sequence[Cell], columns: Sequence[Column] | None = None) -> list[str]:
    """Lines below the table: the build, the machine, how it was measured, what was skipped."""
    columns = matrix_columns(cells) if columns is None else columns
    if not cells:
        return ["nothing was measured"]
    first = cells[0]
    threads = first.settings.get("n_threads")
    builds = {
        f"{cell.variant} build of llama.cpp {cell.upstream_commit[:9]}, patches "
        f"{cell.series[:12] or NONE}, {cell.backend}": None
        for cell in cells
        if cell.program == OURS
    }
    numbers = sorted({len(cell.samples) for cell in cells if cell.samples}) or [0]
    samples = " or ".join(map(str, numbers)) + (" sample" if numbers[-1] < 2 else " samples")
    notes = [
        f"model {first.model}; {'; '.join(builds)}",
        f"{machine_words(first)}{f', {threads} used' if threads else ''}; "
        f"{first.max_tokens} tokens generated; medians of {samples}, interleaved; "
        "acceptance and tokens per round are totals over totals",
        *example_note(cells),
        *_ratio_note(cells),
        *waiting_note(cells),
        *_adaptive_note(cells),
        *few_drafts_note(cells),
        *matrix_verdicts(cells),
    ]
    alike = [
        f"{axis_name(name)} {values[0]}"
        for name in SWITCHES
        if len(values := switch_values(cells, name)) == 1 and values[0] not in (NONE, "auto")
    ]
    if alike:
        notes.append(f"all with MTP: {', '.join(alike)}")
    if SYNC in columns and any(cell.prompt_sync_share is not None for cell in cells):
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
    """A note on the synthetic model of a first look, if it is among them."""
    from pyllama_mtp.models.synth import EXAMPLE_NAME

    if all(cell.model != EXAMPLE_NAME for cell in cells):
        return []
    return [
        f"{EXAMPLE_NAME}: random weights and an MTP head made to draft well. Its speed is that of "
        "a real model of this shape; its text is nonsense, its acceptance no real head's"
    ]


def _ratio_note(cells: Sequence[Cell]) -> list[str]:
    worst: dict[str, Ratio] = {}
    for name, figure in SPEEDS.items():
        ratios = [ratio for cell in cells if (ratio := ratio_to_plain(cell, cells, figure))]
        if ratios:
            worst[name] = max(ratios, key=lambda ratio: ratio.scatter)
    if not worst:
        return []
    note = "vs no-MTP: Hodges-Lehmann estimate of the ratios within a repeat"
    if all(by_cpu_time(cell) for cell in cells if cell.program == OURS):
        note += ", by the CPU time of the one thread"
    if all(ratio.n > 1 for ratio in worst.values()):
        bounds = [f"{100 * ratio.scatter:.1f} % ({name})" for name, ratio in worst.items()]
        sure = 100 * min(ratio.confidence for ratio in worst.values())
        note += f"; {sure:.0f} % confidence intervals reach at most {', '.join(bounds)} from it"
    return [note]


def waiting_note(cells: Sequence[Cell]) -> list[str]:
    """A note that other programs kept the machine busy, if they did."""
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


def few_drafts_note(cells: Iterable[Cell]) -> list[str]:
    """A note on dashes where there are too few drafts for a rate, if there are any."""
    few = (n < LEAST_DRAFTS for cell in cells if cell.adaptive for n in cell.drafted)
    if not any(few):
        return []
    return [f"accepted %: MTP auto has a dash where it drafted fewer than {LEAST_DRAFTS} times"]


def peer_notes(cells: Sequence[Cell]) -> list[str]:
    """Lines about every program beside ours."""
    notes = []
    for name in dict.fromkeys(cell.program for cell in cells if cell.program != OURS):
        own = [cell for cell in cells if cell.program == name and cell.samples]
        if not own:
            continue
        notes.append(_peer_build(own[0]))
        if name in PEERS:
            notes.append(PEERS[name].note)
        if any(cell.synthetic_acceptance for cell in own):
            notes.append(
                f"{name}: acceptance imposed by its --spec-synth-rates, drawn at random anew in "
                "each sample, so that its tokens per round scatter"
            )
        notes += _peer_comparison(name, own, cells)
    return notes


def _peer_build(cell: Cell) -> str:
    commit = f" of llama.cpp {cell.upstream_commit[:9]}" if cell.upstream_commit else ""
    patches = f", patches {cell.series[:12]}" if cell.series else ""
    return f"{cell.program}: {cell.variant}{commit}{patches}, {cell.backend}"


def _peer_comparison(name: str, own: Sequence[Cell], cells: Sequence[Cell]) -> list[str]:
    """Our speed as a multiple of theirs, size by size, from the ratios within a repeat."""
    parts: dict[str, list[str]] = {}
    for theirs in own:
        ours = next((cell for cell in cells if _comparable(cell, theirs)), None)
        if ours is None:
            continue
        mode = " ".join([mode_words(theirs), *map(axis_words, theirs.axes.values())])
        speeds = [
            f"{words} {ratio.value:.2f}x"
            for words, figure in SPEEDS.items()
            if (ratio := ratio_to(ours, theirs, figure))
        ]
        if speeds:
            kind = f"{theirs.n_prompt} {theirs.prompt_class}"
            parts.setdefault(kind, []).append(f"{mode} {', '.join(speeds)}")
    if not parts:
        return []
    sizes = [f"{kind}: {'; '.join(found)}" for kind, found in parts.items()]
    return [f"ours to {name}, from the ratios within a repeat, prompt {' | '.join(sizes)}"]


def _comparable(ours: Cell, theirs: Cell) -> bool:
    """Whether a cell of ours did the same work."""
    same = ("run", "model", "prompt_class", "n_prompt", "max_tokens", "n_max", "adaptive")
    alike = all(getattr(ours, name) == getattr(theirs, name) for name in same)
    alike &= all(ours.axes.get(name) == value for name, value in theirs.axes.items())
    return alike and ours.program == OURS and bool(ours.samples)


def _row_label(cell: Cell, cells: Sequence[Cell]) -> str:
    """The mode of a cell, and its values of what varies."""
    names = [name for name in SWITCHES if cell.n_max and len(switch_values(cells, name)) > 1]
    axes = [axis.text(cell, None) for axis in AXIS_COLUMNS if axis in matrix_columns(cells)]
    more = [axis_column(name).text(cell, None) for name in varied_axes(cells)]
    switches = [switch_value(cell, name) for name in names]
    return " ".join([*axes, mode_label(cell), *switches, *more])


def imposed(cells: Iterable[Cell]) -> list[Sequence[float]]:
    """The imposed acceptance rates of these cells: all values of an axis, or else the longest."""
    rates = {tuple(cell.axes.get("synthetic_acceptance") or ()): None for cell in cells}
    longest = max((cell.synthetic_acceptance or [] for cell in cells), key=len, default=[])
    return [one for one in rates if one] or ([longest] if longest else [])


def synthetic_warning(rates: Sequence[float]) -> str:
    """The warning that goes with every output made under imposed acceptance."""
    values = ", ".join(f"{rate:g}" for rate in rates)
    return (
        f"SYNTHETIC ACCEPTANCE {values}: the driver accepted drafts at these rates whatever the "
        "model said; speed is meaningful, text and acceptance are not"
    )


def print_matrix(
    cells: Sequence[Cell],
    file: IO[str],
    width: int | None = None,
    *,
    plain: bool = False,
    complete: str = "--format markdown",
    per_round: bool = False,
) -> None:
    """Print a table of each model with its notes, then what MTP gains.

    A narrow terminal gets fewer columns, and the names of those that are left out. Nothing is cut:
    what is still too long runs over the edge.

    Args:
        file: where to; colours and lines are used when it is a terminal.
        width: in characters; None is the terminal's, or no limit where `file` is none.
        plain: no colours, whatever the environment says.
        complete: where to find all columns, in words.
        per_round: see :func:`matrix_columns`.
    """
    output = console(file, UNLIMITED if width is None and not file.isatty() else width, plain)
    for part in _by_model(cells):
        columns = matrix_columns(part, per_round=per_round)
        if part:
            _print_table(part, columns, output, complete)
        for note in matrix_notes(part, columns):
            output.print(note)
    for text in summaries(cells):
        output.print(f"\n{text}", style="bold")


def _print_table(
    cells: Sequence[Cell], columns: list[Column], output: Console, complete: str
) -> None:
    """Print a table that fits, as far as `columns` can be spared; these are removed."""
    spared = []
    table = _terminal_table(cells, columns, tight=False)
    if tight := width_of(table) > output.width:
        while width_of(table := _terminal_table(cells, columns, tight=True)) > output.width:
            least = max(columns, key=lambda column: column.spare)
            if not least.spare:
                break
            columns.remove(least)
            spared.append(least.name)
    print_whole(output, table)
    if tight:  # without an edge
        output.print()
    if spared:
        output.print(f"left out in this narrow terminal: {', '.join(spared)}; {complete} has all")


def _terminal_table(cells: Sequence[Cell], columns: Sequence[Column], *, tight: bool) -> Table:
    """The matrix with a line between prompt sizes. `tight`: little space between columns."""
    padding = (0, 0, 0, 0 if tight else 1)
    headings, words = [one.heading for one in columns], [one.words for one in columns]
    rows = matrix_rows(cells, columns)
    return terminal_table(headings, rows, words, grouped=True, padding=padding, show_edge=not tight)


def _by_model(cells: Sequence[Cell]) -> list[Sequence[Cell]]:
    """The cells of each model, in their order; without cells one empty part."""
    models = dict.fromkeys(cell.model for cell in cells)
    return [_ordered([cell for cell in cells if cell.model == model]) for model in models] or [
        cells
    ]


def _ordered(cells: Sequence[Cell]) -> Sequence[Cell]:
    """The cells in order of depth and axes where axes vary; else as their samples were finished."""
    if not varied_axes(cells):
        return cells
    groups = list(dict.fromkeys((cell.prompt_class, cell.n_prompt) for cell in cells))
    programs = list(dict.fromkeys((cell.program, cell.variant) for cell in cells))
    return sorted(
        cells,
        key=lambda cell: (
            groups.index((cell.prompt_class, cell.n_prompt)),
            programs.index((cell.program, cell.variant)),
            *(cell.adaptive, cell.n_max),
            [(value is None, str(value).rjust(9)) for value in cell.axes.values()],
        ),
    )


def markdown_table(cells: Sequence[Cell], *, per_round: bool = False) -> str:
    """What MTP gains, then the matrix as a Markdown table of each model with its notes below."""
    parts = summaries(cells)
    for part in _by_model(cells):
        columns = matrix_columns(part, per_round=per_round)
        headings, words = [one.name for one in columns], [one.words for one in columns]
        parts.append(to_markdown(headings, matrix_rows(part, columns), words))
        parts.append("\n".join(f"- {note}" for note in matrix_notes(part)))
    return "\n\n".join(parts)
