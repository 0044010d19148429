"""What limits the memory of a process is known."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from pyllama_mtp import machine
from pyllama_mtp.machine import available_memory


def test_address_space_limit_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    before = available_memory()
    mapped = machine._fields(Path("/proc/self/status"))["VmSize"] * 1024
    limits = (mapped + (10 << 20), resource.RLIM_INFINITY)
    monkeypatch.setattr(machine.resource, "getrlimit", lambda which: limits)
    assert 0 < available_memory() <= 10 << 20 < before


def test_control_group_limit_is_respected(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 100000\n")
    names = ("memory.max", "memory.current", "inactive_file")
    assert machine._headroom(tmp_path, *names) == 700000
    (tmp_path / "memory.max").write_text("max\n")
    assert machine._headroom(tmp_path, *names) is None
    assert machine._headroom(tmp_path / "absent", *names) is None
