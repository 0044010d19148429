"""Small pure functions: a draft's probability, the common prefix, the chat template."""

from __future__ import annotations

import numpy as np
import pytest

from pyllama_mtp.engine import common_prefix
from pyllama_mtp.errors import UsageError
from pyllama_mtp.llama import chat
from pyllama_mtp.speculative.drafter import top_probability


def test_probability_among_the_best() -> None:
    """Softmax over the k best; the others do not count."""
    logits = np.log(np.array([0.1, 0.6, 0.2, 0.1], dtype=np.float32))
    assert top_probability(logits, k=4) == pytest.approx(0.6)
    assert top_probability(logits, k=2) == pytest.approx(0.6 / 0.8)
    assert top_probability(logits, k=1) == 1.0
    assert top_probability(logits, k=10) == pytest.approx(0.6), "fewer tokens than k"


def test_probability_of_large_and_of_equal_logits() -> None:
    assert top_probability(np.full(50, 3e38, dtype=np.float32)) == pytest.approx(0.1)
    assert top_probability(np.array([1e4, -1e4, 0], dtype=np.float32)) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("a", "b", "n"),
    [([], [1], 0), ([1, 2], [1, 2, 3], 2), ([1, 2, 3], [1, 9, 3], 1), ([5], [6], 0), ([1], [1], 1)],
)
def test_common_prefix(a: list[int], b: list[int], n: int) -> None:
    assert common_prefix(a, b) == common_prefix(b, a) == n


TEMPLATE = """{%- for m in messages -%}
{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endfor %}{% if add_generation_prompt %}<|im_start|>assistant{{ '\n' }}{% endif %}"""
HELLO = [{"role": "user", "content": "Hello {{ 1 }}"}]


def test_template() -> None:
    opened = chat.render(TEMPLATE, HELLO)
    assert opened == "<|im_start|>user\nHello {{ 1 }}<|im_end|>\n<|im_start|>assistant\n"
    assert chat.render(TEMPLATE, HELLO, add_generation_prompt=False) == opened[:-22]


def test_template_variables() -> None:
    assert chat.render("{{ bos_token }}{{ think }}", HELLO, bos_token="<s>", think=1) == "<s>1"
    assert chat.render("{{ absent }}", HELLO) == ""


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for %}", "cannot render"),
        ("{{ messages[0].content.missing.name }}", "cannot render"),
    ],
)
def test_template_that_refuses(template: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        chat.render(template, HELLO)


def test_template_cannot_reach_the_interpreter() -> None:
    with pytest.raises(UsageError):
        chat.render("{{ messages.__class__.__mro__[1].__subclasses__() }}", HELLO)


@pytest.mark.parametrize("template", ["{{ 1 / 0 }}", "{{ messages[0].role + 1 }}"])
def test_template_with_a_runtime_error(template: str) -> None:
    with pytest.raises(UsageError):
        chat.render(template, HELLO)
