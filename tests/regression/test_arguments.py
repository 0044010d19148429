"""Arguments of a wrong type are a UsageError that names them, shows them and says what is right."""

from __future__ import annotations

import array
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyllama_mtp import BatchSession, Model, Sampling, Session, Settings, stream
from pyllama_mtp.errors import UsageError

from .support import settings

PROMPT = [5, 6, 7]
SMALL = Settings(n_ctx=64, n_batch=64, n_ubatch=64, n_threads=1, draft_n_max=1)

#: Prompts, and the element that is wrong; None: all of it.
BAD_PROMPTS: list[tuple[Any, int | None]] = [
    *((bad, None) for bad in (b"abc", bytearray(b"abc"), None, 5, 1.5, {5: 6}, {5}, np.array(5))),
    *((bad, 0) for bad in ([1.5], [2.0], ["a"], [None], [True])),
    ([5, np.True_], 1),
]
BAD_OPTIONS: dict[str, tuple[Any, ...]] = {
    "stop": ([""], ["a", ""], [5], [None], b"", 5, {"a": 5}),
    "max_tokens": ("3", 2.5, 2.0, None, True, np.float64(2), np.int64(0)),
    "sampling": ({"temperature": 1}, {}, 0.7, "greedy"),
    "ignore_eos": ("no", None),
    "draft": ("no", None, 0),
    "log_pairs": ("no",),
    "log_ties": (1,),
}


@pytest.fixture(scope="module")
def session(demo: Model) -> Iterator[Session]:
    with Session(demo, SMALL) as made:
        yield made


@pytest.fixture(scope="module")
def batch(demo: Model) -> Iterator[BatchSession]:
    """A number of numpy reaches the library; unit/test_settings.py has the fields of Settings."""
    with BatchSession(demo, SMALL, np.int64(2)) as made:  # type: ignore[arg-type]
        assert type(made.n_sequences) is int
        yield made


def refused(call: Callable[..., object], *arguments: Any, **options: Any) -> str:
    """What a call is refused with."""
    with pytest.raises(UsageError) as caught:
        call(*arguments, **options)
    return str(caught.value)


@pytest.mark.parametrize(("prompt", "at"), BAD_PROMPTS)
def test_prompts(
    demo: Model, session: Session, batch: BatchSession, prompt: Any, at: int | None
) -> None:
    message = f"prompt is {prompt!r}" if at is None else f"prompt[{at}] is {prompt[at]!r}"
    assert message in refused(session.generate, prompt)
    assert message in refused(session.process, prompt)
    assert f"prompts[1]: {message}" in refused(batch.generate, [PROMPT, prompt])
    assert message in refused(list, stream(demo, prompt))


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_options(session: Session, batch: BatchSession, name: str) -> None:
    for value in BAD_OPTIONS[name]:
        message = f"{name} is {value!r}"
        assert message in refused(session.generate, PROMPT, **{name: value})
        assert message in refused(batch.generate, [PROMPT], **{name: value})
        if name == "draft":
            assert message in refused(session.process, PROMPT, draft=value)


@pytest.mark.parametrize("file", [5, None, b"a", ""])
def test_files_of_a_session(session: Session, file: Any) -> None:
    message = f"path is {file!r}"
    assert message in refused(session.save, file)
    assert message in refused(session.restore, file)


def test_streams(demo: Model) -> None:
    """An option is refused before the file is looked for."""
    options = ("max_tokens", "n_ctx", "p_min", "top_k")
    for model, name in itertools.product((demo, "no such model"), options):
        assert refused(list, stream(model, PROMPT, **{name: "a"})).startswith(f"{name} is ")
    assert "path is 5, it must be" in refused(list, stream(5, PROMPT))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [Session, BatchSession])
def test_what_sessions_are_made_of(demo: Model, kind: Any) -> None:
    for bad in ("path", Path("path"), None):
        assert f"model is {bad!r}" in refused(kind, bad)
    for bad in ({"n_ctx": 512}, 512, "auto"):
        assert f"settings is {bad!r}" in refused(kind, demo, bad)


@pytest.mark.parametrize("n", ["2", 2.0, None, True, 0, 257])
def test_numbers_of_sequences(demo: Model, n: Any) -> None:
    assert f"n_sequences is {n!r}" in refused(BatchSession, demo, SMALL, n)


def test_more_sequences_than_a_graph_has_rows(demo: Model) -> None:
    assert "needs at least 66" in refused(BatchSession, demo, SMALL, 33)


