"""Other programs that are not installed, and fake ones."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def peers(fake_peers: Any, no_peers: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The fake programs, where the package looks for the real ones."""
    for name, value in fake_peers.environment.items():
        monkeypatch.setenv(name, value)
    return fake_peers


@pytest.fixture
def ended() -> Callable[[int], bool]:
    """Whether a process has ended and left nothing behind."""

    def check(pid: int) -> bool:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return True
        return stat.rpartition(")")[2].split()[0] == "Z" and int(stat.split()[3]) != os.getpid()

    return check
