"""Builds by other compilers, and one without OpenMP, have no warning about lines of ours, and pass
the same tests; where a failed assertion ends, on one thread and on several, among them.

pytest -m compiler_build tests/ffi     # 5 minutes of two cores for each; with ccache less

A compiler that is not here is skipped: Debian 12 has `clang`, Debian 13's `gcc` is gcc-14.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pyllama_mtp.llama import native

ROOT = Path(__file__).parents[2]
PRISTINE = ROOT / "vendor" / "llama.cpp"
#: What the language leaves undefined, two compilers seldom make the same of.
FLAGS = "-Wall -Wextra -fstrict-aliasing"
#: What the tests use, and the rest of our lines, but vision.cpp: among upstream's, it takes long.
TARGETS = ("ggml-cpu", "ggml-rpc", "shim-patched", "dropin-patched")
TARGETS += ("llama/CMakeFiles/shim-upstream.dir/__/shim/mtp_absent.cpp.o",)


def build(folder: Path, cc: str, cxx: str, openmp: str) -> str:
    """What the compiler says."""
    configure = ["cmake", "-G", "Ninja", "-S", str(ROOT / "bindings"), "-B", str(folder)]
    configure += [f"-DCMAKE_C_COMPILER={cc}", f"-DCMAKE_CXX_COMPILER={cxx}"]
    configure += [f"-DCMAKE_C_FLAGS={FLAGS}", f"-DCMAKE_CXX_FLAGS={FLAGS}"]
    configure += [f"-DGGML_OPENMP={openmp}", f"-DPython_EXECUTABLE={sys.executable}"]
    ninja = ["ninja", "-C", str(folder)]
    output = ""
    for command in (configure, [*ninja, "-t", "clean"], [*ninja, *TARGETS]):
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert done.returncode == 0, done.stdout[-4000:]
        output = done.stdout
    return output


def about_our_lines(output: str, folder: Path) -> set[str]:
    """Warnings about files of ours, and about lines that upstream's file has not."""
    trees = [folder / "tree" / variant for variant in native.VARIANTS]
    ours = set()
    plain = re.sub(r"\x1b\[[\d;]*[mK]", "", output)
    for file, line, text in re.findall(r"^(\S+?):(\d+):\d+: warning: (.*)$", plain, re.M):
        path = (folder / file).resolve()
        inside = [path.relative_to(tree) for tree in trees if path.is_relative_to(tree)]
        if inside:
            original = PRISTINE / inside[0]
            theirs = original.read_text().splitlines() if original.exists() else []
            mine = path.read_text().splitlines()[int(line) - 1] not in theirs
        else:
            mine = path.is_relative_to(ROOT / "bindings")
        if mine:
            ours.add(f"{inside[0] if inside else path}:{line}: {text}")
    return ours


@pytest.mark.compiler_build
@pytest.mark.parametrize(
    ("cc", "cxx", "openmp"),
    [("clang", "clang++", "OFF"), ("gcc-14", "g++-14", "ON"), ("cc", "c++", "OFF")],
)
def test_compiler(cc: str, cxx: str, openmp: str, tmp_path: Path) -> None:
    if not shutil.which(cxx):
        pytest.skip(f"{cxx} is not here")
    folder = ROOT / "build" / f"{cc}-openmp-{openmp}"
    warnings = about_our_lines(build(folder, cc, cxx, openmp), folder)
    assert not warnings, "\n".join(sorted(warnings))
    package = native.load().folder.parents[1]
    shutil.copytree(package, tmp_path / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    libraries = tmp_path / package.name / "lib"
    for path in libraries.glob("libggml-cpu*.so"):
        path.unlink()
    for path in (folder / "backends").glob("libggml-*.so"):
        shutil.copy(path, libraries)
    for path in (folder / "lib" / "patched").glob("lib*.so*"):
        shutil.copy(path, libraries / "patched")
    shutil.copytree(ROOT / "tests", tmp_path / "tests")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--import-mode=importlib"]
    without = ("--deselect", f"tests/ffi/{Path(__file__).name}")
    done = subprocess.run(
        [*command, "-q", "tests/ffi", "tests/faults/test_calls.py", *without],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    print(done.stdout[-200:])
    assert done.returncode == 0, done.stdout[-4000:]
