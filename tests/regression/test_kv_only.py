"""K/V-only sync leaves the draft cache that the whole MTP block would leave: the same bytes.

And with them the same drafts, the same acceptance and the same text, as upstream's library too.
Equal batches give equal graphs up to K and V, so nothing here needs a tolerance.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess

import numpy as np
import pytest

from pyllama_mtp import Model, Session
from pyllama_mtp.batch import Batch
from pyllama_mtp.context import Context, ContextOptions
from pyllama_mtp.hidden import Floats, HostRows

from .support import EDGES, N_BATCH, N_CTX, N_UBATCH, settings

RunPython = Callable[..., "CompletedProcess[str]"]

#: Types of the K and of the V cache, flash attention. A quantized V cache needs it.
CACHES = [
    *((kind, kind, flash) for kind in ("f16", "f32") for flash in ("on", "off")),
    *((kind, kind, "on") for kind in ("q8_0", "q4_0")),
    ("q8_0", "f16", "off"),
    ("q4_0", "f32", "on"),
    ("f16", "q8_0", "auto"),
]
#: Sequences of one batch.
LENGTHS = (5, 19, 11)


def text(model: Model, n: int, start: int = 0) -> list[int]:
    return [(7 * i * i + 13 * i + 5) % model.n_vocab for i in range(start, start + n)]


def context(model: Model, target: Context | None = None, **options: object) -> Context:
    chosen = {"n_ctx": N_CTX, "n_batch": N_BATCH, "n_ubatch": N_UBATCH, "n_threads": 1, **options}
    return Context(model, ContextOptions(**chosen), target)  # type: ignore[arg-type]


def state(draft: Context, seq: int) -> bytes:
    """The cache of one sequence, as Context.save_state() gives it for sequence 0."""
    ffi, lib = draft.library.ffi, draft.library.lib
    data = bytearray(lib.llama_state_seq_get_size_ext(draft.handle, seq, 0))
    target, message = ffi.from_buffer("uint8_t[]", data), ffi.new("char[256]")
    size, n_message = len(data), len(message)
    n = lib.pyllama_state_seq_get(draft.handle, target, size, seq, 0, message, n_message)
    assert n == len(data)
    return bytes(data)


def in_batches(batch: Batch) -> Iterator[Batch]:
    """A batch in parts of at most N_BATCH tokens."""
    assert isinstance(batch.hidden, HostRows)
    for start in range(0, len(batch.tokens), N_BATCH):
        part = slice(start, start + N_BATCH)
        columns = batch.tokens[part], batch.positions[part], batch.seqs[part]
        yield Batch(*columns, batch.outputs[part], batch.hidden.data[part])


def states_of(model: Model, n: int) -> Floats:
    """Hidden states for `n` tokens. Any will do: they are random, the first one is zeros."""
    found = np.random.default_rng(0).standard_normal((n, model.n_embd)).astype(np.float32)
    found[0] = 0
    return found


def one_sequence(model: Model, n: int) -> Batch:
    none = np.zeros(n, dtype=np.int8)
    tokens = np.array(text(model, n), dtype=np.int32)
    return Batch(tokens, np.arange(n, dtype=np.int32), 0 * tokens, none, states_of(model, n))


def several_sequences(model: Model) -> Batch:
    """One token of each sequence in turn, until all are used up."""
    longest, n_seqs = max(LENGTHS), len(LENGTHS)
    turns = [(p, s) for p in range(longest) for s in range(n_seqs) if p < LENGTHS[s]]
    positions, seqs = (np.array(column, dtype=np.int32) for column in zip(*turns, strict=True))
    found = one_sequence(model, len(turns))
    return Batch(found.tokens, positions, seqs, found.outputs, found.hidden)


def caches(model: Model, batch: Batch, n_seqs: int, **options: object) -> list[bytes]:
    """The draft cache of each sequence after `batch`."""
    several = {"n_seq_max": n_seqs, "n_outputs_max": n_seqs}
    with (
        context(model, **several) as target,
        context(model, target, mtp_head=True, trace=True, **several, **options) as draft,
    ):
        for part in in_batches(batch):
            draft.decode_batch(part)
            whole = any(node.name.startswith("mtp_ffn_out") for node in draft.nodes())
            assert whole is draft.options.full_block, "the switch has no effect"
        return [state(draft, seq) for seq in range(n_seqs)]


def check(model: Model, batch: Batch, n_seqs: int = 1, **options: object) -> None:
    """The caches are equal; they are as long as they should be, and not empty of content."""
    found = caches(model, batch, n_seqs, **options)
    wanted = caches(model, batch, n_seqs, full_block=True, **options)
    for seq in range(n_seqs):
        assert found[seq] == wanted[seq], f"sequence {seq}"
        assert len(found[seq]) > 32 * np.count_nonzero(batch.seqs == seq)
        assert len(set(found[seq])) > 50


def test_a_batch_without_outputs_does_not_end_the_process(
    run_python: RunPython, demo_file: Path
) -> None:
    """The indices of output rows are then in no graph, and have no buffer to be written to."""
    code = """
