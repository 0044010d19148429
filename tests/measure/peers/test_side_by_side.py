"""Other programs in a matrix: measured alone, skipped where they fail."""

from __future__ import annotations

from collections.abc import Hashable
from types import SimpleNamespace
from typing import Any

from pyllama_mtp import Model
from pyllama_mtp.measure.figures import Sample
from pyllama_mtp.measure.peers import PeerError, PeerRunner
from pyllama_mtp.measure.plan import Plan
from pyllama_mtp.measure.records import Run, Skipped
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


def run(model: Model, plan: Plan, peer: Any) -> list[Any]:
    """The records of a plan."""
    runners = {"": Runner(model), plan.peers[0]: peer}
    header: Any = SimpleNamespace(run="r")
    request, settings = MatrixRequest(), Settings(n_threads=1)
    return [*Matrix(model, request, plan, settings, Run(header), runners).run()]


def test_none_of_our_sessions_is_open_meanwhile(demo: Model, watched: Watched) -> None:
    peer = Peer(watched)
    plan = Plan((10,), (0, 2), 8, 2, peers=("llama-server",))
    assert len(run(demo, plan, peer)) == 8 and peer.open_sessions == [0] * 4


TRACEBACK = """llama-server failed (1): Traceback (most recent call last):
  File "/home/me/pyllama_mtp/worker.py", line 102, in <module>
    main()
ValueError: Failed to load model from file: /home/me/my models/m.gguf"""


def test_a_record_says_why_in_a_line_and_not_where(demo: Model, watched: Watched) -> None:
    class Broken(Peer):
        def begin(self, key: Hashable, task: Task) -> None:
            raise PeerError(TRACEBACK)

    plan = Plan((10,), (0,), 8, 1, peers=("llama-server",))
    reasons = [r.reason for r in run(demo, plan, Broken(watched)) if isinstance(r, Skipped)]
    said = "llama-server failed (1): ValueError: Failed to load model from file: "
    assert reasons == [said + "my models/m.gguf"]


def test_paths_lose_their_folders() -> None:
    for reason, said in (
        ("exit code 1: /usr/bin/llama-bench: error", "exit code 1: llama-bench: error"),
        ("cannot run '/a/b/c' (/d/e)", "cannot run 'c' (e)"),
        ("3 tok/s, 1/2, http://127.0.0.1:80", "3 tok/s, 1/2, http://127.0.0.1:80"),
        ("Traceback (most recent call last):", "Traceback (most recent call last):"),
    ):
        assert brief(reason) == said
