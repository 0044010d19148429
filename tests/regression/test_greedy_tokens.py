"""Greedy tokens: the best token of an output row is picked where its logits are, and left.

The reference is numpy's argmax over the logits of the same decode with the switch off. The graphs
are equal up to the logits, so nothing here needs a tolerance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGUFReader

from pyllama_mtp import Model
from pyllama_mtp.errors import FatalDecodeError, UsageError
from pyllama_mtp.llama.batch import Batch, Floats, Ints
from pyllama_mtp.llama.context import Context
from pyllama_mtp.models.synth import write_synthetic

from ..marks import usual
from ..workers import worker
from .support import N_UBATCH, made_up
from .twocontexts import Marks, turns
from .twocontexts import trunk as context

Rows = Callable[[npt.NDArray[np.float16]], None]

#: Three graphs, the last one short.
N = 43
#: Bytes that a decode copies for an output row: its token.
PER_ROW = 4
#: No multiple of 16, which is how many logits the search on a CPU takes at a time.
N_VOCAB = 2055
#: Entries of a batch of N whose token is wanted: the last, some of each graph, some of the second
#: one only, all.
REQUESTED: dict[str, Sequence[int]] = {
    "last": (N - 1,),
    "some": (0, 3, 7, 20, 31, 40, 42),
    "second": (19, 25, 31),
    "all": range(N),
}


def marks_of(requested: Sequence[int], n: int = N) -> Marks:
    return np.isin(np.arange(n), list(requested)).astype(np.int8)


def in_graphs(requested: Sequence[int], n_ubatch: int) -> list[int]:
    """How many of the requested entries each graph has."""
    marks = marks_of(requested)
    return [int(marks[start : start + n_ubatch].sum()) for start in range(0, N, n_ubatch)]


def batch_of(model: Model, requested: Sequence[int], hidden: Floats | None = None) -> Batch:
    positions = np.arange(N, dtype=np.int32)
    return Batch(made_up(model, N), positions, 0 * positions, marks_of(requested), hidden)


def states_of(model: Model) -> Floats:
    """Hidden rows for a context of the MTP block alone. Any will do."""
    return np.random.default_rng(0).standard_normal((N, model.n_embd)).astype(np.float32)


Either = tuple[Context, Floats | None]


@pytest.fixture(params=[False, True], ids=["trunk", "block"])
def either(model: Model, request: pytest.FixtureRequest) -> Iterator[Either]:
    """A context of the trunk, or of the MTP block alone and the hidden rows that it needs."""
    with context(model, mtp_head=request.param, trace=True) as found:
        yield found, states_of(model) if request.param else None


def tokens_of(found: Context, batch: Batch, greedy: bool) -> list[int]:
    """The best token of each output row of a batch in an empty cache."""
    found.clear()
    found.set_greedy(greedy)
    found.decode_batch(batch)
    rows = [int(i) for i in np.flatnonzero(batch.outputs)]
    if greedy:
        return [found.argmax(row) for row in rows]
    return [int(found.logits(row).argmax()) for row in rows]


def assert_picked(found: Context, batch: Batch) -> list[int]:
    """With the switch on, the batch gives the tokens that it gives with the switch off."""
    wanted = tokens_of(found, batch, greedy=False)
    assert tokens_of(found, batch, greedy=True) == wanted
    token = found.library.ffi.new("int32_t *")
    there = []
    for row in range(-1, N + 1):
        found.call(found.library.lib.pyllama_mtp_get_greedy, row, token)
        there.append(token[0] >= 0)
    assert there == [False, *(batch.outputs == 1).tolist(), False]
    return wanted


# -- the tokens ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [{}, {"with_mtp": True}, {"mtp_head": True}], ids=str)
@pytest.mark.parametrize("n_threads", usual(3, long=[1]))
@pytest.mark.parametrize("requested", REQUESTED.values(), ids=REQUESTED)
def test_tokens_of_each_kind_of_context(
    model: Model, requested: Sequence[int], n_threads: int, kind: dict[str, object]
) -> None:
    hidden = states_of(model) if "mtp_head" in kind else None
    with context(model, n_threads=n_threads, **kind) as found:
        wanted = assert_picked(found, batch_of(model, requested, hidden))
    assert len(set(wanted)) > len(wanted) // 4, "rows that are mixed up would not be seen"


@pytest.mark.parametrize("mtp_head", [False, True])
def test_tokens_of_several_sequences(model: Model, mtp_head: bool) -> None:
    """Interleaved and of unequal lengths, so that graphs take entries in an order of their own."""
    (batch,) = turns(model, (5, 27, 11), N)
    hidden = states_of(model) if mtp_head else None
    with context(model, n_seq_max=3, mtp_head=mtp_head) as found:
        for requested in REQUESTED.values():
            assert_picked(found, replace(batch, outputs=marks_of(requested), hidden=hidden))


# -- equals, and what is no number -----------------------------------------------------------------


def edited(source: Path, target: Path, name: str, change: Rows) -> Path:
    """A copy of an F16 model, with rows of the named matrix changed."""
    data = bytearray(source.read_bytes())
    (found,) = (tensor for tensor in GGUFReader(source).tensors if tensor.name == name)
    values = np.frombuffer(data, "<f2", int(found.n_elements), int(found.data_offset))
    change(values.reshape(-1, int(found.shape[0])))
    target.write_bytes(data)
    return target


@pytest.fixture(scope="module")
def odd_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An F16 model of N_VOCAB tokens, whose embeddings are its LM head."""
    return write_synthetic(
        tmp_path_factory.mktemp("odd") / "odd.gguf", "tiny", "f16", n_vocab=N_VOCAB
    )


