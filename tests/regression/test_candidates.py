"""Candidates: the best tokens of an output row, with their logits, picked where the logits are.

The reference is the row of all logits that the same decode leaves with the switch off. The graphs
are equal up to the logits, so nothing here needs a tolerance.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from pyllama_mtp import Model, Sampling, Session, native
from pyllama_mtp.batch import Batch
from pyllama_mtp.context import Context, ContextOptions
from pyllama_mtp.drafthead import head_rows
from pyllama_mtp.errors import UsageError
from pyllama_mtp.hidden import HostRows
from pyllama_mtp.sampling import MOST_CANDIDATES
from pyllama_mtp.speculative.drafter import P_MIN_CANDIDATES

from .support import N_BATCH, N_CTX, N_UBATCH, made_up, settings

N = 43  # three graphs
WANTED = [0, 3, 7, 20, 31, 40, 42]
WARM = Sampling(temperature=0.9, top_k=40, top_p=0.95, min_p=0.05)


@pytest.fixture
def target(model: Model) -> Iterator[Context]:
    options = ContextOptions(N_CTX, N_BATCH, N_UBATCH, 1, n_outputs_max=N_BATCH)
    with Context(model, options) as found:
        yield found


def decode(target: Context, n_candidates: int | None) -> None:
    """The same batch; `n_candidates` None: with all logits."""
    target.clear()
    target.set_greedy(n_candidates is not None)
    target.set_candidates(n_candidates or 0)
    marks = np.isin(np.arange(N), WANTED).astype(np.int8)
    target.decode(made_up(target.model, N), 0, marks)


@pytest.mark.parametrize("n", [1, 2, 10, 40, 255, 100_000])
def test_they_are_the_best_ones(target: Context, n: int) -> None:
    decode(target, None)
    rows = {row: target.logits(row).copy() for row in WANTED}
    decode(target, n)
    for row, logits in rows.items():
        best = np.argsort(-logits, kind="stable")[:n]
        ids, values = target.candidates(row)
        assert ids.tolist() == best.tolist()
        assert values.tobytes() == logits[best].tobytes()
        assert target.argmax(row) == best[0]


def test_nothing_else_is_copied(target: Context) -> None:
    decode(target, 40)
    before = target.output_bytes
    decode(target, 40)
    assert target.output_bytes - before == len(WANTED) * (4 + 40 * 8)


def test_equal_logits(target: Context) -> None:
    """All logits are equal where the weights of the head are; ids are the first ones, each once."""
    model = target.model
    options = ContextOptions(N_CTX, N_BATCH, N_UBATCH, 1, mtp_head=True, n_outputs_max=1)
    ids = np.arange(600, dtype=np.int32) * 2
    rows = head_rows(model.path, ids)
    same = replace(rows, data=np.repeat(rows.data[:1], len(rows.data), axis=0))
    with Context(model, options, target) as draft:
        draft.set_draft_head(same, ids)
        draft.set_greedy(True)
        draft.set_candidates(7)
        zero = np.zeros((1, model.n_embd), dtype=np.float32)
        draft.decode(np.array([5], dtype=np.int32), 0, np.ones(1, dtype=np.int8), zero)
        found, values = draft.candidates(0)
        assert found.tolist() == [0, 2, 4, 6, 8, 10, 12] and len(set(values.tolist())) == 1
        draft.set_candidates(1000)
        draft.decode(np.array([6], dtype=np.int32), 1, np.ones(1, dtype=np.int8), zero)
        assert draft.candidates(0)[0].tolist() == ids.tolist(), "no more than the head has"


def test_of_every_step_of_a_chain(target: Context) -> None:
    """They are those of single steps, with a draft head's own tokens."""
    model, depth = target.model, 4
    options = ContextOptions(N_CTX, N_BATCH, N_UBATCH, 1, mtp_head=True, n_outputs_max=depth)
    taps = {"chain": "off", "steps": "outputs"}
    ids = np.arange(3, model.n_vocab, 5, dtype=np.int32)
    hidden = np.random.default_rng(2).standard_normal((1, model.n_embd)).astype(np.float32)
    found = []
    for way, tap in taps.items():
        with Context(model, replace(options, tap=tap), target) as draft:
            draft.set_draft_head(head_rows(model.path, ids), ids)
            draft.set_greedy(True)
            draft.set_candidates(P_MIN_CANDIDATES)
            if way == "chain":
                positions = np.arange(depth, dtype=np.int32)
                tokens, rows = np.full(depth, 9), np.repeat(hidden, depth, axis=0)
                ones = np.ones(depth, dtype=np.int8)
                draft.decode_batch(
                    Batch(tokens, positions, np.zeros(depth), ones, rows, chain=depth)
                )
                found.append([draft.candidates(step) for step in range(depth)])
                continue
            token, row, steps = 9, hidden, []
            for position in range(depth):
                one = np.ones(1, dtype=np.int8)
                draft.decode(np.array([token], dtype=np.int32), position, one, row)
                steps.append(draft.candidates(0))
                token, row = draft.argmax(0), draft.hidden_rows().copy()
            found.append(steps)
    for (ids_a, logits_a), (ids_b, logits_b) in zip(*found, strict=True):
        assert ids_a.tolist() == ids_b.tolist() and set(ids_a.tolist()) <= set(ids.tolist())
        assert logits_a.tobytes() == logits_b.tobytes()


