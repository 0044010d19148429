"""Several sequences at once with upstream's library, and on a device of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pyllama_mtp import BatchSession, Model

from ..marks import usual
from ..processes import RunPython
from ..workers import worker
from .support import MOST, assert_same_tokens, compare, computed_by, settings

Prompts = list[list[int]]

UPSTREAM = """
prompts, most, options = json.loads(sys.argv[2])
with Model(sys.argv[1]) as model, BatchSession(model, Settings(**SMALL, **options), 3) as session:
    got = session.generate(prompts, max_tokens=most).run()
found = [a.tokens for a in got.results], got.telemetry.accepted
"""


@pytest.mark.parametrize("rollback", usual("snapshot", long=["replay"]))
def test_upstreams_library(
    run_python: RunPython, demo: Model, demo_file: Path, ragged: Prompts, gap: float, rollback: str
) -> None:
    """Without our patches: single steps, hidden rows over the host, the same tokens."""
    given = json.dumps([ragged[:5], MOST[:5], {"draft_n_max": 3, "rollback": rollback}])
    found, accepted = computed_by("upstream", run_python, UPSTREAM, demo_file, given)
    with BatchSession(demo, settings(3, rollback=rollback), 3) as session:
        patched = session.generate(ragged[:5], max_tokens=MOST[:5]).run()
    for prompt, got, wanted in zip(ragged, found, patched.results, strict=False):
        assert_same_tokens(demo, prompt, got, wanted.tokens, gap)
    assert accepted[0] == pytest.approx(patched.telemetry.accepted[0], rel=0.05)


@pytest.mark.parametrize(
    "options", usual({}, long=[{"prompt_sync": "full"}, {"rollback": "replay"}]), ids=str
)
def test_on_a_device(
    demo: Model, demo_file: Path, ragged: Prompts, options: dict[str, object]
) -> None:
    """On a worker: the same tokens."""
    chosen = settings(3, **options)
    with BatchSession(demo, chosen, 3) as here:
        wanted = here.generate(ragged[:5], max_tokens=MOST[:5]).run()
    with (
        worker() as address,
        Model(demo_file, rpc_servers=address) as remote,
        BatchSession(remote, chosen, 3) as there,
    ):
        got = there.generate(ragged[:5], max_tokens=MOST[:5]).run()
    compare(demo, ragged[:5], got.results, wanted.results)
    assert got.telemetry.accepted[0] == pytest.approx(wanted.telemetry.accepted[0], rel=0.05)
