#!/usr/bin/env python3
"""Build upstream's own llama-bench and llama-server, to measure this project against them.

    python bench/peers.py                 # builds into build/peers, or says that it is up to date
    python bench/peers.py --check         # only reports

The sources are the pinned tree with the `upstream` patches (the AMX fix alone); compiler flags and
CPU features are chosen by the same CMake modules as for this project's libraries (bindings/cmake),
and ggml's options are upstream's defaults for its programs. Programs and backends (GGML_BACKEND_DL)
lie in one folder, where the programs look for them. The server is built without its web interface
and without TLS. Where this build and that of our libraries differ, the report says so.

Exit codes: 0 both programs are there, 1 one is missing, and the message says why.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchkit import ROOT

from pyllama_mtp.llama import native
from pyllama_mtp.measure.peers import BUILD_FOLDER, PROGRAMS, PeerError

sys.path.append(str(ROOT / "patches"))

from pq.series import PatchError, read_series

SOURCE = ROOT / "bench" / "cmake"
#: ggml options that decide the speed of the CPU backend, and how its description names them.
BACKEND_OPTIONS = {
    "GGML_LLAMAFILE": "LLAMAFILE",
    "GGML_OPENMP": "OPENMP",
    "GGML_CPU_REPACK": "REPACK",
}


@dataclass(frozen=True)
class Peers:
    """A build of upstream's programs.

    Attributes:
        programs: paths of the programs that are built, by name.
        info: upstream_commit, series, compiler, build_type, cpu_features, ggml (options), defines,
            recipe.
    """

    folder: Path
    programs: dict[str, Path]
    info: dict[str, Any]

    @property
    def missing(self) -> list[str]:
        """Programs that are not built."""
        return [name for name in PROGRAMS if name not in self.programs]


def built(folder: Path) -> Peers:
    """The build in `folder`, complete or not."""
    there = {name: folder / "bin" / name for name in PROGRAMS}
    programs = {name: path for name, path in there.items() if os.access(path, os.X_OK)}
    try:
        info = json.loads((folder / "peers.json").read_text())
        info |= json.loads((folder / "request.json").read_text())
    except (OSError, ValueError):
        programs, info = {}, {}  # half configured: nothing is known about the programs there
    return Peers(folder, programs, info)


def series_stamp() -> str:
    """Hash of the patches that the upstream variant of this checkout gets."""
    return read_series().stamp("upstream")


def recipe() -> str:
    """Hash of the CMake files that decide how the programs are built, and of the pin."""
    files = [SOURCE / "CMakeLists.txt", *sorted((ROOT / "bindings" / "cmake").glob("*.cmake"))]
    files.append(ROOT / "vendor" / "llama-cpp.pin")
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def is_current(peers: Peers, defines: Sequence[str]) -> bool:
    """Whether both programs are there, built from this checkout with these defines."""
    wanted = {"series": series_stamp(), "recipe": recipe(), "defines": list(defines)}
    return not peers.missing and all(peers.info.get(key) == wanted[key] for key in wanted)


def build(
    folder: Path = BUILD_FOLDER,
    jobs: int | None = None,
    defines: Sequence[str] = (),
    archive: Path | None = None,
) -> Peers:
    """Build what is missing or out of date in `folder`; a current build is taken as it is.

    Args:
        jobs: compiler processes at a time; default: the build tool's own.
        defines: CMake definitions, e.g. "GGML_LLAMAFILE=ON".
        archive: source archive of the pin, for a machine without network.

    Returns:
        The build; a program that did not compile is in `missing`.

    Raises:
        PeerError: CMake is missing, or configuring failed.
    """
    present = built(folder)
    if is_current(present, defines):
        return present
    request = {"defines": list(defines), "recipe": recipe()}
    (folder / "request.json").unlink(missing_ok=True)  # a build under way has no description
    _configure(folder, defines, archive)
    log = folder / "build.log"
    log.write_text("")
    for program in PROGRAMS:
        command = [_cmake(), "--build", str(folder), "--target", program]
        command += ["--parallel", str(jobs)] if jobs else []
        if not _run_logged(command, log):
            (folder / "bin" / program).unlink(missing_ok=True)  # an older one would mislead
    (folder / "request.json").write_text(json.dumps(request))
    return built(folder)


def _configure(folder: Path, defines: Sequence[str], archive: Path | None) -> None:
    # Fresh: options remembered from an earlier run would outlive a changed recipe.
    command = [_cmake(), "--fresh", "-S", str(SOURCE), "-B", str(folder)]
    command += ["-G", "Ninja" if shutil.which("ninja") else "Unix Makefiles"]
    command += [f"-DPython_EXECUTABLE={sys.executable}"]
    command += [f"-D{define}" for define in defines]
    command += [f"-DPYLLAMA_SDIST={archive.resolve()}"] if archive else []
    print("configuring upstream's programs ...", file=sys.stderr, flush=True)
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise PeerError("configuring failed:\n" + done.stdout.strip()[-3000:])


def _cmake() -> str:
    beside = Path(sys.executable).parent  # of an environment that is not activated
    found = shutil.which("cmake", path=f"{beside}{os.pathsep}{os.environ.get('PATH', '')}")
    if not found:
        raise PeerError("cmake is not on PATH; `pip install cmake ninja` provides it")
    return found


def _run_logged(command: list[str], log: Path) -> bool:
    """Run a build command, with its output in `log` and its steps on stderr; True: it succeeded."""
    with (
        log.open("a") as file,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            file.write(line)
            if line.startswith("["):  # [steps done/all], or a percentage; the rest is warnings
                print(line.rstrip()[:100], file=sys.stderr, flush=True)
    if process.returncode:
        print("\n".join(log.read_text().splitlines()[-30:]), file=sys.stderr)
    return process.returncode == 0


def parse_system_info(text: str) -> dict[str, str]:
    """llama.cpp's line about the CPU backend as {feature: value}; {} without the line."""
    line = re.search(r"CPU : (.*)", text)
    return dict(re.findall(r"(\w+) = (\S+)", line.group(1) if line else ""))


