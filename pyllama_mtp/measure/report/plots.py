"""The plots: speed and ratio against prompt size, acceptance against draft position."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyllama_mtp.errors import UsageError
from pyllama_mtp.measure import series
from pyllama_mtp.measure.cells import Cell
from pyllama_mtp.measure.columns import LEAST_DRAFTS
from pyllama_mtp.measure.published import Published
from pyllama_mtp.measure.report import style
from pyllama_mtp.measure.report.curves import Curve, Kind, curves, published_curves
from pyllama_mtp.measure.report.style import Shape
from pyllama_mtp.measure.table import imposed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TITLES: dict[Kind, str] = {
    "prefill": "Prefill speed",
    "decode": "Decode speed",
    "prefill-ratio": "Prefill, relative to no MTP",
    "decode-ratio": "Decode, relative to no MTP",
    "acceptance": "Acceptance by draft position",
}
_PREFILL = "Prefill: the prompt is processed, up to the first token of the answer"
_DECODE = "Decode: the answer is written, from the second token on"
_EXPLAINED: dict[Kind, str] = {
    "prefill": f"{_PREFILL}. Higher is faster",
    "decode": f"{_DECODE}. Higher is faster",
    "prefill-ratio": f"{_PREFILL}. Above 1: faster than without MTP",
    "decode-ratio": f"{_DECODE}. Above 1: faster than without MTP",
    "acceptance": "Drafts that the model itself would have written",
}
_Y_LABELS: dict[Kind, str] = {
    "prefill": "tokens per second",
    "decode": "tokens per second",
    "prefill-ratio": "speed / that of no MTP",
    "decode-ratio": "speed / that of no MTP",
    "acceptance": "accepted / drafted",
}
_X_LABEL = "prompt size (tokens; evenly spaced)"
#: Speeds that differ by more are drawn on a logarithmic axis.
_LOGARITHMIC = 8.0
#: Distance between the curves at a size, of that between sizes: bars do not hide each other.
_ASIDE = 0.035
#: Height of a line of the heading, in sizes of the type.
_LINE = 1.2


@dataclass(frozen=True)
class Plot:
    """A finished picture.

    Attributes:
        alt: all values in words.
        svg: for each shape, by name.
        png: the wide shape, 200 dots per inch.
    """

    kind: Kind
    alt: str
    svg: dict[str, str]
    png: bytes


def require_matplotlib() -> None:
    """Raises UsageError, which says what to install."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UsageError(
            "plots need matplotlib, which is not installed; pip install 'pyllama-mtp[report]'"
        ) from None


def make_plot(
    cells: Sequence[Cell], kind: Kind, published: Sequence[Published] = ()
) -> Plot | None:
    """Draw a plot in all its shapes; None if these cells have nothing to show in it."""
    import matplotlib
    from matplotlib.figure import Figure

    shown = curves(cells, kind)
    if not shown:
        return None
    svg, png = {}, b""
    for shape in (style.WIDE, style.NARROW):
        size = figure_size(cells, kind, published, shape)
        with matplotlib.rc_context({"font.size": shape.type_size, "font.family": "DejaVu Sans"}):
            figure = Figure(size, layout="constrained", facecolor=style.PAPER)
            draw(figure.add_subplot(), cells, kind, published, shape)
        svg[shape.name] = _rendered(figure, "svg").decode("utf-8")
        if shape is style.WIDE:
            png = _rendered(figure, "png")
    return Plot(kind, _alt(shown, kind, cells), svg, png)


def figure_size(
    cells: Sequence[Cell], kind: Kind, published: Sequence[Published], shape: Shape
) -> tuple[float, float]:
    """Width and height in inches, with room for title and legend above and below the plot."""
    rows = lines = 0
    if shown := curves(cells, kind):
        behind = published_curves(published, shown, kind)
        rows = sum(legend.rows for legend in style.legends(shown, behind, shape))
        lines = len(_heading_lines(cells, kind, shape))
    points = (rows * style.ROW + 2 + lines * _LINE) * shape.type_size
    return shape.width, shape.height + points / 72


def _rendered(figure: Figure, form: str) -> bytes:
    import matplotlib

    data = io.BytesIO()
    # No random ids and no date: the same cells give the same file.
    with matplotlib.rc_context({"svg.hashsalt": "pyllama-mtp", "svg.fonttype": "path"}):
        metadata = {"Date": None} if form == "svg" else {}
        figure.savefig(data, format=form, dpi=200, metadata=metadata)
    return data.getvalue()


