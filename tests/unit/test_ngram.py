"""Drafts from the text itself: what is found, what is drafted, and how far it is trusted."""

from __future__ import annotations

import itertools
import random

import pytest

from pyllama_mtp.drafting import ngram
from pyllama_mtp.drafting.depth import Costs, DepthController
from pyllama_mtp.drafting.ngram import KINDS, LEAST, MOST, Match, NgramLookup

LIMIT = 6


def lookup(tokens: list[int]) -> NgramLookup:
    made = NgramLookup(LIMIT)
    made.begin(tokens)
    return made


def expected_match(text: list[int]) -> Match | None:
    """Look at every earlier place, the last one first."""
    for follows in range(len(text) - 1, LEAST - 1, -1):
        if text[follows - LEAST : follows] == text[-LEAST:]:
            same = (text[follows - 1 - i] == text[-1 - i] for i in range(min(MOST, follows)))
            return Match(follows, sum(1 for _ in itertools.takewhile(bool, same)))
    return None


def test_the_last_occurrence() -> None:
    text = [1, 2, 3, 7, 8, 1, 2, 3, 9, 4, 1, 2, 3]
    found = lookup(text)
    match = found.find()
    assert match == Match(8, 3)
    assert found.drafts(match, 4) == [9, 4, 1, 2]


def test_a_loop_is_drafted_on() -> None:
    found = lookup([5, 1, 2, 3, 1, 2, 3])
    match = found.find()
    assert match and found.drafts(match, 7) == [1, 2, 3, 1, 2, 3, 1]


def test_against_a_search_of_the_whole_text() -> None:
    rng = random.Random(4)
    for _ in range(200):
        text = [rng.randrange(3) for _ in range(rng.randrange(60))]
        found = NgramLookup(LIMIT)
        found.begin(text[:20])
        found.add(text[20:])
        assert found.find() == expected_match(text), text


def test_another_prompt() -> None:
    """One that goes on, and ones that leave the text: what was left is found in no other text than
    the past ones, and there only where this text has nothing."""
    found = lookup([1, 2, 3, 4])
    found.begin([1, 2, 3, 4, 9, 1, 2, 3])
    assert found.find() == Match(3, 3)
    found.begin([1, 2, 3, 4, 8, 1, 2, 3])
    assert found.drafts(found.find() or Match(0, 0), 2) == [4, 8]
    found.begin([7, 1, 2, 3])
    past = found.find()
    assert past and past.past and found.drafts(past, 2) == [4, 8]
    found.add([5, 1, 2, 3])
    assert found.find() == Match(4, 3), "of this text"
    found.begin([5, 4, 8, 1])
    past = found.find()
    assert past and found.drafts(past, 9) == [2, 3], "no further than the end of a past text"
    found.past.clear()
    found.begin([6, 1, 2, 3])
    found.begin([9, 1, 2])
    assert found.find() is None


def test_a_copy_goes_on_after_an_edit() -> None:
    """Although its newest tokens came again since, and near the place where it was left."""
    source = [*range(100, 150), *range(40), 7, 8, 9]
    found = lookup([*source, *range(100, 105)])
    match = found.find()
    assert match == Match(5, 5)
    for at in range(105, 145):
        found.add([at])
        assert found.find() == Match(at - 99, at - 99)
    found.add([*range(145, 150), 0, 1, 55])  # left where 2 should come
    assert found.find() is None
    found.add([4])
    assert found.find() == Match(55, 1), "one token is enough there"
    assert found.find([5, 6]) == Match(57, 3), "and drafts are text"
    found.add([5])
    assert found.find() == Match(56, 2)
    trusted = found.rates(Match(56, 2))
    found.learn(Match(56, 2), [0])
    assert found.rates(Match(56, 2)) < trusted
    found.add([*range(200, 280), 9])
    assert found.find() is None, "the copy is over"


def test_drafts_behind_those_of_the_head() -> None:
    found = lookup([1, 2, 3, 4, 5, 6, 9, 1, 2])
    assert found.find() is None
    match = found.find([3])
    assert match == Match(3, 3) and found.drafts(match, 3, [3]) == [4, 5, 6]
    loop = lookup([1, 2, 3, 1])
    match = loop.find([2, 3])
    assert match == Match(3, 3) and loop.drafts(match, 5, [2, 3]) == [1, 2, 3, 1, 2]
    before = found.rates(Match(3, 3))
    found.learn(Match(3, 3), [4, 5], [3])
    assert found.rates(Match(3, 3)) > before


