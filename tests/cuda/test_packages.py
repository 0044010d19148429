"""A build takes cuBLAS from NVIDIA's packages, and CCCL's headers if they are new enough."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "bindings" / "cmake" / "find_cublas.py"


def find(packages: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """Run the script where these packages are installed."""
    command = [sys.executable, str(SCRIPT), *map(str, words)]
    environment = {**os.environ, "PYTHONPATH": str(packages)}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The folder of the packages' files, as they lay them out."""
    made = tmp_path / "packages" / "nvidia" / "cu13"
    (made / "include" / "cccl" / "cuda" / "std" / "__cccl").mkdir(parents=True)
    return made


@pytest.mark.parametrize(("version", "taken"), [("3000001", False), ("3002000", True)])
def test_cccl_is_taken_if_it_has_what_candidates_need(
    root: Path, version: str, taken: bool
) -> None:
    cccl = root / "include" / "cccl"
    header = cccl / "cuda" / "std" / "__cccl" / "version.h"
    header.write_text(f"#define CCCL_VERSION {version}\n")
    done = find(root.parents[1])
    assert done.returncode == 0 and done.stdout.strip() == (str(cccl) if taken else "")


def test_cublas_gets_the_names_that_a_linker_asks_for(root: Path, tmp_path: Path) -> None:
    (root / "include" / "cublas_v2.h").touch()
    (root / "lib").mkdir()
    (root / "lib" / "libcublas.so.13").touch()
    dest = tmp_path / "dest"
    assert find(root.parents[1], dest).stdout.strip() == str(dest)
    assert (dest / "include" / "cublas_v2.h").exists()
    assert {path.name for path in (dest / "lib").iterdir()} == {"libcublas.so", "libcublas.so.13"}
