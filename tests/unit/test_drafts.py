"""Drafts before they are verified: what p_min and a grammar leave of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pyllama_mtp.drafting import drafter
from pyllama_mtp.drafting.choice import cut
from pyllama_mtp.drafting.drafter import HeadDrafter
from pyllama_mtp.request import Request
from pyllama_mtp.sampling.acceptance import point
from pyllama_mtp.sampling.sampler import Sampler
from pyllama_mtp.sequence import Drafts, Sequence

from ..fakes import like

TOKENS = [3, 4, 5, 6]


def sequence(n_valid: int, forced: tuple[int, ...] = (), constrained: bool = True) -> Any:
    """A sequence under a grammar of which the first `n_valid` drafts do not break it."""
    sampler = like(
        Sampler,
        constrained=constrained,
        forced=lambda most: list(forced[:most]),
        n_valid=lambda drafts: min(n_valid, len(drafts)),
    )
    return like(Sequence, request=like(Request, sampler=sampler))


def drafts(*, drawn: bool, looked_up: int = 0) -> Drafts:
    """TOKENS, drawn from the head or its best ones."""
    return Drafts(list(TOKENS), [point(t) for t in TOKENS] if drawn else [], looked_up)


@pytest.mark.parametrize("n_valid", range(5))
def test_drafts_end_where_they_break_the_grammar(n_valid: int) -> None:
    """The best tokens and looked-up ones before the one that does. A drawn one stays, as the last:
    rejection sampling needs it. Where the draw is rejected, the next token comes from what the head
    promised too little of. Without the draw that correction is missing, and tokens that the head
    likes come too often."""
    assert cut(sequence(n_valid), drafts(drawn=False)).tokens == TOKENS[:n_valid]
    looked_up = cut(sequence(n_valid), drafts(drawn=True, looked_up=len(TOKENS)))
    assert looked_up.tokens == TOKENS[:n_valid]
    drawn = cut(sequence(n_valid), drafts(drawn=True))
    assert drawn.tokens == TOKENS[: n_valid + 1]
    assert len(drawn.distributions) == len(drawn.tokens)


def test_looked_up_drafts_behind_drawn_ones_are_certain() -> None:
    behind = drafts(drawn=True, looked_up=len(TOKENS) - 2)
    for n_valid, n_kept, n_head in ((0, 1, 1), (1, 2, 2), (2, 2, 2), (3, 3, 2)):
        made = cut(sequence(n_valid), behind)
        assert (made.tokens, made.n_head) == (TOKENS[:n_kept], n_head)


def test_what_is_forced_takes_the_place_of_drafts() -> None:
    made = cut(sequence(4, forced=(9, 8)), drafts(drawn=False), forced=True)
    assert made.tokens == [9, 8] and made.forced


def test_a_grammar_that_was_asked_is_not_asked_again() -> None:
    assert cut(sequence(4, forced=(9, 8)), drafts(drawn=False)).tokens == TOKENS


def test_without_a_grammar_drafts_stay() -> None:
    made = drafts(drawn=True)
    assert cut(sequence(0, constrained=False), made) is made


def test_drafting_stops_when_each_sequence_has_had_an_improbable_draft(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sure, unsure = [9.0, 0.0], [0.0, 0.0]
    logits = np.array([[sure, sure], [unsure, sure], [sure, unsure], [sure, sure]])
    monkeypatch.setattr(drafter, "compute_drafts", lambda *_: np.arange(8).reshape(4, 2))
    monkeypatch.setattr(drafter, "draft_logits", lambda _: logits)
    head = HeadDrafter.__new__(HeadDrafter)
    head.context = like(drafter.Context)
    sequences = [like(Sequence, newest=7, id=i, draws=False) for i in range(2)]
    for p_min, n in ((0.4, 4), (0.6, 2), (1.0, 0)):
        wanted = np.arange(2 * n).reshape(n, 2).T.tolist()
        assert [one.tokens for one in head.draft(sequences, 4, p_min)] == wanted, p_min
