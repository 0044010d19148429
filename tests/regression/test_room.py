"""Context lengths that nobody asked for: little memory shortens them, and no answer is too long."""

from __future__ import annotations

import pytest

from pyllama_mtp import Model, Settings, memory, stream
from pyllama_mtp.errors import InsufficientMemoryError
from pyllama_mtp.memory import LEAST_N_CTX, resolve
from pyllama_mtp.settings import MOST_TOKENS


def test_caches_beyond_all_memory_are_halved_unless_asked_for(
    demo: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 2**20)
    usual = Settings(draft_n_max=0, n_threads=1)
    assert resolve(usual, demo).settings.n_ctx == LEAST_N_CTX
    with pytest.raises(InsufficientMemoryError, match="a context of 4096 tokens needs"):
        resolve(Settings(n_ctx=2**22, draft_n_max=0, n_threads=1), demo)


def test_any_number_of_tokens_may_be_asked_for(demo: Model) -> None:
    pieces = stream(demo, "def main", max_tokens=MOST_TOKENS, n_threads=1)
    assert next(pieces)
