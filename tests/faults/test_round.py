"""An allocation that fails in a round of drafts: an error, and the context is as it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..marks import usual
from ..preloaded import compile_library, run_preloaded

HERE = Path(__file__).parent


@pytest.mark.parametrize("fewer", usual(4, long=[1]))
def test_each_allocation_of_a_round_may_fail(demo_file: Path, tmp_path: Path, fewer: int) -> None:
    """In drafts whose graphs are at hand, in drafts that allocate theirs, and when rounds are
    reserved. Then drafts, verified logits and the state after them are those of a context in
    which nothing failed: the LM head is not left replaced, no cell is left taken. A state is saved
    with what waits to be taken into it, or not at all."""
    library = compile_library(HERE / "failing.cpp", tmp_path)
    done = run_preloaded(library, HERE / "round_child.py", demo_file, fewer, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr[-3000:]
    tried = {line.rpartition(" ")[0]: int(line.split()[-1]) for line in done.stdout.splitlines()}
    assert tried.keys() == {"draft, steady", "draft first", "reserve first", "save", "verify"}
    assert min(tried.values()) >= 5, tried
