"""Prompts of every class have exactly the length asked for, and another text for each repeat."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pyllama_mtp import Model
from pyllama_mtp.errors import UsageError
from pyllama_mtp.measure.prompts import (
    CLASSES,
    CODE_REQUEST,
    Prompts,
    demo_prompts,
    package_prompts,
)

BytesModel = Callable[..., Any]


def test_documentation_is_prose_and_source_is_code(bytes_model: BytesModel) -> None:
    prompts = Prompts(bytes_model())
    prose = bytes(prompts.prompt("text", 20_000, 0)).decode(errors="replace")
    code = bytes(prompts.prompt("source", 20_000, 0)).decode(errors="replace")
    assert code.count("\n    def ") > 10 * max(1, prose.count("\n    def "))
    assert prose != code and len(prose.split()) > 2_000


@pytest.mark.parametrize("name", CLASSES)
def test_questions_after_text(bytes_model: BytesModel, name: str) -> None:
    """A prompt has the length asked for and ends, in a chat, with the question of its repeat."""
    prompts = Prompts(bytes_model())
    questions = package_prompts([name])
    texts = set()
    for repeat in (0, 1, len(questions) + 1):
        prompt = prompts.prompt(name, 3000, repeat)
        assert len(prompt) == 3000
        text = bytes(prompt).decode(errors="replace")
        question = questions[repeat % len(questions)].text
        before, found, after = text.partition("\n\n" + question)
        assert found and before.startswith("<user>") and after == "<assistant>"
        texts.add(before)
    assert len(texts) == 3, "another text for every repeat"
    with pytest.raises(UsageError, match=f"too few for a {name} prompt"):
        prompts.prompt(name, 20, 0)


def test_the_demo_model_is_asked_its_own_questions(demo: Model) -> None:
    prompts = Prompts(demo)
    for kind in CLASSES:
        own = next(prompt for prompt in demo_prompts() if prompt.kind == kind)
        prompt = prompts.prompt(kind, 512, 0)
        assert len(prompt) == 512
        assert demo.detokenize(prompt, special=True).endswith(own.render(demo)[-30:])


@pytest.mark.parametrize("bos", [None, 300])
def test_code_mode_has_exact_lengths_and_other_text_each_time(
    bytes_model: BytesModel, bos: int | None
) -> None:
    prompts = Prompts(bytes_model(bos), output_mode="code")
    found = [prompts.prompt("text", 700, repeat) for repeat in (0, 1)]
    assert [len(prompt) for prompt in found] == [700, 700] and found[0] != found[1]
    text = bytes(token for token in found[0] if token < 256).decode()
    assert text.startswith("<user>") and text.endswith(CODE_REQUEST + "<assistant>")
    assert (found[0][0] == bos) == (bos is not None)
    with pytest.raises(UsageError, match="a prompt of 50 tokens is too short; give at least"):
        prompts.prompt("text", 50, 0)
