"""Functions of the user's that change logits: called as plain decoding would call them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pyllama_mtp import Model, Sampling, Session

from .distributions import PLAIN, WAYS
from .support import settings
from .test_same_text import no_repeats

N = 30


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_what_it_is_told(demo: Model, text: list[int], way: dict[str, object]) -> None:
    """Every position once, in order, with the text before it."""
    told: list[list[int]] = []

    def listen(ids: Any, logits: Any) -> Any:
        assert logits.shape == (demo.n_vocab,) and logits.dtype == np.float32
        told.append(ids.tolist())
        return logits

    chosen = replace(PLAIN, logits_processors=listen, seed=4)
    with Session(demo, settings(3, **way)) as session:
        run = session.generate(text[:20], max_tokens=N, sampling=chosen, ignore_eos=True).run()
    assert told[: N - 3] == [[*text[:20], *run.tokens[:at]] for at in range(N - 3)]
    assert len(told) <= N + 3, "positions after the last one may have been drafted"


@pytest.mark.parametrize("depth", [0, 3])
def test_twice_the_logits_are_half_the_temperature(
    demo: Model, text: list[int], depth: int
) -> None:
    equal = 0
    with Session(demo, settings(depth)) as session:
        for seed in range(10):
            double = replace(PLAIN, logits_processors=[lambda ids, logits: 2 * logits], seed=seed)
            half = replace(PLAIN, temperature=0.5, seed=seed)
            options: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True}
            runs = [session.generate(text[:20], sampling=s, **options) for s in (double, half)]
            equal += runs[0].run().tokens == runs[1].run().tokens
    assert equal >= 9


def test_log_probabilities_stay_the_models_own(demo: Model, text: list[int]) -> None:
    chosen = Sampling(logits_processors=[lambda ids, logits: logits / 3, no_repeats])
    with Session(demo, settings(3)) as session:
        run = session.generate(text[:20], max_tokens=9, sampling=chosen, logprobs=1).run()
        plain = session.generate(text[:20], max_tokens=1, logprobs=1).run()
    assert run.logprobs[0].top[0][1] == pytest.approx(plain.logprobs[0].top[0][1], abs=1e-4)
