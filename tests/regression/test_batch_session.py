"""Several sequences at once: each gets the tokens that it gets alone.

A divergence is allowed only where the two best logits are within rounding; see
:func:`support.assert_same_tokens`, which checks exactly that in a fresh context.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyllama_mtp import Answer, BatchSession, Model, Sampling, Session, Settings
from pyllama_mtp import round as one_round
from pyllama_mtp.drafting.choice import Drafting
from pyllama_mtp.engine import Engine
from pyllama_mtp.errors import UsageError
from pyllama_mtp.sampling.sampler import Sampler
from pyllama_mtp.telemetry import PHASES

from ..marks import usual
from .support import (
    MOST,
    PLACES,
    answers,
    assert_same_tokens,
    compare,
    greedy,
    last_logits,
    same_text,
)
from .support import settings as small

Prompts = list[list[int]]


def settings(depth: int | str, **options: object) -> Settings:
    """As for one sequence, with room for the rows of all."""
    return replace(small(0, **{"n_ubatch": 32, **options}), draft_n_max=depth)


@pytest.fixture(scope="module")
def prompts(ragged: Prompts) -> Prompts:
    return ragged


def test_very_many(demo: Model, text: list[int]) -> None:
    """More rows in a round than graphs have that are kept by their shape."""
    prompts = [text[2 * i : 2 * i + 3 + i % 5] for i in range(45)]
    chosen = settings(3, n_batch=176, n_ubatch=176)
    same_text(demo, prompts, chosen, 12, 43)
    assert 4 * 43 > 64


@pytest.mark.parametrize("n_sequences", [1, PLACES])
def test_up_to_the_end_of_the_context(demo: Model, text: list[int], n_sequences: int) -> None:
    """One fills its context to the last position, drafts or not, while others go on."""
    n_ctx = 256
    prompts = [text[:30], text[: n_ctx - 6], text[40:60], text[:n_ctx]]
    with BatchSession(demo, settings(4, n_ctx=n_ctx - 5), n_sequences) as session:
        assert session.n_ctx == n_ctx, "rounded up, as for one sequence"
        got = session.generate(prompts, max_tokens=40, ignore_eos=True).run().results
    assert [len(answer.tokens) for answer in got] == [40, 7, 40, 1]
    wanted = answers(demo, prompts, settings(0, n_ctx=n_ctx), 40, ignore_eos=True)
    compare(demo, prompts, got, wanted)
    assert {answer.finish_reason for answer in got} == {"length"}


def test_pieces_and_stop_strings(demo: Model, prompts: Prompts) -> None:
    """Pieces belong to their prompt; a stop string ends the sequences that have it."""
    options = {"max_tokens": 24, "ignore_eos": True}
    with BatchSession(demo, settings(4), PLACES) as session:
        whole = [answer.text for answer in session.generate(prompts, **options).run().results]
        stop = whole[1][9:12]
        ends = [stop in text for text in whole]
        assert any(ends) and not all(ends)
        got = session.generate(prompts, stop=stop, **options)
        pieces = [""] * len(prompts)
        for index, piece in got:
            pieces[index] += piece
        for text, piece, answer in zip(whole, pieces, got.results, strict=True):
            assert piece == answer.text == text.partition(stop)[0]
            assert answer.finish_reason == ("stop" if stop in text else "length")
        with pytest.raises(UsageError, match="has ended"):
            iter(got)
        unbegun = session.generate(prompts[:2])
        unbegun.stop()
        assert [answer.finish_reason for answer in unbegun.results] == ["interrupted"] * 2
        assert [answer.text for answer in session.generate(prompts, **options).run()] == whole


def test_figures(demo: Model, prompts: Prompts) -> None:
    """Each sequence's own, and sums; a round counts once in the time of all."""
    with BatchSession(demo, settings(3), PLACES) as session:
        got = session.generate(prompts, max_tokens=MOST).run()
    own, total = [answer.telemetry for answer in got.results], got.telemetry
    assert [t.n_prompt for t in own] == [len(prompt) for prompt in prompts]
    assert [t.n_generated for t in own] == [len(answer.tokens) for answer in got.results]
    for name in ("n_prompt", "n_generated", "rounds"):
        assert getattr(total, name) == sum(getattr(t, name) for t in own)
    assert total.drafted == [sum(n) for n in zip(*(t.drafted or [0] * 3 for t in own), strict=True)]
    n_rounds = sum(k * n for k, found in total.passes.items() for n in found.values())
    assert n_rounds == total.rounds and total.n_started == len(prompts)
    assert total.prefill_s == pytest.approx(sum(t.prefill_s for t in own))
    assert 0 < sum(total.time_s[phase] for phase in PHASES) <= total.decode_s
    assert total.decode_s < sum(t.decode_s for t in own)
    tokens = total.n_generated - len(prompts)
    assert total.decode_tps == pytest.approx(tokens / total.decode_s)
    assert json.loads(json.dumps(total.to_dict()))["output_bytes"] > 0


