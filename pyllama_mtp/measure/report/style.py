"""Colours, markers and sizes of the plots.

The colours are those of M. Okabe and K. Ito, "Color Universal Design" (2008), without the yellow,
which is too light on white: they can be told apart with any kind of colour vision. Markers and
line styles tell the curves apart as well.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

INK = "#1a1d21"
MUTED = "#57606b"
GRID = "#dfe3e8"
PAPER = "#fefefe"
WARNING = "#a84301"

#: Of the depths, in their order; no MTP is drawn in ink.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LINES = ("-", (0, (5, 2)), (0, (1, 1.3)), (0, (6, 2, 1, 2)), (0, (3, 1, 1, 1, 1, 1)))

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
    digits = 2 - math.floor(math.log10(abs(value)))
    rounded = round(value, digits)
    digits = 2 - math.floor(math.log10(abs(rounded)))  # 9.996 is 10.0
    return f"{rounded:,.{max(digits, 0)}f}"


def size_words(tokens: int) -> str:
    """512, 1k, 1.5k, 128k, 1M, where these are exact; else the number."""
    for unit, step in (("M", 1 << 20), ("k", 1 << 10)):
        if tokens >= step and 2 * tokens % step == 0:
            return f"{tokens / step:g}{unit}"
    return str(tokens)
