"""The columns of a matrix, and what is made of them: tables for a terminal (rich) and in Markdown
with notes below, flat records, CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from operator import attrgetter
from statistics import fmean, stdev
from typing import IO, TYPE_CHECKING, Any

from pyllama_mtp.measure.figures import (
    OURS,
    SPEEDS,
    Cell,
    Figure,
    Labels,
    base_of,
    imposed_words,
    machine_words,
    mode_words,
    ratio_to,
    ratio_to_plain,
    shown_rates,
    threads_of,
    varying,
    waited_share,
)
from pyllama_mtp.measure.intervals import CONFIDENCE
from pyllama_mtp.measure.plan import AXES, SWITCHES, axis_name, axis_words
from pyllama_mtp.measure.text import (
    NONE,
    UNLIMITED,
    WAITED_MUCH,
    console,
    counted,
    percent,
    print_whole,
    size_name,
    speed_words,
    synthetic_warning,
    terminal_table,
    times_words,
    to_markdown,
    width_of,
)
from pyllama_mtp.measure.verdict import summaries

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

#: The `dimension` of columns about images.
IMAGES = "images"
#: How other programs measure.
_PEER_NOTES = {
    "llama-server": "; its own timings of a completion of the same tokens",
    "llama-bench": "; as many tokens, but random ones, and none is sampled",
}
#: Axes with a column of their own; these two have one in any case.
_AXES = tuple(name for name in AXES if name not in ("synthetic_acceptance", "n_context"))
#: A figure with its lower and upper bound, None where there are none.
Spread = tuple[float, float | None, float | None]


@dataclass(frozen=True)
class Column:
    """One column of the matrix.

    Attributes:
        heading: its line breaks are for the terminal.
        value: what a cell has there, given also the no-MTP cell of its size, if there is one; None:
            nothing. Of a :data:`Spread` the table shows the first number.
        words: the value as text.
        name: the key of its values in records; "": none.
        left: it holds words, not figures: aligned to the left.
        measured: a cell without samples has nothing there.
        spare: left out where the terminal is too narrow, the highest number first; 0: never.
        shown: where there is room for all columns ("page"), where what a round does is asked for
            ("round"), in records only (""), or always ("table").
        dimension: it is shown only if series differ in this one of :data:`.DIMENSIONS`; "images":
            it is there only if prompts have images.
    """

    heading: str
    value: Callable[[Cell, Cell | None], Any]
    words: Callable[[Any], str] = str
    name: str = ""
    left: bool = False
    measured: bool = True
    spare: int = 0
    shown: str = "table"
    dimension: str = ""

    @property
    def title(self) -> str:
        """The heading on one line."""
        return self.heading.replace("\n", " ")

    def text(self, cell: Cell, base: Cell | None) -> str:
        """The text of one row."""
        value = self.value(cell, base) if cell.samples or not self.measured else None
        return NONE if value is None else self.words(value)

    def record(self, cell: Cell, base: Cell | None) -> dict[str, Any]:
        """The value for a record; a spread has three keys."""
        value = self.value(cell, base)
        if not self.name.endswith(("_tps", "_ratio")):
            return {self.name: value}
        names = (self.name, f"{self.name}_low", f"{self.name}_high")
        return dict(zip(names, value or (None, None, None), strict=True))


def mode_label(cell: Cell) -> str:
    """The mode, with a mark where acceptance was imposed."""
    mark = " SYNTHETIC" if cell.n_max and cell.synthetic_acceptance else ""
    return mode_words(cell) + mark


def _own(heading: str, name: str, value: Callable[[Cell], Any], **more: Any) -> Column:
    """A column of words that a cell has before it is measured."""
    return Column(heading, lambda cell, _: value(cell), str, name, True, measured=False, **more)


def _differs(heading: str, dimension: str, value: Callable[[Cell], Any]) -> Column:
    """A column that there is only if series differ there."""
    return _own(heading, "", lambda cell: value(cell) or None, dimension=dimension)


def _axis(name: str) -> Column:
    heading = {"hidden": "hidden\nnorm", "draft_vocab": "draft\nvocab"}.get(name, axis_name(name))
    return _own(heading, "", lambda cell: axis_shown(cell, name).removesuffix("-norm") or None)


def _same(*names: str) -> list[Column]:
    """What records alone have, as the cell has it."""
    return [_own("", name, attrgetter(name), shown="") for name in names]


def _speed(figure: Figure) -> list[Column]:
    """The columns of a speed: median and range of the samples, ratio to no MTP and its interval."""
    phase = figure.removesuffix("_tps")

    def ratio(cell: Cell, base: Cell | None) -> Spread | None:
        if cell is base:
            return 1.0, 1.0, 1.0
        found = ratio_to(cell, base, figure)
        return (found.value, found.low, found.high) if found else None

    def with_mtp(cell: Cell, base: Cell | None) -> Spread | None:
        return ratio(cell, base) if cell.n_max else None

    return [
        Column(
            f"{phase}\ntok/s", lambda c, _: c.spread(figure), lambda v: speed_words(v[0]), figure
        ),
        Column(
            "range", lambda c, _: c.spread(figure), _bounds(speed_words), left=True, shown="page"
        ),
        Column("vs\nno-MTP\npaired", ratio, lambda v: times_words(*v)),
        Column("", with_mtp, name=f"{phase}_ratio", shown=""),
        Column("interval", with_mtp, _bounds("{:.2f}".format), left=True, shown="page"),
    ]


def _bounds(words: Callable[[float], str]) -> Callable[[Spread], str]:
    def bounds(spread: Spread) -> str:
        low, high = spread[1:]
        return NONE if low is None or high is None else f"{words(low)}-{words(high)}"

    return bounds


def _milliseconds(seconds: float) -> str:
    return speed_words(1e3 * seconds)


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _two(value: float) -> str:
    return f"{value:.2f}"


def _per_round(total: Callable[[Cell], float]) -> Callable[[Cell, Cell | None], float | None]:
    return lambda cell, _: total(cell) / cell.rounds if cell.rounds and cell.n_max else None


def _drafts(cell: Cell) -> int:
    """Drafts that were verified, n-gram drafts included."""
    return sum(cell.drafted) + sum(s.looked_up.get("drafted", 0) for s in cell.samples)


def _looked_up_share(cell: Cell) -> float | None:
    """Share of accepted n-gram drafts among the tokens after the first; None at fixed depth."""
    n_decoded = sum(sample.n_generated - 1 for sample in cell.samples)
    taken = sum(sample.looked_up.get("accepted", 0) for sample in cell.samples)
    return taken / n_decoded if cell.adaptive and n_decoded else None


#: All columns but those of axes, in the order of a table.
COLUMNS = (
    *_same("model"),
    _own("", "machine", machine_words, shown=""),
    Column(
        "context\ntokens",
        lambda cell, _: cell.n_context,
        measured=False,
        dimension="n_context",
    ),
    Column("prompt\ntokens", lambda c, _: c.n_prompt, size_name, "n_prompt", measured=False),
    *_same("program", "variant", "upstream_commit", "series", "backend"),
    *_same("mode", "n_max", "adaptive", "prompt_class", "max_tokens"),
    _differs("class", "class", lambda cell: cell.prompt_class),
    _differs("image", "image", lambda cell: cell.image and cell.image.words),
    Column(
        "image\ntokens",
        lambda cell, _: cell.image and cell.image.n_tokens,
        *(str, "image_tokens"),
        measured=False,
        dimension=IMAGES,
    ),
    Column(
        *("encode\nms", lambda cell, _: cell.encode_s, _milliseconds, "encode_s"),
        dimension=IMAGES,
    ),
    Column(
        *("image\nms", lambda cell, _: cell.image_s, _milliseconds, "image_s"), dimension=IMAGES
    ),
    _differs("program", "program", lambda cell: cell.program),
    _differs("library", "variant", lambda cell: cell.program == OURS and cell.variant),
    _differs("llama.cpp", "upstream", lambda cell: cell.upstream_commit[:9]),
    _differs("patches", "patches", lambda cell: cell.series[:7]),
    _differs("backend", "backend", lambda cell: cell.backend),
    _own("mode", "", mode_label),
    _differs("acceptance", "imposed", imposed_words),
    _differs("generated", "generated", lambda cell: str(cell.max_tokens)),
    _own("", "synthetic", lambda cell: bool(cell.synthetic_acceptance), shown=""),
    *_speed("prefill_tps"),
    Column(
        *("sync\n%", lambda cell, _: cell.prompt_sync_share, _percent, "prompt_sync_share"), spare=3
    ),
    *_speed("decode_tps"),
    Column("elapsed\ns", lambda cell, _: cell.elapsed_s, _two, "elapsed_s", spare=2),
    Column("accepted %\nat 1,2,...", lambda c, _: rates_words([c]), left=True),
    Column(
        "mean\nacceptance\nlength",
        lambda cell, _: cell.mean_acceptance_length or None,
        *(_two, "mean_acceptance_length"),
        spare=1,
    ),
    Column("drafts\n/round", _per_round(_drafts), _two, shown="round"),
    Column(
        "draft\nms/round",
        _per_round(lambda c: sum(1e3 * s.time_s.get("draft", 0) for s in c.samples)),
        *(_two, "", False),
        shown="round",
    ),
    Column("looked\nup %", lambda cell, _: _looked_up_share(cell), _percent, shown="round"),
    Column("samples", lambda c, _: len(c.samples), str, "n_samples", measured=False, shown="page"),
    *_same("time", "run", "skipped"),
)


def matrix_columns(cells: Sequence[Cell], *more: str) -> list[Column]:
    """The columns of a table of these cells. What tells series apart has one only if it does.
    `more`: "page" and "round", see :class:`Column`."""
    chosen: list[Column] = []
    different = {"", *varying(cells), *[IMAGES] * _with_images(cells)}
    different |= {"n_context"} if any(cell.n_context for cell in cells) else set()
    more += ("round",) * any(cell.from_text for cell in cells)
    for column in COLUMNS:
        if column.shown not in ("table", *more) or column.dimension not in different:
            continue
        chosen.append(column)
        if column.title == "mode":
            chosen += [_axis(name) for name in _AXES if _varies(cells, name)]
    return chosen


def _with_images(cells: Iterable[Cell]) -> bool:
    return any(cell.image for cell in cells)


def axis_shown(cell: Cell, name: str) -> str:
    """The value on an axis that counts: of `prompt_sync` what "auto" came down to."""
    used = cell.samples[-1].prompt_sync if name == "prompt_sync" and cell.samples else ""
    return used or cell.axis(name)


def _varies(cells: Iterable[Cell], name: str) -> bool:
    """Whether cells differ on an axis. A cell without samples does not know what `prompt_sync`
    "auto" comes down to, so that this is no value beside others."""
    unknown = {"", "auto"} if name == "prompt_sync" else {""}
    return len({axis_shown(cell, name) for cell in cells} - unknown) > 1


def matrix_rows(
    cells: Sequence[Cell], columns: Sequence[Column], among: Sequence[Cell] | None = None
) -> list[list[str]]:
    """One row of text per cell. `among`: where to look for the cells without MTP that ratios need;
    None: among `cells`."""
    pairs = [(cell, base_of(cell, cells if among is None else among)) for cell in cells]
    return [[column.text(cell, base) for column in columns] for cell, base in pairs]


def rates_words(cells: Iterable[Cell]) -> str:
    """Acceptance by position (:func:`.shown_rates`) in per cent: "91 81 74"."""
    rates = shown_rates(cells)
    return " ".join(NONE if rate is None else f"{100 * rate:.0f}" for rate in rates) or NONE


# -- records ---------------------------------------------------------------------------------------


def records(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """See :meth:`.Results.records`."""
    depth = max((len(cell.drafted) for cell in cells), default=0)
    axes = dict.fromkeys(name for cell in cells for name in cell.axes if name not in SWITCHES)
    rows, images = [], _with_images(cells)
    for cell in ordered(cells):
        base, row = base_of(cell, cells), dict[str, Any]()
        for column in COLUMNS:
            if column.name and (images or column.dimension != IMAGES):
                row |= column.record(cell, base)
        row |= {name: cell.axis(name) or None for name in SWITCHES}
        row |= {name: cell.axes.get(name) for name in axes}
        rates = [*cell.acceptance_per_position, *[None] * depth][:depth]
        row |= {f"acceptance_{position}": rate for position, rate in enumerate(rates, start=1)}
        rows.append(row)
    return rows


def to_csv(rows: Sequence[dict[str, Any]]) -> str:
    """The records as CSV with a header line; None is an empty field."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


