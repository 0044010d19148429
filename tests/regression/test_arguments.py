"""What prompts, stop strings and lengths may be; what they may not be: test_bad_values.py."""

from __future__ import annotations

import array
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from pyllama_mtp import BatchSession, Model, Session, Settings, stream
from pyllama_mtp.settings import MOST_TOKENS

from .support import settings

PROMPT = [5, 6, 7]
SMALL = Settings(n_ctx=64, n_batch=64, n_ubatch=64, n_threads=1, draft_n_max=1)


@pytest.fixture(scope="module")
def session(demo: Model) -> Iterator[Session]:
    with Session(demo, SMALL) as made:
        yield made


@pytest.fixture(scope="module")
def batch(demo: Model) -> Iterator[BatchSession]:
    with BatchSession(demo, SMALL, 2) as made:
        yield made


@pytest.mark.parametrize(
    "prompt",
    [
        tuple(PROMPT),
        np.array(PROMPT),
        np.array(PROMPT, dtype=np.uint8),
        [np.int32(token) for token in PROMPT],
        array.array("i", PROMPT),
        deque(PROMPT),
        range(5, 8),
    ],
)
def test_sequences_and_arrays_of_ids_are_prompts(
    demo: Model, session: Session, batch: BatchSession, prompt: Any
) -> None:
    wanted = session.generate(PROMPT, max_tokens=2).run()
    assert session.generate(prompt, max_tokens=np.int64(2)).run().tokens == wanted.tokens  # type: ignore[arg-type]
    assert "".join(stream(demo, prompt, max_tokens=np.int64(2))) == wanted.text
    got = batch.generate([prompt], max_tokens=np.array([2])).run()  # type: ignore[arg-type]
    assert got.results[0].tokens == wanted.tokens


def test_any_iterable_of_prompts(demo: Model, batch: BatchSession) -> None:
    wanted = [one.tokens for one in batch.generate([PROMPT] * 2, max_tokens=2).run().results]
    for prompts in (iter([PROMPT] * 2), (PROMPT for _ in "ab"), np.array([PROMPT] * 2)):
        got = batch.generate(prompts, max_tokens=2).run()
        assert [one.tokens for one in got.results] == wanted
    assert demo.detokenize(np.array(PROMPT)) == demo.detokenize(PROMPT)  # type: ignore[arg-type]


def test_stop_strings_may_be_none_one_or_any_iterable(session: Session) -> None:
    whole = session.generate(PROMPT, max_tokens=8, ignore_eos=True, stop=None).run().text
    assert len(whole) > 1
    end = whole[1]
    for stop in (end, [end], (end,), {end}, iter([end]), np.array([end])):
        answer = session.generate(PROMPT, max_tokens=8, ignore_eos=True, stop=stop).run()
        assert (answer.finish_reason, answer.text) == ("stop", whole[: whole.index(end)])


def test_a_generation_piece_by_piece(demo: Model) -> None:
    """`next` gives a piece; the repr says how far the text has come."""
    with Session(demo, settings(2)) as session:
        generation = session.generate("def f(x):", max_tokens=6, ignore_eos=True)
        piece = next(generation)
        assert generation.text == piece and "not complete" in repr(generation)
        rest = "".join(generation)
        assert generation.text == piece + rest
        assert "6 tokens, length" in repr(generation) and repr(piece + rest) in repr(generation)
        with pytest.raises(StopIteration):
            next(generation)


def test_as_many_tokens_as_there_is_room_for(demo: Model) -> None:
    assert next(stream(demo, "def main", max_tokens=MOST_TOKENS, n_threads=1))
    with Session(demo, settings(2, n_ctx=256)) as session:
        run = session.generate("def f(x):", max_tokens=-1, ignore_eos=True).run()
        assert run.finish_reason == "length"
        assert run.telemetry.n_prompt + len(run.tokens) == session.n_ctx + 1


def test_the_tokens_that_may_be_drafted(demo: Model, text: list[int]) -> None:
    """A list of ids; nothing else is ever drafted, and the text is the model's."""
    ids = sorted({*text})[:300]
    with Session(demo, settings(3, draft_vocab=ids, draft_follow=False)) as session:
        run = session.generate(text[:40], max_tokens=60, ignore_eos=True, log_pairs=True).run()
    assert {pair.drafted for pair in run.telemetry.pairs or ()} <= {*ids}
    with Session(demo, settings(0)) as session:
        assert (
            session.generate(text[:40], max_tokens=60, ignore_eos=True).run().tokens == run.tokens
        )
