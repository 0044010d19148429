"""Requests that come and go: a place is used again from where a prompt parts, others go on."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Several
from dataclasses import replace

import pytest

from pyllama_mtp import Answer, Model, scheduler
from pyllama_mtp.calibration import open_engine
from pyllama_mtp.drafting.depth import DepthController
from pyllama_mtp.drafting.ngram import Match, NgramLookup
from pyllama_mtp.engine import Engine
from pyllama_mtp.memory import resolve
from pyllama_mtp.request import Limits, Request, make_request
from pyllama_mtp.scheduler import Scheduler
from pyllama_mtp.sequence import Sequence
from pyllama_mtp.telemetry import BatchTelemetry

from ..marks import usual
from .support import alone, assert_same_tokens, settings

N = 24
HOW = {
    "plain": (0, {}),
    "chain": (3, {}),
    "upstream's way": (3, {"prompt_sync": "full"}),
    "replay": (3, {"rollback": "replay"}),
    "auto": ("auto", {}),
}


class Served:
    """A loop that serves, on places for three."""

    def __init__(self, model: Model, how: str, n_sequences: int = 3, **sizes: int) -> None:
        depth, options = HOW[how]
        chosen = replace(settings(0, **{"n_ubatch": 32, **options, **sizes}), draft_n_max=depth)
        self.model = model
        self.engine = open_engine(model, resolve(chosen, model, n_sequences))
        self.total = BatchTelemetry()
        self.loop = Scheduler(self.engine, self.total, take_turns=True)

    def add(self, prompt: list[int], n: int = N, draft: bool = True) -> Request:
        request = make_request(self.model, prompt, Limits(n, ignore_eos=True, draft=draft))
        self.loop.add(request)
        return request

    def run(self) -> None:
        while self.loop.busy:
            self.loop.step()

    def answer(self, prompt: list[int], n: int = N) -> Answer:
        request = self.add(prompt, n)
        self.run()
        return request.answer


@pytest.fixture(params=usual("chain", "upstream's way", long=["auto", "plain", "replay"]))
def served(demo: Model, request: pytest.FixtureRequest) -> Served:
    return Served(demo, request.param)


def check(served: Served, answer: Answer, prompt: list[int], gap: float) -> None:
    wanted = alone(served.model, prompt, len(answer.tokens))
    assert_same_tokens(served.model, prompt, answer.tokens, wanted, gap)


def test_requests_come_and_go_between_steps(served: Served, text: list[int], gap: float) -> None:
    """One joins in the middle, one is dropped while it runs, one while its prompt is processed,
    one while it waits; the others get their texts."""
    prompts = [text[i : i + 100 + 7 * i] for i in range(7)]
    requests = [served.add(prompt, 60) for prompt in prompts[:2]]
    for _ in range(14):
        served.loop.step()
    assert all(request.answer.tokens for request in requests)
    requests += [served.add(prompt, 60) for prompt in prompts[2:]]
    served.loop.step()
    assert served.loop.n_running == 3 and len(served.loop.waiting()) == 4
    assert not requests[2].answer.tokens, "its prompt is being processed"
    for number in (1, 2, 6):
        assert served.loop.drop(requests[number])
    assert served.loop.n_running == 1 and len(served.loop.waiting()) == 3
    served.run()
    for number, request in enumerate(requests):
        if number in (1, 2, 6):
            assert request.answer.finish_reason == "interrupted"
            assert len(request.answer.tokens) < 60 and not served.loop.drop(request)
        else:
            assert request.answer.finish_reason == "length"
            check(served, request.answer, prompts[number], gap)
    longer = [*prompts[1], *requests[1].answer.tokens, *text[50:60]]
    check(served, served.answer(longer), longer, gap)


def test_some_are_drafted_for_and_some_are_not(served: Served, text: list[int], gap: float) -> None:
    """Rounds may have sequences with drafts and without: each gets the text that it gets alone."""
    prompts = [text[i : i + 40 + 7 * i] for i in range(3)]
    requests = [served.add(prompt, 40, draft=i != 1) for i, prompt in enumerate(prompts)]
    served.run()
    assert not requests[1].answer.telemetry.drafted
    if served.engine.settings.draft_n_max == 3:
        assert sum(requests[0].answer.telemetry.accepted) > 0
    for request, prompt in zip(requests, prompts, strict=True):
        check(served, request.answer, prompt, gap)
    assert served.engine.sequences[1].n_drafted_for == 0


@pytest.mark.parametrize("how", ["plain", "chain", "upstream's way"])
def test_a_part_of_a_prompt_takes_as_long_as_some_rounds(
    demo: Model, text: list[int], gap: float, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """By a clock on which a round takes 20, and a part 12 and 1 for each token: the first part has
    the least, 64 tokens, and four rounds are 67. What is left before a cut has at least 64, too, or
    stays with the part. Parts are whole where nobody waits for them. Text and checkpoints do not
    depend on the parts."""
    clock, parts, prefill, rounds = [0.0], list[int](), Engine.prefill, scheduler.speculate

    def counted(engine: Engine, sequence: Sequence, at_most: int | None = None) -> int | None:
        n_before = len(sequence.tokens)
        row = prefill(engine, sequence, at_most)
        parts.append(len(sequence.tokens) - n_before)
        clock[0] += 12.0 + parts[-1]
        return row

    monkeypatch.setattr(scheduler.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(Engine, "prefill", counted)
    monkeypatch.setattr(scheduler, "speculate", lambda *of: {**rounds(*of), "round": 20.0})
    served = Served(demo, how, 2, n_batch=256, n_ubatch=128)
    prompt = [*text[:160], *text[:160], *text[:80]]

    def read(request: Request) -> tuple[list[int], list[int]]:
        parts.clear()
        while not request.answer.tokens:
            served.loop.step()
        first = request.prompt[:1]
        (sequence,) = (one for one in served.engine.sequences if one.tokens[:1] == first)
        return parts[:], sequence.checkpoints.positions

    whole, positions = read(first := served.add(prompt, 400))
    assert whole == [256, 128, 16]
    small, others = read(second := served.add([7, *prompt[1:]]))
    assert small == [64, 67, 125, 64, 64, 16] and others == positions
    times = [one.answer.telemetry.prefill_s for one in (first, second)]
    assert times == [3 * 12 + 400, 6 * 12 + 400] and served.total.prefill_s == sum(times)
    served.loop.drop(first)
    served.run()
    check(served, second.answer, second.prompt, gap)
    assert read(served.add([9, *prompt[1:]]))[0] == whole


def test_the_place_that_holds_most_is_taken(demo: Model, text: list[int]) -> None:
    """Else an empty one, else the one that has been free for longest."""
    served = Served(demo, "chain", 2)
    sequences = served.engine.sequences
    served.answer(text[:40], 4)
    served.answer(text[100:140], 4)
    assert sorted(one.tokens[0] for one in sequences) == sorted((text[0], text[100]))
    first = served.answer([*text[:40], *alone(demo, text[:40], 4), 7], 4)
    assert first.telemetry.n_cached > 40
    served.answer(text[200:210], 4)
    assert {one.tokens[0] for one in sequences} == {text[0], text[200]}


def test_a_sequence_that_is_alone_drafts_from_the_text(
    demo: Model, text: list[int], gap: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sequence drafts from the text in rounds without others, also after rounds with others."""
    asked = itertools.count()

    def every_other(
        self: DepthController, rates: Several[float], at_most: int, n_head: int = 0
    ) -> int:
        return 0 if n_head else min(3, at_most) if next(asked) % 2 else 0

    drafts = NgramLookup.drafts

    def last_is_wrong(
        self: NgramLookup, match: Match, n: int, before: Several[int] = ()
    ) -> list[int]:
        return [*drafts(self, match, n, before)[:-1], 7] if n else []

    monkeypatch.setattr(DepthController, "lookup_depth", every_other)
    monkeypatch.setattr(NgramLookup, "drafts", last_is_wrong)
    served = Served(demo, "auto")
    prompt = [*text[:30], *text[:30]]
    long, short = served.add(prompt, 120), served.add(text[40:70], 12)
    served.run()
    counts = long.answer.telemetry.looked_up
    assert counts["rounds"] >= 5 and 0 < counts["accepted"] < counts["drafted"]
    assert max(served.total.passes) == 2 and served.total.looked_up == counts
    for request in (long, short):
        check(served, request.answer, request.prompt, gap)
    longer = [*prompt, *long.answer.tokens, *text[50:60]]
    after = served.answer(longer)
    assert after.telemetry.n_cached == len(prompt) + 119
    check(served, after, longer, gap)