def last_token(model: Model, tokens: Ints) -> int:
    """The greedy token after `tokens`, which is the first of the largest logits."""
    marks = marks_of((len(tokens) - 1,), len(tokens))
    with context(model) as target:
        target.decode(tokens, 0, marks)
        logits = target.logits(len(tokens) - 1).copy()
        target.clear()
        target.set_greedy(True)
        target.decode(tokens, 0, marks)
        assert target.argmax(len(tokens) - 1) == logits.argmax()
        return int(logits.argmax())


@pytest.mark.parametrize(
    "equals",
    [(3, 2050), (2049, 2051), (40, 24, 7), (0, 2054), (2048, 2054), (15,), (2054,)],
)
def test_the_first_of_equals(odd_file: Path, tmp_path: Path, equals: Sequence[int]) -> None:
    """Equal logits in one lane of the search, in several, and behind its end."""
    tokens = np.arange(100, 110, dtype=np.int32)
    with Model(odd_file) as model:
        best = last_token(model, tokens)
        assert best not in (*tokens, *equals)

    def change(rows: npt.NDArray[np.float16]) -> None:
        rows[list(equals)] = rows[best]
        rows[best] = 0

    with Model(edited(odd_file, tmp_path / "m.gguf", "token_embd.weight", change)) as model:
        assert last_token(model, tokens) == min(equals)


def test_infinite_logits(odd_file: Path, tmp_path: Path) -> None:
    """Every logit is one, the best of which there are many."""

    def change(rows: npt.NDArray[np.float16]) -> None:
        rows[200:] = 0
        rows[200:, 0] = np.where(np.arange(200, N_VOCAB) % 3, np.inf, -np.inf)
        rows[:100] = rows[200]

    tokens = np.arange(100, 110, dtype=np.int32)
    with Model(edited(odd_file, tmp_path / "m.gguf", "token_embd.weight", change)) as model:
        assert last_token(model, tokens) in (0, 201)


