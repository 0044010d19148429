"""A report: plots, one page that needs nothing else, and tables as Markdown and CSV."""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyllama_mtp.errors import UsageError
from pyllama_mtp.files import write_whole
from pyllama_mtp.measure import figures, table
from pyllama_mtp.measure.figures import LEAST_DRAFTS, Cell, Figure, shown_rates
from pyllama_mtp.measure.intervals import CONFIDENCE
from pyllama_mtp.measure.text import counted, percent, speed_words, times_words
from pyllama_mtp.measure.verdict import summaries

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TITLE = "pyllama-mtp: prefill and decode, with and without MTP"
#: What a plot shows, by its name.
TITLES = {
    "models": "Decode speed by model, at the shortest prompt",
    "prefill": "Prefill speed",
    "decode": "Decode speed",
    "prefill-ratio": "Prefill, relative to no MTP",
    "decode-ratio": "Decode, relative to no MTP",
    "acceptance": "Acceptance by draft position",
}
KINDS = (*TITLES,)
#: What speeds are drawn against, in words; see :func:`along`.
_X_WORDS = {"n_prompt": "prompt size (tokens)", "n_context": "length of the context (tokens)"}


# -- what the plots show ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Point:
    """A value at a prompt size or context in tokens, a draft position, or the model of this number;
    and its bounds, None where one sample says nothing of them."""

    x: int
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Curve:
    """A line of a plot, or bars of one colour.

    Attributes:
        label: the series in words.
        points: by rising x.
        number: of the series among all of these cells, which gives the colour in every plot.
    """

    label: str
    points: tuple[Point, ...]
    number: int = 0


def along(cells: Iterable[Cell]) -> str:
    """The attribute of cells against which speeds are drawn: `n_context` if there are filled
    contexts, else `n_prompt`."""
    return "n_context" if any(cell.n_context for cell in cells) else "n_prompt"


def curves(cells: Sequence[Cell], kind: str) -> list[Curve]:
    """The curves of a plot, without MTP first, then by depth, the adaptive depth last.

    A speed is the median of the samples, with the lowest and the highest as bounds. A ratio to no
    MTP is the estimate from the paired ratios, with its interval (see :class:`.Ratio`). Acceptance
    is accepted / drafted by position, totals over all samples and sizes: :func:`.shown_rates`.
    """
    shown = [cell for cell in figures.latest(cells) if cell.samples]
    place, ignored = attrgetter(along(shown)), {along(shown)}
    places = {id(cell): int(place(cell)) for cell in shown}
    if kind == "models":
        ignored = {"model", "machine", "class", "image", "n_context"}
        parts = enumerate(figures.sections(cells))
        places = {id(cell): number for number, part in parts for cell in part}
    label = figures.Labels(shown, ignored)
    by_series: dict[figures.SeriesKey, dict[int, Cell]] = {}
    for cell in sorted(shown, key=attrgetter("n_context", "n_prompt")):
        own = by_series.setdefault(figures.series_key(cell, ignored), {})
        own.setdefault(places[id(cell)], cell)
    drawn, depth = [], attrgetter("adaptive", "n_max")
    members = sorted(by_series.values(), key=lambda own: depth(next(iter(own.values()))))
    for number, own in enumerate(members):
        if points := tuple(_points(own, cells, kind)):
            drawn.append(Curve(label(next(iter(own.values()))), points, number))
    return drawn


def _points(members: Mapping[int, Cell], cells: Sequence[Cell], kind: str) -> Iterator[Point]:
    """The points of a series. `members`: its cells, by their place."""
    if kind == "acceptance":
        rates = shown_rates(cell for cell in members.values() if cell.n_max)
        yield from (Point(n, rate) for n, rate in enumerate(rates, start=1) if rate is not None)
        return
    figure: Figure = "prefill_tps" if kind.startswith("prefill") else "decode_tps"
    for place, cell in sorted(members.items(), key=itemgetter(0)):
        if kind.endswith("-ratio"):
            if ratio := figures.ratio_to_plain(cell, cells, figure):
                yield Point(place, ratio.value, ratio.low, ratio.high)
        elif spread := cell.spread(figure):
            yield Point(place, *spread) if len(cell.samples) > 1 else Point(place, spread[0])