def test_none_were_asked_for(target: Context) -> None:
    decode(target, 0)
    with pytest.raises(UsageError, match="set_candidates"):
        target.candidates(WANTED[0])
    decode(target, 5)
    with pytest.raises(UsageError, match="not marked as an output row"):
        target.candidates(1)


@pytest.mark.parametrize("depth", [0, 3])
@pytest.mark.parametrize("top_k", [1, 40, MOST_CANDIDATES])
def test_sampling_among_them_is_sampling_among_all(
    demo: Model, text: list[int], monkeypatch: pytest.MonkeyPatch, top_k: int, depth: int
) -> None:
    """The same seed gives the same text, whether the samplers get k logits or all."""
    texts, copied = [], []
    for most in (MOST_CANDIDATES, 0):
        monkeypatch.setattr("pyllama_mtp.sampling.MOST_CANDIDATES", most)
        with Session(demo, settings(depth)) as session:
            for seed in range(5):
                drawn = replace(WARM, top_k=top_k, seed=seed)
                run = session.generate(
                    text[:30], max_tokens=24, sampling=drawn, ignore_eos=True
                ).run()
                texts.append(run.tokens)
                copied.append(run.telemetry.output_bytes)
    assert texts[:5] == texts[5:]
    if native.load().has_tap and top_k == 40:
        assert max(copied[:5]) * 4 < min(copied[5:])


def test_what_needs_all_logits_gets_them(demo: Model, text: list[int]) -> None:
    """A penalty or a bias may lift a token that is not among the best."""
    rare = {int(token): 30.0 for token in text[:1]}
    with Session(demo, settings(2)) as session:
        for asked in (replace(WARM, logit_bias=rare), replace(WARM, top_k=0, logit_bias=rare)):
            run = session.generate(text[:30], max_tokens=6, sampling=asked, ignore_eos=True).run()
            assert set(run.tokens) == set(rare)


def test_a_chain_leaves_no_hidden_rows_on_the_host(target: Context) -> None:
    """llama.cpp would look for rows that are not there, and end the process."""
    options = ContextOptions(N_CTX, N_BATCH, N_UBATCH, 1, mtp_head=True, n_outputs_max=2)
    hidden = np.zeros((1, target.model.n_embd), dtype=np.float32)
    with Context(target.model, replace(options, tap="outputs"), target) as draft:
        with pytest.raises(UsageError, match="no hidden rows on the host"):
            draft.draft_chain(7, 0, HostRows(hidden), 2)
        one = np.ones(1, dtype=np.int8)
        draft.decode(np.array([7], dtype=np.int32), 0, one, hidden)
        assert draft.argmax(0) >= 0
