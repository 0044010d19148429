"""Where a variant's libraries lie, and whether they belong to this package; loads nothing."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from pathlib import Path
from typing import Any

from ..errors import LibraryError

#: Names a folder with a variant's libraries, or a variant; the default is "patched".
ENVIRONMENT_VARIABLE = "PYLLAMA_MTP_LIB"
VARIANTS = ("patched", "upstream")
SHIM = "libpyllama-mtp.so"
STAMP = re.compile(rb'\{"pyllama_stamp": 1[^{}]*\}')


def _package_folders() -> list[Path]:
    """Folders that may hold ``lib/`` and ``build_info.json``: the extension's, the package's."""
    spec = importlib.util.find_spec("pyllama_mtp._native")
    beside = [Path(spec.origin).parent] if spec and spec.origin else []
    return list(dict.fromkeys([*beside, Path(__file__).resolve().parents[1]]))


def _candidates(choice: str | os.PathLike[str]) -> list[Path]:
    if choice in VARIANTS:
        return [folder / "lib" / choice for folder in _package_folders()]
    return [Path(choice).expanduser().resolve()]


def find_libraries() -> list[tuple[str, Path, str]]:
    """The variants' folders that would be tried: (label, folder, "ok" or the missing file)."""
    rows = []
    chosen = os.environ.get(ENVIRONMENT_VARIABLE)
    for label in [*VARIANTS, *([chosen] if chosen and chosen not in VARIANTS else [])]:
        for folder in _candidates(label):
            status = "ok" if (folder / SHIM).is_file() else f"no {SHIM} there"
            rows.append((label, folder, status))
    return rows


def expected_stamp() -> dict[str, Any]:
    """The build of this package: upstream_commit, and the hash of each variant's patch series."""
    for folder in _package_folders():
        path = folder / "build_info.json"
        if path.is_file():
            return dict(json.loads(path.read_text()))
    raise LibraryError(
        "this copy of pyllama_mtp was never built: no build_info.json in "
        + ", ".join(str(folder) for folder in _package_folders())
        + ". Run `pip install .` in the project folder; if that is done, run from another folder, "
        "so that the installed package is imported and not the sources."
    )


def read_stamp(folder: Path) -> dict[str, Any]:
    """The stamp in the folder's libllama, read from the file's bytes. Raises LibraryError: no
    libllama there, or one without a stamp (not built by this package)."""
    # libllama.so.0 carries the stamp; libllama.so beside it stands in for a link (shim/dropin.cpp).
    libraries = sorted(folder.glob("libllama.so*"), reverse=True)
    if not libraries:
        raise LibraryError(f"{folder} holds {SHIM} but no libllama.so*: an incomplete build.")
    stamp = STAMP.search(libraries[0].read_bytes())
    if not stamp:
        raise LibraryError(
            f"{libraries[0]} carries no stamp: it was not built by this package. Build one with "
            f"`pip install --force-reinstall .`, or unset {ENVIRONMENT_VARIABLE}."
        )
    return dict(json.loads(stamp[0]))


def check_stamp(stamp: dict[str, Any], expected: dict[str, Any], folder: Path) -> None:
    """Refuse libraries built from another upstream commit or another patch series. Raises
    LibraryError: says which of the two differs, and what to do."""
    variant = stamp.get("variant")
    pairs = [
        ("upstream commit", stamp.get("upstream_commit"), expected["upstream_commit"]),
        ("patch series", stamp.get("series"), expected["series"].get(variant)),
    ]
    for what, built, wanted in pairs:
        if built != wanted:
            raise LibraryError(
                f"the libraries in {folder} (variant {variant!r}) do not belong to this package: "
                f"{what} {built}, but the bindings were built for {wanted}. Build both together: "
                f"`pip install --force-reinstall .`, and unset {ENVIRONMENT_VARIABLE} if it points "
                "to an older build."
            )


def cpu_flags() -> frozenset[str] | None:
    """The CPU's feature flags (/proc/cpuinfo), or None where the system does not list them."""
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return None
    line = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    return frozenset(line[1].split()) if line else None


def missing_cpu_features(stamp: dict[str, Any]) -> list[str]:
    """CPU features that the backend needs and this machine lacks, by ``/proc/cpuinfo``."""
    needed = set(str(stamp.get("cpu_features", "")).split())
    flags = cpu_flags()
    return [] if flags is None else sorted(needed - flags)


def resolve(choice: str | os.PathLike[str]) -> Path:
    """The folder of a variant, by the variant's name or the folder's. Raises LibraryError."""
    tried = _candidates(choice)
    for folder in tried:
        if (folder / SHIM).is_file():
            return folder
    lines = "\n".join(f"  {folder / SHIM}" for folder in tried)
    raise LibraryError(
        f"no native library for {choice!r}. Tried:\n{lines}\n"
        "Build the package with `pip install .`, or point "
        f"{ENVIRONMENT_VARIABLE} (or --lib) to a folder that holds {SHIM} and libllama."
    )


def locate(library: str | os.PathLike[str] | None = None) -> tuple[Path, dict[str, Any]]:
    """The folder of a variant, and its stamp. The argument is that of :func:`.native.load`. Raises
    LibraryError: nothing found (all paths tried are listed), stamp mismatch, or CPU features that
    this machine lacks."""
    expected = expected_stamp()
    folder = resolve(library or os.environ.get(ENVIRONMENT_VARIABLE) or "patched")
    stamp = read_stamp(folder)
    check_stamp(stamp, expected, folder)
    missing = missing_cpu_features(stamp)
    if missing:
        raise LibraryError(
            f"the libraries in {folder} were built for CPU features that this machine lacks: "
            f"{', '.join(missing)}. Build them here (`pip install --force-reinstall .`), or build "
            "a wheel for every x86-64 CPU with `-C cmake.define.PYLLAMA_CPU_ALL=ON`."
        )
    return folder, stamp
