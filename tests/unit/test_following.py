"""Which rows of a draft head make room for what the text needs, and how many. No library."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pyllama_mtp import Model, Settings, Telemetry
from pyllama_mtp.drafting import head as drafthead
from pyllama_mtp.drafting.head import (
    DraftHead,
    Following,
    follows,
    replace_draft_rows,
)

from ..fakes import like, parameters

N_VOCAB = 100
#: Most useful first: the loose half is 16, 18 .. 30, and 30 is the least likely one.
RANKED = np.arange(0, 32, 2, dtype=np.int32)


class FakeContext:
    """Remembers what was replaced; its rows are the ids that the fake file gives."""

    def __init__(self, ids: Any) -> None:
        self.model, self.draft_ids = like(Model, n_vocab=N_VOCAB), ids.copy()
        self.calls: list[tuple[list[int], list[int]]] = []


def replace_rows(context: Any, slots: Any, ids: Any, rows: Any) -> None:
    assert len(set(slots.tolist())) == len(slots) == len(ids)
    assert rows.tolist() == ids.tolist()
    context.calls.append((slots.tolist(), ids.tolist()))
    context.draft_ids = context.draft_ids.copy()
    context.draft_ids[slots] = ids
    assert len(set(context.draft_ids.tolist())) == len(context.draft_ids)


assert parameters(replace_rows) == parameters(replace_draft_rows)


class Both:
    """A follower and its context."""

    def __init__(self) -> None:
        ids = np.sort(RANKED)
        head = like(DraftHead, ids=ids, ranked=RANKED, rows=lambda ids: ids)
        self.context = FakeContext(ids)
        self.following = Following(self.context, head)  # type: ignore[arg-type]
        self.telemetry = Telemetry()

    def see(self, *tokens: int, prompt: bool = False) -> list[int]:
        """The tokens that got rows."""
        self.context.calls.clear()
        self.following.see(tokens, [self.telemetry], prompt)
        return [token for _, ids in self.context.calls for token in ids]

    def tokens(self) -> set[int]:
        return set(self.context.draft_ids.tolist())


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Both:
    monkeypatch.setattr(drafthead, "replace_draft_rows", replace_rows)
    return Both()


def test_the_least_likely_ones_go_first(both: Both) -> None:
    assert both.see(1) == [1] and both.tokens() == {*RANKED.tolist(), 1} - {30}
    assert sorted(both.see(3, 5)) == [3, 5] and not {26, 28} & both.tokens()


def test_what_is_there_costs_nothing(both: Both) -> None:
    both.see(1)
    assert both.see(1, 2, 4, 1) == []


def test_the_better_half_stays(both: Both) -> None:
    """Special tokens, which every ranking begins with, stay however much the text needs."""
    for first in range(33, 90, 3):
        both.see(first, first + 1, first + 2)
    assert set(RANKED[:8].tolist()) <= both.tokens()
    assert len(both.tokens()) == len(RANKED)


def test_tokens_that_occur_again_stay(both: Both) -> None:
    """30 and 28 would be the first to go."""
    both.see(30, 28)
    both.see(1, 3)
    assert {30, 28, 1, 3} <= both.tokens() and not {26, 24} & both.tokens()


def test_what_has_long_not_occurred_goes(both: Both) -> None:
    """Tokens of an earlier text too, when the hand is back."""
    both.see(1)
    for token in range(41, 56, 2):
        both.see(token)
    assert 1 not in both.tokens()
    assert both.see(1) == [1]


def test_those_in_use_give_way_when_all_are(both: Both) -> None:
    both.see(*range(16, 32, 2))
    assert sorted(both.see(1, 3)) == [1, 3]


def test_rows_per_round_and_prompt(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    """The most frequent tokens, of equals the ones that came last; what is left out comes later."""
    monkeypatch.setattr(drafthead, "MOST_PER_ROUND", 2)
    monkeypatch.setattr(drafthead, "MOST_PER_PROMPT", 3)
    assert both.see(51, 53, 53, 55, 57) == [53, 57]
    assert both.see(61, 63, 65, 67, 61, prompt=True) == [61, 67, 65]
    assert both.see(51) == [51]


def test_more_than_there_are_loose_rows(both: Both) -> None:
    assert len(both.see(*range(33, 63, 2), prompt=True)) == 8


def test_what_is_counted(both: Both) -> None:
    """Coverage is that of rounds: tokens of a prompt need not be drafted."""
    both.see(1, 2, 3, prompt=True)
    both.see(1, 2, 5, 5)
    found = both.telemetry.draft_vocab
    assert (found["tokens"], found["outside"], found["replaced"]) == (4, 2, 3)
    assert found["seconds"] > 0


def test_when_it_follows() -> None:
    for options, ranked, wanted in (
        ({}, RANKED, True),
        ({"draft_follow": False}, RANKED, False),
        ({"draft_sampling": True}, RANKED, False),
        ({"draft_n_max": 1, "synthetic_acceptance": (0.5,)}, RANKED, False),
        ({}, None, False),
    ):
        assert follows(Settings(**options), like(DraftHead, ranked=ranked)) is wanted
