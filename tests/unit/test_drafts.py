"""Drafts before they are verified: what a grammar leaves of them."""

from __future__ import annotations

from typing import Any

import pytest

from pyllama_mtp.drafting.choice import cut
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
