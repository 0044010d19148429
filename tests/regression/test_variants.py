"""The patched variant, with everything switched off, is upstream to the last bit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from ..processes import RunPython
from .support import computed_by

OFF = """
native.load().set_small_batch(False)
native.load().set_large_batch(False)
native.load().set_few_rows_attention(False)
"""
#: Model file, output folder: logits of prompts at all edges, and of some decode steps after each.
LOGITS = """
rows, found = [], None
with Model(sys.argv[1]) as model:
    for n in EDGES:
        text = made_up(model, n)
        with Context(model, ContextOptions(**SMALL, n_outputs_max=48)) as context:
            for start in range(0, n, 48):
                part = text[start : start + 48]
                context.decode(part, start, np.ones(len(part), "i1"))
            rows += [context.logits(row).copy() for row in range(len(part))]
            for position in range(n, n + 5):
                context.decode(rows[-1].argmax(keepdims=True), position, np.ones(1, "i1"))
                rows.append(context.logits(0).copy())
np.save(Path(sys.argv[2]) / f"{native.load().variant}.npy", np.stack(rows))
"""


@pytest.mark.parametrize("name", ["demo_file", "moe_file", "next_file"])
def test_same_logits(
    run_python: RunPython, tmp_path: Path, name: str, request: pytest.FixtureRequest
) -> None:
    """Bit by bit, of prompt rows and decode steps."""
    model: Path = request.getfixturevalue(name)
    found = []
    for variant in ("upstream", "patched"):
        computed_by(variant, run_python, OFF + LOGITS, model, tmp_path)
        found.append(np.load(tmp_path / f"{variant}.npy"))
    assert np.isfinite(found[0]).all() and np.ptp(found[0]) > 0
    assert found[0].tobytes() == found[1].tobytes()


#: Model file, (depth, options) of some sessions: what each gives after prompts at all edges.
GENERATIONS = """
found = {}
with Model(sys.argv[1]) as model:
    imposed = (0.75, 0.5, 0.25) if model.info.n_expert else None  # its head predicts nothing
    for depth, options in json.loads(sys.argv[2]):
        same = dict(draft_n_max=depth, synthetic_acceptance=imposed, checkpoints=0)
        with Session(model, Settings(**same, **SMALL, **options)) as session:
            results = found[json.dumps([depth, options])] = []
            for n in EDGES:
                prompt = made_up(model, n)
                run = session.generate(prompt, max_tokens=12, ignore_eos=True, log_pairs=True)
                run.run()
                pairs = [(p.position, p.drafted, p.actual) for p in run.telemetry.pairs]
                results.append([run.tokens, run.text, pairs, run.telemetry.accepted])
"""
CASES = [(depth, {"prompt_rows": rows}) for depth in (1, 3) for rows in ("last", "all")]
CASES += [(3, {"rollback": "replay"})]


@pytest.mark.parametrize("name", ["demo_file", "moe_file", "next_file"])
def test_either_sync_gives_what_upstream_gives(
    run_python: RunPython, name: str, request: pytest.FixtureRequest
) -> None:
    """Text, drafts and acceptance, whichever context the MTP block is in."""
    model: Path = request.getfixturevalue(name)
    upstreams, found = (
        computed_by(
            variant,
            run_python,
            OFF + GENERATIONS,
            model,
            json.dumps([(d, {**o, "prompt_sync": sync}) for d, o in CASES for sync in syncs]),
        )
        for variant, syncs in (("upstream", ["full"]), ("patched", ["kv", "full"]))
    )
    assert len(found) == 2 * len(upstreams) == 2 * len(CASES)
    for case, ours in found.items():
        depth, options = json.loads(case)
        wanted = upstreams[json.dumps([depth, {**options, "prompt_sync": "full"}])]
        assert len(str(wanted)) > 1000
        assert ours == wanted, case
