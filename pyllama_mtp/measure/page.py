"""A report: plots, one page that needs nothing else, and tables as Markdown and CSV."""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from pyllama_mtp.errors import UsageError
from pyllama_mtp.files import write_whole
from pyllama_mtp.measure import figures, table
from pyllama_mtp.measure.figures import LEAST_DRAFTS, Cell, Figure, shown_rates
from pyllama_mtp.measure.text import counted
from pyllama_mtp.measure.verdict import summaries

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Picture

TITLE = "pyllama-mtp: prefill and decode, with and without MTP"
Kind = Literal["decode", "decode-ratio", "prefill", "prefill-ratio", "acceptance"]
KINDS: tuple[Kind, ...] = get_args(Kind)
TITLES: dict[Kind, str] = {
    "prefill": "Prefill speed",
    "decode": "Decode speed",
    "prefill-ratio": "Prefill, relative to no MTP",
    "decode-ratio": "Decode, relative to no MTP",
    "acceptance": "Acceptance by draft position",
}
#: What speeds are drawn against, in words; see :func:`along`.
_X_WORDS = {"n_prompt": "prompt size", "n_context": "length of the context"}
#: Colours of depths in their order, no MTP excepted: M. Okabe and K. Ito, "Color Universal Design"
#: (2008), without the yellow, which is too light on white; they can be told apart with any kind of
#: colour vision.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LINES = ("-", "--", ":", "-.")
#: Of the page and its plots: matplotlib's style, paper, warning.
THEMES = {
    "light": ("default", "#fefefe", "#a84301"),
    "dark": ("dark_background", "#14171b", "#ffa366"),
}
#: Speeds that differ by more are drawn on a logarithmic axis.
_LOGARITHMIC = 8.0


# -- what the plots show ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Point:
    """A value at a prompt size or context in tokens (of acceptance: at a draft position), and its
    bounds."""

    x: int
    y: float
    low: float
    high: float


@dataclass(frozen=True)
class Curve:
    """A line of a plot.

    Attributes:
        label: the series in words.
        points: by rising x.
        mode: "no-MTP" or "MTP 3"; curves of a mode share a colour.
        rest: what tells curves of a mode apart; they differ in the style of the line.
    """

    label: str
    points: tuple[Point, ...]
    mode: str
    rest: str = ""


def check_kind(kind: str) -> Kind:
    """Raises UsageError if `kind` is not one of `KINDS`."""
    for known in KINDS:
        if kind == known:
            return known
    raise UsageError(f"there is no plot {kind!r}; there are: {', '.join(KINDS)}")


def along(cells: Iterable[Cell]) -> str:
    """The attribute of cells against which speeds are drawn: `n_context` if there are filled
    contexts; then prompt sizes are curves of their own; else `n_prompt`."""
    return "n_context" if any(cell.n_context for cell in cells) else "n_prompt"


def curves(cells: Sequence[Cell], kind: Kind) -> list[Curve]:
    """The curves of a plot, without MTP first, then by depth, the adaptive depth last.

    A speed is the median of the samples, with the lowest and the highest as bounds. A ratio to no
    MTP is the estimate from the paired ratios, with its interval (see :class:`.Ratio`). Acceptance
    is accepted / drafted, without bounds: at each position, totals over all samples and sizes, see
    :func:`.shown_rates`; or, where there are filled contexts, of all positions for each length.
    """
    shown = [cell for cell in figures.latest(cells) if cell.samples]
    by_context = (x := along(shown)) == "n_context"
    ignored, several = {"n_context"} if by_context else (), len({one.n_prompt for one in shown}) > 1
    label = figures.Labels(shown, ignored)
    by_series: dict[tuple[figures.SeriesKey, int], list[Cell]] = {}
    for cell in shown:
        key = figures.series_key(cell, ignored), cell.n_prompt if by_context else 0
        by_series.setdefault(key, []).append(cell)
    members = sorted(by_series.values(), key=lambda own: (own[0].adaptive, own[0].n_max))
    drawn = []
    for own in members:
        own.sort(key=attrgetter(x))
        if points := tuple(_points(own, cells, kind, x)):
            words, mode = label(own[0]), figures.mode_words(own[0])
            words += f", prompt {own[0].n_prompt}" if by_context and several else ""
            drawn.append(Curve(words, points, mode, words.replace(mode, "")))
    return drawn