# -- notes -----------------------------------------------------------------------------------------


def matrix_notes(cells: Sequence[Cell]) -> list[str]:
    """Lines below a table: the build, the machine, what figures mean here, what was skipped."""
    from pyllama_mtp.models.synth import EXAMPLE_NAME

    if not cells:
        return ["nothing was measured"]
    first, label = cells[0], Labels(cells)
    threads = first.settings.get("n_threads")
    counts = sorted({len(cell.samples) for cell in cells if cell.samples}) or [0]
    samples = " or ".join(map(str, counts)) + (" sample" if counts[-1] < 2 else " samples")
    generated = " or ".join(map(str, sorted({cell.max_tokens for cell in cells})))
    builds = dict.fromkeys(_build(cell) for cell in cells if cell.program == OURS)
    notes = [
        f"model {first.model}; {'; '.join(builds)}",
        f"{machine_words(first)}{f', {threads} used' if threads else ''}; {generated} tokens "
        f"generated; medians of {samples}, interleaved",
    ]
    if any(cell.model == EXAMPLE_NAME for cell in cells):
        notes.append(
            f"{EXAMPLE_NAME}: random weights and an MTP head made to draft well. Its speed is that "
            "of a real model of this shape; its text and its acceptance are not"
        )
    for image in dict.fromkeys(cell.image for cell in cells if cell.image):
        notes.append(
            f"image {image.words}: {counted(image.n_tokens, 'token')} of each prompt of the class "
            f"image; encoder {image.mmproj}; prefill is without the time to encode"
        )
    notes += [*_ratio_note(cells), *waiting_note(cells), *peer_notes(cells)]
    return notes + [
        f"skipped: {label(cell)}, prompt {size_name(cell.n_prompt)}: {cell.skipped or 'no sample'}"
        for cell in cells
        if not cell.samples
    ]


