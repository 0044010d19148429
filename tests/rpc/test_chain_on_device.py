"""A drafting chain is one graph on a device with memory of its own: nothing goes back and forth.

The device is a worker on loopback, and what passes on the line to it is read: a graph that has to
go to the CPU for something is sent in several parts.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pyllama_mtp import Model
from pyllama_mtp.drafting.head import set_draft_head, use_trimmed_head
from pyllama_mtp.llama import rpc
from pyllama_mtp.llama.context import Context
from pyllama_mtp.models.synth import write_synthetic

from ..regression.twocontexts import TwoContexts, agree, context, drafts_of, one_sequence
from ..trimmed import head_rows, write_trimmed
from ..workers import Line, worker

#: ggml-rpc.cpp.
SET_TENSOR, GET_TENSOR, COMPUTES = 6, 8, {10, 16}
PROMPT = list(range(5, 45))
NEWEST, SHORT, LONG = 5, 2, 6
#: Tokens that may be drafted: fewer than there are, so that rows have to be looked up.
FEW = 300


@pytest.fixture(scope="module")
def line() -> Iterator[Line]:
    """A line to a worker."""
    with worker() as address:
        made = Line(address)
        yield made
        made.close()


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose LM head is its embeddings, and whose head drafts well."""
    path = tmp_path_factory.mktemp("models") / "tied.gguf"
    write_synthetic(path, "tiny", head_noise=0.05, tied_embeddings=True)
    return path


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose LM head is not its embeddings."""
    path = tmp_path_factory.mktemp("models") / "untied.gguf"
    write_synthetic(path, "tiny-moe", head_noise=0.05, tied_embeddings=False)
    return path


@pytest.fixture(scope="module")
def trimmed(untied: Path) -> Path:
    """The same with an MTP head over every second token in the file."""
    with Model(untied) as model:
        rows = np.arange(0, model.n_vocab, 2)
    return write_trimmed(untied, untied.with_name("trimmed.gguf"), rows, rows.astype(np.int64))


def commands(line: Line) -> Counter[int]:
    """How many messages of each command went to the worker (command, size, data)."""
    found: Counter[int] = Counter()
    at = 0
    while at < len(line.up):
        (size,) = struct.unpack_from("<Q", line.up, at + 1)
        found[line.up[at]] += 1
        at += 9 + size
    return found


def settle(line: Line) -> None:
    """Wait until the worker has done everything: ask it for its memory, and wait for the answer."""
    devices = rpc.connect([line.address])
    rpc.release([line.address])
    rpc.wait_for(devices)


def chain(context: Context, line: Line, n: int) -> tuple[list[int], Counter[int]]:
    """Tokens of a chain of `n`, and its messages when the graph is there already."""
    for _ in range(2):
        settle(line)
        line.clear()
        tokens = drafts_of(context, NEWEST, n)
        settle(line)
    return tokens, commands(line)


@pytest.mark.parametrize(
    ("file", "vocabulary", "stays"),
    [
        ("tied", None, True),
        ("tied", FEW, True),
        ("untied", FEW, True),
        ("trimmed", "file", True),
        ("untied", None, False),
    ],
)
def test_it_stays_there(
    request: pytest.FixtureRequest, line: Line, file: str, vocabulary: int | str | None, stays: bool
) -> None:
    """With a tied LM head or a draft head a chain takes equally many messages at every length,
    and drafts what upstream's single steps draft."""
    path: Path = request.getfixturevalue(file)
    prompt = one_sequence(np.array(PROMPT, dtype=np.int32))
    with Model(path, rpc_servers=line.address) as model:
        ids = None if vocabulary is None else np.arange(FEW, dtype=np.int32) * 2
        if vocabulary == "file":
            ids = np.arange(0, model.n_vocab, 2, dtype=np.int32)
        with context(model) as found:
            if vocabulary == "file":
                use_trimmed_head(found)
            elif ids is not None:
                set_draft_head(found, head_rows(model.info, ids), ids)
            found.decode_batch(prompt)
            (few, short), (tokens, long) = (chain(found, line, n) for n in (SHORT, LONG))
        with TwoContexts(model) as wanted:
            wanted.decode(prompt)
            steps = wanted.draft(NEWEST, LONG, ids=ids)
    assert tokens[:SHORT] == few and agree(tokens, steps) and len(set(tokens)) > 2
    graphs = [sum(found[number] for number in COMPUTES) for found in (short, long)]
    if not stays:
        assert graphs == [SHORT, LONG]
        return
    assert graphs == [1, 1]
    # Embeddings of the newest tokens, mask, positions and slots in one piece.
    assert short[SET_TENSOR] == long[SET_TENSOR] == 1
    assert short[GET_TENSOR] == long[GET_TENSOR] == 1


@pytest.mark.parametrize("part", [False, True], ids=["whole", "part"])
def test_rows_are_gathered_by_a_column_that_there_is(tied: Path, line: Line, part: bool) -> None:
    """ggml_argmax() of CUDA gives -1 for a row of NaNs."""
    with Model(tied, rpc_servers=line.address) as model, context(model, trace=True) as draft:
        if part:
            ids = np.arange(0, model.n_vocab, 7, dtype=np.int32)
            set_draft_head(draft, head_rows(model.info, ids), ids)
        draft.decode_batch(one_sequence(np.array(PROMPT, dtype=np.int32)))
        before = len(draft.nodes())
        drafts_of(draft, NEWEST, LONG)
        ops = [node.op for node in draft.nodes()[before:]]
        assert ops.count("ARGMAX") == LONG
        assert ops.count("CLAMP") == (LONG if part else LONG - 1), "nothing follows the last one"
        for at, op in enumerate(ops):
            if op == "ARGMAX" and "GET_ROWS" in ops[at:]:
                assert ops[at:].index("CLAMP") < ops[at:].index("GET_ROWS")