import sys
import numpy as np
from pyllama_mtp import Model
from pyllama_mtp.context import Context, ContextOptions
from pyllama_mtp.hidden import Floats, HostRows
with Model(sys.argv[1]) as model:
    options = ContextOptions(n_ctx=64, n_batch=8, n_ubatch=8, n_threads=1, mtp_head=True)
    with Context(model, options) as draft:
        n = np.arange(8, dtype=np.int32)
        draft.decode(n, 0, np.zeros(8, dtype=np.int8), np.zeros((8, model.n_embd), dtype="f4"))
print("done")
"""
    done = run_python(code, demo_file)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


@pytest.mark.parametrize(("type_k", "type_v", "flash_attn"), CACHES)
def test_cache_types(model: Model, type_k: str, type_v: str, flash_attn: str) -> None:
    """With a rotation of K and V where they are quantized; one sequence, and three in a batch."""
    options = {"type_k": type_k, "type_v": type_v, "flash_attn": flash_attn}
    check(model, one_sequence(model, 37), **options)
    check(model, several_sequences(model), len(LENGTHS), **options)


@pytest.mark.parametrize("n", EDGES)
def test_batch_edges(model: Model, n: int) -> None:
    check(model, one_sequence(model, n))


@pytest.mark.parametrize("n_ubatch", [1, 7, 16, 48])
@pytest.mark.parametrize("cache", ["f16", "q8_0"])
def test_graph_sizes(model: Model, n_ubatch: int, cache: str) -> None:
    options = {"n_ubatch": n_ubatch, "type_k": cache, "type_v": cache}
    check(model, one_sequence(model, N_BATCH + 1), **options)
    check(model, several_sequences(model), len(LENGTHS), **options)


def test_drafts_after_it(model: Model) -> None:
    """Logits of a batch with outputs, on the cache that either has left."""
    n, found = 37, []
    batch, states = one_sequence(model, n), states_of(model, 6)
    tokens, some = np.array(text(model, 6, n), dtype=np.int32), np.array([0, 1, 0, 0, 1, 1], "i1")
    for full_block in (False, True):
        with (
            context(model) as target,
            context(model, target, mtp_head=True, full_block=full_block, n_outputs_max=3) as draft,
        ):
            draft.decode_batch(batch)
            draft.decode(tokens, n, some, states)
            found.append(b"".join(draft.logits(int(i)).tobytes() for i in np.flatnonzero(some)))
            draft.decode(tokens, n + 6, 0 * some, states)
            found.append(draft.save_state())
    assert found[0] == found[2], "logits"
    assert found[1] == found[3], "cache"


# -- generations -----------------------------------------------------------------------------------


def prompts(model: Model) -> list[list[int]]:
    """Prompts at batch edges; the last ones go on from, and part from, what is in the cache."""
    return [*(text(model, n) for n in EDGES), text(model, 80) + text(model, 9, 500)]


@dataclass
class Outcome:
    """Of a generation: (position, drafted, actual) of every draft, accepted ones, draft cache."""

    tokens: list[int]
    text: str
    pairs: list[tuple[int, int, int]]
    accepted: list[int]
    cache: bytes


def outcome(model: Model, depth: int, **options: object) -> list[Outcome]:
    """Generations after each prompt, in one session."""
    found = []
    with Session(model, settings(depth, **options)) as session:
        for prompt in prompts(model):
            run = session.generate(prompt, max_tokens=12, ignore_eos=True, log_pairs=True).run()
            drafter = session._engine.drafter
            assert drafter and run.telemetry.pairs
            assert drafter.context.options.full_block is (options["prompt_sync"] == "full")
            pairs = [(p.position, p.drafted, p.actual) for p in run.telemetry.pairs]
            cache = drafter.context.save_state()
            found.append(Outcome(run.tokens, run.text, pairs, run.telemetry.accepted, cache))
    return found


#: Acceptance of a model whose head predicts nothing: imposed, the same every time.
IMPOSED = (0.75, 0.5, 0.25)


@pytest.mark.parametrize("rollback", ["snapshot", "replay"])
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("name", ["demo", "moe"])
def test_generations(name: str, depth: int, rollback: str, request: pytest.FixtureRequest) -> None:
    """Accepted tokens are synced after each verification, rejected ones are gone."""
    model: Model = request.getfixturevalue(name)
    imposed = IMPOSED if name == "moe" else None
    options = {"rollback": rollback, "synthetic_acceptance": imposed}
    kv = outcome(model, depth, prompt_sync="kv", **options)
    full = outcome(model, depth, prompt_sync="full", **options)
    for prompt, a, b in zip(prompts(model), kv, full, strict=True):
        assert a == b, f"after a prompt of {len(prompt)} tokens"
    held = [drafted == actual for run in kv for _, drafted, actual in run.pairs]
    assert name == "moe" or (any(held) and not all(held))


#: Model file, settings by name; prints what outcome() above gives for each of them.
CODE = f"""
import hashlib, json, sys

