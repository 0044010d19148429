"""What several regression tests look at: the drafts that are made."""

from __future__ import annotations

from typing import Any

import pytest

from pyllama_mtp.drafting.drafter import Drafter, Drafts


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every token that is drafted, verified or not."""
    found: list[int] = []
    real = Drafter.draft

    def draft(self: Drafter, *args: Any) -> list[Drafts]:
        drafts = real(self, *args)
        for one in drafts:
            found.extend(one.tokens)
        return drafts

    monkeypatch.setattr(Drafter, "draft", draft)
    return found
