"""A budget of thought ends it where it must, whatever was drafted across the end."""

from __future__ import annotations

import pytest

from pyllama_mtp import Model, Sampling, Session
from pyllama_mtp.chats.options import ChatOptions
from pyllama_mtp.chats.thinking import FORCED

from ..marks import usual
from .support import settings

QUESTION = "What does this function do?\ndef g(a, b):\n    return a + b"
N = 60


def prompt_of(model: Model, by_template: bool) -> list[int]:
    """A prompt that the demo model thinks about; the template may have opened the thought."""
    tokens = ChatOptions().prompt(model, [{"role": "user", "content": QUESTION}])
    opening = model.tokenize("<think>\n", add_special=False, parse_special=True)
    return [*tokens, *opening] if by_template else tokens


def expected(model: Model, prompt: list[int], by_template: bool, budget: int) -> list[int]:
    """The tokens by plain decoding: thought, closing tag, answer."""
    forced = model.tokenize(FORCED, add_special=False, parse_special=True)
    n = budget + (not by_template)  # the model's own opening tag is no thought
    with Session(model, settings(0)) as session:
        thought = session.generate(prompt, max_tokens=n).run().tokens if n else []
        start = [*thought, *forced]
        rest = session.generate([*prompt, *start], max_tokens=N - len(start)).run().tokens
    return [*start, *rest]


@pytest.mark.parametrize("depth", usual(3, long=["auto", 0, 1]))
@pytest.mark.parametrize("by_template", [True, False])
def test_thought_ends_at_the_budget(demo: Model, by_template: bool, depth: int | str) -> None:
    prompt = prompt_of(demo, by_template)
    with Session(demo, settings(depth)) as session:
        for budget in (0, 1, 3, 17):
            sampling = Sampling(reasoning_budget=budget)
            got = session.generate(prompt, max_tokens=N, sampling=sampling).run()
            assert got.tokens == expected(demo, prompt, by_template, budget), budget


@pytest.mark.parametrize("penalty", [1.0, 1.2])
def test_drawn_drafts_are_cut_too(demo: Model, penalty: float) -> None:
    prompt = prompt_of(demo, True)
    forced = demo.tokenize(FORCED, add_special=False, parse_special=True)
    chosen = Sampling(temperature=1.0, repeat_penalty=penalty, reasoning_budget=6, seed=3)
    with Session(demo, settings(3, draft_sampling=True)) as session:
        tokens = session.generate(prompt, max_tokens=N, sampling=chosen).run().tokens
    assert tokens[6 : 6 + len(forced)] == forced


def test_a_budget_that_is_not_used_up_changes_nothing(demo: Model) -> None:
    prompt = demo.tokenize("import os\n\ndef")
    with Session(demo, settings(3)) as session:
        plain = session.generate(prompt, max_tokens=N).run().tokens
        chosen = Sampling(reasoning_budget=0)
        assert session.generate(prompt, max_tokens=N, sampling=chosen).run().tokens == plain
