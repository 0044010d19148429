"""The patched variant, with everything switched off, is upstream to the last bit.

Each variant computes in a process of its own, because a process loads one of them.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from ..processes import RunPython
from .support import EDGES

#: model file, output folder; settings are the same in both variants.
CODE = f"""
import json, sys
from pathlib import Path

import numpy as np

from pyllama_mtp import Model, Session, Settings
from pyllama_mtp.llama import native
from pyllama_mtp.llama.context import Context, ContextOptions

EDGES = {EDGES!r}
small = dict(n_ctx=512, n_batch=48, n_ubatch=16, n_threads=1)
native.load().set_small_batch(False)
native.load().set_large_batch(False)
native.load().set_large_batch(False)
native.load().set_few_rows_attention(False)
rows, tokens = [], {{}}
with Model(sys.argv[1]) as model:
    text = np.array([(7 * i * i + 13 * i + 5) % model.n_vocab for i in range(max(EDGES))], "i4")
    for n in EDGES:
        with Context(model, ContextOptions(**small, n_outputs_max=48)) as context:
            for start in range(0, n, 48):
                part = text[start : min(start + 48, n)]
                context.decode(part, start, np.ones(len(part), "i1"))
            rows += [context.logits(row).copy() for row in range(len(part))]
            for position in range(n, n + 5):  # decode steps
                context.decode(rows[-1].argmax(keepdims=True), position, np.ones(1, "i1"))
                rows.append(context.logits(0).copy())
    known = model.architecture != "qwen3next"  # upstream keeps no snapshots of it
    for rollback in ("snapshot", "replay") if known else ("replay",):
        options = dict(draft_n_max=3, rollback=rollback, checkpoints=0, **small)
        with Session(model, Settings(**options)) as session:
            for n in EDGES:
                run = session.generate(text[:n], max_tokens=12, ignore_eos=True).run()
                tokens[f"{{rollback}} {{n}}"] = run.tokens, run.telemetry.accepted
np.save(Path(sys.argv[2]) / "rows.npy", np.stack(rows))
print(json.dumps([native.load().variant, tokens]))
"""


def outcome(
    run: RunPython, model: Path, folder: Path, variant: str
) -> tuple[bytes, dict[str, object]]:
    """The bytes of the logits, and the tokens with MTP on."""
    target = folder / variant
    target.mkdir()
    done = run(CODE, model, target, env={"PYLLAMA_MTP_LIB": variant})
    assert done.returncode == 0, done.stderr
    loaded, tokens = json.loads(done.stdout)
    assert loaded == variant
    rows = np.load(target / "rows.npy")
    assert np.isfinite(rows).all() and np.ptp(rows) > 0
    return rows.tobytes(), tokens


@pytest.mark.parametrize("name", ["demo_file", "moe_file", "next_file"])
def test_same_logits_and_same_tokens(
    run_python: RunPython, tmp_path: Path, name: str, request: pytest.FixtureRequest
) -> None:
    """Plain logits bit by bit, of prompt rows and decode steps; with MTP, tokens and acceptance."""
    model = request.getfixturevalue(name)
    upstream = outcome(run_python, model, tmp_path, "upstream")
    patched = outcome(run_python, model, tmp_path, "patched")
    assert patched[0] == upstream[0], "logits differ between the variants"
    assert patched[1] == upstream[1], "tokens or acceptance with MTP differ between the variants"


#: Model file, (depth, options) of some sessions; prints what each gives after prompts at all edges.
GENERATIONS = f"""
import json, sys

from pyllama_mtp import Model, Session, Settings
from pyllama_mtp.llama import native

EDGES = {EDGES!r}
small = dict(n_ctx=512, n_batch=48, n_ubatch=16, n_threads=1, checkpoints=0)
native.load().set_small_batch(False)
native.load().set_few_rows_attention(False)
found = {{}}
with Model(sys.argv[1]) as model:
    text = [(7 * i * i + 13 * i + 5) % model.n_vocab for i in range(max(EDGES))]
    imposed = (0.75, 0.5, 0.25) if model.info.n_expert else None  # its head predicts nothing
    for depth, options in json.loads(sys.argv[2]):
        chosen = Settings(draft_n_max=depth, synthetic_acceptance=imposed, **small, **options)
        with Session(model, chosen) as session:
            results = found[json.dumps([depth, options])] = []
            for n in EDGES:
                run = session.generate(text[:n], max_tokens=12, ignore_eos=True, log_pairs=True)
                run.run()
                pairs = [(p.position, p.drafted, p.actual) for p in run.telemetry.pairs]
                results.append([run.tokens, run.text, pairs, run.telemetry.accepted])
print(json.dumps([native.load().variant, found]))
"""


@pytest.mark.parametrize("name", ["demo_file", "moe_file", "next_file"])
def test_either_sync_gives_what_upstream_gives(
    run_python: RunPython, name: str, request: pytest.FixtureRequest
) -> None:
    """Text, drafts and acceptance, whichever context the MTP block is in."""
    model: Path = request.getfixturevalue(name)
    outcomes = {}
    for variant, syncs in (("upstream", ("full",)), ("patched", ("kv", "full"))):
        cases = [
            (depth, {"prompt_rows": rows, "prompt_sync": sync})
            for depth in (1, 3)
            for rows in ("last", "all")
            for sync in syncs
        ]
        env = {"PYLLAMA_MTP_LIB": variant}
        done = run_python(GENERATIONS, model, json.dumps(cases), env=env)
        assert done.returncode == 0, done.stderr
        loaded, outcomes[variant] = json.loads(done.stdout)
        assert loaded == variant and len(outcomes[variant]) == len(cases)
    for case, found in outcomes["patched"].items():
        depth, options = json.loads(case)
        wanted = outcomes["upstream"][json.dumps([depth, {**options, "prompt_sync": "full"}])]
        assert len(str(wanted)) > 1000
        assert found == wanted, case
