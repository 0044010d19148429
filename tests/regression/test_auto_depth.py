"""draft_n_max="auto": the depth changes while generating, the text does not."""

from __future__ import annotations

import dataclasses
from collections import Counter
from itertools import count
from typing import Any

import pytest

from pyllama_mtp import BatchSession, Model, Session, scheduler
from pyllama_mtp.drafting import drafter
from pyllama_mtp.drafting.depth import CostModel, DepthController
from pyllama_mtp.engine import Engine
from pyllama_mtp.llama.context import Context
from pyllama_mtp.round import speculate
from pyllama_mtp.sequence import Sequence
from pyllama_mtp.settings import AUTO_DEPTH

from .support import COSTS, Scripted, assert_same_tokens, engine_of, greedy, settings, written

AUTO = dataclasses.replace(settings(0), draft_n_max="auto")
N_TOKENS = 160


@pytest.mark.parametrize("n_sequences", [1, 3])
def test_text_is_the_same_whatever_the_depths(
    demo: Model, text: list[int], gap: float, n_sequences: int
) -> None:
    """From no draft to six and back, round by round; what is told is what was done."""
    prompts = [text[i : i + 40] for i in range(0, 10 * n_sequences, 10)]
    with Session(demo, settings(0)) as session:
        expected = [greedy(session, prompt, N_TOKENS).tokens for prompt in prompts]
    chosen = dataclasses.replace(AUTO, ngram=False, n_ubatch=32)
    with BatchSession(demo, chosen, n_sequences) as session:
        depths = engine_of(session).drafting.depths = Scripted(0, 6, 1, 0, 0, 3, 2, 6, 5, 0, 4)
        got = session.generate(prompts, max_tokens=N_TOKENS).run()
    for prompt, answer, wanted in zip(prompts, got.results, expected, strict=True):
        assert_same_tokens(demo, prompt, answer.tokens, wanted, gap)
    assert [drafted for _, drafted, _ in depths.told] == depths.asked
    assert {0, 6} <= {*depths.asked}
    done = [(n, depth) for n, found in got.telemetry.passes.items() for depth in found]
    for n, depth in done:
        assert got.telemetry.passes[n][depth] == [told[:2] for told in depths.told].count(
            (n, depth)
        )
    accepted = sum(accepted for *_, accepted in depths.told)
    assert sum(got.telemetry.accepted) == accepted > 0


def test_a_generation_that_does_not_draft_does_not_ask(demo: Model, text: list[int]) -> None:
    with Session(demo, AUTO) as session:
        depths = engine_of(session).drafting.depths = Scripted(2)
        session.generate(text[:40], max_tokens=20, ignore_eos=True, draft=False).run()
        assert not depths.asked and not depths.told


@pytest.mark.parametrize("n_sequences", [1, 3])
def test_a_round_is_two_graphs_and_none_is_built_anew(
    demo: Model, text: list[int], n_sequences: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts and verification, each one native call, whatever depth is chosen; every shape of a
    graph is kept, so that once all have been built none is built again. All cells are within the
    first 256: graphs attend to a multiple of that, and are built anew when it grows."""
    calls, built = Counter[str](), list[int]()
    for owner, name in ((Context, "decode_batch"), (drafter, "compute_drafts")):
        called = getattr(owner, name)

        def counted(*given: Any, called: Any = called, name: str = name) -> Any:
            calls[name] += 1
            return called(*given)

        monkeypatch.setattr(owner, name, counted)

    def a_round(engine: Engine, sequences: list[Sequence]) -> dict[str, float]:
        calls.clear()
        before = engine.target.graphs_built
        times = speculate(engine, sequences)
        if len(sequences) == n_sequences:  # fewer at the end make shapes of their own
            built.append(engine.target.graphs_built - before)
        drafted = any(one.drafts.tokens for one in sequences)
        assert calls == {"decode_batch": 1} | ({"compute_drafts": 1} if drafted else {})
        return times

    monkeypatch.setattr(scheduler, "speculate", a_round)
    prompts = [text[i : i + 20] for i in range(n_sequences)]
    chosen = dataclasses.replace(AUTO, ngram=False, n_ubatch=32)
    with BatchSession(demo, chosen, n_sequences) as session:
        drafting = engine_of(session).drafting
        for depths in (Scripted(*range(AUTO_DEPTH + 1)), DepthController({1: COSTS})):
            drafting.depths = depths
            built.clear()
            session.generate(prompts, max_tokens=40, ignore_eos=True).run()
            if not isinstance(depths, Scripted):
                assert len(built) > 5 and not any(built)
            session.reset()


def test_what_a_step_without_drafts_takes(demo: Model, text: list[int]) -> None:
    with Session(demo, AUTO) as session:
        t = greedy(session, text[:40], 64).telemetry
        assert t.plain_s and t.speed_up == pytest.approx(t.decode_tps * t.plain_s)
        undrafted = session.generate(text[:40], max_tokens=8, draft=False).run().telemetry
        assert undrafted.plain_s is undrafted.speed_up is None
    t = written(demo, text[:40], 8, 3).telemetry
    assert t.plain_s is t.speed_up is None


def test_the_pace_of_all_rounds_counts(
    demo: Model, text: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that gets slower with every round: its last pace is not that of the answer."""
    steps = count(1)
    monkeypatch.setattr(CostModel, "plain", lambda *_: float(next(steps)))
    with Session(demo, dataclasses.replace(AUTO, ngram=False)) as session:
        engine_of(session).drafting.depths = Scripted(0)
        t = session.generate(text[:40], max_tokens=10, ignore_eos=True).run().telemetry
    assert t.plain_s == pytest.approx(sum(range(1, 10)) / 9)
