"""A matrix that is killed in the middle, again and again: no finished sample is ever lost."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from pyllama_mtp.measure.records import read_file

from ..processes import start

SIZES, DEPTHS, REPEAT = (32, 96), (0, 3), 16
COMMAND = (
    *("matrix", "--output", "m.jsonl"),
    *("--prompt-sizes", ",".join(map(str, SIZES)), "--depths", ",".join(map(str, DEPTHS))),
    *("--repeat", str(REPEAT), "--max-tokens", "48", "--threads", "1"),
)
KILLS = 4


def reported(stderr: bytes) -> int:
    """How many samples the process reported as finished."""
    return sum(b"prefill" in line for line in stderr.splitlines() if line.startswith(b"["))


def whole_lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True) if path.exists() else []


@pytest.mark.long
def test_killed_at_random_moments(tmp_path: Path) -> None:
    draw = random.Random(20)
    path = tmp_path / "m.jsonl"
    kept: list[bytes] = []
    kills = 0
    while kills < KILLS:
        resume = ["--resume"] * path.exists()
        process = start(*COMMAND, *resume, cwd=tmp_path, stdout=subprocess.DEVNULL)
        assert process.stderr
        before = len(kept)
        # Random moments of measuring, not of starting Python.
        while not (line := process.stderr.readline()).startswith(b"[") and line:
            pass
        time.sleep(draw.uniform(0, 0.2))
        how = signal.SIGINT if kills % 2 else signal.SIGKILL
        process.send_signal(how)
        said = line + process.stderr.read()
        assert process.wait(timeout=60) in (-signal.SIGKILL, 130), said.decode()
        assert b"Traceback" not in said
        kills += 1
        lines = whole_lines(path)
        assert lines[: len(kept)] == kept, "what was in the file must stay as it was"
        unfinished = lines and not lines[-1].endswith(b"\n")
        kept = lines[:-1] if unfinished else lines
        for number, text in enumerate(kept):
            assert json.loads(text)["kind"] == ("sample" if number else "run")
        (run,) = read_file(path).runs.values()
        assert len(run.measured) >= len(kept) - 1
        new = len(kept) - before - (before == 0)
        assert new >= reported(said), "a sample that was reported must be in the file"
    assert len(kept) - 1 < len(SIZES) * len(DEPTHS) * REPEAT, "nothing would be left to resume"

    process = start(*COMMAND, "--resume", cwd=tmp_path, stdout=subprocess.DEVNULL)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said.decode()
    assert whole_lines(path)[: len(kept)] == kept
    (run,) = read_file(path).runs.values()
    planned = {(size, depth): [*range(REPEAT)] for size in SIZES for depth in DEPTHS}
    found = {(c.n_prompt, c.n_max): sorted(c.repeats) for c in run.cells.values()}
    assert found == planned
