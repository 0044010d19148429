"""An allocation that fails in a round of drafts: an error, and the context is as it was."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from ..preloaded import compile_library

HERE = Path(__file__).parent


def test_each_allocation_of_a_round_may_fail(demo_file: Path, tmp_path: Path) -> None:
    """In drafts whose graphs are at hand, in drafts that allocate theirs, and when rounds are
    reserved. Then drafts, verified logits and the state after them are those of a context in
    which nothing failed: the LM head is not left replaced, no cell is left taken."""
    preloaded = compile_library(HERE / "failing_alloc.cpp", tmp_path)
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