def _points(members: Sequence[Cell], cells: Sequence[Cell], kind: Kind, x: str) -> Iterator[Point]:
    if kind == "acceptance" and x == "n_context":
        drafted = ((cell, sum(cell.drafted)) for cell in members if cell.n_max)
        for cell, n in drafted:
            if n >= LEAST_DRAFTS:
                rate = sum(cell.accepted) / n
                yield Point(cell.n_context, rate, rate, rate)
        return
    if kind == "acceptance":
        rates = shown_rates(cell for cell in members if cell.n_max)
        yield from (Point(n, r, r, r) for n, r in enumerate(rates, start=1) if r is not None)
        return
    figure: Figure = "prefill_tps" if kind.startswith("prefill") else "decode_tps"
    for cell in members:
        if kind.endswith("-ratio"):
            if ratio := figures.ratio_to_plain(cell, cells, figure):
                low, high = ratio.low or ratio.value, ratio.high or ratio.value
                yield Point(getattr(cell, x), ratio.value, low, high)
        elif spread := cell.spread(figure):
            yield Point(getattr(cell, x), *spread)


def why_nothing(cells: Sequence[Cell], kind: Kind) -> str:
    """Why a plot has nothing to show."""
    if not any(cell.samples for cell in cells):
        return "no cell has samples"
    if kind.endswith("-ratio"):
        return "no cell with MTP has one without beside it"
    if kind == "acceptance":
        if any(cell.adaptive and any(cell.drafted) for cell in cells):
            return f"MTP auto drafted fewer than {LEAST_DRAFTS} times at each position"
        return "no cell has MTP"
    return "no cell has a speed"


def three_digits(value: float) -> str:
    """A figure with three significant digits: 0.952, 68.5, 1,230, 11,000."""
    rounded = float(f"{value:.3g}")
    return f"{rounded:,g}" if rounded >= 100 or not rounded else f"{rounded:#.3g}"


def size_words(tokens: int) -> str:
    """512, 1k, 1.5k, 128k, 1M, where these are exact; else the number."""
    for unit, step in (("M", 1 << 20), ("k", 1 << 10)):
        if tokens >= step and 2 * tokens % step == 0:
            return f"{tokens / step:g}{unit}"
    return str(tokens)


def synthetic_words(cells: Sequence[Cell]) -> str:
    """The warning of imposed acceptance, with the rates; "" where the model's own counted."""
    words = [", ".join(f"{rate:g}" for rate in rates) for rates in table.imposed(cells)]
    return f"SYNTHETIC ACCEPTANCE: imposed at {'; or '.join(words)}" if words else ""


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
def theme(name: str = "light") -> Iterator[None]:
    """matplotlib's settings for pictures of this package: "light" or "dark"."""
    from matplotlib import style

    base, paper, _ = THEMES[name]
    looks: dict[str, Any] = {
        **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), paper),
        **{"figure.constrained_layout.use": True, "figure.figsize": (7.6, 5.2)},
        **{"axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True},
        **{"axes.grid": True, "axes.grid.axis": "y", "grid.alpha": 0.3, "errorbar.capsize": 3},
        **{"axes.titlesize": "small", "legend.frameon": False, "legend.fontsize": "small"},
        "svg.hashsalt": "pyllama-mtp",  # no random ids: the same cells give the same file
    }
    with style.context([base, looks]):
        yield


