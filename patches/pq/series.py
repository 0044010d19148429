"""The series: which patches there are, in which order, and for which build variant.

A line of ``series`` is a file name and ``both`` or ``patched``. ``both`` means that the patch goes
into the `upstream` variant as well as into the `patched` one; such patches come first, so that the
upstream variant is always a prefix of the queue.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

PATCHES = Path(__file__).resolve().parents[1]
VARIANTS = ("upstream", "patched")
MARKERS = ("both", "patched")
#: Folders of our own C++ under bindings/.
SOURCES = ("ggml-cpu", "llama")
SERIES_HEADER = (
    "# Patches in the order of application, and the variants that get them:\n"
    "# both = upstream and patched, patched = patched only. Written by patchqueue.py export.\n"
)


class PatchError(Exception):
    """A problem the maintainer can mend; the message ends with the next commands to type."""


@dataclass(frozen=True)
class Patch:
    """One mailbox patch of the queue."""

    name: str
    marker: str
    path: Path

    @property
    def data(self) -> bytes:
        """The bytes of the patch file."""
        return self.path.read_bytes()

    @property
    def topic(self) -> str:
        """The name without its number, which survives renumbering."""
        return re.sub(r"^\d+-", "", self.name)

    def touched(self) -> list[str]:
        """The files that the patch changes, adds or removes, relative to llama.cpp's root."""
        found = re.findall(rb"^diff --git a/(\S+) b/(\S+)$", self.data, re.M)
        return sorted({name.decode() for pair in found for name in pair})


@dataclass(frozen=True)
class Series:
    """The queue in one folder."""

    folder: Path
    patches: tuple[Patch, ...]

    def of(self, variant: str) -> tuple[Patch, ...]:
        """The patches that go into one build variant."""
        return tuple(p for p in self.patches if variant == "patched" or p.marker == "both")

    def stamp(self, variant: str) -> str:
        """sha256 over the names and bytes of the variant's patches, in order."""
        digest = hashlib.sha256()
        for patch in self.of(variant):
            data = patch.data
            digest.update(f"{patch.name} {len(data)}\n".encode())
            digest.update(data)
        if variant == "patched":
            for path in self.sources():
                data = path.read_bytes()
                digest.update(f"{path.name} {len(data)}\n".encode())
                digest.update(data)
        return digest.hexdigest()

    def sources(self) -> list[Path]:
        """Our C++ sources, which the patched variant is compiled from beside the patched tree."""
        bindings = self.folder.resolve().parent / "bindings"
        found = [path for name in SOURCES for path in (bindings / name).glob("*.[ch]*")]
        return sorted(found)


def read_series(folder: Path = PATCHES) -> Series:
    """Read and validate ``series``; every patch file must be listed, every listed file be there."""
    try:
        text = (folder / "series").read_text(encoding="utf-8")
    except OSError as error:
        raise PatchError(
            f"the series cannot be read: {error}\nnext:\n  git restore patches"
        ) from error
    patches: list[Patch] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2 or words[1] not in MARKERS:
            raise _bad_line(number, line, "expected 'NAME.patch both' or 'NAME.patch patched'")
        patch = Patch(words[0], words[1], folder / words[0])
        if not patch.path.is_file():
            raise _bad_line(number, line, f"no such file: {patch.path}")
        if patch.marker == "both" and any(p.marker == "patched" for p in patches):
            raise _bad_line(number, line, "patches for both variants come before the others")
        patches.append(patch)
    names = [p.name for p in patches]
    if len(set(names)) != len(names):
        raise PatchError("the series lists a patch twice\nnext:\n  edit patches/series")
    unlisted = sorted({p.name for p in folder.glob("*.patch")} - set(names))
    if unlisted:
        raise PatchError(f"not in the series: {', '.join(unlisted)}\nnext:\n  edit patches/series")
    return Series(folder, tuple(patches))


def _bad_line(number: int, line: str, problem: str) -> PatchError:
    return PatchError(f"series, line {number}: {line!r}: {problem}\nnext:\n  edit patches/series")


def write_series(folder: Path, patches: list[tuple[str, str]]) -> None:
    """Write ``series`` from (name, marker) pairs."""
    lines = "".join(f"{name} {marker}\n" for name, marker in patches)
    (folder / "series").write_text(SERIES_HEADER + lines, encoding="utf-8")
