"""What the plots show, as numbers: curves over prompt size, and acceptance over position."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from pyllama_mtp.errors import UsageError
from pyllama_mtp.measure import series
from pyllama_mtp.measure.cells import Cell
from pyllama_mtp.measure.columns import mode_words, shown_rates
from pyllama_mtp.measure.published import Published
from pyllama_mtp.measure.ratios import Figure, ratio_to_plain
from pyllama_mtp.measure.records import spread_of

Kind = Literal["prefill", "decode", "prefill-ratio", "decode-ratio", "acceptance"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class Point:
    """A value at a prompt size in tokens (of acceptance: at a draft position), and its bounds."""

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
        source: who published the figures, and on what; "" for measured ones.
    """

    label: str
    points: tuple[Point, ...]
    mode: str
    rest: str = ""
    source: str = ""


def check_kind(kind: str) -> Kind:
    """Raises UsageError if `kind` is not one of `KINDS`."""
    for known in KINDS:
        if kind == known:
            return known
    raise UsageError(f"there is no plot {kind!r}; there are: {', '.join(KINDS)}")


def _figure_of(kind: Kind) -> Figure:
    return "prefill_tps" if kind.startswith("prefill") else "decode_tps"


def curves(cells: Sequence[Cell], kind: Kind) -> list[Curve]:
    """The curves of a plot, without MTP first, then by depth, the adaptive depth last.

    A speed is the median of the samples, with the lowest and the highest as bounds. A ratio to no
    MTP is the estimate from the paired ratios, with its interval (see ``ratios.py``). Acceptance is
    accepted / drafted at each position, totals over all samples and sizes, without bounds; see
    :func:`shown_rates`.
    """
    shown = [cell for cell in series.latest(cells) if cell.samples]
    label = series.Labels(shown)
    by_series: dict[series.SeriesKey, list[Cell]] = {}
    for cell in shown:
        by_series.setdefault(series.series_key(cell), []).append(cell)
    found = []
    for members in by_series.values():
        members.sort(key=lambda cell: cell.n_prompt)
        if points := _points(members, cells, kind):
            words, mode = label(members[0]), mode_words(members[0])
            place = (members[0].adaptive, members[0].n_max)
            found.append((place, Curve(words, points, mode, words.replace(mode, ""))))
    return [curve for _, curve in sorted(found, key=lambda item: item[0])]


def _points(members: Sequence[Cell], cells: Sequence[Cell], kind: Kind) -> tuple[Point, ...]:
    if kind == "acceptance":
        return _acceptance(members)
    points, figure = [], _figure_of(kind)
    for cell in members:
        if kind.endswith("-ratio"):
            if ratio := ratio_to_plain(cell, cells, figure):
                points.append(Point(cell.n_prompt, ratio.value, ratio.low, ratio.high))
        elif spread := spread_of(cell, figure):
            points.append(Point(cell.n_prompt, *spread))
    return tuple(points)


def _acceptance(members: Iterable[Cell]) -> tuple[Point, ...]:
    rates = enumerate(shown_rates(cell for cell in members if cell.n_max), start=1)
    return tuple(Point(position, rate, rate, rate) for position, rate in rates if rate is not None)


def published_curves(
    figures: Sequence[Published], shown: Sequence[Curve], kind: Kind
) -> list[Curve]:
    """Reference curves for a plot: published figures whose mode the plot shows as well."""
    if kind == "acceptance":
        return []
    modes, name, found = {curve.mode for curve in shown}, _figure_of(kind), []
    for source in dict.fromkeys(one.source for one in figures):
        members = [one for one in figures if one.source == source]
        title = f"{source}: {members[0].model}, {members[0].hardware}"
        plain = {one.n_prompt: getattr(one, name) for one in members if not one.n_max}
        members = sorted(members, key=lambda one: one.n_prompt)
        for n_max in sorted({one.n_max for one in members}):
            mode = f"MTP {n_max}" if n_max else "no-MTP"
            own = [(one.n_prompt, getattr(one, name)) for one in members if one.n_max == n_max]
            if kind.endswith("-ratio"):
                own = [(x, y / plain[x]) for x, y in own if n_max and x in plain]
            if own and mode in modes:
                points = tuple(Point(x, y, y, y) for x, y in own)
                found.append(Curve(f"{mode}, {source}", points, mode, source, title))
    return found
