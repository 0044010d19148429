"""What several regression tests share: prompts, their plain answers, the drafts that are made."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from pyllama_mtp import Answer, Model
from pyllama_mtp.drafting.drafter import HeadDrafter
from pyllama_mtp.llama.vision import Vision
from pyllama_mtp.models.mmproj import write_synthetic_mmproj
from pyllama_mtp.sequence import Drafts

from .support import MOST, answers, settings


@pytest.fixture(scope="session")
def ragged(demo: Model, demo_prompts: list[str]) -> list[list[int]]:
    """Chat that ends early, chat that goes on, code; 20 to 159 tokens."""
    chosen = (0, 12, 18, 3, 22, 20, 9, 15)
    return [demo.tokenize(demo_prompts[i], parse_special=True) for i in chosen]


@pytest.fixture(scope="session")
def plain_answers(demo: Model, ragged: list[list[int]]) -> list[Answer]:
    """Plain greedy answers to `ragged`; some end early, at different places."""
    found = answers(demo, ragged, settings(0, n_ubatch=32), MOST)
    assert [answer.finish_reason for answer in found].count("eos") >= 3
    assert len({len(answer.tokens) for answer in found}) >= 6
    for answer in found:
        ends = [demo.is_end(token) for token in answer.tokens]
        assert not any(ends[:-1]) and ends[-1] == (answer.finish_reason == "eos")
        assert answer.text == demo.detokenize(answer.tokens[: len(ends) - ends[-1]])
    return found


@pytest.fixture(scope="module")
def vision(demo: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vision]:
    """An encoder of images for the demo model, with random weights."""
    path = write_synthetic_mmproj(tmp_path_factory.mktemp("vision") / "mm.gguf", demo.n_embd_inp)
    with Vision(demo, path, n_threads=1) as found:
        yield found


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every token that is drafted, verified or not."""
    found: list[int] = []
    real = HeadDrafter.draft

    def draft(self: HeadDrafter, *args: Any) -> list[Drafts]:
        drafts = real(self, *args)
        for one in drafts:
            found.extend(one.tokens)
        return drafts

    monkeypatch.setattr(HeadDrafter, "draft", draft)
    return found
