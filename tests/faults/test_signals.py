"""Signals at random moments of some commands; ``bench/faults.py`` sends many more, to all."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest

from . import signalled


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    ("name", "most_s"),
    [("generate", 1.0), ("matrix", 3.0), ("accept", 2.0), ("synth", 2.0), ("draft-vocab", 1.0),
     ("tune", 1.0)],
)  # fmt: skip
@pytest.mark.long
def test_a_command_ends_cleanly(
    tmp_path: Path, name: str, most_s: float, number: signal.Signals
) -> None:
    signalled.prepare(tmp_path, b"")
    after_s = random.Random(f"{name} {number}").uniform(0, most_s)
    assert not signalled.trial(name, tmp_path, number, after_s), f"after {after_s:.3f} s"
