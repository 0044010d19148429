"""Sets of prompts: what the package ships, and what is refused in a file of the user's."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyllama_mtp import Model
from pyllama_mtp.errors import UsageError
from pyllama_mtp.measure import prompts as promptset
from pyllama_mtp.measure.prompts import Prompt, read_prompts

from ..fakes import like


def test_the_package_has_twenty_different_prompts_of_each_class() -> None:
    found = promptset.package_prompts()
    for name in ("factual", "thinking", "code", "instruction"):
        own = [prompt for prompt in found if prompt.kind == name]
        assert 20 <= len(own) <= 24
        assert all(prompt.chat and prompt.thinking is (name == "thinking") for prompt in own)
    texts = [prompt.text.strip().lower() for prompt in found]
    assert len(set(texts)) == len(texts) and all(len(text) >= 30 for text in texts)


def test_classes_are_chosen_in_the_order_asked_for() -> None:
    kinds = [prompt.kind for prompt in promptset.package_prompts(("code", "factual"))]
    assert list(dict.fromkeys(kinds)) == ["code", "factual"]
    with pytest.raises(UsageError, match=r"'cod'; there are factual, thinking, code, instruction"):
        promptset.package_prompts(("cod",))


def test_the_demo_model_has_prompts_of_its_own() -> None:
    found = promptset.demo_prompts()
    assert {prompt.kind for prompt in found} == set(promptset.CLASSES)
    assert not {prompt.text for prompt in found} & {p.text for p in promptset.package_prompts()}


def test_only_the_prompt_is_needed(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    text = '{"prompt": "one\u2028line"}\r\n\n{"class": "x", "prompt": "b", "chat": true}'
    path.write_text(text, encoding="utf-8", newline="")
    assert read_prompts(path) == [Prompt("own", "one\u2028line"), Prompt("x", "b", chat=True)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not a prompt as in"),
        ('["a"]', "not a prompt as in"),
        ('{"class": "code"}', "'prompt' is missing or empty"),
        ('{"prompt": " "}', "'prompt' is missing or empty"),
        ('{"prompt": "a", "class": ""}', "'class' is missing or empty"),
        ('{"prompt": 3}', "Expected `str`, got `int` - at `$.prompt`"),
        ('{"prompt": "a", "chat": "yes"}', "Expected `bool`, got `str` - at `$.chat`"),
        ('{"prompt": "a", "chat": null}', "Expected `bool`, got `null`"),
        ('{"prompt": "a", "thinkng": true}', "unknown field `thinkng`"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "fine"}\n\n' + line + "\n")
    with pytest.raises(UsageError) as error:
        read_prompts(path)
    assert "mine.jsonl, line 3: " in str(error.value) and message in str(error.value)


def test_rendering() -> None:
    """The stand-in's calls show their arguments."""
    model = like(
        Model,
        apply_chat_template=lambda messages, **variables: (
            f"{messages[0]['role']}:{messages[0]['content']}:{variables}"
        ),
        tokenize=lambda text, add_special=True, parse_special=False: (
            (text, add_special, parse_special)
        ),
    )
    assert Prompt("x", "a").render(model, "b ") == "b a"
    assert Prompt("x", "a", chat=True).render(model) == "user:a:{}"
    thinking = Prompt("x", "a", chat=True, thinking=False)
    assert thinking.render(model, "b ") == "user:b a:{'enable_thinking': False}"
    assert Prompt("x", "a").tokens(model) == ("a", True, True)
