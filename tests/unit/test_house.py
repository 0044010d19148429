"""The house, drawn from its imports: no circles, few floors, and what nothing below may know.

A room is a folder of the package, or a file beside the folders. A room stands above all that it
imports: at the top of a file, in a function, or for types only.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

import pytest

PACKAGE = Path(__file__).parents[2] / "pyllama_mtp"
#: From whom to whom: the lines that say so, "FILE:LINE -> FILE".
Arrows: TypeAlias = dict[str, dict[str, list[str]]]
FLOORS = 18
#: Rooms that nothing below knows, and who may know of them.
TOP = {
    "cli": {"__main__"},
    "highlevel": {"__init__"},
    "llmplugin": set[str](),
    "serve": {"cli", "highlevel"},
    "measure": {"bench", "cli"},
    "bench": {"cli"},
}
#: Arrows between rooms that run up. None may be added.
UP = {("models", "llama")}
DOOR = "__init__.py"

pytestmark = pytest.mark.skipif(not PACKAGE.is_dir(), reason="only a checkout has the sources")


def file_of(module: str) -> str:
    """The file of a module below the package: "llama.model" -> "llama/model.py"; "": none."""
    path = module.replace(".", "/")
    return next((f for f in (f"{path}.py", f"{path}/__init__.py") if (PACKAGE / f).is_file()), "")


def imports(file: str) -> Iterator[tuple[int, str, str]]:
    """Line, module below the package and name of all that a file imports from the package."""
    folder = ["pyllama_mtp", *file.split("/")[:-1]]
    for node in ast.walk(ast.parse((PACKAGE / file).read_text())):
        if isinstance(node, ast.ImportFrom):
            above = folder[: len(folder) - node.level + 1] if node.level else []
            module = ".".join([*above, *filter(None, [node.module])])
            names = [(module, alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [(alias.name, "") for alias in node.names]
        else:
            continue
        for module, name in names:
            package, _, inner = module.partition(".")
            if package == "pyllama_mtp":
                yield node.lineno, inner, name


@cache
def drawn() -> Arrows:
    """The arrows between files. Who takes a name from the package imports its front door, which
    imports the files of all names that it offers."""
    names = [path.relative_to(PACKAGE).as_posix() for path in sorted(PACKAGE.rglob("*.py"))]
    offered = {name for _, module, name in imports(DOOR) if module}
    files: Arrows = {name: {} for name in names}
    for file, arrows in files.items():
        for line, module, name in imports(file):
            to = file_of(f"{module}.{name}".strip(".")) or (file_of(module) if module else "")
            if not module and name in offered:
                to = DOOR
            known = module or file != DOOR  # its modules are loaded when they are asked for
            if known and to and to != file:
                arrows.setdefault(to, []).append(f"{file}:{line} -> {to}")
    return files


def rooms() -> Arrows:
    """The arrows between rooms."""
    found: Arrows = {}
    for file, arrows in drawn().items():
        room = room_of(file)
        found.setdefault(room, {})
        for to, lines in arrows.items():
            if (other := room_of(to)) != room:
                found[room].setdefault(other, []).extend(lines)
    return found


def room_of(file: str) -> str:
    return file.partition("/")[0].removesuffix(".py")


def floors(arrows: Arrows) -> list[str]:
    """What stands on each floor, the lowest first. A circle is an error, which shows its arrows."""
    sorter = TopologicalSorter(arrows)
    try:
        sorter.prepare()
    except CycleError as error:
        circle = error.args[1][::-1]  # each imports the next one
        pytest.fail("\n".join(arrows[a][b][0] for a, b in pairwise(circle)))
    found = list[str]()
    while sorter.is_active():
        floor = sorter.get_ready()
        sorter.done(*floor)
        found.append(f"{len(found) + 1}: {' '.join(sorted(floor))}")
    return found


def test_no_circle_of_files() -> None:
    assert floors(drawn())


def test_a_room_stands_above_what_it_imports() -> None:
    house = rooms()
    for room, other in UP:
        assert house.get(room, {}).pop(other, None), f"{room} -> {other} is gone: remove it here"
    found = floors(house)
    assert len(found) <= FLOORS, "\n".join(found)


def test_nothing_below_knows_of_the_top() -> None:
    up = [
        line
        for room, arrows in rooms().items()
        for to, lines in arrows.items()
        if to in TOP and room not in TOP[to]
        for line in lines
    ]
    assert not up, "\n".join(up)
