"""Drafts of several sequences in one decode are those that each makes alone."""

from __future__ import annotations

import pytest

from pyllama_mtp import Model, Telemetry
from pyllama_mtp.engine import Engine
from pyllama_mtp.speculative.drafter import Newest

from .support import settings

DEPTH = 5
LENGTHS = (20, 49, 1, 33)
Drafts = list[list[int]]


def drafts(model: Model, prompts: list[list[int]], **options: object) -> Drafts:
    """What follows the last token of each prompt, which the caches do not have."""
    engine = Engine(model, settings(DEPTH, n_ubatch=32, **options), len(prompts))
    try:
        for place, prompt in zip(engine.places, prompts, strict=True):
            engine.enter(place, prompt[:-1], Telemetry())
            while engine.prefill(place, prompt[:-1], Telemetry()) is None:
                pass
        assert engine.drafter
        newest = [Newest(seq, prompt[-1], DEPTH) for seq, prompt in enumerate(prompts)]
        found = engine.drafter.draft(newest, DEPTH, engine.settings.p_min)
        past = {engine.target.past(place.seq) for place in engine.places}
        assert past == {len(prompt) - 1 for prompt in prompts}, "drafting is not the target's"
    finally:
        engine.close()
    return [made.tokens for made in found]


@pytest.fixture
def prompts(model: Model, text: list[int]) -> list[list[int]]:
    return [[t % model.n_vocab for t in text[9 * n : 10 * n + 1]] for n in LENGTHS]


@pytest.mark.parametrize("drafting", ["chain", "stepwise"])
@pytest.mark.parametrize("handoff", ["device", "host"])
def test_together_and_alone(
    model: Model, prompts: list[list[int]], drafting: str, handoff: str
) -> None:
    """Alone by a chain, which test_chain.py compares with the contract. Rounding may turn a draft
    and what follows it: one of four sequences may differ."""
    alone = [drafts(model, [prompt], drafting="chain")[0] for prompt in prompts]
    found = drafts(model, prompts, drafting=drafting, handoff=handoff)
    assert [len(one) for one in found] == [DEPTH] * len(prompts)
    assert sum(a == b for a, b in zip(found, alone, strict=True)) >= len(prompts) - 1
    assert len({*map(tuple, alone)}) == len(prompts), "they must differ for this to mean anything"


def test_drafting_goes_on_while_one_sequence_is_sure(demo: Model, text: list[int]) -> None:
    """What is below p_min for one is made all the same where another one goes on."""
    prompts = [text[9 * n : 10 * n + 1] for n in (20, 49, 33, 28)]
    alone = [drafts(demo, [prompt], p_min=0.5)[0] for prompt in prompts]
    lengths = [len(one) for one in alone]
    assert min(lengths) < max(lengths), "all are equally sure: it was not tested"
    found = drafts(demo, prompts, p_min=0.5)
    assert [len(one) for one in found] == [max(lengths)] * len(prompts)
    equal = [one[:n] == two for one, two, n in zip(found, alone, lengths, strict=True)]
    assert sum(equal) >= len(prompts) - 1
