"""Near ties of greedy text: named where they are, drafts or not, and nothing else changes."""

from __future__ import annotations

import pytest

from pyllama_mtp import Model, Sampling, Session
from pyllama_mtp.measure.text import telemetry_lines
from pyllama_mtp.sampling.sampler import NEAR_TIE
from pyllama_mtp.telemetry import NearTie

from .support import last_logits, made_up, settings

N_TOKENS = 24


def watched(session: Session, prompt: list[int]) -> tuple[list[int], list[NearTie]]:
    plain = session.generate(prompt, max_tokens=N_TOKENS, ignore_eos=True).run()
    run = session.generate(prompt, max_tokens=N_TOKENS, ignore_eos=True, log_ties=True).run()
    assert run.tokens == plain.tokens and plain.telemetry.near_ties is None
    assert run.telemetry.near_ties is not None
    return run.tokens, run.telemetry.near_ties


def test_they_are_where_the_best_two_logits_are_close(moe: Model) -> None:
    """Random weights, so that there are some; against the logits of fresh contexts."""
    prompt = made_up(moe, 40).tolist()
    with Session(moe, settings(0)) as session:
        tokens, ties = watched(session, prompt)
        asked = {"max_tokens": N_TOKENS, "ignore_eos": True, "log_ties": True}
        both = session.generate(prompt, logprobs=1, **asked).run()
    wanted = []
    for index, token in enumerate(tokens):
        logits = last_logits(moe, [*prompt, *tokens[:index]])
        second, best = (int(t) for t in logits.argsort()[-2:])
        assert best == token
        if logits[best] - logits[second] <= NEAR_TIE * abs(logits[best]):
            wanted.append((index, best, second))
    assert 0 < len(wanted) < N_TOKENS
    for found in (ties, both.telemetry.near_ties or []):  # with log probabilities, from all logits
        assert [(tie.index, tie.token, tie.other) for tie in found] == wanted


@pytest.mark.parametrize("depth", [1, 3])
def test_drafts_do_not_change_them(demo: Model, moe: Model, text: list[int], depth: int) -> None:
    for model, prompt in ((demo, text[:50]), (moe, list(range(30)))):
        with Session(model, settings(0)) as off, Session(model, settings(depth)) as on:
            (tokens, ties), (drafted, found) = watched(off, prompt), watched(on, prompt)
        if model.same_bits:
            assert (drafted, found) == (tokens, ties)


def test_only_greedy_text_has_them(demo: Model, text: list[int]) -> None:
    with Session(demo, settings(2)) as session:
        warm = Sampling(temperature=0.7, seed=1)
        run = session.generate(text[:20], max_tokens=8, sampling=warm, log_ties=True).run()
        assert run.telemetry.near_ties is None
        assert "near ties" not in "\n".join(telemetry_lines(run.telemetry))
        run.telemetry.near_ties = [NearTie(3, 65, 66, 0.0125, " a", " the")]
        lines = "\n".join(telemetry_lines(run.telemetry))
        assert "near ties  token 3 (' a' or ' the'): " in lines
