"""RoPE and YaRN scaling reach both contexts, and make them longer."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from pyllama_mtp import Model, RopeScaling, Session
from pyllama_mtp.llama.context import Context
from pyllama_mtp.llama.contextoptions import ContextOptions

from .support import made_up, settings
from .test_same_text import SCALINGS, YARN


def logits(model: Model, rope: RopeScaling, mtp_head: bool) -> Any:
    """Logits of the last of 24 tokens, in a context of this kind."""
    options = ContextOptions(512, 64, 64, 1, rope=rope, mtp_head=mtp_head)
    tokens, ones = made_up(model, 24), np.zeros(24, dtype=np.int8)
    ones[-1] = 1
    rows = np.ones((24, model.n_embd), dtype=np.float32) if mtp_head else None
    with Context(model, options) as context:
        context.decode(tokens, 0, ones, rows)
        return context.logits(23).copy()


@pytest.mark.parametrize("mtp_head", [False, True], ids=["target", "draft"])
def test_each_value_reaches_both_contexts(demo: Model, mtp_head: bool) -> None:
    found = [logits(demo, RopeScaling(**one), mtp_head) for one in [{}, *SCALINGS]]
    for i, one in enumerate(found):
        for other in found[:i]:
            assert np.abs(one - other).max() > 1e-4
    again = logits(demo, RopeScaling(), mtp_head)  # nothing of it is left in the model
    np.testing.assert_array_equal(again, found[0])


def test_the_context_may_be_longer(demo: Model, caplog: pytest.LogCaptureFixture) -> None:
    trained = demo.n_ctx_train
    assert RopeScaling(**YARN).length(trained) == 4 * 4096
    assert RopeScaling(rope_freq_scale=0.5).length(trained) == 2 * trained
    assert RopeScaling(rope_scaling="none", rope_freq_scale=0.5).length(trained) == trained
    plain, scaled = RopeScaling(), RopeScaling(**YARN)
    for n_ctx, rope in ((trained, plain), (2 * trained, scaled), (trained + 256, plain)):
        assert not any("trained for" in line for line in caplog.messages)
        Session(demo, settings(0, n_ctx=n_ctx, rope=rope)).close()
    (record,) = [one for one in caplog.records if "trained for" in one.getMessage()]
    assert record.levelno == logging.WARNING and "4352 tokens is longer" in record.getMessage()
    with Session(demo, settings(0, n_ctx=0, rope=RopeScaling(**YARN))) as session:
        assert trained < session.n_ctx == 8192