ONE = [PROMPT]
SEVERAL: list[tuple[Any, dict[str, Any], str]] = [
    *((bad, {}, f"prompts is {bad!r}, it must be a list") for bad in (None, 5, {"a": 1})),
    (b"abc", {}, "prompts is one text"),
    (PROMPT, {}, "prompts[0]: prompt is 5, it must be text"),
    ([], {}, "there is no prompt"),
    ([[5], []], {}, "prompts[1]: the prompt is empty"),
    ([[5], [6] * 257], {}, "prompts[1]: the prompt has 257 tokens and the context 256"),
    ([[5], [10**6]], {}, "prompts[1]: token id 1000000 is not in the vocabulary"),
    (ONE * 2, {"max_tokens": [3, "3"]}, "max_tokens is '3', it"),
    (ONE * 2, {"max_tokens": [3]}, "max_tokens has 1 values for 2 prompts"),
    (ONE, {"logprobs": -1}, "logprobs is -1"),
    (ONE, {"sampling": [5]}, "sampling is 5, it must"),
    (ONE * 2, {"sampling": [None] * 3}, "sampling has 3 values for 2 prompts"),
    (ONE * 2, {"sampling": [None, Sampling(logit_bias={10**6: 1})]}, "prompts[1]: token id"),
]


@pytest.mark.parametrize(("prompts", "options", "message"), SEVERAL)
def test_several_prompts(
    batch: BatchSession, prompts: Any, options: dict[str, Any], message: str
) -> None:
    assert message in refused(batch.generate, prompts, **options)
    assert batch.generate(ONE, max_tokens=2).run().results[0].tokens


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


def test_any_iterable_of_prompts(batch: BatchSession) -> None:
    wanted = [one.tokens for one in batch.generate([PROMPT] * 2, max_tokens=2).run().results]
    for prompts in (iter([PROMPT] * 2), (PROMPT for _ in "ab"), np.array([PROMPT] * 2)):
        got = batch.generate(prompts, max_tokens=2).run()
        assert [one.tokens for one in got.results] == wanted
    assert "there is no prompt" in refused(batch.generate, iter([]))


def test_stop_strings_may_be_none_one_or_any_iterable(session: Session) -> None:
    whole = session.generate(PROMPT, max_tokens=8, ignore_eos=True, stop=None).run().text
    assert len(whole) > 1
    end = whole[1]
    for stop in (end, [end], (end,), {end}, iter([end]), np.array([end])):
        answer = session.generate(PROMPT, max_tokens=8, ignore_eos=True, stop=stop).run()
        assert (answer.finish_reason, answer.text) == ("stop", whole[: whole.index(end)])


def test_models(demo: Model) -> None:
    for bad in ("", None, 5, b"a"):
        assert f"path is {bad!r}" in refused(Model, bad)
    wrong: dict[str, tuple[Any, ...]] = {
        **dict.fromkeys(("n_gpu_layers", "rpc_timeout"), ("1", 1.0, None, True)),
        "mtp": ("no", 0),
        "tensor_split": (0.5, "1", ("1",)),
    }
    for name, bad in ((name, bad) for name, several in wrong.items() for bad in several):
        assert f"{name} is {bad!r}" in refused(Model, demo.path, **{name: bad})


def test_text_and_tokens_of_a_model(demo: Model) -> None:
    for bad in (b"abc", None, 5):
        assert f"text is {bad!r}" in refused(demo.tokenize, bad)
    assert "tokens[0] is 1.5" in refused(demo.detokenize, [1.5])
    assert "tokens is 5" in refused(demo.detokenize, 5)
    assert demo.detokenize(np.array(PROMPT)) == demo.detokenize(PROMPT)  # type: ignore[arg-type]


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
    with Session(demo, settings(2, n_ctx=256)) as session:
        run = session.generate("def f(x):", max_tokens=-1, ignore_eos=True).run()
        assert run.finish_reason == "length"
        assert run.telemetry.n_prompt + len(run.tokens) == session.n_ctx + 1
        with pytest.raises(UsageError, match="max_tokens is 0"):
            session.generate("def f(x):", max_tokens=0)


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
    for wrong in ([demo.n_vocab], [3, 3], [-1]):
        with pytest.raises(UsageError, match=r"draft_vocab: (a )?token"):
            Session(demo, settings(3, draft_vocab=wrong))