def _build(cell: Cell) -> str:
    """ "patched build of llama.cpp 0c1e57098, patches 7ffaa8541e19, CPU"."""
    commit = f" build of llama.cpp {cell.upstream_commit[:9]}" if cell.upstream_commit else ""
    patches = f", patches {cell.series[:12]}" if cell.series else ""
    return f"{cell.variant}{commit}{patches}, {cell.backend}"


def _ratio_note(cells: Sequence[Cell]) -> list[str]:
    ratios = [one for cell in cells if (one := ratio_to_plain(cell, cells, "decode_tps"))]
    if not ratios:
        everywhere = any(cell.samples for cell in cells) and all(cell.n_max for cell in cells)
        return ["there are no ratios: no MTP (depth 0) was not measured"] if everywhere else []
    widest = max(ratios, key=lambda ratio: (ratio.high or inf) / ratio.value)
    if widest.low is None:
        return ["vs no-MTP: of the same repeats; ~: one sample says nothing of the noise"]
    return [
        f"vs no-MTP: of the same repeats; the widest {100 * CONFIDENCE:g} % interval of decode: "
        f"{widest.low:.2f} to {widest.high:.2f}; ~: noise can be all of the difference"
    ]


def waiting_note(cells: Sequence[Cell]) -> list[str]:
    """A note that other programs kept the machine busy, if they did."""
    if (share := waited_share(cells)) < WAITED_MUCH:
        return []
    return [
        f"threads waited for a core {percent(share)} of the time: other programs are running. "
        "Close them, or use fewer --threads, and figures scatter less"
    ]


