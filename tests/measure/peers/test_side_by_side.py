"""Other programs in a matrix: measured alone, skipped where they fail, and the time budget."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from pyllama_mtp.measure.peers import PeerError, PeerRunner
from pyllama_mtp.measure.plan import Plan
from pyllama_mtp.measure.records import Dropped, Measured, Run, Sample, Skipped
from pyllama_mtp.measure.run import Matrix, MatrixRequest, brief
from pyllama_mtp.measure.runner import Runner, Task
from pyllama_mtp.settings import Sampling, Settings

from ...fakes import same_methods


class Peer:
    """Another program; notes how many of our sessions are open while it measures."""

    def __init__(self, fake: ModuleType) -> None:
        self._fake = fake
        self.open_sessions: list[int] = []

    def begin(self, number: int, task: Task) -> None:
        self.open_sessions.append(self._fake.state["open_sessions"])
        self._task = task

    def advance(self, number: int, goal: int) -> int:
        return self._task.max_tokens

    def finish(self, number: int) -> tuple[Sample, dict[str, int]]:
        return Sample(10, 8, 1, 1, 2, 10, 7, [], [], 7, 1), {}

    def drop(self) -> None:
        pass


same_methods(Peer, PeerRunner)


def matrix(fake: ModuleType, plan: Plan, peer: Any, ours: Runner | None = None, **more: Any) -> Any:
    model = fake.Model("m.gguf")
    runners = {"": ours or Runner(model), plan.peers[0]: peer}
    request = MatrixRequest(plan, Settings(), Sampling(), [], **more)
    run: Any = SimpleNamespace(run="r")
    return Matrix(model, request, Run(run), runners)


def kinds(records: Any) -> list[tuple[type, str, int]]:
    return [(type(r), r.cell.build, r.cell.n_max) for r in records]


def test_none_of_our_sessions_is_open_meanwhile(fake: ModuleType) -> None:
    peer = Peer(fake)
    plan = Plan((10,), (0, 2), 8, 2, peers=("llama-server",))
    records = [*matrix(fake, plan, peer).run()]
    assert len(records) == 8 and peer.open_sessions == [0] * 4


def test_what_is_not_installed_takes_nothing_from_the_budget(
    fake: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr("pyllama_mtp.measure.run.time.monotonic", lambda: clock[0])

    class OneSecond(Runner):
        def begin(self, number: int, task: Task) -> None:
            clock[0] += 1
            super().begin(number, task)

    plan = Plan((10,), (0,), 8, 5, peers=("llama-bench",), prompt_step=4)
    peer = PeerRunner(PeerError("not installed"), "m.gguf", -1)
    ours = OneSecond(fake.Model("m.gguf"))
    records = [*matrix(fake, plan, peer, ours, budget_s=4.5).run()]
    found = kinds(record for record in records if not isinstance(record, Dropped))
    assert found.count((Measured, "", 0)) == 4
    assert found.count((Skipped, "llama-bench", 0)) == 1


TRACEBACK = """llama-server failed (1): Traceback (most recent call last):
  File "/home/me/pyllama_mtp/worker.py", line 102, in <module>
    main()
ValueError: Failed to load model from file: /home/me/my models/m.gguf"""


def test_a_record_says_why_in_a_line_and_not_where(fake: ModuleType) -> None:
    class Broken(Peer):
        def begin(self, number: int, task: Task) -> None:
            raise PeerError(TRACEBACK)

    plan = Plan((10,), (0,), 8, 1, peers=("llama-server",))
    reasons = [r.reason for r in matrix(fake, plan, Broken(fake)).run() if isinstance(r, Skipped)]
    said = "llama-server failed (1): ValueError: Failed to load model from file: "
    assert reasons == [said + "my models/m.gguf"]


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("exit code 1: /usr/bin/llama-bench: error", "exit code 1: llama-bench: error"),
        ("cannot run '/a/b/c' (/d/e)", "cannot run 'c' (e)"),
        ("3 tok/s, 1/2, http://127.0.0.1:80", "3 tok/s, 1/2, http://127.0.0.1:80"),
        ("Traceback (most recent call last):", "Traceback (most recent call last):"),
    ],
)
def test_paths_lose_their_folders(reason: str, said: str) -> None:
    assert brief(reason) == said