def differences(peers: Peers, stamp: dict[str, Any], system_info: str) -> list[str]:
    """What differs, and should not, between this build and that of our library.

    Args:
        stamp, system_info: our library's words about its build and backends.
    """
    notes = []
    for key in ("upstream_commit", "cpu_features", "compiler"):
        theirs, own = peers.info.get(key), stamp.get(key)
        if theirs != own:
            notes.append(f"the builds differ in {key}: upstream's {theirs!r}, ours {own!r}")
    backend = parse_system_info(system_info)
    for option, feature in BACKEND_OPTIONS.items():
        theirs, own = peers.info.get("ggml", {}).get(option), feature in backend
        if theirs != own:
            state = {True: "on", False: "off"}
            notes.append(
                f"the builds differ in {option}: {state.get(theirs)} in upstream's programs, "
                f"{state[own]} in our library"
            )
    return notes


def report(peers: Peers) -> str:
    """What is built and how, for the screen."""
    lines = [f"{name:13} {peers.programs.get(name, 'not built')}" for name in PROGRAMS]
    info = peers.info
    if info:
        options = [name for name, on in info["ggml"].items() if on]
        lines += [
            f"upstream      {info['upstream_commit'][:12]}, patches {info['series'][:12]}",
            f"compiler      {info['compiler']}, {info['build_type']}",
            f"CPU features  {info['cpu_features']}",
            f"ggml          {' '.join(options)}",
        ]
        if info["defines"]:
            lines.append(f"defines       {' '.join(info['defines'])}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="Build upstream's llama-bench and llama-server.")
    parser.add_argument("--folder", type=Path, default=BUILD_FOLDER, help="build folder")
    parser.add_argument("--jobs", type=int, metavar="N", help="compiler processes at a time")
    parser.add_argument(
        "--define", action="append", default=[], metavar="NAME=VALUE", help="for CMake; repeatable"
    )
    parser.add_argument("--archive", type=Path, metavar="FILE", help="source archive of the pin")
    parser.add_argument("--check", action="store_true", help="only report what is built")
    args = parser.parse_args(argv)
    try:
        if args.check:
            peers = built(args.folder)
        else:
            peers = build(args.folder.resolve(), args.jobs, args.define, args.archive)
    except (PeerError, PatchError) as error:
        print(f"peers: {error}", file=sys.stderr)
        return 1
    print(report(peers))
    library = native.load()
    for note in differences(peers, library.stamp, library.system_info()) if peers.info else ():
        print(note)
    return 1 if peers.missing else 0


if __name__ == "__main__":
    raise SystemExit(main())
