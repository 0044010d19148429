"""Drafts from the text itself, and plain rounds between drafts: the text and both caches."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from pyllama_mtp import Model, Sampling, Session
from pyllama_mtp.engine import Engine
from pyllama_mtp.sequence import Sequence

from ..marks import usual
from .support import (
    Scripted,
    assert_same_tokens,
    cached,
    engine_of,
    greedy,
    settings,
    written,
)
from .test_draft_cache import check

AUTO = dataclasses.replace(settings(0), draft_n_max="auto", cache_type_k="f32", cache_type_v="f32")


def script(engine: Engine, *rounds: tuple[int, ...]) -> Scripted:
    """(depth of the head, drafts from the text where there are any, and those behind the head's) of
    the rounds to come."""
    engine.drafting.depths = scripted = Scripted(*rounds)
    return scripted


@pytest.fixture
def repeated(text: list[int]) -> list[int]:
    """A prompt that says everything twice; what follows does not."""
    return [*text[60:100], *text[60:100]]


@pytest.mark.parametrize("rollback", ["snapshot", "replay"])
def test_the_text_is_the_same(demo: Model, repeated: list[int], gap: float, rollback: str) -> None:
    """Drafts of the head, of the text and none, in turn."""
    expected = written(demo, repeated, 120, 0)
    with Session(demo, dataclasses.replace(AUTO, rollback=rollback)) as session:
        rounds = (0, 6), (3, 0), (0, 0), (0, 2), (2, 5), (2, 0, 4), (0, 0), (1, 0, 5)
        told = script(engine_of(session), *rounds)
        got = greedy(session, repeated, 120)
        assert_same_tokens(demo, repeated, got.tokens, expected.tokens, gap)
        check(session)
        ngrams = engine_of(session).drafting.ngrams
        assert ngrams and ngrams.texts[0].tokens == [*repeated, *got.tokens]
        session.process([7, *repeated])
        assert ngrams.past.tokens[1:] == [*repeated, *got.tokens]
        session.reset()
        assert not ngrams.past.tokens and not ngrams.texts[0].tokens
    looked_up = got.telemetry.looked_up
    assert looked_up["rounds"] > len(told.told_looked_up) > 3
    n_drafted = sum(told.told_looked_up) + told.n_behind
    assert looked_up["drafted"] == n_drafted > looked_up["accepted"] > 0
    assert sum(got.telemetry.drafted) == sum(n for _, n, _ in told.told) > 0
    assert got.telemetry.rounds == len(told.told) + len(told.told_looked_up)
    emitted = got.telemetry.tokens_per_round * got.telemetry.rounds
    assert round(emitted) == got.telemetry.n_generated - 1


def test_drafts_are_what_followed_before(
    demo: Model, repeated: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same three tokens earlier in the text, once they came."""
    verify, seen = Engine.verify, list[int]()

    def watched(engine: Engine, sequences: list[Sequence]) -> None:
        text, drafts = [*sequences[0].tokens, sequences[0].newest], sequences[0].drafts
        if drafts.looked_up:
            places = [i for i in range(3, len(text)) if text[i - 3 : i] == text[-3:]]
            n, follow = len(drafts.tokens), [[*text[at:], *drafts.tokens] for at in places]
            assert any(drafts.tokens == tokens[:n] for tokens in follow)
            seen.append(len(drafts.tokens))
        verify(engine, sequences)

    monkeypatch.setattr(Engine, "verify", watched)
    with Session(demo, AUTO) as session:
        script(engine_of(session), (0, 6))
        greedy(session, repeated, 60)
    assert max(seen) == 6


def test_off_where_it_has_no_place(demo: Model) -> None:
    for other in (
        dataclasses.replace(AUTO, ngram=False),
        dataclasses.replace(AUTO, draft_n_max=3),
        dataclasses.replace(AUTO, synthetic_acceptance=(0.5,) * 6),
    ):
        with Session(demo, other) as session:
            assert engine_of(session).drafting.ngrams is None
    with Session(demo, AUTO) as session:
        assert engine_of(session).drafting.ngrams


def test_drawn_drafts_and_looked_up_ones(demo: Model, repeated: list[int]) -> None:
    """Under rejection sampling a draft from the text is certain of itself."""
    chosen = dataclasses.replace(AUTO, draft_sampling=True)
    with Session(demo, chosen) as session:
        told = script(engine_of(session), (2, 3), (0, 3))
        run = session.generate(
            repeated, max_tokens=80, sampling=Sampling(temperature=1.0, seed=5), ignore_eos=True
        ).run()
        check(session)
    assert len(run.tokens) == 80 and told.told and told.told_looked_up


@pytest.mark.parametrize("n_plain", usual(1, 33, long=[5]))
@pytest.mark.parametrize("then", [(3, 0), (0, 6)])
def test_drafts_after_plain_rounds(
    demo: Model, text: list[int], n_plain: int, then: tuple[int, int]
) -> None:
    """Drafts of the head, or from the text."""
    prompt = [*text[:24], *text[:24]]
    with Session(demo, AUTO) as session:
        script(engine_of(session), *[(0, 0)] * n_plain, then)
        session.generate(prompt, max_tokens=100, ignore_eos=True).run()
        check(session)


def test_what_was_given_up_is_saved_and_goes_on(
    demo: Model, text: list[int], tmp_path: Path
) -> None:
    """A generation that nobody went on with, after plain rounds."""
    with Session(demo, AUTO) as session, Session(demo, AUTO) as other:
        script(engine_of(session), (0, 0))
        generation = session.generate(text[:20], max_tokens=50, ignore_eos=True)
        while len(generation.tokens) < 9:
            next(iter(generation))
        session.save(tmp_path / "prompt")
        other.restore(tmp_path / "prompt")
        for one in (session, other):
            check(one)
            prompt = [*cached(one), *text[40:60]]
            one.generate(prompt, max_tokens=5, ignore_eos=True).run()
            check(one)


def test_rounds_in_which_drafting_stops_at_once(demo: Model, text: list[int]) -> None:
    """p_min 1: the newest token is in step by then, and there is no draft."""
    with Session(demo, dataclasses.replace(AUTO, p_min=1.0, ngram=False)) as session:
        script(engine_of(session), (3, 0), (0, 0), (0, 0), (3, 0), (3, 0), (0, 0))
        run = session.generate(text[:20], max_tokens=30, ignore_eos=True).run()
        assert not sum(run.telemetry.drafted)
        check(session)
