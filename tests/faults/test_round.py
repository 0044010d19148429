"""An allocation that fails in a round of drafts: an error, and the context is as it was."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def preloaded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    path: Path = tmp_path_factory.mktemp("alloc") / "failing_alloc.so"
    source = str(HERE / "failing_alloc.cpp")
    command = [compiler, "-std=c++17", "-O1", "-shared", "-fPIC", "-o", str(path), source, "-ldl"]
    subprocess.run(command, check=True)
    return path


def test_each_allocation_of_a_round_may_fail(demo_file: Path, preloaded: Path) -> None:
    """In drafts whose graphs are at hand, in drafts that allocate theirs, and when rounds are
    reserved. Then drafts, verified logits and the state after them are those of a context in
    which nothing failed: the LM head is not left replaced, no cell is left taken."""
    root = HERE.parents[1]
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.round_child", str(demo_file)],
        capture_output=True,
        text=True,
        cwd=root,
        env={**os.environ, "LD_PRELOAD": str(preloaded), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    tried = {line.rpartition(" ")[0]: int(line.split()[-1]) for line in done.stdout.splitlines()}
    assert tried.keys() == {"draft, steady", "draft first", "reserve first", "verify"}
    assert min(tried.values()) >= 5, tried
