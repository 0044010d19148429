"""Interpreters and commands that tests start."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import pyllama_mtp

#: `cli("matrix", "--repeat", "1")` runs a command in this process -> code, out, err.
Cli = Callable[..., SimpleNamespace]
#: `program("matrix", "--repeat", "1")` runs it in a process of its own, and waits for it.
Program = Callable[..., "subprocess.CompletedProcess[bytes]"]

#: Runs `code` in a new interpreter: (code, *arguments, env={...}) -> the finished process.
RunPython = Callable[..., "subprocess.CompletedProcess[str]"]


def environment(**more: str) -> dict[str, str]:
    """This process's, with the package that is tested here, wherever it was imported from."""
    root = str(Path(pyllama_mtp.__file__).parents[1])
    return {**os.environ, "PYTHONPATH": root, **more}


def start(
    *words: object, program: Sequence[str] = ("-m", "pyllama_mtp"), **options: Any
) -> subprocess.Popen[Any]:
    """Start a command, which Ctrl-C reaches even where tests run in the background. Not in the
    checkout, whose sources it would import in place of the installed package."""
    usual: dict[str, Any] = {
        **{"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE},
        **{"cwd": tempfile.gettempdir(), "env": environment()},
        "preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL) and None,
    }
    command = [sys.executable, *program, *map(str, words)]
    return subprocess.Popen(command, **{**usual, **options})


@contextmanager
def disk_full_at(n_bytes: int) -> Iterator[None]:
    """No file can grow beyond `n_bytes`: writing more fails as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def every_core() -> Iterator[None]:
    """What starts inside has all cores of the machine, also in a worker of ``pytest -n``: with one
    core a model computes in the calling thread alone, where a failed assertion is an exception."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    try:
        if len(os.sched_getaffinity(0)) == 1:
            pytest.skip("a machine of one core")
        yield
    finally:
        os.sched_setaffinity(0, before)


def printed_by(*command: object, **variables: str) -> str:
    """What a command prints; it must succeed."""
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, **variables})
    assert done.returncode == 0, f"{words}\n{done.stdout}{done.stderr}"
    return done.stdout


def patched_tree(tree: Path) -> Path:
    """Upstream's tree with all patches, written there, with the header that cmake writes."""
    root = Path(__file__).parents[1]
    printed_by(sys.executable, root / "vendor" / "fetch.py")
    queue = (sys.executable, root / "patches" / "patchqueue.py")
    printed_by(*queue, "apply", "--dest", tree, "--variant", "patched")
    version = '#define GGML_VERSION ""\n#define GGML_COMMIT ""\n'
    (tree / "ggml" / "src" / "ggml-version.h").write_text(version)
    return tree