# -- drawing ---------------------------------------------------------------------------------------


def require_matplotlib() -> None:
    """Raises UsageError, which says what to install."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UsageError(
            "plots need matplotlib, which is not installed; pip install 'pyllama-mtp[report]'"
        ) from None


@contextmanager
def theme() -> Iterator[None]:
    """matplotlib's settings for pictures of this package."""
    from matplotlib import style

    looks = {
        "figure.constrained_layout.use": True,
        "svg.fonttype": "none",
        "svg.hashsalt": "pyllama-mtp",  # no random ids: the same cells give the same file
    }
    with style.context(["tableau-colorblind10", looks]):
        yield


def draw(axes: Axes, cells: Sequence[Cell], kind: str) -> None:
    """Draw a plot into `axes`.

    Raises:
        UsageError: there is no such plot, or these cells have nothing to show in it.
    """
    if kind not in KINDS:
        raise UsageError(f"there is no plot {kind!r}; there are: {', '.join(KINDS)}")
    shown = curves(cells, kind)
    if not shown:
        raise UsageError(
            f"there is nothing to plot for {kind}: speeds need samples, ratios need cells with "
            f"MTP and without it, acceptance {LEAST_DRAFTS} drafts of an MTP head"
        )
    where = _X_WORDS[along(cells)]
    if kind == "acceptance":
        where = "draft position in the round (1 is the first)"
    places = sorted({point.x for curve in shown for point in curve.points})
    names = [str(place) for place in places]
    if kind == "models":
        titles, where = [*map(title_of, figures.sections(cells))], ""
        names = [titles[place] for place in places]
        axes.tick_params(axis="x", rotation=20 if len(names) > 3 else 0)
    bars = kind == "models" or (len(places) == 1 and kind != "acceptance")
    _draw_curves(axes, shown, places, kind, bars)
    step = 1 if kind == "models" else -(-len(places) // 12)
    axes.set_xticks([*range(len(places))][::step], names[::step])
    axes.set_xlabel(where)
    _scale_y(axes, shown, kind)
    axes.set_title("\n".join([*_caption(cells, kind)]), loc="left", fontsize="medium")
    columns = max(1, min(6, len(shown), 90 // (max(len(one.label) for one in shown) + 8)))
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.15), ncols=columns, frameon=False)


def _draw_curves(
    axes: Axes, shown: Sequence[Curve], places: Sequence[int], kind: str, bars: bool
) -> None:
    """Bars side by side at each place, with their values above them if there is room; or lines.
    Places are evenly spaced."""
    width = 0.8 / len(shown) if bars else 0
    for number, curve in enumerate(shown):
        shift = (number - (len(shown) - 1) / 2) * width
        at = [places.index(point.x) + shift for point in curve.points]
        values, color = [point.y for point in curve.points], f"C{curve.number % 10}"
        same: dict[str, Any] = {"yerr": _bounds(curve), "color": color, "label": curve.label}
        if not bars:
            look = "o-" if curve.number < 10 else "s--"
            axes.errorbar(at, values, fmt=look, capsize=3, **same)
            continue
        drawn = axes.bar(at, values, width, ecolor="gray", capsize=3, **same)
        if len(places) * len(shown) <= 12:
            axes.bar_label(drawn, [_value(point, kind) for point in curve.points], padding=3)


def _bounds(curve: Curve) -> list[list[float]] | None:
    """What bounds are below and above values, as errorbar wants it; None: one has no bounds."""
    if any(point.low is None for point in curve.points):
        return None
    below = [point.y - (point.low or 0) for point in curve.points]
    return [below, [(point.high or 0) - point.y for point in curve.points]]


def _value(point: Point, kind: str) -> str:
    """The value above a bar: of one sample, two digits."""
    if kind.endswith("-ratio"):
        return times_words(point.y, point.low, point.high)
    return speed_words(point.y) if point.low else f"~{float(f'{point.y:.2g}'):,g}"


def _scale_y(axes: Axes, drawn: Sequence[Curve], kind: str) -> None:
    """From 0. Long error bars, of few repeats, are cut at twice the largest value."""
    points = [point for curve in drawn for point in curve.points]
    high = min(2 * max(point.y for point in points), max(point.high or point.y for point in points))
    axes.set_ylim(0, 1.12 * high)
    if kind == "acceptance":
        axes.set_ylabel("accepted / drafted")
    elif kind.endswith("-ratio"):
        axes.axhline(1.0, color="gray", linewidth=1.2, linestyle="--")
        axes.set_ylabel("speed / that of no MTP")
    else:
        axes.set_ylabel("tokens per second")


def _caption(cells: Sequence[Cell], kind: str) -> Iterator[str]:
    """What is drawn, and what the bars are."""
    counts = sorted({len(cell.samples) for cell in figures.latest(cells) if cell.samples})
    several = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else f"{counts[0]}"
    samples = f"{several} sample{'' if counts[-1] == 1 else 's'}"
    models = {cell.model for cell in cells}
    yield TITLES[kind] + (f": {models.pop()}" if len(models) == 1 else "")
    if kind == "acceptance":
        yield f"totals over {samples} of each size"
    elif counts[-1] == 1:
        yield "one sample each: nothing is known of the noise"
    elif kind.endswith("-ratio"):
        yield f"from {samples}; error bars: {percent(CONFIDENCE)} intervals"
    else:
        yield f"medians of {samples}; error bars: lowest and highest"
    for warning in table.above(cells):
        yield warning.partition(": ")[0]


def picture(cells: Sequence[Cell], kind: str) -> bytes:
    """A plot as SVG."""
    from matplotlib.figure import Figure as Picture

    data = io.BytesIO()
    with theme():
        drawn = Picture(figsize=(7.6, 5.2))
        draw(drawn.add_subplot(), cells, kind)
        drawn.savefig(data, format="svg", metadata={"Date": None})
    return data.getvalue()


# -- tables ----------------------------------------------------------------------------------------


class Section:
    """Cells of one model, machine and class of prompts as a part of a report.

    Attributes:
        title: see :func:`title_of`.
        results: what MTP gains, in sentences.
        about: machine, date and command, by name.
        columns, rows: the whole table; of a cell that was measured more than once the last counts.
        above: what stands above the table; `notes`: what stands below it.
    """

    def __init__(self, cells: Sequence[Cell], commands: Mapping[str, str]) -> None:
        shown = figures.latest(cells)
        shown.sort(key=lambda cell: (cell.n_prompt, cell.n_context, cell.adaptive, cell.n_max))
        self.cells, self.title, self.results = cells, title_of(cells), summaries(cells)
        self.columns = table.matrix_columns(shown, "page")
        # The cell without MTP that a ratio needs may not be shown.
        self.rows = table.matrix_rows(shown, self.columns, cells)
        self.above = table.above(cells)
        self.notes = table.matrix_notes(shown)
        if again := len(cells) - len(shown):
            said = f"measured more than once, the last counts: {counted(again, 'cell')}"
            self.notes.append(said)
        self.about = [("machine", figures.machine_words(cells[-1]))]
        if times := sorted(cell.time for cell in cells if cell.time):
            days = dict.fromkeys(time_words(time) for time in (times[0], times[-1]))
            self.about.append(("measured", " to ".join(days)))
        runs = dict.fromkeys(cell.run for cell in cells)
        typed = dict.fromkeys(commands[run] for run in runs if run in commands)
        self.about += [("command", command) for command in typed]

    def markdown(self) -> str:
        """The section as Markdown."""
        about = "\n".join(f"- {name}: {value}" for name, value in self.about)
        parts = table.with_notes(self.rows, self.columns, self.notes)
        return "\n\n".join([f"## {self.title}", *self.results, about, *self.above, *parts])


def title_of(cells: Sequence[Cell]) -> str:
    """The model of a section, and the class of its prompts if it is not plain text."""
    kind = cells[0].prompt_class
    return cells[0].model + ("" if kind == "text" else f": {kind}")


def time_words(time: str) -> str:
    """2026-11-20T23:31:02+00:00, which is UTC, as 2026-11-20 23:31 UTC."""
    return f"{time[:16].replace('T', ' ')} UTC"


# -- files -----------------------------------------------------------------------------------------


def write_report(
    cells: Sequence[Cell],
    directory: str | os.PathLike[str],
    *,
    command: str = "",
    commands: Mapping[str, str] | None = None,
) -> list[Path]:
    """Write ``index.html``, ``tables.md``, ``tables.csv``, and each plot as SVG.

    There is a section per model, machine and class of prompts, and a chart over several. Files of
    the same names are replaced, others stay.

    Args:
        cells: what was measured; skipped cells are named with their reason.
        directory: made if it is not there.
        command: the command that makes the report, for the page.
        commands: the commands that measured the cells, by run, as far as they are known.

    Returns:
        the files, ``index.html`` first.

    Raises:
        UsageError: no cells, matplotlib is not installed, or the directory cannot be written.
    """
    if not cells:
        raise UsageError("there are no cells to report")
    check_report(directory)
    sections = [Section(part, commands or {}) for part in figures.sections(cells)]
    written = "\n\n".join([f"# {TITLE}", *(section.markdown() for section in sections)])
    plots = {
        f"{kind}{f'-{number}' if len(sections) > 1 else ''}": picture(section.cells, kind)
        for number, section in enumerate(sections, start=1)
        for kind in KINDS[1:]
        if curves(section.cells, kind)
    }
    if len(sections) > 1 and curves(cells, "models"):
        plots["models"] = picture(cells, "models")
    return _write(
        Path(directory),
        {
            "index.html": _page(sections, plots, command).encode("utf-8"),
            "tables.md": f"{written}\n".encode(),
            "tables.csv": table.to_csv(table.records(cells)).encode("utf-8"),
            **{f"{name}.svg": plot for name, plot in plots.items()},
        },
    )


def check_report(directory: str | os.PathLike[str]) -> None:
    """Find out before a long measurement whether a report can be made; makes the directory.

    Raises:
        UsageError: matplotlib is not installed, or the directory cannot be written.
    """
    require_matplotlib()
    _write(Path(directory), {})
    if not os.access(directory, os.W_OK | os.X_OK):
        raise _cannot_write(directory, "Permission denied")


def _write(directory: Path, files: dict[str, bytes]) -> list[Path]:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _cannot_write(directory, error.strerror) from None
    for name, data in reversed(files.items()):  # the page last, when all it names is there
        write_whole(directory / name, data)
    return [directory / name for name in files]


def _cannot_write(directory: str | os.PathLike[str], reason: str | None) -> UsageError:
    return UsageError(f"cannot write the report to {directory}: {reason}; name another folder")


def _page(sections: Sequence[Section], plots: Mapping[str, bytes], command: str) -> str:
    import jinja2

    from pyllama_mtp import __version__

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    encoded = {name: base64.b64encode(svg).decode("ascii") for name, svg in plots.items()}
    return environment.get_template("page.html.j2").render(
        title=TITLE,
        titles=TITLES,
        date=time_words(datetime.now(timezone.utc).isoformat()),
        version=__version__,
        command=command,
        sections=sections,
        plots=encoded,
    )
