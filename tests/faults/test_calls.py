"""Native calls that fail are exceptions, whatever fails in them. ffi/test_compilers.py runs this
with a build whose graphs are computed by ggml's own threads, too."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from ..preloaded import compile_library, run_preloaded

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """failing.cpp, compiled."""
    return compile_library(HERE / "failing.cpp", tmp_path_factory.mktemp("failing"))


def test_calls_that_wait_or_allocate(library: Path, demo_file: Path) -> None:
    done = run_preloaded(library, HERE / "fail_calls.py", demo_file)
    found = dict(line.split(": ") for line in done.stdout.splitlines()[:-1])
    waits = ("logits", "greedy", "candidates", "nextn rows", "pre-norm rows", "round at once")
    allocations = ("size of a state", "memory", "samplers", "accept")
    assert found == {
        **dict.fromkeys(waits, "FatalDecodeError"),
        **dict.fromkeys(allocations, "InsufficientMemoryError"),
        "in C": "False, out of memory, True",
    }, done.stderr
    assert done.stdout.endswith("\nend\n") and done.returncode == 0, done.stderr


def test_an_assertion_while_one_thread_computes(library: Path, demo_file: Path) -> None:
    done = run_preloaded(library, HERE / "fail_calls.py", demo_file, 1)
    assert done.stdout.splitlines() == ["computing: FatalDecodeError", "end"], done.stderr


def test_an_assertion_while_others_compute_ends_the_process(library: Path, demo_file: Path) -> None:
    """An exception would leave the others waiting for ever."""
    done = run_preloaded(library, HERE / "fail_calls.py", demo_file, 2)
    assert done.returncode == -signal.SIGABRT and not done.stdout
    assert "an assertion on the main thread" in done.stderr
