"""The hidden-state tap: which rows it keeps, and that they do not depend on what is an output."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from pyllama_mtp import Model
from pyllama_mtp.llama.context import Context, ContextOptions, Floats

TOKENS = np.array([5, 9, 2, 7, 11, 3, 8, 4, 6, 10, 12, 1], dtype=np.int32)


def rows(model: Model, tap: str, marks: list[int], n_ubatch: int = 16) -> Floats:
    """Hidden rows of one batch of TOKENS."""
    options = ContextOptions(
        n_ctx=64, n_batch=16, n_ubatch=n_ubatch, n_threads=1, tap=tap, n_outputs_max=16
    )
    with Context(model, options) as context:
        context.decode(TOKENS, 0, np.array(marks, dtype=np.int8))
        return context.hidden_rows().copy()


def marks_of(*outputs: int) -> list[int]:
    return [int(i in outputs) for i in range(len(TOKENS))]


@pytest.mark.parametrize("n_ubatch", [16, 5])
def test_rows_go_by_token_whatever_is_an_output(model: Model, n_ubatch: int) -> None:
    every = rows(model, "all", marks_of(*range(len(TOKENS))), n_ubatch)
    assert every.shape == (len(TOKENS), model.n_embd)
    for a, b in itertools.combinations(every, 2):
        assert not np.allclose(a, b)
    for outputs in ((), (11,), (0, 5), (3, 4, 10)):
        found = rows(model, "all", marks_of(*outputs), n_ubatch)
        np.testing.assert_allclose(found, every, rtol=0, atol=1e-3 * np.abs(every).max())


@pytest.mark.parametrize("n_ubatch", [16, 5])
@pytest.mark.parametrize("outputs", [(0,), (11,), (2, 3, 9), (0, 6, 11)])
def test_masked_rows_are_those_of_the_outputs(
    model: Model, outputs: tuple[int, ...], n_ubatch: int
) -> None:
    every = rows(model, "all", marks_of(11), n_ubatch)
    found = rows(model, "outputs", marks_of(*outputs), n_ubatch)
    assert found.shape == (len(outputs), model.n_embd)
    wanted = every[list(outputs)]
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-3 * np.abs(every).max())


def test_the_tap_does_not_change_logits(model: Model) -> None:
    """It is a switch of its own, not the embeddings mode."""
    found = {}
    for tap in ("off", "all", "outputs"):
        options = ContextOptions(n_ctx=64, n_batch=16, n_ubatch=16, n_threads=1, tap=tap)
        with Context(model, options) as context:
            context.decode(TOKENS, 0, np.array(marks_of(11), dtype=np.int8))
            found[tap] = context.logits(11).tobytes()
    assert found["off"] == found["all"] == found["outputs"]


def test_a_draft_context_that_is_only_synced_gives_no_rows(demo: Model) -> None:
    """A batch without outputs updates the cache; the tap by outputs then holds nothing."""
    common = {"n_ctx": 64, "n_batch": 16, "n_ubatch": 16, "n_threads": 1}
    with (
        Context(demo, ContextOptions(**common, tap="all")) as target,
        Context(demo, ContextOptions(**common, mtp_head=True, tap="outputs"), target) as draft,
    ):
        none = np.zeros(len(TOKENS), dtype=np.int8)
        target.decode(TOKENS, 0, none)
        hidden = target.hidden_rows().copy()
        draft.decode(TOKENS, 0, none, hidden)
        assert draft.n_past == len(TOKENS)
        assert draft.hidden_rows().shape == (0, demo.n_embd)
