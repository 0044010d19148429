"""What a machine without network needs, laid out in one folder: upstream's tree and wheels.

    FOLDER/llama.cpp.tar.xz      the pinned tree as vendor/fetch.py lays it out, 4 MB
    FOLDER/wheels/*.whl          what pip needs to build, run and test
    FOLDER/project.tar.xz        this checkout's tracked files, when asked for

cuBLAS is not in it (400 MB): it comes with the CUDA toolkit or the nvidia-cublas package there.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchkit.paths import ROOT

from gpukit.state import RunbookError

LIMIT = 64 * 2**20
TREE, PROJECT = "llama.cpp.tar.xz", "project.tar.xz"
PRISTINE = ROOT / "vendor" / "llama.cpp"
#: What building, running and testing needs; pip finds what these need.
REQUIREMENTS = (
    *("scikit-build-core>=1.0", "cffi>=1.17", "cmake>=3.26", "ninja>=1.10"),
    *("numpy>=1.24", "gguf>=0.17", "rich>=13", "jinja2>=3.1"),
    *("pytest>=8", "jsonschema>=4.18"),
)
#: Refuses links and paths that leave the folder, where Python knows how (3.10.12, 3.11.4, 3.12).
SAFELY: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
PLATFORMS = (
    *(f"manylinux_2_{n}_x86_64" for n in (34, 28, 27, 24, 17)),
    *("manylinux2014_x86_64", "manylinux1_x86_64"),
)


def lay_out(
    folder: Path, python: str, leave_out: Sequence[str], project: bool, fetch: bool = True
) -> list[str]:
    """Make the bundle and return the lines that say what is in it.

    Args:
        python: the other machine's version, such as "3.12"; x86-64 Linux with glibc.
        leave_out: packages that the other machine has, by name.
        fetch: False: no wheels (a dry run).

    Raises:
        RunbookError: pip or the pinned tree failed, or the bundle is larger than LIMIT.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pinned_tree()
    with tarfile.open(folder / TREE, "w:xz", preset=3) as tar:
        tar.add(PRISTINE, "llama.cpp")
    if project:
        _pack_project(folder / PROJECT)
    if fetch:
        _fetch_wheels(folder / "wheels", python, leave_out)
    return report(folder)


def pinned_tree() -> None:
    """Make sure that the pinned tree lies in vendor/."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "vendor" / "fetch.py")], capture_output=True, text=True
    )
    if done.returncode:
        raise RunbookError(done.stderr.strip())


def _pack_project(path: Path) -> None:
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True)
    if listed.returncode:
        raise RunbookError("--project needs git and a checkout; copy this folder by hand instead")
    with tarfile.open(path, "w:xz", preset=3) as tar:
        for name in filter(None, listed.stdout.decode().split("\0")):
            if (ROOT / name).exists():
                tar.add(ROOT / name, name)


def _fetch_wheels(folder: Path, python: str, leave_out: Sequence[str]) -> None:
    """Download for the other machine's Python, then remove what it has."""
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "-q"]
    command += ["--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    for platform in PLATFORMS:
        command += ["--platform", platform]
    done = subprocess.run(
        [*command, "-d", str(folder), *REQUIREMENTS], capture_output=True, text=True
    )
    if done.returncode:
        raise RunbookError(f"pip could not fetch the wheels: {done.stderr.strip()[-1000:]}")
    dropped = {name.lower().replace("-", "_") for name in leave_out}
    for wheel in folder.glob("*.whl"):
        if wheel.name.split("-")[0].lower() in dropped:
            wheel.unlink()


def report(folder: Path) -> list[str]:
    """Sizes of what is in the bundle. Raises RunbookError above LIMIT."""
    files = sorted((f for f in folder.rglob("*") if f.is_file()), key=lambda f: -f.stat().st_size)
    total = sum(file.stat().st_size for file in files)
    lines = [f"{file.stat().st_size / 2**20:7.1f} MiB  {file.name}" for file in files]
    lines.append(f"{total / 2**20:7.1f} MiB  in all, of {LIMIT // 2**20}")
    if total > LIMIT:
        raise RunbookError(
            "\n".join(lines) + "\nthe bundle is too large: leave out what the other machine has, "
            "for instance --leave-out cmake,numpy"
        )
    return lines


def unpack_tree(folder: Path) -> bool:
    """Lay the tree out in vendor/ unless a complete one is there; False without an archive.

    vendor/fetch.py, which the build calls, recognises it by its stamp, file count and size.
    """
    archive = folder / TREE
    if is_complete() or not archive.exists():
        return is_complete()
    temporary = PRISTINE.with_name(".llama.cpp.unpacking")
    shutil.rmtree(temporary, ignore_errors=True)
    with tarfile.open(archive, "r:xz") as tar:
        tar.extractall(temporary, **SAFELY)
    shutil.rmtree(PRISTINE, ignore_errors=True)
    (temporary / "llama.cpp").rename(PRISTINE)
    temporary.rmdir()
    return is_complete()


def is_complete() -> bool:
    """Whether vendor/ holds the pinned tree."""
    sys.path.insert(0, str(ROOT / "vendor"))
    try:
        from sdist import read_pin
        from tree import read_tree
    finally:
        sys.path.pop(0)
    return read_tree(PRISTINE, read_pin(ROOT / "vendor" / "llama-cpp.pin")) is not None
