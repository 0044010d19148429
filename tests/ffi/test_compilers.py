"""The CPU kernels compiled by clang, with what it may assume about aliasing, pass the same tests.

pytest -m compiler_build tests/ffi     # 4 minutes of a core; the second time 2
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pyllama_mtp.llama import native

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CLANG = shutil.which("clang"), shutil.which("clang++")
TESTS = ("test_products.py", "test_attention.py", "test_large_batch_ops.py", "test_state_copies.py")


@pytest.mark.compiler_build
@pytest.mark.skipif(None in CLANG, reason="clang is not here: Debian's package `clang` has it")
def test_clang(tmp_path: Path) -> None:
    """Two compilers seldom make the same of what the language leaves undefined."""
    build = ROOT / "build" / "clang"
    configure = ["cmake", "-G", "Ninja", "-S", str(ROOT / "bindings"), "-B", str(build)]
    configure += [f"-DCMAKE_C_COMPILER={CLANG[0]}", f"-DCMAKE_CXX_COMPILER={CLANG[1]}"]
    configure += ["-DGGML_OPENMP=OFF", "-DCMAKE_CXX_FLAGS=-fstrict-aliasing"]
    configure += [f"-DPython_EXECUTABLE={sys.executable}"]
    for command in (configure, ["ninja", "-C", str(build), "ggml-cpu"]):
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    package = native.load().folder.parents[1]
    shutil.copytree(package, tmp_path / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    libraries = tmp_path / package.name / "lib"
    for path in libraries.glob("libggml-cpu*.so"):
        path.unlink()
    shutil.copy(build / "backends" / "libggml-cpu.so", libraries)
    shutil.copytree(ROOT / "tests", tmp_path / "tests")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--import-mode=importlib"]
    done = subprocess.run(
        [*command, *(f"tests/ffi/{name}" for name in TESTS)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:]
