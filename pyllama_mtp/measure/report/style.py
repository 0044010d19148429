"""Colours, markers and sizes of the plots, and their legends.

The colours are those of M. Okabe and K. Ito, "Color Universal Design" (2008), without the yellow,
which is too light on white: they can be told apart with any kind of colour vision. Markers and
line styles tell the curves apart as well.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyllama_mtp.measure.report.curves import Curve

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.legend import Legend as MplLegend

INK = "#1a1d21"
MUTED = "#57606b"
GRID = "#dfe3e8"
PAPER = "#fefefe"
WARNING = "#a84301"

#: Of the depths, in their order; no MTP is drawn in ink.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LINES = ("-", (0, (5, 2)), (0, (1, 1.3)), (0, (6, 2, 1, 2)), (0, (3, 1, 1, 1, 1, 1)))

#: Height of a line of the legend, in sizes of the type.
ROW = 1.55

#: For a dark page: each colour and its replacement.
DARK = {
    INK: "#e8ebee",
    MUTED: "#a3acb6",
    GRID: "#343a42",
    PAPER: "#14171b",
    WARNING: "#ffa366",
    "#0072b2": "#3d9bd4",
}


@dataclass(frozen=True)
class Shape:
    """Size of a picture in inches, of its type in points, and what fits into it.

    Attributes:
        height: of the plot with its axes' labels, without title and legend.
        letters: of small type, per line.
        legend_columns: entries of the legend per line.
        ticks: most labels of the x axis.
    """

    name: str
    width: float
    height: float
    type_size: float
    letters: int
    legend_columns: int
    ticks: int


WIDE = Shape("wide", 7.6, 3.4, 10.5, 92, 4, 12)
#: For a phone: as wide as its screen, type as large as the page's.
NARROW = Shape("narrow", 3.7, 3.1, 9.5, 47, 2, 6)


def dark(svg: str) -> str:
    """An SVG picture in the colours for a dark page."""
    for light, replacement in DARK.items():
        svg = svg.replace(light, replacement)
    return svg


def three_digits(value: float) -> str:
    """A figure with three significant digits: 0.952, 68.5, 1,230, 11,000."""
    if not value:
        return "0"
    rounded = float(f"{value:.2e}")
    digits = 2 - math.floor(math.log10(abs(rounded)))
    return f"{rounded:,.{max(digits, 0)}f}"


def size_words(tokens: int) -> str:
    """512, 1k, 1.5k, 128k, 1M, where these are exact; else the number."""
    for unit, step in (("M", 1 << 20), ("k", 1 << 10)):
        if tokens >= step and 2 * tokens % step == 0:
            return f"{tokens / step:g}{unit}"
    return str(tokens)


def looks(shown: Sequence[Curve]) -> list[tuple[Curve, dict[str, Any]]]:
    """Each curve and its looks: colour and marker by mode, line and filling by the rest."""
    modes = list(dict.fromkeys(["no-MTP", *(curve.mode for curve in shown)]))
    rests = list(dict.fromkeys(curve.rest for curve in shown))
    found = []
    for curve in shown:
        mode, rest = modes.index(curve.mode), rests.index(curve.rest)
        color = COLORS[(mode - 1) % len(COLORS)] if mode else INK
        look: dict[str, Any] = {
            "color": color,
            "marker": MARKERS[(mode + rest * (len(rests) > 1)) % len(MARKERS)],
            "linestyle": LINES[rest % len(LINES)],
            "markerfacecolor": PAPER if rest % 2 else color,
        }
        found.append((curve, look))
    return found


def source_lines(behind: Sequence[Curve]) -> dict[str, Any]:
    """The line style of every source of published figures."""
    sources = dict.fromkeys(curve.source for curve in behind)
    return {s: LINES[n % len(LINES)] for n, s in enumerate(sources, start=1)}


@dataclass(frozen=True)
class Legend:
    """Entries in columns; an entry is a label and how its line is drawn."""

    entries: list[tuple[str, dict[str, Any]]]
    columns: int

    @property
    def rows(self) -> int:
        """Lines of text."""
        lines = [1 + label.count("\n") for label, _ in self.entries]
        per_column = -(-len(lines) // self.columns)
        return max(
            sum(lines[start : start + per_column]) for start in range(0, len(lines), per_column)
        )


def legends(shown: Sequence[Curve], behind: Sequence[Curve], shape: Shape) -> list[Legend]:
    """The legend of the measured curves, then of the sources of published figures, if any."""
    own = [(curve.label, look) for curve, look in looks(shown)]
    found = [_in_columns(own, shape)]
    if behind:
        grey = {"color": MUTED, "alpha": 0.7, "linewidth": 1.1}
        sources = [
            (f"published: {source}", {**grey, "linestyle": line})
            for source, line in source_lines(behind).items()
        ]
        found.append(_in_columns(sources, shape))
    return found


def _in_columns(entries: Sequence[tuple[str, dict[str, Any]]], shape: Shape) -> Legend:
    wrapped = [
        ("\n".join(textwrap.wrap(label, shape.letters - 8)), look) for label, look in entries
    ]
    longest = max(len(label) for label, _ in entries)
    columns = max(1, min(shape.legend_columns, shape.letters // (longest + 8), len(entries)))
    return Legend(wrapped, columns)


def draw_legends(axes: Axes, legends: Sequence[Legend], shape: Shape) -> None:
    """Draw them below the plot and the label of its axis, where they hide nothing."""
    down = 4.4 * shape.type_size
    for legend in legends[:-1]:
        # Axes keep one legend; the others are added as artists.
        axes.add_artist(_draw_legend(axes, legend, shape, down)).set_clip_on(False)
        down += legend.rows * ROW * shape.type_size
    _draw_legend(axes, legends[-1], shape, down)


def _draw_legend(axes: Axes, legend: Legend, shape: Shape, down: float) -> MplLegend:
    from matplotlib.lines import Line2D
    from matplotlib.transforms import ScaledTranslation

    handles = [
        Line2D([], [], **{"linewidth": 1.8, "markersize": 6, **look}) for _, look in legend.entries
    ]
    return axes.legend(
        handles,
        [label for label, _ in legend.entries],
        loc="upper left",
        bbox_to_anchor=(0, 0),
        bbox_transform=axes.transAxes
        + ScaledTranslation(0, -down / 72, axes.figure.dpi_scale_trans),
        ncols=legend.columns,
        frameon=False,
        borderaxespad=0,
        borderpad=0,
        handlelength=2.6,
        columnspacing=1.4,
        labelcolor=INK,
        fontsize=shape.type_size - 0.5,
    )
