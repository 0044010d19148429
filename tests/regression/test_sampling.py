"""At temperature > 0 the emitted text is a draw from the target's own distribution.

Two proofs. The strong one: each emitted token takes one number of one generator, in order, so a
seed gives the same text with and without MTP. The independent one: frequencies over many seeds
against probabilities that numpy computes from plain logits.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import numpy.typing as npt
import pytest

from pyllama_mtp import Model, Sampling, Session

from .support import assert_same_tokens, last_logits, rounding, scaled, settings

#: The chance of a red test although nothing is wrong, each time other seeds are drawn.
FALSE_ALARM = 1e-4
FALSE_ALARM_SIGMAS = 3.719  # the same, as a normal quantile

WARM = Sampling(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05)
HOT = Sampling(temperature=1.2, top_k=0, top_p=1.0, min_p=0.0)


def probabilities(logits: npt.NDArray[np.float32], sampling: Sampling) -> npt.NDArray[np.float64]:
    """The distribution that `Sampling` documents: top-k, top-p, min-p, then temperature."""
    scores = logits.astype(np.float64)
    order = np.argsort(-scores, kind="stable")
    order = order[: sampling.top_k] if sampling.top_k else order
    share = np.exp(scores[order] - scores[order[0]])
    share /= share.sum()
    if sampling.top_p < 1:
        order = order[: int(np.searchsorted(np.cumsum(share), sampling.top_p)) + 1]
        share = share[: len(order)]
    order = order[share >= sampling.min_p * share[0]]
    out = np.zeros(len(scores))
    heated = np.exp((scores[order] - scores[order[0]]) / sampling.temperature)
    out[order] = heated / heated.sum()
    return out


def chi_square(counts: Sequence[float], expected: Sequence[float]) -> tuple[float, float]:
    """The statistic over cells of at least 5 (the others in one), and its FALSE_ALARM quantile by
    Wilson and Hilferty's approximation."""
    pairs = sorted(zip(expected, counts, strict=True), reverse=True)
    cells = [(e, n) for e, n in pairs if e >= 5]
    rest = [sum(column) for column in zip(*[p for p in pairs if p[0] < 5], strict=True)]
    if rest and rest[0] >= 1:
        cells.append((rest[0], rest[1]))
    assert len(cells) > 3, "too few cells to compare anything"
    found = sum((n - e) ** 2 / e for e, n in cells)
    k = len(cells) - 1
    limit = k * (1 - 2 / (9 * k) + FALSE_ALARM_SIGMAS * (2 / (9 * k)) ** 0.5) ** 3
    return found, limit


@pytest.mark.parametrize(
    ("sampling", "n_tokens", "n_seeds"),
    [(WARM, 2, 500), (Sampling(temperature=1.5, top_k=3, top_p=1.0, min_p=0.0), 4, 700)],
    ids=["usual", "four tokens of three"],
)
def test_frequencies(
    demo: Model, text: list[int], sampling: Sampling, n_tokens: int, n_seeds: int
) -> None:
    """Joint frequencies of the first tokens at depth 3: one round verifies all but the first."""
    prompt = text[:6]

    @cache
    def following(tokens: tuple[int, ...]) -> npt.NDArray[np.float64]:
        return probabilities(last_logits(demo, [*prompt, *tokens]), sampling)

    exact: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(n_tokens):
        exact = {
            (*tokens, int(token)): p * following(tokens)[token]
            for tokens, p in exact.items()
            for token in np.flatnonzero(following(tokens))
        }
    assert sum(exact.values()) == pytest.approx(1)
    counts: Counter[tuple[int, ...]] = Counter()
    accepted = 0
    # One token more than compared, so that the last compared one comes out of a round with drafts.
    with Session(demo, settings(3)) as session:
        for seed in range(n_seeds):
            session.reset()
            drawn = replace(sampling, seed=seed)
            run = session.generate(
                prompt, max_tokens=n_tokens + 1, sampling=drawn, ignore_eos=True
            ).run()
            counts[tuple(run.tokens[:n_tokens])] += 1
            accepted += sum(run.telemetry.accepted)
    assert accepted > n_seeds / 10, "drafts must have been accepted for this to mean anything"
    assert set(counts) <= set(exact), "a token came out that the settings exclude"
    cells = list(exact)
    found, limit = chi_square([counts[c] for c in cells], [n_seeds * exact[c] for c in cells])
    assert found < limit


