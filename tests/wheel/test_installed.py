"""The installed package: holds its libraries and licences, and works after being moved."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from pyllama_mtp.llama import native

PACKAGE = native.load().folder.parents[1]

PROGRAM = """
import sys, pyllama_mtp
from pyllama_mtp.models.demo import demo_path
assert pyllama_mtp.__file__.startswith(sys.argv[1]), pyllama_mtp.__file__
print("".join(pyllama_mtp.stream(demo_path(), "def main", max_tokens=8)))
assert str(pyllama_mtp.llama.native.load().folder).startswith(sys.argv[1])
"""


def test_licences_travel_with_the_libraries() -> None:
    assert "ggml authors" in (PACKAGE / "licenses" / "LICENSE-llama.cpp").read_text()
    licences = [f for f in metadata.files("pyllama-mtp") or [] if f.name == "LICENSE"]
    assert licences and "MIT License" in licences[0].read_text()


def test_a_moved_copy_works(tmp_path: Path) -> None:
    shutil.copytree(PACKAGE, tmp_path / "pyllama_mtp")
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    environment = {"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_libraries_hold_no_search_path_outside_the_package() -> None:
    """Every run-time search path is relative to the library itself."""
    for library in PACKAGE.rglob("*.so*"):
        text = subprocess.run(["readelf", "-d", library], capture_output=True, text=True).stdout
        paths = [line for line in text.splitlines() if "RPATH" in line or "RUNPATH" in line]
        assert all("[$ORIGIN" in line for line in paths), (library, paths)
