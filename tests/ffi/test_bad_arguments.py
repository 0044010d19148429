"""No argument ends the interpreter: each bad one is an exception, and the context goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from pyllama_mtp import Model, Session, Settings, stream
from pyllama_mtp.errors import (
    DecodeAborted,
    DecodeError,
    FatalDecodeError,
    InsufficientMemoryError,
    InvalidBatchError,
    NoKVSlotError,
    PyllamaMtpError,
    UsageError,
)
from pyllama_mtp.llama import native
from pyllama_mtp.llama.context import Context
from pyllama_mtp.llama.contextoptions import ContextOptions
from pyllama_mtp.llama.native import decode_error

SMALL = {"n_ctx": 256, "n_batch": 8, "n_ubatch": 8, "n_threads": 1}
Decode = Callable[..., None]


@pytest.fixture
def context(demo: Model) -> Iterator[Context]:
    with Context(demo, ContextOptions(**SMALL, tap="all", n_outputs_max=2)) as made:
        yield made


@pytest.fixture
def draft(demo: Model, context: Context) -> Iterator[Context]:
    options = ContextOptions(**SMALL, mtp_head=True, tap="outputs")
    with Context(demo, options, context) as made:
        yield made


def decode(
    context: Context, tokens: list[int], start: int = 0, marks: list[int] | None = None
) -> None:
    """Decode with the given output marks; by default the last entry."""
    outputs = np.array(marks if marks is not None else [0] * (len(tokens) - 1) + [1], "int8")
    context.decode(np.array(tokens, dtype=np.int32), start, outputs)


@pytest.mark.parametrize(
    ("tokens", "start", "marks", "message"),
    [
        ([], 0, [], "batch of 0 tokens"),
        ([1] * 9, 0, [0] * 9, "batch of 9 tokens"),
        ([-1], 0, [1], "token id -1"),
        ([2**31 - 1], 0, [1], "token id 2147483647"),
        ([2048], 0, [1], "token id 2048 is not in the vocabulary"),
        ([1], 5, [1], "position 5; the cache ends at 0"),
        ([1], -1, [1], "positions -1 to -1"),
        ([1], 256, [1], "positions 256 to 256"),
        ([1, 2], 255, [1, 0], "positions 255 to 256"),
        ([1, 2], 0, [1], "output marks"),
        ([1, 2, 3], 0, [1, 1, 1], "3 output rows"),
    ],
)
def test_bad_batches(
    context: Context, tokens: list[int], start: int, marks: list[int], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        decode(context, tokens, start, marks)
    decode(context, [1, 2, 3])
    assert context.past() == 3
    assert np.isfinite(context.logits(2)).all()


@pytest.mark.parametrize("start", [0, 2])
def test_positions_that_are_there_already(context: Context, start: int) -> None:
    """llama.cpp refuses, and says why."""
    decode(context, [1, 2, 3])
    with pytest.raises(InvalidBatchError) as caught:
        decode(context, [4], start)
    assert caught.value.code == -1
    assert "inconsistent sequence positions" in str(caught.value)
    decode(context, [4], 3)
    assert context.past() == 4


def test_hidden_states_for_a_draft_context(context: Context, draft: Context) -> None:
    n_embd = context.model.n_embd
    tokens, marks = np.array([1, 2], dtype=np.int32), np.zeros(2, dtype=np.int8)
    with pytest.raises(UsageError, match="hidden rows belong to a context of the MTP block"):
        draft.decode(tokens, 0, marks)
    with pytest.raises(UsageError, match="hidden rows belong to a context of the MTP block"):
        context.decode(tokens, 0, marks, np.zeros((2, n_embd), dtype=np.float32))
    for shape in ((1, n_embd), (2, n_embd - 1), (2 * n_embd,), (2, n_embd, 1)):
        with pytest.raises(UsageError, match="hidden rows of shape"):
            draft.decode(tokens, 0, marks, np.zeros(shape, dtype=np.float32))
    draft.decode(tokens, 0, marks, np.zeros((2, n_embd), dtype=np.float32))
    assert draft.past() == 2


def test_arrays_of_other_types_and_strides(context: Context, draft: Context) -> None:
    """Converted, not read as something else."""
    decode(context, [5, 6, 7])
    wanted = context.logits(2).copy()
    context.clear()
    tokens = np.array([5, 0, 6, 0, 7, 0], dtype=np.int64)[::2]
    context.decode(tokens, 0, np.array([False, False, True]))
    assert np.array_equal(context.logits(2), wanted)
    rows = context.hidden_rows().astype(np.float64)[:, ::-1][:, ::-1]
    draft.decode(tokens, 0, np.array([0, 0, 1]), rows)
    first = draft.logits(2).copy()
    draft.clear()
    draft.decode(tokens, 0, np.array([0, 0, 1], "int8"), context.hidden_rows().copy())
    assert np.array_equal(draft.logits(2), first)


def test_states_of_another_kind(context: Context) -> None:
    decode(context, [1, 2, 3])
    state = context.save_state()
    for bad in (b"", b"x", state[: len(state) // 2], b"\xff" * len(state)):
        with pytest.raises(PyllamaMtpError):
            context.load_state(bad)
    context.clear()
    context.load_state(state)
    assert context.past() == 3


def test_context_options(demo: Model) -> None:
    for change in (
        {"type_v": "q4_0", "flash_attn": "off"},
        {"n_rs_seq": 7},  # needs a ubatch of 9
        {"n_rs_seq": 3, "n_ubatch": 4},
        {"n_rs_seq": 3, "n_ctx": 4},
    ):
        with pytest.raises(UsageError):
            Context(demo, ContextOptions(**{**SMALL, **change}))  # type: ignore[arg-type]
    with Context(demo, ContextOptions(**{**SMALL, "n_rs_seq": 6})) as context:
        decode(context, [1] * 8)


def test_a_context_shorter_than_a_round(demo: Model) -> None:
    assert "".join(stream(demo, [5], max_tokens=1, ignore_eos=True, n_threads=1))
    with Session(demo, Settings(n_ctx=1, draft_n_max=6, n_threads=1)) as session:
        assert session.generate([5], max_tokens=4, ignore_eos=True).run().tokens


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (1, NoKVSlotError),
        (2, DecodeAborted),
        (-1, InvalidBatchError),
        ("PYLLAMA_BATCH_REFUSED", InvalidBatchError),
        ("PYLLAMA_OUT_OF_MEMORY", InsufficientMemoryError),
        ("PYLLAMA_EXCEPTION", FatalDecodeError),
        (-2, InsufficientMemoryError),
        (-3, FatalDecodeError),
    ],
)
def test_each_code_has_its_exception(code: int | str, kind: type[PyllamaMtpError]) -> None:
    number = getattr(native.load().lib, code) if isinstance(code, str) else code
    error = decode_error(number, "what was said")
    assert type(error) is kind
    if isinstance(error, DecodeError):
        assert error.code == number
    if kind in (NoKVSlotError, InvalidBatchError, FatalDecodeError):
        assert "what was said" in str(error)


def test_a_short_context_with_a_huge_batch_is_not_a_matter_of_memory(demo: Model) -> None:
    with Session(demo, Settings(n_ctx=256, n_batch=10**9, n_threads=1)) as session:
        assert session.n_ctx == 256
