"""Lay out cuBLAS of the nvidia-cublas package as a linker expects it, and print the folder.

The package ships ``libcublas.so.13`` without the ``libcublas.so`` link that ``-lcublas`` looks for.
Usage: ``find_cublas.py DEST``; exit code 1 when the package is not installed.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path


def package_root() -> Path | None:
    """The folder of the package that holds ``include/`` and ``lib/``, or None."""
    spec = importlib.util.find_spec("nvidia")
    for base in (spec.submodule_search_locations or []) if spec else []:
        for header in Path(base).glob("*/include/cublas_v2.h"):
            return header.parent.parent
    return None


def main() -> int:
    """Link the package's folders under DEST; see the module docstring."""
    root, dest = package_root(), Path(sys.argv[1])
    if root is None:
        return 1
    (dest / "lib").mkdir(parents=True, exist_ok=True)
    include = dest / "include"
    if not include.exists():
        include.symlink_to(root / "include")
    for library in (root / "lib").glob("lib*.so.*"):
        for name in (library.name, library.name.split(".so")[0] + ".so"):
            link = dest / "lib" / name
            if not link.exists():
                link.symlink_to(library)
    print(dest)
    return 0


if __name__ == "__main__":
    sys.exit(main())
