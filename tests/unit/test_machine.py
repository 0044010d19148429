"""The machine: its record, which does not identify it; how busy it is; what limits its memory; the
number of threads that compute beside other programs, by measurements that are made up."""

from __future__ import annotations

import getpass
import json
import os
import platform
import resource
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from pyllama_mtp import machine
from pyllama_mtp.machine import Threads, available_memory, describe_machine

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
    """Two processes on one core: one waits while the other computes, both for a minute at most."""
    code = (
        "import os, signal, time\n"
        "from pyllama_mtp.machine import waited_for_core\n"
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "child, began = os.fork(), time.monotonic()\n"
        "signal.alarm(60)\n"
        "before = waited_for_core()\n"
        "while not child or (waited := waited_for_core() - before) < 0.1: pass\n"
        "os.kill(child, signal.SIGKILL)\n"
        "print(waited < time.monotonic() - began)\n"
    )
    assert run_python(code).stdout == "True\n"


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


# -- memory ----------------------------------------------------------------------------------------


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


# -- threads ---------------------------------------------------------------------------------------

#: Computations per second, threads without a core, and idle cores, by busy loops beside and threads
#: that compute: the 0.8B shape on two cores.
TWO_CORES = {
    (0, 2): (46.0, 0.03, 0.05),
    (0, 1): (30.0, 0.0, 1.0),
    (1, 2): (14.0, 0.8, 0.1),
    (1, 1): (28.0, 0.01, 0.0),
    (2, 2): (3.9, 1.0, 0.0),
    (2, 1): (9.8, 0.66, 0.0),
}
#: A tiny model, whose threads spend most of the time waiting for each other.
TINY = {(0, 2): (1200.0, 0.02, 0.3), (0, 1): (2200.0, 0.0, 1.0)}


@dataclass
class MadeUp:
    """Computes as a table says; see TWO_CORES. `loops` may change at any time."""

    table: Mapping[tuple[int, int], tuple[float, float, float]]
    loops: int = 0
    most: int = 2
    first: int | None = None
    waited: float = 0.0
    idle: float = 0.0
    at: float = 100.0
    numbers: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.threads = Threads(
            *(self.most, self.first, lambda: self.waited, lambda: self.idle, lambda: self.at)
        )

    def compute(self, seconds: float, kind: str = "round", work: float = 1.0) -> float:
        """Compute for so long: work done per second."""
        done, began = 0.0, self.at
        while self.at < began + seconds:
            n = self.threads.n
            speed, waiting, idle = self.table[self.loops, n]
            took = work / speed
            self.at += took
            self.waited += waiting * took
            self.idle += idle * took
            done += work
            self.numbers.append(n)
            self.threads.took(kind, took)
        return done / (self.at - began)


def test_nothing_is_tried_while_no_thread_waits() -> None:
    made_up = MadeUp(TWO_CORES)
    made_up.compute(60)
    assert {*made_up.numbers} == {2}


@pytest.mark.parametrize("loops", [1, 2])
@pytest.mark.parametrize("faster", [1, 30])
def test_a_thread_is_dropped_beside_busy_programs_and_comes_back(loops: int, faster: int) -> None:
    table = {key: (faster * speed, *rest) for key, (speed, *rest) in TWO_CORES.items()}
    made_up = MadeUp(table, loops)
    made_up.compute(2)
    assert made_up.threads.n == 1
    made_up.compute(30)
    assert made_up.threads.n == 1 and made_up.numbers[-100:].count(2) == 0
    made_up.loops = 0
    made_up.compute(3)
    assert made_up.threads.n == 2
    assert made_up.compute(10) == pytest.approx(table[0, 2][0], rel=0.01)


def test_all_threads_stay_where_that_is_faster_and_trials_become_rare() -> None:
    made_up = MadeUp({(1, 2): (20.0, 0.5, 0.0), (1, 1): (15.0, 0.0, 0.0)}, 1)
    made_up.compute(600)
    tried = [n for n in made_up.numbers if n == 1]
    assert 0 < len(tried) < 0.01 * len(made_up.numbers)


def test_short_computations_are_tried_with_fewer_threads() -> None:
    made_up = MadeUp(TINY)
    made_up.compute(1)
    assert made_up.threads.n == 1
    assert made_up.compute(60) > 0.99 * TINY[0, 1][0]
    at_once = MadeUp(TINY, first=1)
    assert at_once.compute(10) > 0.99 * TINY[0, 1][0]


@pytest.mark.parametrize("kind", ["round", "prompt"])
def test_more_threads_must_be_faster(kind: str) -> None:
    """Than as many as there are now: a prompt before these took twice as long."""
    made_up = MadeUp({**TWO_CORES, (0, 2): (30.0, 0.0, 0.0)}, 1)
    made_up.compute(0.01, "prompt")
    made_up.compute(2)
    made_up.loops = 0
    while made_up.threads.n == 1:
        made_up.compute(0.01)
    made_up.compute(20, kind)
    assert made_up.threads.n == 1


def test_as_many_are_dropped_as_wait() -> None:
    table = {(3, n): (10.0 if n == 5 else 5.0, max(0, n - 5), 0.0) for n in range(1, 9)}
    made_up = MadeUp(table, 3, most=8)
    made_up.compute(2)
    assert [*dict.fromkeys(made_up.numbers)] == [8, 5]


def test_only_computations_that_do_the_same_work_are_compared() -> None:
    """A prompt of one part begins the trial; the rounds after it say nothing of the number."""
    made_up = MadeUp({(1, 2): (20.0, 0.5, 0.0), (1, 1): (15.0, 0.0, 0.0)}, 1)
    made_up.compute(9, "prompt", work=60.0)
    assert made_up.threads.n == 1
    made_up.compute(20)
    assert made_up.threads.n == 2


def test_who_waits_for_a_moment_changes_nothing() -> None:
    """In one window, and while nothing computes, as for the next question of a chat."""
    made_up = MadeUp(TWO_CORES)
    for _ in range(20):
        made_up.compute(1)
        made_up.waited += 0.02
        made_up.compute(1)
        made_up.at += 3.0
        made_up.waited, made_up.idle = made_up.waited + 2.0, made_up.idle + 6.0
    assert {*made_up.numbers} == {2}


def test_a_trial_that_loses_much_is_short() -> None:
    made_up = MadeUp({(1, 2): (5.0, 0.5, 0.0), (1, 1): (2.0, 0.0, 0.0)}, 1)
    made_up.compute(20)
    assert made_up.numbers.count(1) == 2


def test_one_core_has_one_thread() -> None:
    made_up = MadeUp({(2, 1): (10.0, 2.0, 0.0)}, 2, most=1)
    made_up.compute(10)
    assert {*made_up.numbers} == {1}
