"""Other programs in a matrix: measured alone, skipped where they fail, and the time budget."""

from __future__ import annotations

from collections.abc import Hashable
from types import SimpleNamespace
from typing import Any

import pytest

from pyllama_mtp import Model
from pyllama_mtp.measure.figures import Sample
from pyllama_mtp.measure.peers import PeerError, PeerRunner
from pyllama_mtp.measure.plan import Plan
from pyllama_mtp.measure.records import Measured, Run, Skipped
from pyllama_mtp.measure.request import MatrixRequest
from pyllama_mtp.measure.run import Matrix, brief
from pyllama_mtp.measure.runner import Runner, Task
from pyllama_mtp.settings import Settings

from ...cli.conftest import Watched
from ...fakes import same_methods


class Peer:
    """Another program; notes how many of our sessions are open while it measures."""

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self.open_sessions: list[int] = []

    def begin(self, key: Hashable, task: Task) -> None:
        self.open_sessions.append(self._watched.n_open)
        self._task = task

    def advance(self, key: Hashable, goal: int) -> int:
        return self._task.max_tokens

    def finish(self, key: Hashable) -> tuple[Sample, dict[str, int]]:
        return Sample(10, 8, 1, 1, 2, 10, 7, [], [], 7, 1), {}

    def drop(self) -> None:
        pass


same_methods(Peer, PeerRunner)


def matrix(model: Model, plan: Plan, peer: Any, ours: Runner | None = None, **more: Any) -> Any:
    runners = {"": ours or Runner(model), plan.peers[0]: peer}
    run: Any = SimpleNamespace(run="r")
    settings = Settings(n_threads=1)
    return Matrix(model, MatrixRequest(**more), plan, settings, Run(run), runners)


def kinds(records: Any) -> list[tuple[type, str, int]]:
    return [(type(r), r.cell.build, r.cell.n_max) for r in records]


def test_none_of_our_sessions_is_open_meanwhile(demo: Model, watched: Watched) -> None:
    peer = Peer(watched)
    plan = Plan((10,), (0, 2), 8, 2, peers=("llama-server",))
    records = [*matrix(demo, plan, peer).run()]
    assert len(records) == 8 and peer.open_sessions == [0] * 4


def test_what_is_not_installed_takes_nothing_from_the_budget(
    demo: Model, no_peers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(
        "pyllama_mtp.measure.run.time",
        SimpleNamespace(monotonic=lambda: clock[0], sleep=lambda s: None),
    )

    class OneSecond(Runner):
        def begin(self, key: Hashable, task: Task) -> None:
            clock[0] += 1
            super().begin(key, task)

    plan = Plan((10,), (0,), 8, 5, peers=("llama-bench",))
    peer = PeerRunner("llama-bench", "m.gguf", -1)
    ours = OneSecond(demo)
    records = [*matrix(demo, plan, peer, ours, budget_s=3.5).run()]
    found = kinds(records)
    assert found.count((Measured, "", 0)) == 4
    assert found.count((Skipped, "llama-bench", 0)) == 1


TRACEBACK = """llama-server failed (1): Traceback (most recent call last):
  File "/home/me/pyllama_mtp/worker.py", line 102, in <module>
    main()
ValueError: Failed to load model from file: /home/me/my models/m.gguf"""


def test_a_record_says_why_in_a_line_and_not_where(demo: Model, watched: Watched) -> None:
    class Broken(Peer):
        def begin(self, key: Hashable, task: Task) -> None:
            raise PeerError(TRACEBACK)

    plan = Plan((10,), (0,), 8, 1, peers=("llama-server",))
    reasons = [
        r.reason for r in matrix(demo, plan, Broken(watched)).run() if isinstance(r, Skipped)
    ]
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
