"""Drafts that are drawn, and the logits that come with drafts.

The Gumbel-max trick: the largest of logits / temperature + noise is a draw from softmax(logits /
temperature), if the noise has the standard Gumbel distribution. That texts drawn so are as frequent
as they must be is tested in test_distribution.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from pyllama_mtp import Model
from pyllama_mtp.drafting.head import set_draft_head
from pyllama_mtp.errors import UsageError
from pyllama_mtp.llama.batch import Floats
from pyllama_mtp.llama.context import Context
from pyllama_mtp.llama.drafts import compute_drafts, draft_logits

from ..trimmed import head_rows
from .support import made_up, scaled
from .twocontexts import agree, beside, context, one_sequence

N = 17  # tokens of a prompt
NEWEST = np.array([7, 9, 11], dtype=np.int32)
SEQS = np.arange(3, dtype=np.int32)


@pytest.fixture
def found(model: Model) -> Iterator[Context]:
    """Three sequences in one cache."""
    with context(model, n_seq_max=3, unified=True) as one:
        for seq in range(3):
            one.decode_batch(one_sequence(made_up(model, N + seq, 100 * seq), seq=seq))
        yield one


def gumbel(rng: np.random.Generator, *shape: int) -> Floats:
    noise: Floats = rng.gumbel(size=shape).astype(np.float32)
    return noise


def warm(*temperatures: float) -> Floats:
    return np.array(temperatures, dtype=np.float32)


# -- logits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [None, 700])
@pytest.mark.parametrize("n_candidates", [1, 5, 256])
def test_candidates_are_the_best_logits_of_each(
    model: Model, size: int | None, n_candidates: int
) -> None:
    """Candidates of the whole vocabulary, or of a draft head, are those of single steps."""
    ids = None if size is None else np.arange(size, dtype=np.int32) * 2
    with beside(model, [one_sequence(made_up(model, N))]) as (one, wanted):
        if ids is not None:
            set_draft_head(one, head_rows(model.info, ids), ids)
        n_compared = 0
        for newest in (7, 9, 11, 13):
            drafts = compute_drafts(one, np.array([newest], np.int32), SEQS[:1], 4, n_candidates)
            kept, steps = draft_logits(one), wanted.draft(newest, 4, ids=ids)
            assert kept.shape == (4, 1, n_candidates)
            if not agree(drafts[:, 0].tolist(), steps):
                continue
            n_compared += 1
            for i, logits in enumerate(steps.logits):
                allowed = logits if ids is None else logits[ids]
                best, size_of = np.sort(allowed)[-n_candidates:], np.abs(allowed).max()
                np.testing.assert_allclose(
                    np.sort(kept[i, 0]), best, rtol=0, atol=scaled(1e-4) * size_of
                )
        assert n_compared >= 3


# -- draws -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [None, 700])
def test_the_largest_sum_is_drawn(found: Context, size: int | None) -> None:
    """Computed here from the logits that come back: step by step, each sequence with a temperature
    of its own. The next step takes what was drawn."""
    ids = np.arange(found.model.n_vocab, dtype=np.int32)
    if size is not None:
        ids = np.sort(np.random.default_rng(1).choice(ids, size, replace=False))
        set_draft_head(found, head_rows(found.model.info, ids), ids)
    rng, temperatures, seen = np.random.default_rng(2), warm(0.3, 1.0, 4.0), set()
    n_equal = n = 0
    for _ in range(10):
        noise = gumbel(rng, 5, 3, len(ids))
        drawn = compute_drafts(found, NEWEST, SEQS, 5, temperatures=temperatures, noise=noise)
        sums = draft_logits(found) / temperatures[:, None] + noise
        n_equal += int((ids[sums.argmax(axis=-1)] == drawn).sum())
        n += drawn.size
        seen |= {tuple(column) for column in drawn.T.tolist()}
        again = compute_drafts(found, NEWEST, SEQS, 5, temperatures=temperatures, noise=noise)
        assert again.tolist() == drawn.tolist()
    assert n_equal >= n - 1, "sums may be as close as rounding once"
    assert len(seen) > 15


def test_the_next_step_takes_what_was_drawn(model: Model) -> None:
    """Its logits are those of a single step after the drawn token."""
    with beside(model, [one_sequence(made_up(model, N))]) as (one, wanted):
        best = wanted.draft(7, 3)
        second = int(np.argsort(best.logits[0])[-2])
        noise = np.zeros((3, 1, model.n_vocab), dtype=np.float32)
        noise[0, 0, second] = 1e4
        drawn = compute_drafts(one, NEWEST[:1], SEQS[:1], 3, temperatures=warm(1.0), noise=noise)
        logits = draft_logits(one).copy()
        assert drawn[0, 0] == second != best.tokens[0]
        assert drawn[1:, 0].tolist() == logits[1:, 0].argmax(axis=-1).tolist()
        size = np.abs(best.logits[0]).max()
        np.testing.assert_allclose(logits[0, 0], best.logits[0], rtol=0, atol=scaled(1e-4) * size)
        off = np.abs(logits[1, 0] - best.logits[1]).max()
        assert off > 0.05 * size, "the second step does not look at the draw"
        # The same token as the newest one's draft, by the reference's own way.
        steps = wanted.draft(7, 2, ids=np.array([second], dtype=np.int32))
        np.testing.assert_allclose(logits[1, 0], steps.logits[1], rtol=0, atol=scaled(1e-4) * size)


def test_shapes_that_do_not_fit(found: Context) -> None:
    noise = np.zeros((2, 3, found.n_head), dtype=np.float32)
    before = bytes(found.save_state())
    for wrong in (noise[:1], noise[:, :2], noise[:, :, :-1], noise[0]):
        with pytest.raises(UsageError, match="noise of shape"):
            compute_drafts(found, NEWEST, SEQS, 2, temperatures=warm(1, 1, 1), noise=wrong)
    with pytest.raises(UsageError, match="temperatures"):
        compute_drafts(found, NEWEST, SEQS, 2, temperatures=warm(1, 1), noise=noise)
    assert bytes(found.save_state()) == before
    for n_candidates in (8, 0):
        assert compute_drafts(found, NEWEST, SEQS, 2, n_candidates).shape == (2, 3)
    with pytest.raises(UsageError, match="no logits"):
        draft_logits(found)