def draw(axes: Axes, cells: Sequence[Cell], kind: Kind, warning: str = THEMES["light"][2]) -> None:
    """Draw a plot into `axes`. `warning`: the colour of the warning of imposed acceptance.

    Raises:
        UsageError: these cells have nothing to show in it.
    """
    shown = curves(cells, kind)
    if not shown:
        raise UsageError(f"there is nothing to plot: {why_nothing(cells, kind)}")
    sizes = sorted({point.x for curve in shown for point in curve.points})
    by_position = kind == "acceptance" and along(cells) == "n_prompt"
    if not by_position and len(sizes) == 1:
        _draw_bars(axes, shown, f"{_X_WORDS[along(cells)]}: {size_words(sizes[0])} tokens")
    else:
        where = f"{_X_WORDS[along(cells)]} (tokens; evenly spaced)"
        _draw_curves(axes, shown, sizes, None if by_position else where)
    _scale_y(axes, shown, kind)
    if said := synthetic_words(cells):
        axes.text(0, 1, said, color=warning, weight="bold", transform=axes.transAxes, va="bottom")
    name = TITLES[kind] if by_position or kind != "acceptance" else "Acceptance"
    title = "\n".join([name, *_caption(cells, kind)])
    axes.set_title(title, loc="left", pad=20 if said else 6)
    columns = max(1, min(4, len(shown), 90 // (max(len(one.label) for one in shown) + 8)))
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.15), ncols=columns)


def _looks(shown: Sequence[Curve]) -> list[tuple[Curve, dict[str, Any]]]:
    """Each curve and its looks: colour and marker by mode, the line by the rest."""
    import matplotlib

    modes = list(dict.fromkeys(["no-MTP", *(curve.mode for curve in shown)]))
    rests = list(dict.fromkeys(curve.rest for curve in shown))
    colors = (matplotlib.rcParams["text.color"], *COLORS)
    pairs = []
    for curve in shown:
        mode, rest = modes.index(curve.mode), rests.index(curve.rest)
        look = {
            "color": colors[mode if mode < len(colors) else (mode - 1) % len(COLORS) + 1],
            "marker": MARKERS[mode % len(MARKERS)],
            "linestyle": LINES[rest % len(LINES)],
        }
        pairs.append((curve, look))
    return pairs


def _draw_bars(axes: Axes, shown: Sequence[Curve], where: str) -> None:
    """A single prompt size or context: bars side by side, their values above them."""
    for number, (curve, look) in enumerate(_looks(shown)):
        (point,) = curve.points
        bars = axes.bar(
            *(number, point.y, 0.62),
            yerr=[[point.y - point.low], [point.high - point.y]],
            color=look["color"],
            hatch=None if look["linestyle"] == LINES[0] else "//",
            ecolor="gray",
            label=curve.label,
        )
        axes.bar_label(bars, [three_digits(point.y)], padding=3)
    axes.set_xticks([])
    axes.set_xlabel(where)


