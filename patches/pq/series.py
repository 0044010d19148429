"""The series: which patches there are, for which build variant, and the rules that they keep.

A line of ``series`` is a file name and ``both`` or ``patched``. ``both`` means that the patch goes
into the `upstream` variant as well as into the `patched` one; such patches come first, so that the
upstream variant is always a prefix of the queue.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import NamedTuple

from sdist import read_pin
from tree import Tree, read_tree

from . import PATCHES

PIN = "llama-cpp.pin"  # beside the pristine tree
VARIANTS = ("upstream", "patched")
HEADER = "# Patches in order; both = upstream and patched. Written by patchqueue.py export.\n"
#: Folders of our own C++ under bindings/, which the patched variant is compiled from as well.
SOURCES = ("ggml-cpu", "ggml-cuda", "llama")
#: The most lines of one patch, and of all of them, with their messages.
LINES_OF_ONE, LINES_OF_ALL = 400, 6500


class PatchError(Exception):
    """A problem the maintainer can mend; the message ends with the next commands to type."""


class Series(NamedTuple):
    """The queue in one folder: its patches in order, and how many of them are for both variants."""

    folder: Path
    patches: list[Path]
    both: int

    def of(self, variant: str) -> list[Path]:
        """The patches that go into one build variant."""
        return self.patches[: None if variant == "patched" else self.both]

    def files(self) -> dict[str, bytes]:
        """The bytes of all patches, by name."""
        return {path.name: path.read_bytes() for path in self.patches}

    def sources(self, folder: str) -> list[Path]:
        """Our C++ sources in one of SOURCES."""
        return sorted((self.folder.parent / "bindings" / folder).glob("*.[ch]*"))

    def stamp(self, variant: str) -> str:
        """sha256 over the names and bytes of the variant's patches and sources, in order."""
        digest = hashlib.sha256()
        ours = [path for name in SOURCES for path in self.sources(name) if variant == "patched"]
        for path in [*self.of(variant), *ours]:
            data = path.read_bytes()
            digest.update(f"{path.name} {len(data)}\n".encode() + data)
        return digest.hexdigest()

    def problems(self) -> list[str]:
        """The rules that are broken: change upstream's files only, be short, be in the README."""
        table, found, total = (self.folder / "README.md").read_text(encoding="utf-8"), [], 0
        for name, data in self.files().items():
            total += (lines := data.count(b"\n"))
            if b"\nnew file mode " in data:
                found.append(f"{name} adds a file: put sources of ours in a folder of bindings/")
            if lines > LINES_OF_ONE:
                found.append(f"{name} has {lines} lines, more than {LINES_OF_ONE}")
            if f"`{name}`" not in table:
                found.append(f"{name} has no row in the table of README.md")
        if total > LINES_OF_ALL:
            found.append(f"all patches have {total} lines, more than {LINES_OF_ALL}")
        return found


def read_series(folder: Path = PATCHES) -> Series:
    """Read ``series``: the patches of the folder in the order of their names, ``both`` first."""
    text = (folder / "series").read_text(encoding="utf-8")
    names = sorted(path.name for path in folder.glob("*.patch"))
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    both = sum(line.endswith(" both") for line in lines)
    if lines != [f"{name} {'both' if n < both else 'patched'}" for n, name in enumerate(names)]:
        rule = "the folder's patches in order, those with 'both' before those with 'patched'"
        raise PatchError(f"{folder}/series must list {rule}\nnext:\n  edit it")
    return Series(folder.resolve(), [folder.resolve() / name for name in names], both)


def touched(patches: list[Path]) -> set[str]:
    """The files that patches change, relative to llama.cpp's root."""
    pattern = re.compile(rb"^diff --git a/(\S+) b/(\S+)$", re.M)
    pairs = [pair for path in patches for pair in pattern.findall(path.read_bytes())]
    return {name.decode() for pair in pairs for name in pair}


def pristine(path: Path) -> Tree:
    """The pinned tree at `path`, or an error that says how to get it."""
    if tree := read_tree(path, read_pin(path.parent / PIN)):
        return tree
    raise PatchError(f"{path} is not the pin's llama.cpp\nnext:\n  python vendor/fetch.py")
