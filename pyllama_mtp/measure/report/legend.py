"""The colours, markers and line styles of a plot's curves, and its legend."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyllama_mtp.measure.report import style
from pyllama_mtp.measure.report.curves import Curve
from pyllama_mtp.measure.report.style import Shape

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.legend import Legend as MplLegend

#: Height of a line of the legend, in sizes of the type.
ROW = 1.55


def looks(shown: Sequence[Curve]) -> list[dict[str, Any]]:
    """The looks of each curve: colour and marker by mode, line and filling by the rest."""
    modes = list(dict.fromkeys(curve.mode for curve in shown if curve.mode != "no-MTP"))
    rests = list(dict.fromkeys(curve.rest for curve in shown))
    found = []
    for curve in shown:
        mode = modes.index(curve.mode) + 1 if curve.mode in modes else 0
        rest = rests.index(curve.rest)
        color = style.COLORS[(mode - 1) % len(style.COLORS)] if mode else style.INK
        found.append(
            {
                "color": color,
                "marker": style.MARKERS[(mode + rest * (len(rests) > 1)) % len(style.MARKERS)],
                "linestyle": style.LINES[rest % len(style.LINES)],
                "markerfacecolor": style.PAPER if rest % 2 else color,
            }
        )
    return found


def source_lines(behind: Sequence[Curve]) -> dict[str, Any]:
    """The line style of every source of published figures."""
    sources = dict.fromkeys(curve.source for curve in behind)
    return {s: style.LINES[n % len(style.LINES)] for n, s in enumerate(sources, start=1)}


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
    own = [(curve.label, look) for curve, look in zip(shown, looks(shown), strict=True)]
    found = [_in_columns(own, shape)]
    if behind:
        grey = {"color": style.MUTED, "alpha": 0.7, "linewidth": 1.1}
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
        labelcolor=style.INK,
        fontsize=shape.type_size - 0.5,
    )
