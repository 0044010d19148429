"""No space: the error names the file, nothing half-written has its name, and what was good stays.

Two ways that need no privileges: a limit on the size of files (a part is written, then EFBIG), and
/dev/full, where every write fails (ENOSPC).
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from pyllama_mtp.errors import DiskFullError
from pyllama_mtp.measure.page import _write
from pyllama_mtp.measure.records import read_file

from ..processes import Cli, disk_full_at, environment, start

ONE = ("--threads", "1")
MATRIX = ("matrix", "--prompt-sizes", "32", "--depths", "0,1", "--max-tokens", "8", *ONE)
#: More than the line of a run and that of a sample, less than four samples.
MOST = 3500


def refused(done: SimpleNamespace, name: str) -> None:
    """One message that names the file."""
    assert done.code == 2, done.err
    (line,) = (line for line in done.err.splitlines() if "error" in line)
    assert name in line and "File too large" in line, done.err


def test_matrix_keeps_what_was_finished(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    words = (*MATRIX, "--repeat", "2", "--output", path)
    with disk_full_at(MOST):
        done = cli(*words)
    refused(done, "m.jsonl")
    assert "what was measured before" in done.err and "no-MTP" in done.out
    kept = path.read_bytes()
    assert kept.endswith(b"\n") and len(kept) > 100
    (run,) = read_file(path).runs.values()
    assert len(run.measured) == kept.count(b"\n") - 1 >= 1
    with disk_full_at(len(kept) + 10):
        refused(cli(*words, "--resume"), "m.jsonl")
    assert path.read_bytes() == kept, "a good file is not destroyed"
    assert cli(*words, "--resume").code == 0  # with space again
    assert path.read_bytes().startswith(kept)
    (run,) = read_file(path).runs.values()
    assert len(run.measured) == 2 * 2


def test_a_report_replaces_files_as_a_whole(tmp_path: Path) -> None:
    def files(mark: bytes, n: int) -> dict[str, bytes]:
        return {"index.html": mark * 10, "tables.md": mark * n, "decode.svg": mark * 10}

    _write(tmp_path, files(b"1", 10))
    with disk_full_at(1000), pytest.raises(DiskFullError, match=r"/tables\.md"):
        _write(tmp_path, files(b"2", 2000))
    found = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert found == {**files(b"1", 10), "decode.svg": b"2" * 10}, "whole files, the page last"


def test_pairs(cli: Cli, tmp_path: Path) -> None:
    words = ("generate", "def f", "--max-tokens", "40", "--draft-n-max", "3", "--ignore-eos", *ONE)
    with disk_full_at(300):
        refused(cli(*words, "--log-pairs", tmp_path / "p.jsonl"), "p.jsonl")
    assert not (tmp_path / "p.jsonl").exists()


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", ["inspect {demo}", "--version", "--help"])
def test_stdout_that_is_full(demo_file: Path, words: str, unbuffered: str) -> None:
    if words == "--help" and unbuffered:
        pytest.skip("argparse says nothing of it")
    env = environment(PYTHONUNBUFFERED=unbuffered)
    with Path("/dev/full").open("w") as full:
        given = words.format(demo=demo_file).split()
        process = start(*given, stdout=full, text=True, env=env)
        _, said = process.communicate(timeout=120)
    assert process.returncode == 2 and "No space left on device" in said
    assert "Traceback" not in said and "Exception ignored" not in said
