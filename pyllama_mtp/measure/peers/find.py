"""Finds the other programs, and asks for their versions and devices."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyllama_mtp.errors import UsageError
from pyllama_mtp.measure.header import Build
from pyllama_mtp.measure.peers import PEERS, PeerError
from pyllama_mtp.measure.peers.process import Program

#: Upstream's programs.
PROGRAMS = ("llama-bench", "llama-server")
#: The environment variable with a folder of programs.
VARIABLE = "PYLLAMA_MTP_PEERS"
#: The environment variable with the Python that imports llama-cpp-python.
PYTHON_VARIABLE = "PYLLAMA_MTP_PEER_PYTHON"
#: The build folder of ``bench/peers.py`` in the checkout that this package is imported from.
BUILD_FOLDER = Path(__file__).resolve().parents[3] / "build" / "peers"
_ANSWER_S = 60.0
_WORKER = Path(__file__).resolve().with_name("llama_cpp_worker.py")


@dataclass(frozen=True)
class Peers:
    """A build of upstream's programs.

    Attributes:
        programs: paths of the programs that are built, by name.
        info: upstream_commit, series, compiler, build_type, cpu_features, ggml (options), defines,
            recipe (see ``bench/peers.py``).
    """

    folder: Path
    programs: dict[str, Path]
    info: dict[str, Any]

    @property
    def missing(self) -> list[str]:
        """Programs that are not built."""
        return [name for name in PROGRAMS if name not in self.programs]

    def program(self, name: str) -> Path:
        """The path of a program. Raises PeerError when it is not built."""
        if name not in self.programs:
            raise PeerError(
                f"{name} is not built in {self.folder}: run `python bench/peers.py`; "
                f"if it fails, the compiler's output is in {self.folder / 'build.log'}"
            )
        return self.programs[name]


def built(folder: Path | None = None) -> Peers:
    """The build of ``bench/peers.py`` in `folder`, complete or not; None: BUILD_FOLDER."""
    folder = folder or BUILD_FOLDER
    there = {name: folder / "bin" / name for name in PROGRAMS}
    programs = {name: path for name, path in there.items() if os.access(path, os.X_OK)}
    try:
        info = json.loads((folder / "peers.json").read_text())
        info |= json.loads((folder / "request.json").read_text())
    except (OSError, ValueError):
        programs, info = {}, {}  # half configured: nothing is known about the programs there
    return Peers(folder, programs, info)


@dataclass(frozen=True)
class Installed:
    """A program that is there and runs; `command` starts it.

    The variant of its build is its own version; "upstream" for a build of ``bench/peers.py``.
    """

    command: tuple[str, ...]
    build: Build


def check_folder(folder: str | None) -> None:
    """Refuse a --peer-dir that is no folder. Raises UsageError."""
    if folder is not None and not Path(folder).is_dir():
        raise UsageError(f"--peer-dir {folder}: there is no such folder")


def check_python(python: str | None) -> None:
    """Refuse a --peer-python that is no program. Raises UsageError."""
    if python is not None and shutil.which(python) is None:
        raise UsageError(
            f"--peer-python {python}: there is no such program; give the Python of the environment "
            "that llama-cpp-python is installed in, as in venv/bin/python"
        )


def find(
    name: str, folder: str | None = None, python: str | None = None, *, gpu: bool = True
) -> Installed:
    """Find a program of `PEERS`, and start it once to see that it runs.

    Upstream's programs are looked for in `folder`, in the folder of the environment variable
    PYLLAMA_MTP_PEERS, in the build folder of ``bench/peers.py``, and on PATH. llama-cpp-python is
    imported by `python`, or the Python of the environment variable PYLLAMA_MTP_PEER_PYTHON, or this
    one; LLAMA_CPP_LIB_PATH chooses the libllama that it loads.

    Args:
        gpu: whether the program may use a GPU.

    Raises:
        PeerError: the program is not installed, or does not run; the message says what to do.
    """
    if name == "llama-cpp-python":
        return _find_llama_cpp_python(name, python or os.environ.get(PYTHON_VARIABLE), gpu)
    path = next(_candidates(name, folder), None)
    if path is None:
        raise PeerError(f"{name} is not installed: {PEERS[name].obtain}")
    version, commit = _version(name, path)
    series = ""
    if (build := built(path.parent.parent)).programs.get(name) == path:
        version, commit = "upstream", str(build.info.get("upstream_commit", commit))
        series = str(build.info.get("series", ""))
    devices = _devices(name, path) if gpu else []
    backend = "+".join(sorted({device.rstrip("0123456789") for device in devices})) or "CPU"
    return Installed((str(path),), Build(version, commit, series, backend, {}, name))


def _candidates(name: str, folder: str | None) -> Iterator[Path]:
    given = [Path(one) for one in (folder, os.environ.get(VARIABLE)) if one]
    for place in given:
        for path in (place / name, place / "bin" / name):
            if path.is_file() and os.access(path, os.X_OK):
                yield path.resolve()
    if name in (here := built()).programs:
        yield here.programs[name]
    if found := shutil.which(name):
        yield Path(found).resolve()


def _ask(name: str, *command: str) -> str:
    with Program(name, command) as program:
        return program.wait(_ANSWER_S) + program.stderr()


def _version(name: str, path: Path) -> tuple[str, str]:
    """Version and commit, from ``version: 0.6.0-dev (build 11549, commit 0c1e570)``, or from
    ``version: 6789 (0c1e570)`` of older ones.
    """
    said = _ask(name, str(path), "--version")
    found = re.search(r"version: (\S+)(?: \((?:build \d+, commit )?(\w+)\))?", said)
    if not found:
        raise PeerError(f"{path} does not say its version as {name} does: {said.strip()[:200]!r}")
    return found[1], found[2] or ""


def _devices(name: str, path: Path) -> list[str]:
    """The name in each line like ``  CUDA0: NVIDIA H100 (80000 MiB, 79000 MiB free)``."""
    found = re.findall(r"^  (\w+): ", _ask(name, str(path), "--list-devices"), re.MULTILINE)
    return [device for device in found if not device.startswith(("CPU", "BLAS"))]


def _find_llama_cpp_python(name: str, python: str | None, gpu: bool) -> Installed:
    command = (python or sys.executable, str(_WORKER))
    try:
        with Program(name, [*command, "--probe"]) as program:
            said = json.loads(program.wait(_ANSWER_S))
        missing, version, has_gpu = said["missing"], str(said["version"]), bool(said["gpu"])
        stamp = said["stamp"]  # of a libllama that this package has built; else there is none
        commit, series = str(stamp.get("upstream_commit", "")), str(stamp.get("series", ""))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PeerError(f"{name} answers nothing that can be read ({error!r})") from None
    if missing:
        where = f" for {python}" if python else ""
        raise PeerError(f"{name} is not installed{where}: {PEERS[name].obtain}")
    backend = "GPU" if gpu and has_gpu else "CPU"
    return Installed(command, Build(version, commit, series, backend, {}, name))
