"""Drafting in one graph: the tokens that upstream's single steps draft, and nothing else changes.

A step of a chain runs the same operations on one row as a single step does, so on an AVX-512
machine tokens agree to the bit, across a padding edge of the cache too. Elsewhere the attention may
add up in another order there, because all steps of a chain see the same length of cache. A
difference is therefore accepted where the two best logits of the single step are closer than
ROUNDING; most chains must agree all the same. Steps of several sequences at once do take other
kernels.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
import pytest

from pyllama_mtp import Model
from pyllama_mtp.drafting.head import set_draft_head
from pyllama_mtp.llama.batch import Ints
from pyllama_mtp.llama.context import Context
from pyllama_mtp.llama.drafts import compute_drafts, draft_logits

from ..marks import usual
from ..trimmed import head_rows
from .support import c_call, made_up
from .twocontexts import (
    TwoContexts,
    agree,
    beside,
    context,
    drafts_of,
    every,
    in_batches,
    one_sequence,
    rows_of,
    some,
)

ONE = np.zeros(1, dtype=np.int32)


# -- the same drafts; of other settings: test_in_trunk.py ------------------------------------------


def agreeing(
    found: Context, wanted: TwoContexts, n_turns: int, n: int, ids: Ints | None = None
) -> float:
    """The part of chains that are what single steps draft, one after each token of a text that goes
    on; some chains are of other tokens than others."""
    n_equal, seen = 0, set[tuple[int, ...]]()
    for _ in range(n_turns):
        at = found.past()
        newest = int(made_up(found.model, 1, 3 * at)[0])
        chain = drafts_of(found, newest, n)
        assert drafts_of(found, newest, n) == chain
        seen.add(tuple(chain))
        n_equal += agree(chain, wanted.draft(newest, n, ids=ids))
        batch = one_sequence(made_up(found.model, 1, at), at)
        found.decode_batch(batch)
        wanted.decode(batch)
    assert len(seen) > 1 and (ids is None or {*sum(seen, ())} <= {*ids.tolist()})
    return n_equal / n_turns


@pytest.mark.parametrize(
    ("kind", "flash"),
    usual(("f16", "on"), ("f32", "off"), ("q8_0", "on"), long=[("f16", "off"), ("q4_0", "on")]),
)
def test_chains_across_an_edge_of_the_cache(model: Model, kind: str, flash: str) -> None:
    """Graphs see a multiple of 256 cells of the cache, so the first steps of a chain see more than
    they would alone when the last ones need them; and chains longer than a graph of the trunk."""
    options = {"type_k": kind, "type_v": kind, "flash_attn": flash}
    with beside(model, in_batches(model, 248), **options) as (found, wanted):
        assert agreeing(found, wanted, 12, 8) >= 0.9
        assert agreeing(found, wanted, 2, 50) >= 0.5


@pytest.mark.parametrize("size", [37, 700])
def test_with_a_draft_head(model: Model, size: int) -> None:
    """Ids are those of the whole vocabulary, from step to step too."""
    drawn = np.random.default_rng(0).choice(model.n_vocab, size, replace=False)
    ids = np.sort(drawn).astype(np.int32)
    with beside(model, in_batches(model, 17)) as (found, wanted):
        set_draft_head(found, head_rows(model.info, ids), ids)
        assert found.n_head == size
        assert agreeing(found, wanted, 10, 8, ids) >= 0.9


def test_after_a_shift_of_positions(qwen3next: Model) -> None:
    """K waits for its shift until the next computation, which may be that of a draft. All positions
    are shifted, so nothing else changes."""
    with context(qwen3next, type_k="f32") as found:
        found.decode_batch(one_sequence(made_up(qwen3next, 40)))
        logits = []
        for _ in range(2):
            compute_drafts(found, ONE + 7, ONE, 1, n_candidates=qwen3next.n_vocab)
            logits.append(np.sort(draft_logits(found)[0, 0]))
            memory = found.library.lib.llama_get_memory(found.handle)
            c_call(found, "llama_memory_seq_add", 0, 0, -1, 23, handle=memory)
        np.testing.assert_allclose(logits[1], logits[0], atol=1e-3 * np.ptp(logits[0]))


def test_a_sampler_in_the_graph_is_for_decodes(model: Model) -> None:
    """A chain picks its drafts by itself, and has no nodes of the sampler."""
    with context(model, trace=True) as found:
        found.decode_batch(one_sequence(made_up(model, 12)))
        before = len(found.nodes())
        drafts, n = drafts_of(found, 7), len(found.nodes()) - before
        lib = found.library.lib
        sampler = lib.pyllama_sampler_chain_init()
        lib.pyllama_sampler_chain_add(sampler, lib.pyllama_sampler_init_greedy())
        pointer = ctypes.c_void_p(int(found.library.ffi.cast("uintptr_t", sampler)))
        assert c_call(found, "llama_set_sampler", 0, pointer) & 1
        before = len(found.nodes())
        assert drafts_of(found, 7) == drafts and len(found.nodes()) == before + n
        c_call(found, "llama_set_sampler", 0, None)
        lib.llama_sampler_free(sampler)


# -- what a draft leaves ---------------------------------------------------------------------------


@pytest.fixture(
    params=usual({}, {"n_rs_seq": 3}, long=[{"type_k": "q8_0", "type_v": "q8_0"}]), ids=str
)
def found(model: Model, request: pytest.FixtureRequest) -> Iterator[Context]:
    """A context with two sequences."""
    with context(model, n_seq_max=2, unified=True, trace=True, **request.param) as one:
        one.decode_batch(one_sequence(made_up(model, 9, 40), seq=1))
        one.decode_batch(one_sequence(made_up(model, 12), outputs=some(12)))
        yield one


@pytest.mark.parametrize("depth", [1, 6])
def test_a_draft_leaves_all_as_it_was(found: Context, depth: int) -> None:
    """Every byte of the caches of every sequence, and where they end; what the last decode left:
    logits, greedy tokens, candidates. Ids of drafts are copied, and the logits asked for."""

    def draft(order: list[int], n_candidates: int = 0) -> list[list[int]]:
        before, seqs = found.output_bytes, np.array(order, dtype=np.int32)
        tokens = np.array([7, 9], np.int32)[seqs]
        drafts = compute_drafts(found, tokens, seqs, depth, n_candidates)
        assert found.output_bytes == before + 4 * drafts.size * (1 + n_candidates)
        return drafts.tolist()

    def left() -> list[object]:
        states = [(bytes(found.save_state(seq=seq)), found.past(seq)) for seq in range(2)]
        rows = [found.logits(int(row)).tobytes() for row in np.flatnonzero(some(12))]
        return [states, rows, *(found.rewind(seq) for seq in range(2))]

    before, first = left(), draft([0])
    for order in ([1], [0, 1], [1, 0]):
        draft(order)
        assert left() == before
    found.set_greedy(True)
    assert draft([0]) == first and left() == before
    found.set_candidates(4)
    found.decode_batch(one_sequence(made_up(found.model, 5, 12), 12, outputs=every(5)))
    wanted = [(found.argmax(row), *map(np.copy, found.candidates(row))) for row in range(5)]
    draft([0], 2)
    for row, (best, ids, values) in enumerate(wanted):
        assert found.argmax(row) == best
        again = [part.tobytes() for part in found.candidates(row)]
        assert again == [ids.tobytes(), values.tobytes()]
    found.set_greedy(False)
    draft([0])
    assert [found.argmax(row) for row in range(5)] == [best for best, *_ in wanted]


def test_switches_of_decodes_are_not_those_of_drafts(model: Model) -> None:
    """Greedy tokens, candidates, the tap and snapshots are as they were set, before and after."""
    with context(model, need_embd_pre_norm=True, n_rs_seq=3) as found:
        batches = [one_sequence(made_up(model, 12), outputs=some(12))]
        batches.append(one_sequence(made_up(model, 4, 12), 12, outputs=every(4)))
        outcomes = []
        for drafting in (False, True):
            found.clear()
            outcomes.append([])
            for batch in batches:
                found.decode_batch(batch)
                if drafting:
                    drafts_of(found, 7)
                outcomes[-1].append(found.hidden_rows().tobytes())
                rows = np.flatnonzero(batch.outputs)
                outcomes[-1] += [found.logits(int(row)).tobytes() for row in rows]
            assert found.remove(14)
            outcomes[-1].append(bytes(found.save_state()))
        assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("part", [False, True], ids=["whole", "part"])
def test_the_graph_runs_the_block_once_a_step(found: Context, depth: int, part: bool) -> None:
    """On one row each time; what the steps share is built once."""
    if part:
        ids = np.arange(0, found.model.n_vocab, 7, dtype=np.int32)
        set_draft_head(found, head_rows(found.model.info, ids), ids)
    before = len(found.nodes())
    drafts_of(found, 7, depth)
    nodes = found.nodes()[before:]
    for name in ("mtp_attn_norm", "mtp_attn_residual", "mtp_ffn_out", "mtp_shared_head_norm"):
        assert rows_of(nodes, name) == [1] * depth, name
    assert rows_of(nodes, "result_output") == [1] * depth
    searches = [n.shape for n in nodes if n.name == "mtp_argmax" and n.op == "CUSTOM"]
    assert searches == [(1, 1, 1, 1)] * depth
    assert not any(n.name in ("hidden_tap_store", "mtp_shift") for n in nodes)
