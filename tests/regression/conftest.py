"""What several regression tests look at: the drafts that are made."""

from __future__ import annotations

from typing import Any

import pytest

from pyllama_mtp.drafting.drafter import HeadDrafter
from pyllama_mtp.sequence import Drafts


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
