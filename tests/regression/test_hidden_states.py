"""Hidden states of a session are those from which the model makes its logits, and cost none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader

from pyllama_mtp import Model, Session
from pyllama_mtp.errors import ContextClosedError
from pyllama_mtp.llama.batch import Batch, Floats, Ints
from pyllama_mtp.llama.context import Context

from .support import EDGES, N_BATCH, cached, made_up, scaled, settings
from .test_tap import normalized
from .twocontexts import every, trunk

N = 2 * N_BATCH + 1  # three decodes


def decoded_with_all_outputs(model: Model, tokens: Ints) -> tuple[Floats, Floats]:
    """Logits and hidden rows (by upstream's tap) of a decode that makes every row an output."""
    logits, rows = list[Floats](), list[Floats]()
    with trunk(model, tap="all", n_outputs_max=N_BATCH) as context:
        for start in range(0, len(tokens), N_BATCH):
            part = tokens[start : start + N_BATCH]
            context.decode(part, start, every(len(part)))
            logits += [context.logits(row).copy() for row in range(len(part))]
            rows.append(context.hidden_rows().copy())
    return np.stack(logits), np.concatenate(rows)


@pytest.mark.parametrize("n", EDGES[::3])
def test_rows_are_those_of_a_decode_with_all_outputs(model: Model, n: int) -> None:
    tokens = made_up(model, n)
    with Session(model, settings(3)) as session:
        found = session.hidden_states(tokens)
    _, wanted = decoded_with_all_outputs(model, tokens)
    assert found.dtype == np.float32 and found.shape == wanted.shape == (n, model.n_embd)
    assert len(np.unique(found, axis=0)) == n, "tokens cannot be told apart"
    assert np.abs(found - wanted).max() <= scaled(1e-3) * np.abs(wanted).max()


def test_the_lm_head_makes_the_logits_of_them(demo: Model) -> None:
    """Of rows after the norm; those before it become these by the norm."""
    tokens = made_up(demo, N)
    with Session(demo, settings("auto")) as session:
        after = session.hidden_states(tokens)
        before = session.hidden_states(tokens, point="pre-norm")
    logits, _ = decoded_with_all_outputs(demo, tokens)
    tensors = {tensor.name: tensor.data for tensor in GGUFReader(demo.path).tensors}
    wanted = after @ tensors["token_embd.weight"].astype(np.float32).T
    np.testing.assert_allclose(logits, wanted, rtol=0, atol=scaled(2e-3) * np.abs(wanted).max())
    assert not np.allclose(before, after, rtol=0.05)
    np.testing.assert_allclose(
        normalized(demo, before), after, rtol=scaled(1e-4), atol=scaled(1e-6)
    )


def test_the_last_row_alone(demo: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what a call has given is not overwritten by the next one, longer or shorter. No row is an
    output for it."""
    decode = Context.decode_batch

    def noted(self: Context, batch: Batch) -> None:
        assert not batch.outputs.any()
        decode(self, batch)
        assert self.output_bytes == 0

    monkeypatch.setattr(Context, "decode_batch", noted)
    tokens = made_up(demo, N)
    with Session(demo, settings(3)) as session:
        rows = session.hidden_states(tokens)
        kept = rows.copy()
        last = session.hidden_states(tokens, rows="last")
        session.hidden_states(made_up(demo, 4 * N), point="pre-norm")
        again = session.hidden_states(tokens[:N_BATCH])
    assert np.array_equal(rows, kept) and np.array_equal(last, rows[-1:])
    assert np.array_equal(again, rows[:N_BATCH])
    with pytest.raises(ContextClosedError):
        session.hidden_states(tokens)


@pytest.mark.parametrize("how", [{}, {"prompt_sync": "full"}, {"hidden": "pre-norm"}])
def test_the_text_of_the_session_goes_on(demo: Model, how: dict[str, Any]) -> None:
    prompt = made_up(demo, 60).tolist()
    with Session(demo, settings(3, **how)) as one, Session(demo, settings(3, **how)) as other:
        for session in (one, other):
            session.generate(prompt, max_tokens=12, ignore_eos=True).run()
        before = cached(one)[:]
        one.hidden_states(made_up(demo, 30), point="pre-norm")
        assert cached(one) == before
        texts = [
            session.generate([*before, 7], max_tokens=20, ignore_eos=True).run()
            for session in (one, other)
        ]
    assert texts[0].tokens == texts[1].tokens
    assert texts[0].telemetry.accepted == texts[1].telemetry.accepted
    assert texts[0].telemetry.n_cached == len(before)