@pytest.mark.parametrize("sampling", [WARM, HOT], ids=["usual", "hot"])
@pytest.mark.parametrize("depth", [1, 3])
def test_a_seed_gives_the_same_text(
    demo: Model, text: list[int], sampling: Sampling, depth: int
) -> None:
    """Rounding may move a draw across the border of two tokens: about one token in a hundred where
    batch sizes differ by 0.004 in a logit and the distribution is flat. That leaves some nine texts
    of ten equal; a generator out of step gives no equal text at all."""
    equal, accepted, n_seeds = 0, 0, 20
    with Session(demo, settings(0)) as off, Session(demo, settings(depth)) as on:
        for seed in range(n_seeds):
            prompt, drawn = text[seed : seed + 20], replace(sampling, seed=seed)
            options = {"max_tokens": 12, "sampling": drawn, "ignore_eos": True}
            with_mtp = on.generate(prompt, **options).run()
            equal += with_mtp.tokens == off.generate(prompt, **options).run().tokens
            accepted += sum(with_mtp.telemetry.accepted)
    assert accepted > n_seeds
    assert equal >= 0.5 * n_seeds


def test_seeds_differ_and_repeat(demo: Model, text: list[int]) -> None:
    with Session(demo, settings(2)) as session:
        texts = [
            session.generate(text[:9], max_tokens=12, sampling=replace(HOT, seed=seed)).run().text
            for seed in (1, 2, 1)
        ]
    assert texts[0] == texts[2] != texts[1]


@pytest.mark.parametrize("depth", [1, 4])
def test_repetition_penalty(demo: Model, text: list[int], depth: int) -> None:
    """The penalty sees each accepted token before the next row is sampled, as without MTP.

    Rounding may part one prompt of six; a penalty that looks elsewhere parts them all.
    """
    sampling = Sampling(repeat_penalty=1.3, repeat_last_n=32)
    changed = equal = 0
    with Session(demo, settings(0)) as off, Session(demo, settings(depth)) as on:
        for start in range(0, 60, 10):
            prompt = text[start : start + 20]
            options = {"max_tokens": 20, "sampling": sampling, "ignore_eos": True}
            plain = off.generate(prompt, **options).run()
            equal += on.generate(prompt, **options).run().tokens == plain.tokens
            free = off.generate(prompt, max_tokens=20, ignore_eos=True).run()
            changed += free.tokens != plain.tokens
    assert equal >= 5
    assert changed, "the penalty changed nothing: it was not tested"


def test_what_the_penalty_looks_at(demo: Model, text: list[int]) -> None:
    """The last n tokens of prompt and output, each once: against numpy."""
    prompt, window = text[:20], 12
    sampling = Sampling(repeat_penalty=1.5, repeat_last_n=window)
    with Session(demo, settings(3)) as session:
        run = session.generate(prompt, max_tokens=16, sampling=sampling, ignore_eos=True).run()
    for at, token in enumerate(run.tokens):
        so_far = [*prompt, *run.tokens[:at]]
        logits = last_logits(demo, so_far)
        recent = sorted(set(so_far[-window:]))
        before = logits[recent]
        logits[recent] = np.where(before > 0, before / 1.5, before * 1.5)
        assert logits[token] > logits.max() - scaled(0.03), f"token {at}"


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 9])
def test_max_tokens(demo: Model, text: list[int], n: int) -> None:
    """Exactly so many, however they fall into rounds."""
    with Session(demo, settings(4)) as session:
        run = session.generate(text[:20], max_tokens=n, ignore_eos=True).run()
    assert len(run.tokens) == run.telemetry.n_generated == n
    assert (run.text, run.finish_reason) == (demo.detokenize(run.tokens, special=False), "length")


def test_stop_strings(demo: Model, text: list[int]) -> None:
    """Text ends before the first stop string, wherever it lies in a round or across tokens."""
    with Session(demo, settings(4)) as on:
        options = {"max_tokens": 24, "ignore_eos": True}
        whole = on.generate(text[:20], **options).run().text
        assert len(whole) > 20
        for at, length in itertools.product((0, 1, 5, 11, 17), (1, 2, 6)):
            stop = whole[at : at + length]
            run = on.generate(text[:20], stop=[stop, "\0never"], **options).run()
            assert run.text == whole[: whole.index(stop)]
            assert run.finish_reason == "stop"
            pieces = on.generate(text[:20], stop=[stop], **options)
            assert "".join(pieces) == run.text


def test_end_token(demo: Model, demo_prompts: list[str], text: list[int]) -> None:
    """An end token ends the generation, is not in the text, and nothing comes after it."""
    gap = rounding(demo, text[:97])
    ended = 0
    with Session(demo, settings(0)) as off, Session(demo, settings(4)) as on:
        for prompt in demo_prompts[:10]:
            tokens = demo.tokenize(prompt, parse_special=True)
            plain = off.generate(tokens, max_tokens=60).run()
            mtp = on.generate(tokens, max_tokens=60).run()
            assert_same_tokens(demo, tokens, mtp.tokens, plain.tokens, gap)
            assert not any(demo.is_end(token) for token in mtp.tokens[:-1])
            if mtp.finish_reason == "eos":
                ended += 1
                assert demo.is_end(mtp.tokens[-1])
                assert mtp.text == demo.detokenize(mtp.tokens[:-1])
    assert ended, "no prompt came to an end token: it was not tested"
