"""Graphs of drafting chains: none is built in the steady state, and what is reserved is enough."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from pyllama_mtp import Model
from pyllama_mtp.llama.context import Context
from pyllama_mtp.llama.drafts import compute_drafts, reserve_rounds

from ..marks import usual
from .support import made_up, scaled
from .twocontexts import context, drafts_of, every, in_batches, one_sequence

ONE = np.zeros(1, dtype=np.int32)
DEPTH = 5
GRAPHS: dict[str, dict[str, object]] = {
    "as it is": {},
    "pre-norm": {"hidden": "pre-norm"},
    "q8_0": {"type_k": "q8_0", "type_v": "q8_0"},
    "no flash attention": {"flash_attn": "off"},
}


def a_round(found: Context, depth: int, kept: int = 1) -> None:
    """Draft, verify, go back; of depth 0: a plain step."""
    start, newest = found.past(), made_up(found.model, 1, found.past())
    drafts = compute_drafts(found, newest, ONE, depth)[:, 0] if depth else newest[:0]
    tokens = np.concatenate([newest, drafts])
    found.decode_batch(one_sequence(tokens, start, outputs=every(len(tokens))))
    assert found.remove(start + min(kept, depth + 1))


def n_built(found: Context, rounds: Callable[[], None]) -> int:
    before = found.graphs_built
    rounds()
    return found.graphs_built - before


@pytest.mark.parametrize("options", GRAPHS.values(), ids=GRAPHS)
def test_no_graph_is_built_in_the_steady_state(model: Model, options: dict[str, object]) -> None:
    """A round is two graphs, whose shapes go by its depth. Each is built once, and once more where
    the padded length of the cache grows."""
    depths = (0, 1, 2, 3, 4, 5)
    shapes = 2 * len(depths) - 1
    with context(model, n_rs_seq=DEPTH, **options) as found:
        for batch in in_batches(model, 40):
            found.decode_batch(batch)

        def all_depths() -> None:
            for depth in depths:
                a_round(found, depth)

        assert n_built(found, all_depths) == shapes
        rng, seen = np.random.default_rng(0), set()
        while found.past() + 2 * (DEPTH + 1) < 256:
            depth = int(rng.integers(0, DEPTH + 1))
            kept = int(rng.integers(1, depth + 2))
            seen.add((depth, kept))
            assert n_built(found, lambda d=depth, k=kept: a_round(found, d, k)) == 0, seen  # type: ignore[misc]
        assert len(seen) > 15
        while found.past() < 256:
            a_round(found, 0)
        assert n_built(found, all_depths) in (shapes, shapes - 1)  # a plain step was there already
        assert n_built(found, all_depths) == 0


def test_other_batches_in_between_build_nothing_again(model: Model) -> None:
    """A prompt of another sequence, drafts of several: rounds find theirs afterwards."""
    with context(model, n_rs_seq=DEPTH, n_seq_max=2, unified=True) as found:
        found.decode_batch(one_sequence(made_up(model, 20)))
        found.decode_batch(one_sequence(made_up(model, 20, 60), seq=1))
        for depth in (3, 0):
            a_round(found, depth)
        compute_drafts(found, np.array([7, 9], np.int32), np.array([0, 1], np.int32), 3)
        found.decode_batch(one_sequence(made_up(model, 40, 80), 20, seq=1))
        assert n_built(found, lambda: [a_round(found, depth) for depth in (3, 0, 3)]) == 0  # type: ignore[func-returns-value]


@pytest.mark.parametrize(("n_seqs", "depth"), usual((1, 5), (3, 2), long=[(1, 1)]))
def test_rounds_lie_in_the_buffers_of_prompts(model: Model, n_seqs: int, depth: int) -> None:
    """They allocate nothing, reserved or not, however full the cache is."""
    for reserved in (True, False):
        with context(model, n_rs_seq=depth, n_seq_max=n_seqs, unified=True) as found:
            seqs = np.arange(n_seqs, dtype=np.int32)
            for seq in range(n_seqs):
                found.decode_batch(one_sequence(made_up(model, 40), seq=seq))
            before, start = found.memory(), 40
            if reserved:
                reserve_rounds(found, n_seqs, range(depth + 1))
            while start < 480 // n_seqs:
                newest = made_up(model, n_seqs, start)
                drafts = compute_drafts(found, newest, seqs, depth)
                tokens = np.concatenate([newest[None], drafts]).T.ravel()
                positions = np.tile(np.arange(start, start + depth + 1), n_seqs)
                batch = one_sequence(tokens, outputs=every(len(tokens)))
                batch.positions, batch.seqs = positions.astype(np.int32), np.repeat(seqs, depth + 1)
                found.decode_batch(batch)
                start += 1 + start % (depth + 1)
                assert all(found.remove(start, seq) for seq in range(n_seqs))
                plain = one_sequence(newest, outputs=every(n_seqs))
                plain.positions, plain.seqs = np.full(n_seqs, start, dtype=np.int32), seqs
                found.decode_batch(plain)
                start += 1
            assert found.memory() == before


def test_drafts_too_large_for_them_have_their_own(model: Model) -> None:
    """Of a chain of more tokens than prompts' graphs have, all logits are kept: drawn, with noise
    that leaves the best ones."""
    newest, ones, n = np.array([7], np.int32), np.ones(1, np.float32), 50
    with context(model, n_rs_seq=DEPTH, n_ubatch=DEPTH + 2) as found:
        for batch in in_batches(model, 40):
            found.decode_batch(batch)
        noise = np.zeros((n, 1, found.n_head), np.float32)
        wanted, before = drafts_of(found, 7, n), found.memory()
        for _ in range(2):
            drafts = compute_drafts(found, newest, ONE, n, temperatures=ones, noise=noise)
            assert drafts[:, 0].tolist() == wanted == drafts_of(found, 7, n)
        assert found.memory()["compute"] >= before["compute"] + noise.nbytes


def test_contexts_close_without_complaint(model: Model, caplog: pytest.LogCaptureFixture) -> None:
    """llama.cpp compares a buffer with what was reserved for it when a context ends."""
    for reserved in (False, True):
        with context(model, n_rs_seq=DEPTH) as found:
            if reserved:
                reserve_rounds(found, 1, range(DEPTH + 1))
            found.decode_batch(one_sequence(made_up(model, 30)))
            for depth in (3, 5, 0):
                a_round(found, depth)
    assert not [record.getMessage() for record in caplog.records]


def test_many_shapes(model: Model) -> None:
    """More than are kept: those unused for longest are built again, and drafts do not change."""
    with context(model, n_rs_seq=DEPTH) as found:
        found.decode_batch(one_sequence(made_up(model, 30)))
        wanted = drafts_of(found, 7, 50)
        for depth in itertools.chain(range(1, 50), range(50, 0, -1)):
            assert drafts_of(found, 7, depth) == wanted[:depth]
        assert n_built(found, lambda: drafts_of(found, 7, 49)) == 1
        assert n_built(found, lambda: drafts_of(found, 7, 1)) == 0
        assert found.memory()["compute"] < scaled(2e9)