from pyllama_mtp import Model, Session, Settings, native

EDGES = {EDGES!r}
small = dict(n_ctx={N_CTX}, n_batch={N_BATCH}, n_ubatch={N_UBATCH}, n_threads=1, checkpoints=0)
native.load().set_small_batch(False)  # which round otherwise
native.load().set_few_rows_attention(False)
found = {{}}
with Model(sys.argv[1]) as model:
    text = [(7 * i * i + 13 * i + 5) % model.n_vocab for i in range(max(EDGES))]
    imposed = {IMPOSED!r} if model.info.n_expert else None
    for depth, options in json.loads(sys.argv[2]):
        settings = Settings(
            draft_n_max=depth, synthetic_acceptance=imposed, **small, **options
        )
        with Session(model, settings) as session:
            results = found[json.dumps([depth, options])] = []
            for n in EDGES:
                run = session.generate(text[:n], max_tokens=12, ignore_eos=True, log_pairs=True)
                run.run()
                draft = session._engine.drafter.context
                assert draft.options.full_block is (options["prompt_sync"] == "full")
                assert (draft.hidden_bytes_sent > 0) is (options["handoff"] == "host")
                cache = hashlib.sha256(draft.save_state()).hexdigest()
                pairs = [(p.position, p.drafted, p.actual) for p in run.telemetry.pairs]
                results.append([run.tokens, run.text, pairs, run.telemetry.accepted, cache])
print(json.dumps([native.load().variant, found]))
"""
#: What upstream's library can do, and every combination that the patched one adds.
UPSTREAMS = ("full", "host")
SWITCHES = list(itertools.product(("kv", "full"), ("device", "host")))


def outcomes(
    run: RunPython, model: Path, cases: Sequence[tuple[int, dict[str, str]]], variant: str | None
) -> dict[str, object]:
    done = run(CODE, model, json.dumps(cases), env={"PYLLAMA_MTP_LIB": variant} if variant else {})
    assert done.returncode == 0, done.stderr
    loaded, found = json.loads(done.stdout)
    assert loaded == (variant or "patched")
    return dict(found)


@pytest.mark.parametrize("name", ["demo_file", "moe_file"])
def test_every_switch_gives_what_upstream_gives(
    run_python: RunPython, name: str, request: pytest.FixtureRequest
) -> None:
    """Each switch alone, and all together: text, drafts, acceptance, and bytes of the cache."""
    file: Path = request.getfixturevalue(name)

    def case(depth: int, sync: str, handoff: str, rows: str) -> tuple[int, dict[str, str]]:
        return depth, {"prompt_sync": sync, "handoff": handoff, "prompt_rows": rows}

    shapes = list(itertools.product((1, 3), ("last", "all")))
    wanted = outcomes(
        run_python, file, [case(d, *UPSTREAMS, rows) for d, rows in shapes], "upstream"
    )
    cases = [case(d, *switch, rows) for d, rows in shapes for switch in SWITCHES]
    found = outcomes(run_python, file, cases, None)
    for depth, rows in shapes:
        reference = wanted[json.dumps(case(depth, *UPSTREAMS, rows))]
        assert len(str(reference)) > 1000
        for switch in SWITCHES:
            assert found[json.dumps(case(depth, *switch, rows))] == reference, (depth, rows, switch)
