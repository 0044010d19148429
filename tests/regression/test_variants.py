"""The patched variant, with everything switched off, is upstream to the last bit. What upstream's
variant lacks is refused with words that say so, and what it need not know of is ignored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyllama_mtp.models.surgery import drop_head, extract_head

from ..marks import usual
from ..processes import RunPython
from ..trimmed import write_trimmed
from .support import computed_by

OFF = "native.load().lib.pyllama_set_cpu_changes(False)"
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


@pytest.mark.parametrize("name", usual("demo_file", long=["next_file", "moe_file"]))
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
def told(answer):
    pairs = [(p.position, p.drafted, p.actual) for p in answer.telemetry.pairs]
    return [answer.tokens, answer.text, pairs, answer.telemetry.accepted]

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
                results.append(told(run))
        prompts = [made_up(model, n) for n in (30, 7, 31, 60, 1)]
        with BatchSession(model, Settings(**same, **SMALL, **options), 3) as session:
            batch = session.generate(prompts, max_tokens=12, ignore_eos=True, log_pairs=True)
            results.append([told(answer) for answer in batch.run().results])
"""
CASES = [(depth, {"prompt_rows": rows}) for depth in (1, 3) for rows in ("last", "all")]
CASES += [(3, {"rollback": "replay"})]


@pytest.mark.long
@pytest.mark.parametrize("name", ["demo_file", "next_file", "moe_file"])
def test_either_sync_gives_what_upstream_gives(
    run_python: RunPython, name: str, request: pytest.FixtureRequest
) -> None:
    """Text, drafts and acceptance, whichever context the MTP block is in; of several sequences,
    too."""
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


# -- upstream's variant ----------------------------------------------------------------------------

#: Model files: the demo model, with a head of its own over a part of the vocabulary, and with its
#: head in another file.
LACKING = """
from pyllama_mtp.errors import PyllamaMtpError
from pyllama_mtp.drafting.head import DraftHead, set_draft_head
from pyllama_mtp.llama.drafts import compute_drafts, reserve_rounds

demo, trimmed, apart = sys.argv[1:]
size = dict(n_ctx=64, n_batch=48, n_ubatch=16, n_threads=1, n_outputs_max=48)
one, ones = np.zeros(1, np.int32), np.ones(1, np.int8)
found = said = {}

def refused(name, call):
    try:
        call()
    except PyllamaMtpError as error:
        said[name] = f"{type(error).__name__}: {error}"

with Model(demo) as model:
    refused("with_mtp", lambda: Context(model, ContextOptions(**size, with_mtp=True)))
    with Context(model, ContextOptions(**size)) as plain:
        refused("draft", lambda: compute_drafts(plain, one + 7, one, 1))
        refused("reserve", lambda: reserve_rounds(plain, 1, [1]))
        plain.decode(np.arange(3, dtype=np.int32), 0, np.ones(3, np.int8))
        said["goes on"] = plain.argmax(2) >= 0
    ids, logits = np.arange(0, 2048, 7, dtype=np.int32), []
    with Context(model, ContextOptions(**size, mtp_head=True)) as block:
        for _ in range(2):
            block.clear()
            block.decode(one + 7, 0, ones, np.ones((1, model.n_embd), np.float32))
            logits.append(block.logits(0).tobytes())
            refused("head", lambda: set_draft_head(block, DraftHead(model.info).rows(ids), ids))
    said["same logits"] = logits[0] == logits[1]
    refused("vocabulary", lambda: Session(model, Settings(n_ctx=64, draft_vocab=300)))
    with Session(model, Settings(draft_n_max=0, **SMALL)) as session:
        refused("hidden states", lambda: session.hidden_states("import"))
        session.generate("import", max_tokens=2).run()
    for vocab in ("auto", "full"):
        with Session(model, Settings(n_ctx=64, draft_vocab=vocab)) as session:
            said[vocab] = session._engine.head.context.draft_ids
for mtp in (True, False):
    refused(f"trimmed {mtp}", lambda: Model(trimmed, mtp=mtp))
refused("apart", lambda: Model(apart))
Model(apart, mtp=False).close()
"""


@pytest.fixture(scope="module")
def said(
    run_python: RunPython, demo_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What upstream's library makes of it, by name."""
    folder = tmp_path_factory.mktemp("files")
    ids = np.arange(1, 2048, 3)
    trimmed = write_trimmed(demo_file, folder / "trimmed.gguf", ids, ids)
    extract_head(demo_file, folder / "mtp-apart.gguf")
    files = (demo_file, trimmed, drop_head(demo_file, folder / "apart.gguf"))
    found: dict[str, Any] = computed_by("upstream", run_python, LACKING, *files)
    return found


@pytest.mark.parametrize(
    ("what", "words"),
    {
        "with_mtp": ["UsageError", "with_mtp", "patched"],
        "draft": ["UsageError", "with_mtp"],
        "reserve": ["Error"],
        "head": ["UsageError", "a draft head is not possible here: it needs the patched library"],
        "vocabulary": ["UsageError", "draft_vocab 300 is not in upstream's library"],
        "hidden states": ["UsageError", "hidden-state tap is not possible"],
        "trimmed True": ["ModelFileError", "683 of 2048 tokens (tensor d2t)", "use the patched"],
        "trimmed False": ["ModelFileError", "683 of 2048 tokens (tensor d2t)", "use the patched"],
        "apart": ["ModelFileError", "in a file of its own", "use the patched variant"],
    }.items(),
)
def test_what_it_lacks_is_refused(said: dict[str, Any], what: str, words: list[str]) -> None:
    assert all(word in said[what] for word in words), said[what]


def test_contexts_go_on_and_the_whole_vocabulary_is_drafted_over(said: dict[str, Any]) -> None:
    assert said["goes on"] and said["same logits"]
    assert said["auto"] is said["full"] is None