@pytest.mark.parametrize("depth", usual(3, long=[0]))
def test_log_probabilities(demo: Model, prompts: Prompts, depth: int) -> None:
    """Each token has its log probabilities, which are those of a fresh context."""
    with BatchSession(demo, settings(depth), 2) as session:
        got = session.generate(prompts[:2], max_tokens=6, logprobs=2).run().results
        assert session.generate(prompts[:1], max_tokens=2).run().results[0].logprobs == []
    with Session(demo, settings(depth)) as single:
        got.append(single.generate(prompts[0], max_tokens=6, logprobs=2).run())
    for prompt, answer in zip([*prompts[:2], prompts[0]], got, strict=True):
        assert [one.token for one in answer.logprobs] == answer.tokens
        for i, one in enumerate(answer.logprobs):
            logits = last_logits(demo, [*prompt, *answer.tokens[:i]]).astype(np.float64)
            wanted = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
            best = [(token, pytest.approx(wanted[token], abs=0.05)) for token, _ in one.top]
            assert one.top == best and len(best) == 2
            assert (one.token, one.logprob) == one.top[0], "greedy text"


def test_prompts_that_are_there_already(demo: Model, prompts: Prompts, tmp_path: Path) -> None:
    """Processed ahead, or restored from the file of a session; a second answer continues one."""
    with Session(demo, settings(3)) as single:
        single.process(prompts[0])
        single.save(tmp_path / "prompt")
        wanted = single.generate(prompts[0], max_tokens=20).run()
    with BatchSession(demo, settings(3), PLACES) as session:
        assert session.restore(tmp_path / "prompt", 1) == len(prompts[0]) - 1
        session.process(prompts[2])
        got = session.generate(prompts[:3], max_tokens=20).run().results
        cached = [answer.telemetry.n_cached for answer in got]
        assert cached == [len(prompts[0]) - 1, 0, len(prompts[2]) - 1]
        assert got[0].tokens == wanted.tokens
        assert got[0].telemetry.accepted == wanted.telemetry.accepted
        session.save(tmp_path / "longer", 1)
        longer = [*prompts[0], *got[0].tokens, 5]
        (after,) = session.generate([longer], max_tokens=2).run().results
        assert after.telemetry.n_cached == len(longer) - 2
        session.reset()
        assert session.restore(tmp_path / "longer") == len(longer) - 2
        with pytest.raises(UsageError, match="sequence is 3, it must be from 0 to 2"):
            session.save(tmp_path / "no", 3)


STEPS = ("sample", "prefill", "draft", "verify", "accept", "roll_back")
#: Interrupted where, at which depth, with how many sequences.
INTERRUPTED = [(where, depth, n) for where in STEPS for depth in (3, 0) for n in (PLACES, 1)]
FEWER = [*((where, 3, PLACES) for where in STEPS[1::2]), ("sample", 0, 1)]


