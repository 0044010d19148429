"""A second ``pip install .`` compiles what has changed, and nothing else.

The project is configured for real; a compiler that only leaves files takes the place of the real
one, so that all of a build takes a second, and ninja says what it compiles when it runs again.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import fetch
import pytest

ROOT = Path(__file__).resolve().parents[2]
#: Leaves an object, and the note that it was made from all headers; or a library.
COMPILER = """#!/bin/sh
while [ $# -gt 0 ]; do
    case $1 in -o) out=$2 ;; -MF) note=$2 ;; esac
    shift
done
: > "$out"
[ -z "$note" ] || { printf '%s:' "$out" && cat "$0.headers"; } > "$note"
"""
PLACES = 'message("${CMAKE_COMMAND}\\n${CMAKE_ROOT}")'
CMAKE, NINJA = shutil.which("cmake"), shutil.which("ninja")


def said(*command: object) -> str:
    """What a command prints."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


def cmake_elsewhere(folder: Path) -> Path:
    """cmake under another path, as each environment that pip makes for a build has one."""
    (folder / "bin").mkdir()
    (folder / "places.cmake").write_text(PLACES)
    program, modules = map(Path, said(CMAKE, "-P", folder / "places.cmake").split())
    (folder / "share").symlink_to(modules.parent)
    return Path(shutil.copy(program, folder / "bin"))


@pytest.mark.long
@pytest.mark.skipif(not CMAKE or not NINJA, reason="cmake and ninja are not on PATH")
def test_a_second_install_compiles_what_has_changed(tmp_path: Path) -> None:
    if tuple(map(int, re.findall(r"\d+", said(CMAKE, "--version"))[:2])) < (3, 26):
        pytest.skip("cmake is older than 3.26")
    fetch.ensure_tree()
    project, build, compiler = tmp_path / "project", tmp_path / "build", tmp_path / "compiler"
    for name in ("bindings", "patches"):
        shutil.copytree(ROOT / name, project / name)
    shutil.copytree(ROOT / "vendor", project / "vendor", ignore=lambda *_: ["llama.cpp"])
    (project / "vendor" / "llama.cpp").symlink_to(ROOT / "vendor" / "llama.cpp")
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    configure = ["-G", "Ninja", "-S", project / "bindings", "-B", build, "-DGGML_CUDA=OFF"]
    configure += [f"-DPython_EXECUTABLE={sys.executable}"]
    configure += [f"-DCMAKE_{kind}_LAUNCHER={compiler}"
                  for kind in ("C_COMPILER", "CXX_COMPILER", "C_LINKER", "CXX_LINKER")]  # fmt: skip
    said(CMAKE, *configure)
    headers = " ".join(str(path) for path in build.rglob("*.h*"))
    Path(f"{compiler}.headers").write_text(f" {headers}\n")
    assert said(NINJA, "-C", build, "-v").count(f"-c {project}") > 15  # ours

    kernel = project / "bindings" / "ggml-cpu" / "small-batch.cpp"
    kernel.write_text(kernel.read_text() + "// changed\n")
    # As scikit-build-core does where it is in another environment than before:
    (build / "CMakeCache.txt").unlink()
    shutil.rmtree(build / "CMakeFiles")
    said(cmake_elsewhere(tmp_path), *configure)
    compiled = re.findall(r"-c \S*/(\S+)$", said(NINJA, "-C", build, "-v"), re.M)
    assert sorted(compiled) == [kernel.name, "stamp-patched.c"]
