"""Penalties, DRY, top-n-sigma, typical and XTC: what is drawn from is what their papers say, and
with MTP texts are as frequent as without. The reference is numpy's, on plain decoding's logits."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import numpy.typing as npt
import pytest

from pyllama_mtp import Model, Sampling, Session
from pyllama_mtp.llama.chat import usual_sampling
from pyllama_mtp.speculative.sampling import Sampler

from .support import last_logits, plain_context, settings
from .test_sampling import chi_square

Doubles = npt.NDArray[np.float64]

PLAIN = Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
SAMPLINGS = {
    "frequency": replace(PLAIN, frequency_penalty=0.7, repeat_last_n=30),
    "presence": replace(PLAIN, presence_penalty=1.5, repeat_penalty=1.2, repeat_last_n=30),
    "top-n-sigma": replace(PLAIN, top_n_sigma=1.2, temperature=1.5, top_k=40),
    "typical": replace(PLAIN, typical_p=0.6),
    "typical of few": replace(PLAIN, typical_p=0.9, top_n_sigma=1.5, logit_bias={70: -np.inf}),
    "dry": replace(PLAIN, dry_multiplier=0.8, dry_base=1.5, dry_allowed_length=1),
    "xtc": replace(PLAIN, xtc_probability=0.5, xtc_threshold=0.05, top_k=30),
}
#: Where each is about repetition: two statements that begin alike.
PROMPT = " self._cmd = cmd\n        self._args = args\n        self"
#: What follows is neither certain nor open.
OPEN = " self._cmd = cmd\n"


def softmax(scores: Doubles) -> Doubles:
    weights = np.exp(scores - scores.max())
    found: Doubles = weights / weights.sum()
    return found


def repeated(history: Sequence[int], s: Sampling) -> dict[int, int]:
    """DRY: by token, the longest repetition at the end of `history` that it would continue."""
    found: dict[int, int] = {}
    for at in range(1, len(history)):
        n = 0
        while n < at and history[at - 1 - n] == history[-1 - n]:
            n += 1
        if n >= s.dry_allowed_length:
            found[history[at]] = max(n, found.get(history[at], 0))
    return found


def reference(logits: npt.NDArray[np.float32], history: Sequence[int], s: Sampling) -> Doubles:
    """[n_vocab] float64: the distribution that `Sampling` documents."""
    scores = logits.astype(np.float64)
    for token, bias in (s.logit_bias or {}).items():
        scores[token] += bias
    for token, count in Counter(history[-s.repeat_last_n :]).items():
        scores[token] *= s.repeat_penalty if scores[token] <= 0 else 1 / s.repeat_penalty
        scores[token] -= count * s.frequency_penalty + s.presence_penalty
    if s.dry_multiplier:
        for token, n in repeated(history[-s.dry_penalty_last_n :], s).items():
            scores[token] -= s.dry_multiplier * s.dry_base ** (n - s.dry_allowed_length)
    if s.top_n_sigma:
        spread = scores[np.isfinite(scores)].std()
        scores[scores < scores.max() - s.top_n_sigma * spread] = -np.inf
    if s.top_k:
        scores[np.argsort(-scores, kind="stable")[s.top_k :]] = -np.inf
    if s.typical_p < 1:
        p = softmax(scores)
        with np.errstate(divide="ignore", invalid="ignore"):
            surprise = -np.log(p)
            distance = np.abs(surprise - np.nansum(p * surprise))
        order = np.argsort(np.where(p > 0, distance, np.inf), kind="stable")
        kept = order[: int(np.searchsorted(np.cumsum(p[order]), s.typical_p, side="right")) + 1]
        scores[np.setdiff1d(np.arange(len(scores)), kept)] = -np.inf
    heated = softmax(scores / s.temperature)
    p = softmax(scores)
    above = np.flatnonzero(p >= s.xtc_threshold)
    if s.xtc_probability and len(above) > 1:
        without = scores.copy()
        without[above[above != above[p[above].argmin()]]] = -np.inf
        rest = softmax(without / s.temperature)
        heated = (1 - s.xtc_probability) * heated + s.xtc_probability * rest
    return heated


@pytest.mark.parametrize("name", [name for name in SAMPLINGS if name != "xtc"])
def test_what_is_drawn_from(demo: Model, name: str) -> None:
    """Of rows one after the other; what came before counts, the prompt included."""
    sampling = replace(SAMPLINGS[name], seed=1, dry_sequence_breakers=())
    prompt = demo.tokenize(PROMPT)
    answer = demo.tokenize("._cmd = cmd\n        self._args", add_special=False)
    every, differs = np.arange(demo.n_vocab, dtype=np.int32), 0.0
    sampler = Sampler(demo, sampling, prompt)
    with plain_context(demo, n_outputs_max=len(answer)) as context:
        context.decode(np.array(prompt, dtype=np.int32), 0, np.zeros(len(prompt), dtype=np.int8))
        outputs = np.ones(len(answer), dtype=np.int8)
        context.decode(np.array(answer, dtype=np.int32), len(prompt), outputs)
        sampler.accept(answer[0])
        for row in range(len(answer) - 1):
            logits, history = context.logits(row), [*prompt, *answer[: row + 1]]
            wanted = reference(logits, history, sampling)
            found = sampler.distribution(context, row).probabilities_of(every)
            np.testing.assert_allclose(found, wanted, atol=2e-5)
            differs = max(differs, float(np.abs(wanted - reference(logits, (), PLAIN)).max()))
            sampler.accept(answer[row + 1])
    assert differs > 0.05, "it changes nothing here"


def test_a_breaker_ends_a_repetition(demo: Model) -> None:
    """With a breaker in the middle of what is repeated less is held against a token."""
    prompt = demo.tokenize(PROMPT)
    sharp = replace(SAMPLINGS["dry"], dry_multiplier=50.0, dry_allowed_length=3, seed=1)
    found = []
    with plain_context(demo) as context:
        outputs = np.zeros(len(prompt), dtype=np.int8)
        outputs[-1] = 1
        context.decode(np.array(prompt, dtype=np.int32), 0, outputs)
        for breakers in ((), ("\n",), ("self", "\n", " ")):
            chosen = replace(sharp, dry_sequence_breakers=breakers)
            found.append(Sampler(demo, chosen, prompt).distribution(context, len(prompt) - 1))
    every = np.arange(demo.n_vocab, dtype=np.int32)
    one, _, three = (each.probabilities_of(every) for each in found)
    assert np.abs(one - three).max() > 0.3


WAYS = [
    pytest.param({}, id="best drafts"),
    pytest.param({"draft_sampling": True}, id="drawn drafts"),
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SAMPLINGS)
def test_frequencies(demo: Model, name: str, way: dict[str, object]) -> None:
    """Joint frequencies of three tokens at depth 3: one round verifies all but the first."""
    sampling = replace(SAMPLINGS[name], dry_sequence_breakers=())
    prompt, n_texts, n = demo.tokenize(OPEN), 500, 3
    logits = cache(lambda text: last_logits(demo, [*prompt, *text]))

    def following(text: tuple[int, ...]) -> Doubles:
        return reference(logits(text), [*prompt, *text], sampling)

    counts: Counter[tuple[int, ...]] = Counter()
    accepted = 0
    with Session(demo, settings(3, **way)) as session:
        for seed in range(n_texts):
            drawn = replace(sampling, seed=seed)
            options = {"max_tokens": n + 2, "sampling": drawn, "ignore_eos": True}
            run = session.generate(prompt, **options).run()  # type: ignore[arg-type]
            counts[tuple(run.tokens[:n])] += 1
            accepted += sum(run.telemetry.accepted)
    assert accepted > n_texts / 20, "drafts must have been accepted for this to mean anything"
    likely = {(): 1.0}
    for _ in range(n):
        likely = {
            (*text, int(token)): share * float(p[token])
            for text, share in likely.items()
            for p in [following(text)]
            for token in np.flatnonzero(share * p * n_texts >= 6)
        }
    for text in list(counts)[:40]:
        assert all(following(text[:at])[text[at]] > 0 for at in range(n)), "it is excluded"
    seen = [counts[text] for text in likely]
    expected = [n_texts * share for share in (*likely.values(), 1 - sum(likely.values()))]
    found, limit = chi_square([*seen, n_texts - sum(seen)], expected)
    assert found < limit


def test_what_a_model_file_says(caplog: pytest.LogCaptureFixture) -> None:
    said = {
        "temp": 0.6,
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.0,
        "penalty_repeat": 1.1,
        "penalty_last_n": -1,
        "xtc_probability": 0.1,
        "xtc_threshold": 0.2,
    }
    found = usual_sampling({f"general.sampling.{key}": value for key, value in said.items()})
    assert found == Sampling(
        temperature=0.6,
        top_k=20,
        top_p=0.9,
        min_p=0.0,
        repeat_penalty=1.1,
        repeat_last_n=0,
        xtc_probability=0.1,
        xtc_threshold=0.2,
    )
    assert usual_sampling({}) == Sampling(temperature=0.8)
    with caplog.at_level(logging.WARNING, "pyllama_mtp"):
        assert usual_sampling({"general.sampling.top_p": 7.0}) == Sampling(temperature=0.8)
    assert "top_p" in caplog.text
