#!/usr/bin/env python3
"""Build upstream's own llama-bench and llama-server, to measure this project against them.

    python bench/peers.py                        # builds into build/peers, or is up to date
    python bench/peers.py --define GGML_CUDA=ON
    python bench/peers.py --check                # only reports

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
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchkit import ROOT

from pyllama_mtp.llama import native
from pyllama_mtp.measure.peers import BUILD_FOLDER, PROGRAMS, PeerError

sys.path.append(str(ROOT / "patches"))

from pq.series import PatchError, read_series

SOURCE = ROOT / "bench" / "cmake"


def missing(folder: Path) -> list[str]:
    """Programs that are not built."""
    return [name for name in PROGRAMS if not os.access(folder / "bin" / name, os.X_OK)]


def description(folder: Path) -> dict[str, Any]:
    """Of a build: upstream_commit, series, compiler, build_type, cpu_features, ggml (options),
    defines, recipe. {}: half configured, nothing is known about the programs there."""
    try:
        info: dict[str, Any] = json.loads((folder / "peers.json").read_text())
        return info | json.loads((folder / "request.json").read_text())
    except (OSError, ValueError):
        return {}


def request(defines: Sequence[str]) -> dict[str, Any]:
    """What a build of this checkout has: the defines, the patches that the upstream variant gets,
    and a hash of the pin and of the CMake files that decide how the programs are built."""
    files = [SOURCE / "CMakeLists.txt", *sorted((ROOT / "bindings" / "cmake").glob("*.cmake"))]
    files.append(ROOT / "vendor" / "llama-cpp.pin")
    recipe = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    series = read_series().stamp("upstream")
    return {"defines": list(defines), "recipe": recipe, "series": series}


def is_current(folder: Path, defines: Sequence[str]) -> bool:
    """Whether both programs are there, built from this checkout with these defines."""
    return not missing(folder) and request(defines).items() <= description(folder).items()


def build(folder: Path, defines: Sequence[str] = (), archive: Path | None = None) -> None:
    """Build what is missing or out of date; a current build is taken as it is. A program that does
    not compile is missing then.

    Args:
        defines: CMake definitions, e.g. "GGML_LLAMAFILE=ON".
        archive: source archive of the pin, for a machine without network.

    Raises:
        PeerError: CMake is missing, or configuring failed.
    """
    if is_current(folder, defines):
        return
    beside = Path(sys.executable).parent  # of an environment that is not activated
    cmake = shutil.which("cmake", path=f"{beside}{os.pathsep}{os.environ.get('PATH', '')}")
    if not cmake:
        raise PeerError("cmake is not on PATH; `pip install cmake ninja` provides it")
    (folder / "request.json").unlink(missing_ok=True)  # a build under way has no description
    # Fresh: options remembered from an earlier run would outlive a changed recipe.
    command = [cmake, "--fresh", "-S", str(SOURCE), "-B", str(folder)]
    command += ["-G", "Ninja" if shutil.which("ninja") else "Unix Makefiles"]
    command += [f"-DPython_EXECUTABLE={sys.executable}", *(f"-D{define}" for define in defines)]
    command += [f"-DPYLLAMA_SDIST={archive.resolve()}"] if archive else []
    print("configuring upstream's programs ...", file=sys.stderr, flush=True)
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise PeerError("configuring failed:\n" + done.stdout.strip()[-3000:])
    for program in PROGRAMS:
        command = [cmake, "--build", str(folder), "--target", program, "-j", str(os.cpu_count())]
        if subprocess.run(command, stdout=sys.stderr).returncode:
            (folder / "bin" / program).unlink(missing_ok=True)  # an older one would mislead
    (folder / "request.json").write_text(json.dumps(request(defines)))


def report(folder: Path, ours: dict[str, Any]) -> str:
    """What is built and how, and where it differs from our library, whose stamp is `ours`."""
    info = description(folder)
    lines = [f"not built: {', '.join(missing(folder)) or 'none'}", json.dumps(info, indent=1)]
    for key in ("upstream_commit", "cpu_features", "compiler") if info else ():
        if info.get(key) != ours.get(key):
            lines.append(f"our library has another {key}: {ours.get(key)}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="Build upstream's llama-bench and llama-server.")
    what = "for CMake; repeatable"
    parser.add_argument("--define", action="append", default=[], metavar="NAME=VALUE", help=what)
    parser.add_argument("--archive", type=Path, metavar="FILE", help="source archive of the pin")
    parser.add_argument("--check", action="store_true", help="only report what is built")
    args = parser.parse_args(argv)
    try:
        if not args.check:
            build(BUILD_FOLDER, args.define, args.archive)
    except (PeerError, PatchError) as error:
        print(f"peers: {error}", file=sys.stderr)
        return 1
    print(report(BUILD_FOLDER, native.load().stamp))
    return int(bool(missing(BUILD_FOLDER)))


if __name__ == "__main__":
    raise SystemExit(main())
