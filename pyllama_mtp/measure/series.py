"""Which cells belong together, and the words for what tells them apart.

A series is what a line of a plot is: cells that differ in nothing but the prompt size. What can
tell two series apart are their dimensions (program, mode, library variant, ...); a label names the
mode, and of the others those that vary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial

from pyllama_mtp.measure.cells import OURS, Cell
from pyllama_mtp.measure.columns import axis_of, mode_words
from pyllama_mtp.measure.plan import AXES, PLAIN_AXES, SWITCHES, axis_name
from pyllama_mtp.measure.text import counted


def machine_words(cell: Cell) -> str:
    """ "AMD EPYC, 2 cores": processor, cores and accelerators."""
    machine = cell.machine
    words = [str(machine.get("cpu") or "unknown machine"), *machine.get("devices", ())]
    if cores := machine.get("cores"):
        words.append(counted(cores, "core"))
    return ", ".join(words)


def build_words(cell: Cell) -> str:
    """ "patched, llama.cpp 0c1e57098, patches 7ffaa8541e19, CPU"."""
    words = [cell.variant]
    if cell.upstream_commit:
        words.append(f"llama.cpp {cell.upstream_commit[:9]}")
    if cell.series:
        words.append(f"patches {cell.series[:12]}")
    return ", ".join(word for word in [*words, cell.backend] if word)


def switch_of(cell: Cell, name: str) -> str:
    """The value of a switch that was asked for; "" without MTP. Older files lack newer switches:
    these have their default."""
    return str(cell.settings.get(name, SWITCHES[name])) if cell.n_max else ""


def imposed_words(cell: Cell) -> str:
    """The imposed acceptance rates, "0.84 0.76"; "" where the model's own counted."""
    rates = cell.synthetic_acceptance or ()
    return axis_of(cell, "synthetic_acceptance") or " ".join(f"{rate:g}" for rate in rates)


@dataclass(frozen=True)
class Dimension:
    """Something that tells series apart.

    Attributes:
        value: what a cell has there.
        within: a label names the value only if it varies among cells that are equal in these
            dimensions: a peer has a build of its own, which its program's name says already.
        words: a value as part of a label.
    """

    name: str
    value: Callable[[Cell], str]
    within: tuple[str, ...] = ()
    words: str = "{}"


def _axis(name: str) -> Dimension:
    value = partial(switch_of if name in SWITCHES else axis_of, name=name)
    within = () if name in PLAIN_AXES else ("mode",)
    return Dimension(name, value, within, axis_name(name) + " {}")


MODE = Dimension("mode", mode_words)
#: In the order in which a label names them.
DIMENSIONS = (
    Dimension("model", lambda cell: cell.model),
    Dimension("machine", machine_words),
    Dimension("program", lambda cell: cell.program),
    MODE,
    Dimension("variant", lambda cell: cell.variant, within=("program",)),
    Dimension(
        "upstream", lambda cell: cell.upstream_commit[:9], ("program", "variant"), "llama.cpp {}"
    ),
    Dimension("patches", lambda cell: cell.series[:7], ("program", "variant"), "patches {}"),
    Dimension("backend", lambda cell: cell.backend, within=("program",)),
    *(_axis(name) for name in AXES if name != "synthetic_acceptance"),
    Dimension("imposed", imposed_words, within=("mode",), words="acceptance {}"),
    Dimension("class", lambda cell: cell.prompt_class),
    Dimension("generated", lambda cell: str(cell.max_tokens), words="{} generated"),
)

#: The values of all dimensions, in their order.
SeriesKey = tuple[str, ...]


def series_key(cell: Cell, ignored: Collection[str] = ()) -> SeriesKey:
    """The values of a cell in all dimensions but the ignored ones; equal in a series."""
    return tuple(one.value(cell) for one in DIMENSIONS if one.name not in ignored)


def varying(cells: Iterable[Cell]) -> dict[str, set[tuple[str, ...]]]:
    """The names of the dimensions that tell series of these cells apart, each with the values of
    its `within` dimensions where it has several values."""
    names = [dimension.name for dimension in DIMENSIONS]
    keys = {series_key(cell) for cell in cells}
    found = {}
    for dimension in DIMENSIONS:
        values: dict[tuple[str, ...], set[str]] = {}
        for one in (dict(zip(names, key, strict=True)) for key in keys):
            group = tuple(one[name] for name in dimension.within)
            values.setdefault(group, set()).add(one[dimension.name])
        if several := {group for group, different in values.items() if len(different) > 1}:
            found[dimension.name] = several
    return found


class Labels:
    """Words for the series of some cells: the mode, and what else tells them apart.

    Args:
        ignored: names of dimensions to leave out.
    """

    def __init__(self, cells: Iterable[Cell], ignored: Collection[str] = ()) -> None:
        self._named = {
            name: groups for name, groups in varying(cells).items() if name not in ignored
        }

    def __call__(self, cell: Cell) -> str:
        """ "MTP 3, upstream"."""
        values = {dimension.name: dimension.value(cell) for dimension in DIMENSIONS}
        mode, words = mode_words(cell), []
        for dimension in DIMENSIONS:
            value = values[dimension.name]
            group = tuple(values[name] for name in dimension.within)
            if dimension is MODE or not value or group not in self._named.get(dimension.name, ()):
                continue
            if dimension.name != "program":
                words.append(dimension.words.format(value))
            elif value != OURS:
                mode = f"{value} {mode}"
        return ", ".join([mode, *words])


def latest(cells: Iterable[Cell]) -> list[Cell]:
    """One cell per series and prompt size, in the order of first appearance: the last cell with
    samples, if any has some. A file is appended to, so it may hold the same cell twice."""
    kept: dict[tuple[SeriesKey, int], Cell] = {}
    for cell in cells:
        place = (series_key(cell), cell.n_prompt)
        if place not in kept or cell.samples or not kept[place].samples:
            kept[place] = cell
    return list(kept.values())


@dataclass(frozen=True)
class Section:
    """Cells of one model, machine and class of prompts; they may share a plot."""

    model: str
    machine: str
    prompt_class: str
    cells: tuple[Cell, ...]


def sections(cells: Iterable[Cell]) -> list[Section]:
    """The cells by section, in order of appearance."""
    found: dict[tuple[str, str, str], list[Cell]] = {}
    for cell in cells:
        place = (cell.model, machine_words(cell), cell.prompt_class)
        found.setdefault(place, []).append(cell)
    return [Section(*place, tuple(members)) for place, members in found.items()]
