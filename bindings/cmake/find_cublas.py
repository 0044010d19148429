"""Find cuBLAS of the nvidia-cublas package, and CCCL of the nvidia-cuda-cccl package.

``find_cublas.py DEST`` lays cuBLAS out under DEST as a linker expects it, and prints DEST: the
package ships ``libcublas.so.13`` without the ``libcublas.so`` link that ``-lcublas`` looks for.
Exit code 1 when it is not installed. ``find_cublas.py`` prints the folder of CCCL's headers, if
they are new enough.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import sysconfig
from pathlib import Path

#: The first release with DeviceTopK, as CCCL_VERSION counts.
CCCL = 3_002_000


def installed(pattern: str) -> Path | None:
    """A file of NVIDIA's packages, here or where pip makes the environment of a build, or None."""
    spec = importlib.util.find_spec("nvidia")
    outside = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    for base in (*((spec.submodule_search_locations or []) if spec else []), outside):
        for path in Path(base).glob(pattern):
            return path
    return None


def lay_out(dest: Path) -> int:
    """Link cuBLAS under `dest`; the exit code."""
    header = installed("*/include/cublas_v2.h")
    if header is None:
        return 1
    root = header.parent.parent
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


def main() -> int:
    """See the module docstring."""
    if len(sys.argv) > 1:
        return lay_out(Path(sys.argv[1]))
    header = installed("*/include/cccl/cuda/std/__cccl/version.h")
    found = re.search(r"define CCCL_VERSION (\d+)", header.read_text()) if header else None
    if header and found and int(found[1]) >= CCCL:
        print(header.parents[3])
    return 0


if __name__ == "__main__":
    sys.exit(main())
