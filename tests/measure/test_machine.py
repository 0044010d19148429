"""The record of the machine is useful, and nothing in it identifies the machine."""

from __future__ import annotations

import getpass
import json
import os
import platform
from pathlib import Path

import pytest

from pyllama_mtp import machine
from pyllama_mtp.machine import describe_machine

from ..processes import RunPython


def test_the_record_describes_the_machine() -> None:
    found = describe_machine(["a GPU"])
    assert set(found) == {"cpu", "cores", "memory_bytes", "devices", "os", "arch", "python"}
    assert found["cpu"] and found["cores"] >= 1 and found["devices"] == ["a GPU"]
    assert found["python"] == platform.python_version()


def test_the_record_has_no_host_no_user_no_path() -> None:
    text = json.dumps(describe_machine())
    private = {platform.node(), getpass.getuser(), str(Path.home()), str(Path.cwd()), os.sep}
    # A name so short that it may occur by chance proves nothing.
    assert not [word for word in private if len(word) > 3 and word in text]


def test_waiting_for_a_core_is_counted(run_python: RunPython) -> None:
    """Two processes on one core: one waits while the other computes."""
    code = (
        "import os, time\n"
        "from pyllama_mtp.machine import waited_for_core\n"
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "child = os.fork()\n"
        "end = time.monotonic() + 0.8\n"
        "before = waited_for_core()\n"
        "while time.monotonic() < end: pass\n"
        "if child:\n"
        "    print(waited_for_core() - before)\n"
        "    os.waitpid(child, 0)\n"
        "else:\n"
        "    os._exit(0)\n"
    )
    assert 0.1 < float(run_python(code).stdout) < 0.8


def test_busy_cores_are_those_that_are_not_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of cores 0 to 2 one is idle, one half idle, one busy; core 3 is not ours."""
    stat = tmp_path / "stat"

    def write(*idle: int) -> None:
        cores = [f"cpu{n} 0 0 0 {ticks} 5 0 0 0 0 0" for n, ticks in enumerate(idle)]
        stat.write_text("\n".join(["cpu  0 0 0 1 5", *cores, "intr 1 2"]) + "\n")

    ticks = os.sysconf("SC_CLK_TCK")
    write(0, 0, 0, 0)
    monkeypatch.setattr(machine, "_STAT", stat)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2})
    clock = iter([0.0, 1.0])
    monkeypatch.setattr(machine.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(machine.time, "sleep", lambda s: write(ticks, ticks // 2, 0, 0))
    assert machine.busy_cores() == pytest.approx(1.5)