def peer_notes(cells: Sequence[Cell]) -> list[str]:
    """Lines about every program beside ours: its build, and our speed as a multiple of its."""
    notes = []
    for name in dict.fromkeys(cell.program for cell in cells if cell.program != OURS):
        if own := [cell for cell in cells if cell.program == name and cell.samples]:
            notes.append(f"{name}: {_build(own[0])}{_PEER_NOTES.get(name, '')}")
            notes += _peer_comparison(name, own, cells)
    return notes


def _peer_comparison(name: str, own: Sequence[Cell], cells: Sequence[Cell]) -> list[str]:
    """Our speed as a multiple of theirs, size by size, from the ratios within a repeat. Their
    prefill contains the encoding of images, so that of ours does, too."""
    parts: dict[str, list[str]] = {}
    for theirs in own:
        ours = next((cell for cell in cells if _comparable(cell, theirs)), None)
        mode = " ".join([mode_words(theirs), *map(axis_words, theirs.axes.values())])
        figures_of: dict[str, Figure] = dict(SPEEDS)
        if theirs.image:
            figures_of = {"encoding and prefill": "prompt_tps", "decode": "decode_tps"}
        speeds = [
            f"{words} {times_words(ratio.value, ratio.low, ratio.high)}"
            for words, figure in figures_of.items()
            if ours and (ratio := ratio_to(ours, theirs, figure))
        ]
        if speeds:
            kind = f"{theirs.n_prompt} {theirs.prompt_class}"
            parts.setdefault(kind, []).append(f"{mode} {', '.join(speeds)}")
    sizes = [f"{kind}: {'; '.join(speeds)}" for kind, speeds in parts.items()]
    return [f"ours to {name}, of the same repeats, prompt {' | '.join(sizes)}"] if sizes else []


