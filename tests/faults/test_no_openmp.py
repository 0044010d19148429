"""A build without OpenMP, whose graphs are computed by ggml's own threads.

    pytest -m no_openmp_build tests/faults     # 2 minutes of a core; the second time seconds

Only the CPU backend and the shim are built, and put beside the other libraries of the package.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pyllama_mtp.llama import native

from ..preloaded import compile_library, run_preloaded

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SHIM_OBJECT = "llama/CMakeFiles/shim-patched.dir/__/shim/shim.cpp.o"


def build(folder: Path) -> None:
    configure = ["cmake", "-G", "Ninja", "-S", str(ROOT / "bindings"), "-B", str(folder)]
    configure += ["-DGGML_OPENMP=OFF", f"-DPython_EXECUTABLE={sys.executable}"]
    for command in (configure, ["ninja", "-C", str(folder), "ggml-cpu", SHIM_OBJECT]):
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to import from: the package with these two libraries in place of its own."""
    build(folder := ROOT / "build" / "no-openmp")
    installed = native.load().folder.parents[1]
    root = tmp_path_factory.mktemp("no-openmp")
    shutil.copytree(installed, root / installed.name, ignore=shutil.ignore_patterns("__pycache__"))
    libraries = root / installed.name / "lib"
    for path in libraries.glob("libggml-cpu*.so"):
        path.unlink()
    shutil.copy(folder / "backends" / "libggml-cpu.so", libraries)
    link = [os.environ.get("CXX", "c++"), "-shared", folder / SHIM_OBJECT]
    link += ["-o", libraries / "patched" / "libpyllama-mtp.so", "-Wl,-soname,libpyllama-mtp.so"]
    link += ["-L", libraries / "patched", "-L", libraries, "-Wl,-rpath,$ORIGIN:$ORIGIN/.."]
    needed = ("libllama.so.0", "libggml.so.0", "libggml-base.so.0")
    subprocess.run([*link, *(f"-l:{name}" for name in needed)], check=True)
    return root


@pytest.mark.no_openmp_build
def test_an_assertion_on_the_main_thread(
    root: Path, demo_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Of one thread, it is an error; of several, the process ends: an exception would leave the
    others at a barrier for ever."""
    library = compile_library(HERE / "failing.cpp", tmp_path_factory.mktemp("failing"))
    script, package = HERE / "fail_calls.py", {"PYTHONPATH": str(root)}
    alone = run_preloaded(library, script, demo_file, 1, **package)
    assert alone.stdout.splitlines() == ["computing: FatalDecodeError", "end"], alone.stderr
    several = run_preloaded(library, script, demo_file, 2, **package)
    assert several.returncode == -signal.SIGABRT and not several.stdout, several.stdout
    assert "an assertion on the main thread" in several.stderr