@pytest.mark.parametrize(
    ("where", "depth", "n_sequences"),
    usual(*FEWER, long=[case for case in INTERRUPTED if case not in FEWER]),
)
def test_usable_after_an_interruption(
    demo: Model,
    prompts: Prompts,
    plain_answers: list[Answer],
    gap: float,
    monkeypatch: pytest.MonkeyPatch,
    depth: int,
    where: str,
    n_sequences: int,
) -> None:
    owners: dict[str, Any] = {"sample": Sampler, "draft": Drafting, "accept": one_round}
    owner = owners.get(where, Engine)
    original, calls = getattr(owner, where), itertools.count(1)

    def interrupted(*arguments: object) -> object:
        result = original(*arguments)
        if next(calls) == (2 if where == "prefill" else 5):
            raise KeyboardInterrupt
        return result

    with BatchSession(demo, settings(depth), n_sequences) as session:
        broken = session.generate(prompts, max_tokens=MOST)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(owner, where, interrupted)
            broken.run()
        assert "interrupted" in {answer.finish_reason for answer in broken.results}
        # The worst case for what is left in the caches: a prompt that continues all of it.
        longer = [[*prompts[i], *broken.results[i].tokens, 5, 6] for i in range(n_sequences)]
        went_on = session.generate(longer, max_tokens=24).run().results
        after = session.generate(prompts, max_tokens=MOST).run().results
    compare(demo, prompts, after, plain_answers)
    with Session(demo, settings(0)) as fresh:
        for prompt, answer in zip(longer, went_on, strict=True):
            assert_same_tokens(demo, prompt, answer.tokens, greedy(fresh, prompt, 24).tokens, gap)


@pytest.mark.parametrize("n_sequences", [1, PLACES])
def test_an_overtaken_generation_says_so(
    demo: Model, prompts: Prompts, plain_answers: list[Answer], gap: float, n_sequences: int
) -> None:
    """The overtaken generation does not change the places of the newer one."""
    with BatchSession(demo, settings(3), n_sequences) as session:
        first = session.generate(prompts[:3], max_tokens=60)
        for _ in range(20):
            next(iter(first))
        second = session.generate(prompts, max_tokens=MOST)
        next(iter(second))
        with pytest.raises(UsageError, match="used for something else"):
            first.run()
        assert {answer.finish_reason for answer in first.results} <= {"interrupted", "eos"}
        compare(demo, prompts, second.run().results, plain_answers)
        third = session.generate(prompts, max_tokens=MOST)
        next(iter(third))
        session.reset()
        with pytest.raises(UsageError, match="used for something else"):
            third.run()


@pytest.mark.parametrize(
    ("depth", "options"), [(0, {}), (3, {}), (3, {"draft_sampling": True})], ids=str
)
def test_each_its_own_sampling(
    demo: Model, prompts: Prompts, depth: int, options: dict[str, object]
) -> None:
    """Greedy, drawn by seeds, with a penalty, side by side: each generator's numbers are taken as
    they are alone, whatever the others do. Rounding may part a text, not half of them."""
    warm = Sampling(temperature=0.8, seed=7)
    chosen = [None, warm, Sampling(temperature=1.2, top_k=0, top_p=1.0, min_p=0.0, seed=8)]
    chosen += [Sampling(), replace(warm, seed=9), Sampling(repeat_penalty=1.3), warm, None]
    with BatchSession(demo, settings(depth, **options), len(prompts)) as session:
        got = session.generate(prompts, max_tokens=MOST, sampling=chosen).run().results
    n_equal = 0
    with Session(demo, settings(depth, **options)) as single:
        for prompt, n, sampling, answer in zip(prompts, MOST, chosen, got, strict=True):
            single.reset()
            wanted = single.generate(prompt, max_tokens=n, sampling=sampling).run()
            same = answer.tokens == wanted.tokens
            n_equal += same and answer.telemetry.accepted == wanted.telemetry.accepted
    assert n_equal >= 6, "of eight; with another's numbers, or rows, no drawn one is equal"