def draw(
    axes: Axes,
    cells: Sequence[Cell],
    kind: Kind,
    published: Sequence[Published] = (),
    shape: Shape = style.WIDE,
) -> None:
    """Draw a plot into `axes`.

    Raises:
        UsageError: these cells have nothing to show in it.
    """
    shown = curves(cells, kind)
    if not shown:
        raise UsageError(f"there is nothing to plot: {why_nothing(cells, kind)}")
    behind = published_curves(published, shown, kind)
    _frame(axes)
    if kind == "acceptance":
        _draw_curves(axes, shown, kind, {})
        _position_axis(axes, shown)
    else:
        sizes = sorted({p.x for curve in [*shown, *behind] for p in curve.points})
        if len(sizes) == 1:
            _draw_bars(axes, shown, sizes[0])
        else:
            places = {size: place for place, size in enumerate(sizes)}
            _draw_published(axes, behind, shown, places)
            _draw_curves(axes, shown, kind, places)
            _size_axis(axes, sizes, shape)
    _value_axis(axes, [*shown, *behind], kind)
    _heading(axes, cells, kind, shape)
    style.draw_legends(axes, style.legends(shown, behind, shape), shape)


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


def _frame(axes: Axes) -> None:
    axes.set_facecolor(style.PAPER)
    axes.grid(True, axis="y", color=style.GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(style.MUTED)
    axes.tick_params(colors=style.MUTED, labelcolor=style.INK, which="both")


def _draw_bars(axes: Axes, shown: Sequence[Curve], size: int) -> None:
    """A single prompt size: bars side by side, their values above them."""
    for number, (curve, look) in enumerate(style.looks(shown)):
        (point,) = curve.points
        axes.bar(
            *(number, point.y, 0.62),
            yerr=[[point.y - point.low], [point.high - point.y]],
            facecolor=look["markerfacecolor"],
            edgecolor=look["color"],
            linestyle=look["linestyle"],
            ecolor=style.MUTED,
            capsize=4,
            zorder=3,
        )
        axes.annotate(
            *(style.three_digits(point.y), (number, point.high), (0, 3)),
            textcoords="offset points",
            ha="center",
            color=style.INK,
            zorder=5,
            bbox={"facecolor": style.PAPER, "edgecolor": "none", "pad": 0.5},
        )
    axes.set_xticks([])
    axes.set_xlim(-0.7, len(shown) - 0.3)
    axes.set_xlabel(f"prompt of {style.size_words(size)} tokens", color=style.INK)


def _draw_curves(axes: Axes, shown: Sequence[Curve], kind: Kind, places: Mapping[int, int]) -> None:
    """`places`: of the prompt sizes on the axis; empty: a draft position is its own place."""
    for number, (curve, look) in enumerate(style.looks(shown)):
        aside = _ASIDE * (number - (len(shown) - 1) / 2)
        x = [places.get(point.x, point.x) + aside for point in curve.points]
        below = [point.y - point.low for point in curve.points]
        above = [point.high - point.y for point in curve.points]
        axes.errorbar(
            x,
            [point.y for point in curve.points],
            None if kind == "acceptance" else (below, above),
            label=curve.label,
            linewidth=1.8,
            markersize=6,
            elinewidth=1.2,
            capsize=3,
            zorder=3,
            **look,
        )


def _draw_published(
    axes: Axes, behind: Sequence[Curve], shown: Sequence[Curve], places: Mapping[int, int]
) -> None:
    colors = {c.mode: look["color"] for c, look in style.looks(shown)}
    lines = style.source_lines(behind)
    for curve in behind:
        axes.plot(
            [places[point.x] for point in curve.points],
            [point.y for point in curve.points],
            color=colors[curve.mode],
            alpha=0.45,
            linewidth=1.1,
            linestyle=lines[curve.source],
            marker=".",
            markersize=4,
            zorder=1,
        )


def _size_axis(axes: Axes, sizes: Sequence[int], shape: Shape) -> None:
    """The sizes, evenly spaced, with as many labels as have room."""
    step = -(-len(sizes) // shape.ticks)
    axes.set_xticks(range(0, len(sizes), step), [style.size_words(n) for n in sizes[::step]])
    axes.set_xlim(-0.35, len(sizes) - 0.65)
    axes.set_xlabel(_X_LABEL, color=style.INK)


def _value_axis(axes: Axes, drawn: Sequence[Curve], kind: Kind) -> None:
    """From 0, or logarithmic where speeds differ much; the label says which."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low = min(point.low for curve in drawn for point in curve.points)
    high = max(point.high for curve in drawn for point in curve.points)
    logarithmic = kind in ("prefill", "decode") and high / low > _LOGARITHMIC
    if logarithmic:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_formatter(NullFormatter())
    elif kind != "acceptance":
        axes.set_ylim(0, 1.12 * max(high, 1.0 if kind.endswith("-ratio") else 0.0))
    if kind in ("prefill", "decode"):
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.12g}"))
    if kind.endswith("-ratio"):
        axes.axhline(1.0, color=style.MUTED, linewidth=1.2, linestyle=(0, (4, 3)), zorder=4)
    scale = "logarithmic" if logarithmic else "linear"
    axes.set_ylabel(f"{_Y_LABELS[kind]} ({scale})", color=style.INK)


def _position_axis(axes: Axes, shown: Sequence[Curve]) -> None:
    positions = sorted({point.x for curve in shown for point in curve.points})
    axes.set_xticks(positions)
    axes.set_xlim(min(positions) - 0.5, max(positions) + 0.5)
    axes.set_ylim(0, 1.03)
    axes.set_xlabel("draft position in the round (1 is the first)", color=style.INK)


def _caption(cells: Sequence[Cell], kind: Kind) -> str:
    """What the points and bars are."""
    counts = sorted({len(cell.samples) for cell in series.latest(cells) if cell.samples})
    many = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else f"{counts[0]}"
    noun = "sample" if counts[-1] == 1 else "samples"
    if kind == "acceptance":
        return f"totals over {many} {noun} per prompt size and all sizes"
    if kind.endswith("-ratio"):
        return f"{many} paired ratios (Hodges-Lehmann); bars: their interval"
    return f"medians of {many} {noun}; bars: lowest and highest"


def synthetic_words(cells: Sequence[Cell]) -> str:
    """The warning of imposed acceptance, with the rates; "" where the model's own counted."""
    words = [", ".join(f"{rate:g}" for rate in rates) for rates in imposed(cells)]
    return f"SYNTHETIC ACCEPTANCE: imposed at {'; or '.join(words)}" if words else ""


def _heading_lines(cells: Sequence[Cell], kind: Kind, shape: Shape) -> list[tuple[str, str, str]]:
    """The lines below the title, with their colour and weight."""
    places = list(dict.fromkeys(f"{cell.model}, {series.machine_words(cell)}" for cell in cells))
    grey = [_EXPLAINED[kind], *(places if len(places) == 1 else []), _caption(cells, kind)]
    lines = [
        (line, style.MUTED, "normal")
        for text in grey
        for line in textwrap.wrap(text, shape.letters)
    ]
    letters = round(shape.letters * 0.84)  # bold is wider
    warning = textwrap.wrap(synthetic_words(cells), letters)
    return lines + [(line, style.WARNING, "bold") for line in warning]


def _heading(axes: Axes, cells: Sequence[Cell], kind: Kind, shape: Shape) -> None:
    """Draw the title and :func:`_heading_lines` above the plot."""
    lines = _heading_lines(cells, kind, shape)
    step = _LINE * shape.type_size
    for number, (line, color, weight) in enumerate(reversed(lines)):
        axes.annotate(
            *(line, (0, 1), (0, 7 + number * step)),
            xycoords="axes fraction",
            textcoords="offset points",
            fontsize=shape.type_size - 1.5,
            color=color,
            fontweight=weight,
        )
    axes.set_title(
        TITLES[kind],
        loc="left",
        pad=11 + len(lines) * step,
        fontsize=shape.type_size + 2,
        fontweight="bold",
        color=style.INK,
    )


def _alt(shown: Sequence[Curve], kind: Kind, cells: Sequence[Cell]) -> str:
    where = "position" if kind == "acceptance" else "prompt size"
    lines = []
    for curve in shown:
        values = ((style.three_digits(p.y), style.size_words(p.x)) for p in curve.points)
        lines.append(f"{curve.label}: " + ", ".join(f"{y} at {x}" for y, x in values))
    warning = synthetic_words(cells)
    text = f"{TITLES[kind]}, {_Y_LABELS[kind]} against {where}. {'; '.join(lines)}."
    return f"{text} {warning}." if warning else text
