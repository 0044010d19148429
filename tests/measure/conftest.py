"""The demo model, its sessions watched; a model of bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pyllama_mtp import Model

from ..cli.conftest import folder, watched  # noqa: F401 (fixtures)
from ..fakes import like


@pytest.fixture
def bytes_model() -> Callable[..., Any]:
    """`bytes_model(bos)`: what prompts ask of a model whose tokens are bytes; one above 255 is a
    special token of the text, which nobody asks for."""

    def make(bos: int | None = None) -> Any:
        def tokenize(text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
            assert not (parse_special and "<|" in text)
            return [bos] * (add_special and bos is not None) + [*text.encode()]  # type: ignore

        def chat(messages: list[dict[str, str]], **variables: Any) -> str:
            return "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>"

        return like(Model, path="m.gguf", tokenize=tokenize, apply_chat_template=chat)

    return make
