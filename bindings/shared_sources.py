"""Print the sources of libllama that compile to the same object in both variants.

A source can be shared when its text is the same in both trees and so is every header it includes,
directly or through another header. Includes are resolved by name within the tree (``src/``,
``src/models/``, ``include/``); a header that is not found there (the standard library, ggml) is the
same for both by construction.

Usage: ``shared_sources.py TREE_A TREE_B``; prints paths relative to the tree, joined by ``;``.
"""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path

INCLUDE = re.compile(rb'^\s*#\s*include\s*[<"]([^">]+)[">]', re.MULTILINE)
SEARCH = ("src", "src/models", "include")


def shared_sources(tree_a: Path, tree_b: Path) -> list[str]:
    """Paths, relative to the trees, of the sources that both variants can share."""

    @cache
    def same_text(path: str) -> bool:
        other = tree_b / path
        return other.is_file() and (tree_a / path).read_bytes() == other.read_bytes()

    def reaches(path: str) -> set[str]:
        """`path` and all files of the tree that it includes, transitively."""
        seen, todo = set(), [path]
        while todo:
            current = todo.pop()
            if current in seen:
                continue
            seen.add(current)
            for name in INCLUDE.findall((tree_a / current).read_bytes()):
                todo += [
                    candidate
                    for folder in SEARCH
                    if (tree_a / (candidate := f"{folder}/{name.decode()}")).is_file()
                ]
        return seen

    sources = sorted((tree_a / "src").glob("*.cpp")) + sorted((tree_a / "src/models").glob("*.cpp"))
    names = [source.relative_to(tree_a).as_posix() for source in sources]
    return [name for name in names if all(same_text(path) for path in reaches(name))]


if __name__ == "__main__":
    print(";".join(shared_sources(Path(sys.argv[1]), Path(sys.argv[2]))))
