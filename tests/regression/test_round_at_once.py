"""Drafts and the pass over them in one submission: what they are one after the other."""

from __future__ import annotations

import numpy as np
import pytest

from pyllama_mtp import Model
from pyllama_mtp.drafting.head import draft_head, set_draft_head
from pyllama_mtp.errors import InvalidBatchError
from pyllama_mtp.llama.batch import Batch
from pyllama_mtp.llama.context import Context
from pyllama_mtp.llama.drafts import compute_drafts

from ..adapters import write_adapter
from .support import c_call, made_up
from .twocontexts import context, every, in_batches, one_sequence

LENGTHS = (30, 12, 17)
DEPTH = 3


def round_of(found: Context, newest: list[int], n: int, at_once: bool) -> list[list[int]]:
    """Draft `n` tokens after each sequence's newest, and decode them: all tokens of the pass, then
    the best one of each row."""
    n_seqs, rows = len(newest), n + 1
    tokens = np.repeat(np.array(newest, dtype=np.int32)[:, None], rows, axis=1)
    seqs = np.arange(n_seqs, dtype=np.int32)
    if not at_once:
        tokens[:, 1:] = compute_drafts(found, tokens[:, 0], seqs, n).T
    places = np.array([found.past(seq) for seq in range(n_seqs)])[:, None] + np.arange(rows)
    batch = Batch(tokens.ravel(), places.ravel(), np.repeat(seqs, rows), every(n_seqs * rows))
    if at_once:
        found.draft_and_decode(batch, n)
    else:
        found.decode_batch(batch)
    best = [found.argmax(row) for row in range(n_seqs * rows)]
    return [batch.tokens.tolist(), best]


@pytest.mark.parametrize("n_seqs", [1, 3])
@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("greedy", [False, True])
def test_as_one_after_the_other(model: Model, n_seqs: int, head: bool, greedy: bool) -> None:
    """Drafts, what the pass chooses, and the caches afterwards, whatever is taken back; rounds
    without drafts and of other depths come between."""
    options = {"n_seq_max": n_seqs, "unified": n_seqs > 1, "n_rs_seq": DEPTH}
    with context(model, **options) as one, context(model, **options) as other:
        for found in (one, other):
            if head and (rows := draft_head(model.info, 300)):
                set_draft_head(found, rows.rows(), rows.ids)
            found.set_greedy(greedy)
            for seq in range(n_seqs):
                for batch in in_batches(model, LENGTHS[seq], 40 * seq, seq):
                    found.decode_batch(batch)
        rng = np.random.default_rng(n_seqs)
        newest = made_up(model, n_seqs, 300).tolist()
        for n in (3, 1, 3, 2, 3, 3, 1):
            got = [round_of(found, newest, n, found is one) for found in (one, other)]
            assert got[0] == got[1]
            kept = rng.integers(1, n + 2, n_seqs)
            for found in (one, other):
                for seq in range(n_seqs):
                    assert found.remove(found.past(seq) - n - 1 + int(kept[seq]), seq)
            newest = [got[0][1][seq * (n + 1) + k - 1] for seq, k in enumerate(kept)]
            if n == 2:  # a plain step of the first sequence
                for found in (one, other):
                    found.decode_batch(one_sequence(np.array(newest[:1], np.int32), found.past(0)))
                newest[0] = one.argmax(0)
            for seq in range(n_seqs):
                here, there = (bytes(found.save_state(seq=seq)) for found in (one, other))
                assert here == there


def test_no_graph_is_built_in_the_steady_state(model: Model) -> None:
    """Rounds at once and rounds one after the other have graphs of their own."""
    with context(model, n_rs_seq=DEPTH) as found:
        for batch in in_batches(model, 20):
            found.decode_batch(batch)
        built = []
        for turn in range(6):
            before = found.graphs_built
            round_of(found, [7], DEPTH, at_once=turn % 2 == 0)
            found.remove(20)
            built.append(found.graphs_built - before)
        assert built[:2] == [2, 2] and sum(built[2:]) == 0


def test_where_there_is_none(model: Model, tmp_path_factory: pytest.TempPathFactory) -> None:
    """More drafts than the states can go back by, embeddings that are asked for, and embeddings
    that an adapter changes."""
    with context(model, n_rs_seq=1) as found:
        found.decode_batch(one_sequence(made_up(model, 9)))
        assert found.can_draft_and_decode(1, 1) and not found.can_draft_and_decode(1, 2)
        with pytest.raises(InvalidBatchError):
            round_of(found, [7], 2, at_once=True)
    # With embeddings each sequence is a ubatch of its own, but the pass takes all drafts at once.
    with context(model, n_rs_seq=1, n_seq_max=2, unified=True) as found:
        for seq in range(2):
            found.decode_batch(one_sequence(made_up(model, 9, 40 * seq), seq=seq))
        c_call(found, "llama_set_embeddings", True)
        assert not found.can_draft_and_decode(2, 1)
        with pytest.raises(InvalidBatchError):
            round_of(found, [7, 9], 1, at_once=True)
        c_call(found, "llama_set_embeddings", False)
        assert not found.can_draft_and_decode(1, 3)  # as many rows as there is room for, of one
        assert found.can_draft_and_decode(2, 1) and round_of(found, [7, 9], 1, at_once=True)
    if not model.info.tied_embeddings:
        path = tmp_path_factory.mktemp("adapter") / "a.gguf"
        write_adapter(path, model.info, ["token_embd.weight"])
        with Model(model.path, lora=path) as changed, context(changed, n_rs_seq=1) as found:
            assert not found.can_draft_and_decode(1, 1)