@pytest.mark.parametrize("column", usual(0, N_VOCAB - 1, long=[15, 16, 1000, 2047, 2048]))
@pytest.mark.parametrize("mtp_head", [False, True])
def test_a_nan_in_any_column(odd_file: Path, tmp_path: Path, column: int, mtp_head: bool) -> None:
    """A NaN is an error in any column; numpy takes the first one for the largest."""

    def change(rows: npt.NDArray[np.float16]) -> None:
        rows[column] = np.nan

    file = edited(odd_file, tmp_path / "nan.gguf", "token_embd.weight", change)
    with Model(file) as model, context(model, mtp_head=mtp_head) as found:
        hidden = states_of(model)[:3] if mtp_head else None
        for greedy in (False, True):
            found.clear()
            found.set_greedy(greedy)
            found.decode(np.array([7, 8, 9], np.int32), 0, marks_of((1, 2), 3), hidden)
            for row in (1, 2):
                with pytest.raises(FatalDecodeError, match="logits are NaN"):
                    found.argmax(row)


def test_a_nan_in_some_rows(moe_file: Path, tmp_path: Path) -> None:
    """Entries before the damaged one have their tokens all the same."""
    token, at = 1234, 20

    def change(rows: npt.NDArray[np.float16]) -> None:
        rows[token] = np.nan

    file = edited(moe_file, tmp_path / "nan.gguf", "token_embd.weight", change)
    with Model(file) as model, context(model) as target:
        tokens = made_up(model, N)
        tokens[at] = token
        wanted: list[int] = []
        for greedy in (False, True):
            target.clear()
            target.set_greedy(greedy)
            target.decode(tokens, 0, marks_of(range(N)))
            found = [target.argmax(row) for row in range(at)]
            assert found == (wanted or found)
            wanted = found
            for row in range(at, N):
                with pytest.raises(FatalDecodeError, match="logits are NaN"):
                    target.argmax(row)


# -- what a decode leaves, and costs ---------------------------------------------------------------


def test_what_there_is_and_what_it_costs(either: Either) -> None:
    """The token of each output row in place of its logits, by one search for each graph with
    outputs; the other rows are refused. Off again, all is as before it was on."""
    found, hidden = either
    with pytest.raises(UsageError, match="not marked as an output"):
        found.argmax(0)
    whole, copied, left = 4 * found.model.n_vocab, 0, list[list[tuple[object, ...]]]()
    for greedy, each in ((False, whole), (True, PER_ROW), (False, whole)):
        left.append([])
        for requested in ((), *REQUESTED.values()):
            found.clear()
            found.set_greedy(greedy)
            found.decode_batch(batch_of(found.model, requested, hidden))
            copied += each * len(requested)
            assert found.output_bytes == copied
            for row in (*sorted({*range(N)} - {*requested}), -1, N, 2**31 - 1):
                with pytest.raises(UsageError, match="not marked as an output"):
                    found.argmax(row)
            for row in requested if greedy else ():
                found.check_finite(row)
                with pytest.raises(UsageError, match="greedy tokens only"):
                    found.logits(row)
                assert not found._rows(found.library.lib.pyllama_get_logits, row)
            nodes = found.nodes()
            searches = [n.shape[:2] for n in nodes if n.name == "mtp_argmax" and n.op == "CUSTOM"]
            asked = in_graphs(requested, N_UBATCH)
            assert searches == [(n, 1) for n in asked if n and greedy]
            others = [node for node in nodes if not node.name.startswith("mtp_argmax")]
            logits = [] if greedy else [found.logits(row).tobytes() for row in requested]
            left[-1].append((others, [found.argmax(row) for row in requested], logits))
    off, on, again = left
    assert off == again and [one[:2] for one in on] == [one[:2] for one in off]


def test_on_a_device(demo: Model, demo_file: Path) -> None:
    """On a worker the search is ggml's, and no row of logits comes from there."""
    batch = batch_of(demo, REQUESTED["some"])
    with context(demo) as here:
        wanted = tokens_of(here, batch, greedy=False)
    with (
        worker() as address,
        Model(demo_file, rpc_servers=address) as remote,
        context(remote, trace=True) as there,
    ):
        assert tokens_of(there, batch, greedy=True) == wanted
        assert {n.op for n in there.nodes() if n.name == "mtp_argmax"} == {"ARGMAX"}
        assert there.output_bytes == 4 * len(wanted)
        assert tokens_of(there, batch, greedy=False) == wanted
