"""How many threads compute beside other programs, by measurements that are made up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from pyllama_mtp.machine import Threads

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
class Machine:
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
    machine = Machine(TWO_CORES)
    machine.compute(60)
    assert {*machine.numbers} == {2}


@pytest.mark.parametrize("loops", [1, 2])
@pytest.mark.parametrize("faster", [1, 30])
def test_a_thread_is_dropped_beside_busy_programs_and_comes_back(loops: int, faster: int) -> None:
    table = {key: (faster * speed, *rest) for key, (speed, *rest) in TWO_CORES.items()}
    machine = Machine(table, loops)
    machine.compute(2)
    assert machine.threads.n == 1
    machine.compute(30)
    assert machine.threads.n == 1 and machine.numbers[-100:].count(2) == 0
    machine.loops = 0
    machine.compute(3)
    assert machine.threads.n == 2
    assert machine.compute(10) == pytest.approx(table[0, 2][0], rel=0.01)


def test_all_threads_stay_where_that_is_faster_and_trials_become_rare() -> None:
    machine = Machine({(1, 2): (20.0, 0.5, 0.0), (1, 1): (15.0, 0.0, 0.0)}, 1)
    machine.compute(600)
    tried = [n for n in machine.numbers if n == 1]
    assert 0 < len(tried) < 0.01 * len(machine.numbers)


def test_short_computations_are_tried_with_fewer_threads() -> None:
    machine = Machine(TINY)
    machine.compute(1)
    assert machine.threads.n == 1
    assert machine.compute(60) > 0.99 * TINY[0, 1][0]
    at_once = Machine(TINY, first=1)
    assert at_once.compute(10) > 0.99 * TINY[0, 1][0]


def test_more_threads_must_be_faster() -> None:
    equal = {**TWO_CORES, (0, 2): (30.0, 0.0, 0.0)}
    machine = Machine(equal, 1)
    machine.compute(2)
    machine.loops = 0
    machine.compute(20)
    assert machine.threads.n == 1 and 2 in machine.numbers[-500:]


def test_as_many_are_dropped_as_wait() -> None:
    table = {(3, n): (10.0 if n == 5 else 5.0, max(0, n - 5), 0.0) for n in range(1, 9)}
    machine = Machine(table, 3, most=8)
    machine.compute(2)
    assert [*dict.fromkeys(machine.numbers)] == [8, 5]


def test_only_computations_that_do_the_same_work_are_compared() -> None:
    """A prompt of one part begins the trial; the rounds after it say nothing of the number."""
    machine = Machine({(1, 2): (20.0, 0.5, 0.0), (1, 1): (15.0, 0.0, 0.0)}, 1)
    machine.compute(9, "prompt", work=60.0)
    assert machine.threads.n == 1
    machine.compute(20)
    assert machine.threads.n == 2


def test_who_waits_for_a_moment_changes_nothing() -> None:
    """In one window, and while nothing computes, as for the next question of a chat."""
    machine = Machine(TWO_CORES)
    for _ in range(20):
        machine.compute(1)
        machine.waited += 0.02
        machine.compute(1)
        machine.at += 3.0
        machine.waited, machine.idle = machine.waited + 2.0, machine.idle + 6.0
    assert {*machine.numbers} == {2}


def test_a_trial_that_loses_much_is_short() -> None:
    machine = Machine({(1, 2): (5.0, 0.5, 0.0), (1, 1): (2.0, 0.0, 0.0)}, 1)
    machine.compute(20)
    assert machine.numbers.count(1) == 2


def test_one_core_has_one_thread() -> None:
    machine = Machine({(2, 1): (10.0, 2.0, 0.0)}, 2, most=1)
    machine.compute(10)
    assert {*machine.numbers} == {1}
