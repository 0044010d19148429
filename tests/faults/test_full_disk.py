"""No space: the error names the file, nothing half-written has its name, and what was good stays.

Two ways that need no privileges: /dev/full, where every write fails (ENOSPC), and a limit on the
size of files with SIGXFSZ ignored (a part is written, then EFBIG), in a process of its own.
"""

from __future__ import annotations

import resource
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pyllama_mtp.measure.records import read_file

from ..processes import environment, start

ONE = ("--threads", "1")
MATRIX = ("matrix", "--prompt-sizes", "32", "--depths", "0,1", "--max-tokens", "8", *ONE)
#: More than the line of a run and that of a sample, less than four samples.
MOST = 3500
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def command(tmp_path: Path) -> Run:
    """Runs a command whose files can have `most` bytes."""

    def run(*words: str, most: int = resource.RLIM_INFINITY, **more: Any) -> Any:
        def limit() -> None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))

        env = environment(PYTHONDONTWRITEBYTECODE="1")
        process = start(*words, text=True, cwd=tmp_path, env=env, preexec_fn=limit, **more)
        out, err = process.communicate(timeout=120)
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    return run


def refused(done: subprocess.CompletedProcess[str], name: str) -> None:
    """One message that names the file; no traceback."""
    assert done.returncode == 2, done.stderr
    (line,) = (line for line in done.stderr.splitlines() if "error" in line)
    assert name in line and "File too large" in line, done.stderr
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


def test_matrix_keeps_what_was_finished(command: Run, tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    words = (*MATRIX, "--repeat", "2", "--output", "m.jsonl")
    done = command(*words, most=MOST)
    refused(done, "m.jsonl")
    assert "what was measured before" in done.stderr and "no-MTP" in done.stdout
    kept = path.read_bytes()
    assert kept.endswith(b"\n") and len(kept) > 100
    (run,) = read_file(path).runs.values()
    assert len(run.measured) == kept.count(b"\n") - 1 >= 1
    refused(command(*words, "--resume", most=len(kept) + 10), "m.jsonl")
    assert path.read_bytes() == kept, "a good file is not destroyed"
    assert command(*words, "--resume").returncode == 0  # with space again
    assert path.read_bytes().startswith(kept)
    (run,) = read_file(path).runs.values()
    assert len(run.measured) == 2 * 2


REPORT = """
import resource, signal, sys
from pathlib import Path
from pyllama_mtp.errors import DiskFullError
from pyllama_mtp.measure.page import _write
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
def files(mark, n):
    return {"index.html": mark * 10, "tables.md": mark * n, "decode.svg": mark * 10}
folder = Path(sys.argv[1])
_write(folder, files(b"1", 10))
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    _write(folder, files(b"2", 2000))
except DiskFullError as error:
    assert str(folder / "tables.md") in str(error), error
    found = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert found == {**files(b"1", 10), "decode.svg": b"2" * 10}, "whole files, the page last"
    print("whole")
"""


def test_a_report_replaces_files_as_a_whole(run_python: Run, tmp_path: Path) -> None:
    done = run_python(REPORT, tmp_path / "page")
    assert done.stdout == "whole\n", done.stderr


def test_pairs_and_prompts(command: Run, tmp_path: Path, run_python: Run, demo_file: Path) -> None:
    words = ("generate", "def f", "--max-tokens", "40", "--draft-n-max", "3", "--ignore-eos", *ONE)
    refused(command(*words, "--log-pairs", "p.jsonl", most=300), "p.jsonl")
    assert not (tmp_path / "p.jsonl").exists()
    done = run_python(SAVE, demo_file, tmp_path / "saved.prompt")
    assert done.stdout == "unharmed\n", done.stderr


SAVE = """
import os, resource, signal, sys
from pyllama_mtp import Model, Session, Settings
from pyllama_mtp.errors import DiskFullError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
path = sys.argv[2]
with Model(sys.argv[1]) as model, Session(model, Settings(n_ctx=256, n_threads=1)) as session:
    session.process("def read_lines(path):")
    session.save(path)
    good = open(path, "rb").read()
    session.process("class Reader:")
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(good) // 2,) * 2)
    try:
        session.save(path)
    except DiskFullError as error:
        assert path in str(error), error
        assert open(path, "rb").read() == good and len(os.listdir(os.path.dirname(path))) == 1
        assert session.restore(path)
        print("unharmed")
"""


@pytest.mark.parametrize("words", [("inspect", "{demo}"), ("--version",)])
def test_stdout_that_is_full(command: Run, demo_file: Path, words: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w") as full:
        done = command(*(word.format(demo=demo_file) for word in words), stdout=full)
    assert done.returncode == 2 and "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
