"""The CMake modules: what programs of upstream say of themselves, and that pip's cmake is not in
the commands."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import fetch
import pytest

ROOT = Path(__file__).resolve().parents[2]
CMAKE = shutil.which("cmake")


def value(folder: Path, module: str, name: str, *settings: str) -> str:
    """What a variable is after a module has been included by a project without languages."""
    (folder / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.20)\nproject(modules NONE)\n"
        f"include({ROOT}/bindings/cmake/{module}.cmake)\n"
        f'message(STATUS "found: ${{{name}}}")\n'
    )
    command = [str(CMAKE), "-S", str(folder), "-B", str(folder / "build"), *settings]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = re.search(r"^-- found: (.*)$", done.stdout, re.MULTILINE)
    assert found, done.stdout
    return found[1]


@pytest.mark.skipif(CMAKE is None, reason="cmake is not on PATH")
@pytest.mark.parametrize("system", ["WIN32", "APPLE"])
def test_other_systems_stop_at_once(tmp_path, system):
    command = [CMAKE, "-S", ROOT / "bindings", "-B", tmp_path, f"-DCMAKE_HOST_{system}=1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    said = " ".join(done.stderr.split())
    assert done.returncode == 1 and "in WSL2 (wsl --install). On macOS, use a Linux cont" in said
    assert "compiler" not in done.stdout


@pytest.mark.skipif(CMAKE is None, reason="cmake is not on PATH")
def test_upstreams_build_number(tmp_path):
    settings = (f"-DPYLLAMA_ROOT={ROOT}", f"-DPython_EXECUTABLE={sys.executable}")
    commit = fetch.ensure_tree().commit
    number = commit[1:] if commit.startswith("b") and len(commit) < 40 else "0"
    assert value(tmp_path, "UpstreamTrees", "PYLLAMA_UPSTREAM_BUILD", *settings) == number


@pytest.mark.skipif(CMAKE is None, reason="cmake is not on PATH")
def test_the_compiler_is_called_in_the_same_way_by_each_pip_install(tmp_path):
    """pip's cmake lies in a temporary folder; its path in the commands compiled everything anew.
    And ccache is told which part of the paths belongs to this clone."""
    settings = ("-DPYLLAMA_CCACHE=ccache", f"-DPYLLAMA_ROOT={tmp_path}")
    launcher = value(tmp_path, "Toolchain", "CMAKE_CXX_COMPILER_LAUNCHER", *settings).split(";")
    assert launcher[-1].endswith("/ccache") and Path(launcher[0]).name == "env"
    assert f"CCACHE_BASEDIR={tmp_path}" in launcher