def test_old_past_texts_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "PAST", 20)
    found = lookup([])
    for first in range(100, 200, 10):
        found.begin([*range(first, first + 10)])
    assert len(found.past.tokens) <= 40
    assert not any(first in found.past.tokens for first in range(100, 130))
    found.begin([1, 181, 182, 183])
    past = found.find()
    assert past and found.drafts(past, 2) == [184, 185]


def test_trust_is_learned_by_kind_of_match() -> None:
    found = lookup([*range(40), *range(20)])
    long, short = Match(20, MOST), Match(20, LEAST)
    before = found.rates(short)
    for _ in range(30):
        found.learn(long, [20, 21, 22, 0])
    rates = found.rates(long)
    assert rates[0] > 0.9 and rates[2] > 0.9 and rates[3] < 0.2
    assert rates[4] == pytest.approx(rates[3]), "never reached: as the one before"
    assert found.rates(short) == before
    for _ in range(60):
        found.learn(long, [0])
    assert found.rates(long)[0] < 0.2
    assert [least for least, _ in KINDS] == sorted(least for least, _ in KINDS)


COSTS = Costs((0.0, 1.0, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7), (0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.2))


def test_worth_it_where_it_beats_the_depth_in_use() -> None:
    controller = DepthController({1: COSTS})
    assert controller.lookup_depth([0.99] * LIMIT, LIMIT) == LIMIT
    assert controller.lookup_depth([0.99] * LIMIT, 2) == 2
    assert controller.lookup_depth([0.99] * LIMIT, 0) == 0
    assert controller.lookup_depth([0.99] * LIMIT, -1) == 0
    assert controller.lookup_depth([0.05] * LIMIT, LIMIT) == 0
    # two drafts hold for sure, no more: (1 + 1 + 1) / 1.3 is the best there is
    assert controller.lookup_depth([1.0, 1.0, 0.0, 0.0, 0.0, 0.0], LIMIT) == 2


def test_not_where_the_head_is_faster() -> None:
    """Drafts that hold nine times in ten, against a head that is free and always right."""
    free = Costs(COSTS.verify, (0.0, *[1e-6] * LIMIT))
    controller = DepthController({1: free})
    for _ in range(40):
        depth = controller.choose()
        controller.update(depth, [(depth, depth)], free.verify[depth + 1])
    assert controller.depth() == LIMIT
    assert controller.lookup_depth([0.9] * LIMIT, LIMIT) == 0


def test_behind_drafts_of_the_head_where_further_rows_pay() -> None:
    controller = DepthController({1: COSTS})
    assert controller.lookup_depth([0.99] * LIMIT, LIMIT, 2) == LIMIT - 2
    assert controller.lookup_depth([0.99] * LIMIT, 3, 2) == 1
    assert controller.lookup_depth([0.99] * LIMIT, 2, 2) == 0
    assert controller.lookup_depth([0.05] * LIMIT, LIMIT, 2) == 0
    for _ in range(40):  # none of the head's holds, so none behind them
        controller.choose()
        controller.update(2, [(2, 0)], 1.7)
    assert controller.lookup_depth([0.99] * LIMIT, LIMIT, 2) == 0


def test_without_a_head_plain_decoding_is_what_to_beat() -> None:
    controller = DepthController({1: COSTS}, has_head=False)
    assert controller.lookup_depth([0.25] * LIMIT, LIMIT) > 0
    assert controller.lookup_depth([0.05] * LIMIT, LIMIT) == 0


def test_rounds_of_n_grams_teach_costs_and_nothing_of_the_head() -> None:
    controller = DepthController({1: COSTS})
    depth, asked = controller.depth(), controller.choose()
    for factor in (1.0, 1.5):
        for _ in range(50):
            controller.update(3, [(0, 0)], factor * COSTS.verify[4], n_behind=3)
        assert controller.costs.factors()[3] == pytest.approx(factor, rel=0.05)
        assert asked and (factor > 1.0 or controller.depth() == depth > 0)
