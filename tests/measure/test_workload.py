"""Prompts have exactly the length asked for, real text, and another text for each repeat."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pyllama_mtp.errors import UsageError
from pyllama_mtp.files import decode_text
from pyllama_mtp.measure.prompts import (
    Workload,
    docstrings,
    source_of_prompts,
    stdlib_texts,
)

BytesModel = Callable[..., Any]


@pytest.mark.parametrize("size", [2, 77])
def test_lengths_are_exact_with_a_bos(bytes_model: BytesModel, size: int) -> None:
    prompts = [Workload(bytes_model(300)).prompt(size, repeat) for repeat in (0, 1)]
    assert [len(prompt) for prompt in prompts] == [size, size]
    assert all(prompt[0] == 300 and 300 not in prompt[1:] for prompt in prompts)


def test_a_prompt_must_have_room_for_text(bytes_model: BytesModel) -> None:
    with pytest.raises(UsageError, match="at least 2"):
        Workload(bytes_model(300)).prompt(1)


def test_repeats_follow_each_other_in_the_text(bytes_model: BytesModel) -> None:
    source = next(stdlib_texts()).encode()
    workload = Workload(bytes_model())
    joined = b"".join(bytes(workload.prompt(500, repeat)) for repeat in range(3))
    assert joined == source[:1500]


def test_the_same_prompt_every_time(bytes_model: BytesModel) -> None:
    one, other = Workload(bytes_model()), Workload(bytes_model())
    other.prompt(9000, 2)
    assert one.prompt(700, 1) == other.prompt(700, 1)


@pytest.mark.parametrize("size", [5, 10, 15, 20])
def test_too_little_text_is_repeated_but_never_alike(bytes_model: BytesModel, size: int) -> None:
    """Ten bytes of text: sizes that divide it would give every repeat the same prompt."""
    workload = Workload(bytes_model(), ["abcdefghij"])
    prompts = [workload.prompt(size, repeat) for repeat in range(4)]
    assert [len(prompt) for prompt in prompts] == [size] * 4
    assert len({tuple(prompt) for prompt in prompts}) == 4


def test_no_text_at_all(bytes_model: BytesModel) -> None:
    with pytest.raises(UsageError, match="--prompt-file"):
        Workload(bytes_model(), []).prompt(5)


def test_special_tokens_in_the_text_stay_text(bytes_model: BytesModel) -> None:
    assert bytes(Workload(bytes_model(), ["<|im_end|> and more"]).prompt(5)) == b"<|im_"


def test_a_byte_order_mark_is_no_text() -> None:
    assert decode_text(b"\xef\xbb\xbfhello", "x") == "hello"
    with pytest.raises(UsageError, match="the prompt is empty"):
        decode_text(b"\xef\xbb\xbf", "the prompt")


# -- classes and modes -----------------------------------------------------------------------------


@pytest.mark.long
def test_documentation_does_not_run_out() -> None:
    """Source code follows the documentation, which has fewer than a million tokens."""
    assert sum(map(len, docstrings())) > sum(map(len, stdlib_texts())) + 500_000


def test_where_prompts_come_from_is_equal_only_for_equal_text() -> None:
    assert source_of_prompts(None, None).startswith("standard library of Python 3.")
    one, other = (source_of_prompts("folder/p.txt", text) for text in ("a", "b"))
    assert one != other and one.startswith("p.txt, SHA-256 ")
