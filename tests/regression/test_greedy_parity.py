"""Greedy output with MTP is plain greedy output, token for token.

On an x86 CPU always. Elsewhere a divergence is allowed where the two best logits are
within rounding; see :func:`support.assert_same_tokens`, which checks that in a fresh context.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pyllama_mtp import BatchSession, Model, Session, Telemetry

from ..marks import usual
from .support import (
    EDGES,
    N_UBATCH,
    assert_same_tokens,
    greedy,
    made_up,
    rounding,
    settings,
)

N_TOKENS = 16
Prompts = list[list[int]]


@pytest.fixture(scope="module")
def gap(demo: Model, gap: float) -> float:
    return 0.0 if demo.same_bits else gap


@pytest.fixture(scope="module")
def prompts(demo: Model, demo_prompts: list[str], text: list[int]) -> Prompts:
    """Real prompts of all classes, and one for each edge of a batch."""
    real = [demo.tokenize(prompt, parse_special=True) for prompt in demo_prompts]
    edges = [text[:n] for n in EDGES]
    assert len(real) + len(edges) >= 20
    return real + edges


@pytest.fixture(scope="module")
def plain(demo: Model, prompts: Prompts) -> Prompts:
    with Session(demo, settings(0)) as session:
        return [greedy(session, prompt, N_TOKENS).tokens for prompt in prompts]


def held(telemetry: Telemetry) -> list[list[bool]]:
    """Which drafts were accepted, round by round."""
    rounds: list[list[bool]] = []
    for pair in telemetry.pairs or ():
        if pair.position == 1:
            rounds.append([])
        rounds[-1].append(pair.drafted == pair.actual)
    return rounds


USUAL = [(3, "replay"), (6, "snapshot")]
ALL = {(depth, rollback) for depth in range(1, 7) for rollback in ("snapshot", "replay")}


@pytest.mark.parametrize(("depth", "rollback"), usual(*USUAL, long=sorted(ALL - {*USUAL})))
def test_demo_model(
    demo: Model, prompts: Prompts, plain: Prompts, gap: float, depth: int, rollback: str
) -> None:
    rounds: list[list[bool]] = []
    equal = 0
    with Session(demo, settings(depth, rollback=rollback)) as session:
        for prompt, wanted in zip(prompts, plain, strict=True):
            run = greedy(session, prompt, N_TOKENS)
            rounds += held(run.telemetry)
            equal += assert_same_tokens(demo, prompt, run.tokens, wanted, gap)
    assert [True] * depth in rounds, "no round with all drafts accepted: it was not tested"
    assert [False] in rounds, "no round with the first draft rejected: it was not tested"
    assert equal >= 0.9 * len(prompts), "rounding may part a rare pair, not one in ten"


@pytest.mark.parametrize("n_sequences", usual(3, long=[1]))
@pytest.mark.parametrize("rollback", ["snapshot", "replay"])
def test_mixture_of_experts(moe: Model, rollback: str, n_sequences: int) -> None:
    """Random weights: hardly a draft is right, so this is about rejection; edges included."""
    text = made_up(moe, max(EDGES)).tolist()
    gap = 0.0 if moe.same_bits else rounding(moe, text)
    prompts: Sequence[list[int]] = [text[:n] for n in EDGES]
    options = {"rollback": rollback, "n_ubatch": N_UBATCH if n_sequences == 1 else 32}
    with BatchSession(moe, settings(0, **options), n_sequences) as session:
        plain = [r.tokens for r in session.generate(prompts, max_tokens=N_TOKENS).run().results]
    rounds: list[list[bool]] = []
    for depth in (1, 3, 6):
        chosen = settings(depth, **options)
        with BatchSession(moe, chosen, n_sequences) as session:
            got = session.generate(prompts, max_tokens=N_TOKENS, log_pairs=True).run().results
        for prompt, answer, wanted in zip(prompts, got, plain, strict=True):
            rounds += held(answer.telemetry)
            assert_same_tokens(moe, prompt, answer.tokens, wanted, gap)
    assert [False] in rounds