def _comparable(ours: Cell, theirs: Cell) -> bool:
    """Whether a cell of ours did the same work."""
    same = ("run", "model", "prompt_class", "n_prompt", "max_tokens", "n_max", "adaptive")
    alike = all(getattr(ours, name) == getattr(theirs, name) for name in same)
    alike &= all(ours.axes.get(name) == value for name, value in theirs.axes.items())
    return alike and ours.program == OURS and bool(ours.samples)


def above(cells: Iterable[Cell]) -> list[str]:
    """What stands above every table of these cells: that acceptance was imposed, and whose."""
    return [*map(synthetic_warning, imposed(cells))]


def imposed(cells: Iterable[Cell]) -> list[Sequence[float]]:
    """The imposed acceptance rates of these cells, each as far as the deepest cell has them."""
    given = (cell.axes.get("synthetic_acceptance") or cell.synthetic_acceptance for cell in cells)
    rates = {tuple(one): None for one in given if one}
    return [one for one in rates if all(one == o or one != o[: len(one)] for o in rates)]


# -- for a terminal --------------------------------------------------------------------------------


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
        per_round: add what a round does.
    """
    output = console(file, UNLIMITED if width is None and not file.isatty() else width, plain)
    for part in _by_model(cells):
        columns = matrix_columns(part, *["round"] * per_round)
        for warning in above(part):
            output.print(warning)
        if part:
            _print_table(part, columns, output, complete)
        for note in matrix_notes(part):
            output.print(note)
    for text in summaries(cells):
        output.print(f"\n{text}", style="bold")


def _print_table(
    cells: Sequence[Cell], columns: list[Column], output: Console, complete: str
) -> None:
    """Print a table that fits, as far as `columns` can be spared; these are removed."""
    spared = []
    rows = [dict(zip(columns, row, strict=True)) for row in matrix_rows(cells, columns)]
    while width_of(table := _terminal_table(rows, columns)) > output.width:
        least = max(columns, key=lambda column: column.spare)
        if not least.spare:
            break
        columns.remove(least)
        spared.append(least.title)
    print_whole(output, table)
    if spared:
        output.print(f"left out in this narrow terminal: {', '.join(spared)}; {complete} has all")


def _terminal_table(rows: Sequence[Mapping[Column, str]], columns: Sequence[Column]) -> Table:
    headings, words = [one.heading for one in columns], [one.left for one in columns]
    return terminal_table(headings, [[row[one] for one in columns] for row in rows], words)


def _by_model(cells: Sequence[Cell]) -> list[Sequence[Cell]]:
    """The cells of each model, in their order; without cells one empty part."""
    models = dict.fromkeys(cell.model for cell in cells)
    return [[cell for cell in ordered(cells) if cell.model == model] for model in models] or [cells]


def ordered(cells: Sequence[Cell]) -> list[Cell]:
    """The cells by model, class and size as they come, then by program, depth and axes."""
    models = list(dict.fromkeys(cell.model for cell in cells))
    groups = list(dict.fromkeys((cell.prompt_class, cell.n_prompt) for cell in cells))
    programs = list(dict.fromkeys((cell.run, cell.program, cell.variant) for cell in cells))
    return sorted(
        cells,
        key=lambda cell: (
            models.index(cell.model),
            groups.index((cell.prompt_class, cell.n_prompt)),
            cell.n_context,
            programs.index((cell.run, cell.program, cell.variant)),
            *(cell.adaptive, cell.n_max),
            # words stay in the order in which they were asked for
            [
                (value is None, value if isinstance(value, int | float) else 0)
                for value in cell.axes.values()
            ],
        ),
    )


# -- Markdown --------------------------------------------------------------------------------------


def markdown_table(cells: Sequence[Cell], *, per_round: bool = False) -> str:
    """What MTP gains, then the matrix as a Markdown table of each model with its notes below."""
    parts = summaries(cells)
    for part in _by_model(cells):
        columns = matrix_columns(part, *["round"] * per_round)
        rows = matrix_rows(part, columns)
        parts += [*above(part), *with_notes(rows, columns, matrix_notes(part))]
    return "\n\n".join(parts)


def with_notes(
    rows: Sequence[Sequence[str]], columns: Sequence[Column], notes: Sequence[str]
) -> list[str]:
    """The parts of a table in Markdown: the table, and the notes as a list."""
    headings, left = [one.title for one in columns], [one.left for one in columns]
    return [to_markdown(headings, rows, left), "\n".join(f"- {note}" for note in notes)]


# -- as llama-bench prints it ----------------------------------------------------------------------

#: The characters of columns; below 0 to the left. Others have -10.
_WIDTHS = {"model": -30, "size": 10, "params": 10, "threads": 7, "test": 15, "t/s": 20}


def llama_bench(cells: Sequence[Cell]) -> str:
    """The cells as llama-bench prints its tests in Markdown: a row for prompt and answer each, with
    mean and standard deviation of the samples. Drafts are part of the test's name; what else tells
    cells apart has a column before it."""
    cells = [cell for cell in ordered(cells) if cell.samples]
    more = [
        column
        for column in matrix_columns(cells)
        if column.left and not column.measured and column.title not in ("mode", "backend")
    ]
    titles = [column.title for column in more]
    headings = ["model", "size", "params", "backend", "threads", *titles, "test", "t/s"]
    widths = [_WIDTHS.get(heading, -10) for heading in headings]
    rows = [headings, ["-" * (abs(width) - 1) + "-:"[width > 0] for width in widths]]
    for cell in cells:
        size, n = cell.loaded.get("bytes", 0), cell.loaded.get("n_params", 0)
        same = [
            cell.loaded.get("description", cell.model),  # the latter of older files
            f"{size / 2**30:.2f} GiB" if size >= 2**30 else size and f"{size / 2**20:.2f} MiB",
            f"{n / 1e9:.2f} B" if n >= 1e9 else n and f"{n / 1e6:.2f} M",
            *(cell.backend, threads_of(cell), *(one.text(cell, None) for one in more)),
        ]
        drafts = f"+mtp{'-auto' if cell.adaptive else cell.n_max}" if cell.n_max else ""
        drafts = "+ngram" if cell.from_text else drafts
        drafts += f" @ d{cell.n_context}" if cell.n_context else ""
        for test, figure in (f"pp{cell.n_prompt}", "prefill"), (f"tg{cell.max_tokens}", "decode"):
            speeds = [tps for one in cell.samples if (tps := getattr(one, SPEEDS[figure])) > 0]
            if speeds:
                spread = stdev(speeds) if len(speeds) > 1 else 0.0
                rows.append([*same, test + drafts, f"{fmean(speeds):.2f} ± {spread:.2f}"])
    line = "| " + " | ".join(f"{{:{'<' if n < 0 else '>'}{abs(n)}}}" for n in widths) + " |"
    builds = dict.fromkeys(f"build: {cell.program}, {_build(cell)}" for cell in cells)
    lines = [line.format(*(word or NONE for word in row)) for row in rows]
    return "\n\n".join([*above(cells), "\n".join(lines), "\n".join(builds)])
