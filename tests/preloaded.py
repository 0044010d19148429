"""C or C++ beside a test, compiled and loaded before the libraries of the package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from pyllama_mtp.llama import native

from .processes import environment

INCLUDE = Path(__file__).parents[1] / "vendor" / "llama.cpp" / "ggml" / "include"


def compile_library(source: Path, folder: Path) -> Path:
    """The shared library of a C or C++ file."""
    variable, *names = ("CC", "cc", "gcc") if source.suffix == ".c" else ("CXX", "c++", "g++")
    compiler = os.environ.get(variable) or next(filter(None, map(shutil.which, names)), None)
    assert compiler and INCLUDE.is_dir(), "what the package was built with"
    path = folder / f"{source.stem}.so"
    command = [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Werror", source, "-I", INCLUDE]
    subprocess.run([*command, "-o", path, "-ldl"], check=True)
    return path


def ggml_base() -> Path:
    """libggml-base of the package that is tested."""
    folder = native.load().folder
    return next(path for name in (folder, folder.parent) for path in name.glob("libggml-base.so*"))


def run_preloaded(
    library: Path, script: Path, *arguments: object, **variables: str
) -> subprocess.CompletedProcess[str]:
    """The end of a Python script that began with the library loaded."""
    return subprocess.run(
        [sys.executable, script, *map(str, arguments)],
        # ggml-base too: what is loaded later finds the functions of both. A backtrace would start
        # a debugger.
        env=environment(LD_PRELOAD=f"{library} {ggml_base()}", GGML_NO_BACKTRACE="1", **variables),
        capture_output=True,
        text=True,
        timeout=600,  # a device that compiles its kernels for the first time takes minutes
    )