def _draw_curves(
    axes: Axes, shown: Sequence[Curve], sizes: Sequence[int], where: str | None
) -> None:
    """Sizes are evenly spaced, with as many labels as have room. `where`: what they are, in words;
    None: draft positions, and bounds are not drawn."""
    places = {size: n if where else size for n, size in enumerate(sizes)}
    for curve, look in _looks(shown):
        bounds = [(p.y - p.low, p.high - p.y) for p in curve.points]
        axes.errorbar(
            [places[point.x] for point in curve.points],
            [point.y for point in curve.points],
            [*zip(*bounds, strict=True)] if where else None,
            label=curve.label,
            **look,
        )
    ticks = sizes[:: -(-len(sizes) // 12)]
    axes.set_xticks([places[size] for size in ticks], [size_words(size) for size in ticks])
    axes.set_xlabel(where or "draft position in the round (1 is the first)")


def _scale_y(axes: Axes, drawn: Sequence[Curve], kind: Kind) -> None:
    """From 0, or logarithmic where speeds differ much; the label says which."""
    points = [point for curve in drawn for point in curve.points]
    # Bars of few repeats may be long; beyond twice the largest value they are cut.
    high = min(2 * max(point.y for point in points), max(point.high for point in points))
    ratio, speed = kind.endswith("-ratio"), kind in ("prefill", "decode")
    logarithmic = speed and high / min(point.low for point in points) > _LOGARITHMIC
    if logarithmic:
        axes.set_yscale("log")
    else:
        axes.set_ylim(0, 1.12 * max(high, 1.0 if ratio or not speed else 0.0))
    if speed:
        axes.yaxis.set_major_formatter("{x:,.12g}")
    if ratio:
        axes.axhline(1.0, color="gray", linewidth=1.2, linestyle="--")
    axes.set_ylabel(f"{_y_label(kind)} ({'logarithmic' if logarithmic else 'linear'})")


def _y_label(kind: Kind) -> str:
    if kind == "acceptance":
        return "accepted / drafted"
    return "speed / that of no MTP" if kind.endswith("-ratio") else "tokens per second"


def _caption(cells: Sequence[Cell], kind: Kind) -> list[str]:
    """What is measured, where, and what the points and bars are."""
    latest = [cell for cell in figures.latest(cells) if cell.samples]
    places = {f"{cell.model}, {figures.machine_words(cell)}" for cell in cells}
    counts = sorted({len(cell.samples) for cell in latest})
    many = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else f"{counts[0]}"
    samples = f"{many} sample{'' if counts[-1] == 1 else 's'}"
    phase = (
        "Prefill: the prompt is processed, up to the first token of the answer"
        if kind.startswith("prefill")
        else "Decode: the answer is written, from the second token on"
    )
    if kind == "acceptance":
        phase = "Drafts that the model itself would have written"
        what = f"totals over {samples} per {_X_WORDS[along(cells)]}, all together"
    elif kind.endswith("-ratio"):
        phase += ". Above 1: faster than without MTP"
        what = f"{many} paired ratios (Hodges-Lehmann); bars: their interval"
    else:
        phase += ". Higher is faster"
        what = f"medians of {samples}; bars: lowest and highest"
    return [phase, *(places if len(places) == 1 else ()), what]


def alternative_text(cells: Sequence[Cell], kind: Kind) -> str:
    """All values of a plot in words."""
    where = "position" if kind == "acceptance" else _X_WORDS[along(cells)]
    lines = []
    for curve in curves(cells, kind):
        values = ((three_digits(p.y), size_words(p.x)) for p in curve.points)
        lines.append(f"{curve.label}: " + ", ".join(f"{y} at {x}" for y, x in values))
    text = f"{TITLES[kind]}, {_y_label(kind)} against {where}. {'; '.join(lines)}."
    warning = synthetic_words(cells)
    return f"{text} {warning}." if warning else text


def pictures(cells: Sequence[Cell], kind: Kind) -> dict[str, bytes]:
    """A plot as "light.svg", "dark.svg" and "png" (light, 200 dots per inch)."""
    from matplotlib.figure import Figure as Picture

    drawn = {}
    for name in THEMES:
        with theme(name):
            picture = Picture()
            draw(picture.add_subplot(), cells, kind, THEMES[name][2])
            drawn[f"{name}.svg"] = _rendered(picture, "svg")
            if name == "light":
                drawn["png"] = _rendered(picture, "png")
    return drawn


def _rendered(picture: Picture, form: str) -> bytes:
    data = io.BytesIO()
    picture.savefig(data, format=form, dpi=200, metadata={"Date": None} if form == "svg" else {})
    return data.getvalue()


# -- tables ----------------------------------------------------------------------------------------


class Section:
    """Cells of one model, machine and class of prompts as a part of a report.

    Attributes:
        columns, rows: the whole table; of a cell that was measured more than once the last counts.
        notes: what stands below it.
        results: what MTP gains, in sentences.
    """

    def __init__(self, cells: Sequence[Cell], commands: Mapping[str, str]) -> None:
        shown = figures.latest(cells)
        shown.sort(key=lambda cell: (cell.n_prompt, cell.n_context, cell.adaptive, cell.n_max))
        kind = cells[0].prompt_class
        self.cells, self._commands = cells, commands
        self.title = cells[0].model + ("" if kind == "text" else f": {kind}")
        self.columns = table.matrix_columns(shown, "page")
        # The cell without MTP that a ratio needs may not be shown.
        self.rows = table.matrix_rows(shown, self.columns, cells)
        self.notes = table.matrix_notes(shown, self.columns)
        if again := len(cells) - len(shown):
            said = f"measured more than once, the last counts: {counted(again, 'cell')}"
            self.notes.append(said)
        self.results = summaries(cells)

    @property
    def about(self) -> list[tuple[str, str]]:
        """Machine, date and command, by name."""
        machine = self.cells[-1].machine
        details = [str(machine[name]) for name in ("os", "arch") if machine.get(name)]
        if memory := machine.get("memory_bytes"):
            details.insert(0, f"{memory / 2**30:.0f} GiB")
        if machine.get("python"):
            details.append(f"Python {machine['python']}")
        about = [("machine", "; ".join([figures.machine_words(self.cells[0]), *details]))]
        if times := sorted(cell.time for cell in self.cells if cell.time):
            days = dict.fromkeys(time_words(time) for time in (times[0], times[-1]))
            about.append(("measured", " to ".join(days)))
        runs = dict.fromkeys(cell.run for cell in self.cells)
        typed = dict.fromkeys(self._commands[run] for run in runs if run in self._commands)
        return [*about, *(("command", command) for command in typed)]

    def markdown(self) -> str:
        """The section as Markdown."""
        about = "\n".join(f"- {name}: {value}" for name, value in self.about)
        parts = table.with_notes(self.rows, self.columns, self.notes)
        return "\n\n".join([f"## {self.title}", *self.results, about, *parts])


def time_words(time: str) -> str:
    """2026-11-20T23:31:02+00:00 as 2026-11-20 23:31 UTC; any other text as it is."""
    try:
        moment = datetime.fromisoformat(time)
    except ValueError:
        return time
    return f"{moment.astimezone(timezone.utc):%Y-%m-%d %H:%M} UTC"


# -- files -----------------------------------------------------------------------------------------


def write_report(
    cells: Sequence[Cell],
    directory: str | os.PathLike[str],
    *,
    command: str = "",
    commands: Mapping[str, str] | None = None,
) -> list[Path]:
    """Write ``index.html``, ``tables.md``, ``tables.csv``, and each plot as SVG and PNG.

    There is a section per model, machine and class of prompts. Files of the same names are
    replaced, others stay.

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
    drawn = [
        {kind: pictures(one.cells, kind) for kind in KINDS if curves(one.cells, kind)}
        for one in sections
    ]
    written = "\n\n".join([f"# {TITLE}", *(section.markdown() for section in sections)])
    files = {
        "index.html": _page(sections, drawn, command).encode("utf-8"),
        "tables.md": f"{written}\n".encode(),
        "tables.csv": table.to_csv(table.records(cells)).encode("utf-8"),
    }
    for number, plots in enumerate(drawn, start=1):
        suffix = f"-{number}" if len(sections) > 1 else ""
        for kind, plot in plots.items():
            files[f"{kind}{suffix}.svg"] = plot["light.svg"]
            files[f"{kind}{suffix}.png"] = plot["png"]
    return _write(Path(directory), files)


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


def _page(
    sections: Sequence[Section],
    drawn: Sequence[Mapping[Kind, dict[str, bytes]]],
    command: str,
) -> str:
    import jinja2

    from pyllama_mtp import __version__

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    results = [
        f"{section.title}: {text}" if len(sections) > 1 else text
        for section in sections
        for text in section.results
    ]
    return environment.get_template("page.html.j2").render(
        title=TITLE,
        date=time_words(datetime.now(timezone.utc).isoformat()),
        version=__version__,
        command=command,
        results=results,
        sections=[_section(*pair) for pair in zip(sections, drawn, strict=True)],
    )


def _section(section: Section, drawn: Mapping[Kind, Mapping[str, bytes]]) -> dict[str, Any]:
    noise = table.waiting_note(section.cells)
    return {
        "title": section.title,
        "noise": " ".join(noise),
        "warning": synthetic_words(section.cells),
        "about": section.about,
        "plots": [
            {
                "kind": kind,
                "alt": alternative_text(section.cells, kind),
                **{name: _data(plot[f"{name}.svg"]) for name in THEMES},
            }
            for kind, plot in drawn.items()
        ],
        "missing": [
            f"No plot of {TITLES[kind]}: {why_nothing(section.cells, kind)}."
            for kind in KINDS
            if kind not in drawn
        ],
        "columns": section.columns,
        "rows": section.rows,
        "notes": [note for note in section.notes if note not in noise],
    }


def _data(svg: bytes) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(svg).decode('ascii')}"
