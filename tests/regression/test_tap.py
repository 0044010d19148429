"""The hidden-state tap of the patched library: rows by token index, whatever else is asked for.

The reference is upstream's tap (``ContextOptions.tap = "all"``), which stages the same rows through
the host. Equal batches give equal graphs, so the rows are compared bit by bit; where a batch of
several sequences is compared with one of a single sequence, whose graphs have other sizes, a
thousandth of the largest entry is allowed. Rows of two different tokens differ by about as much as
the largest entry.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader

from pyllama_mtp import Model, Session, Settings
from pyllama_mtp.errors import UsageError
from pyllama_mtp.llama.batch import Floats, Ints
from pyllama_mtp.llama.context import Context

from ..marks import usual
from ..plain import write_model
from .support import EDGES, N_BATCH, scaled
from .support import made_up as text
from .twocontexts import Marks, every, last, none, some, turns
from .twocontexts import trunk as context

Of = Callable[[int], Marks]

#: Sequences of one batch: lengths that fit no ubatch, and that differ.
LENGTHS = (5, 19, 11)
MARKS = (none, last, some, every)


def rows(model: Model, tokens: Ints, marks: Of, **options: object) -> Floats:
    """Hidden rows of a text, decoded in batches of N_BATCH."""
    found = []
    with context(model, **options) as target:
        for start in range(0, len(tokens), N_BATCH):
            part = tokens[start : start + N_BATCH]
            target.decode(part, start, marks(len(part)))
            found.append(target.hidden_rows().copy())
    return np.concatenate(found)


# -- rows are upstream's ---------------------------------------------------------------------------


@pytest.mark.parametrize("n", usual(*EDGES[::3], long=[n for n in EDGES if n not in EDGES[::3]]))
def test_rows_are_those_of_upstreams_tap(model: Model, n: int) -> None:
    """For any output marks."""
    tokens, first = text(model, n), rows(model, text(model, n), none, tap="all")
    for marks in MARKS:
        wanted = rows(model, tokens, marks, tap="all")
        np.testing.assert_allclose(wanted, first, rtol=0, atol=1e-3 * np.abs(first).max())
        found = rows(model, tokens, marks, need_embd_pre_norm=True)
        assert found.shape == wanted.shape == (n, model.n_embd)
        assert len(np.unique(wanted, axis=0)) == n, "the reference cannot tell tokens apart"
        assert found.tobytes() == wanted.tobytes(), marks.__name__


@pytest.mark.parametrize("marks", MARKS)
def test_rows_of_several_sequences_go_by_token_index(model: Model, marks: Of) -> None:
    """llama.cpp reorders such a batch: the lengths differ, and a ubatch takes equal parts."""
    (batch,) = turns(model, LENGTHS, N_BATCH, marks)
    several = {"n_seq_max": len(LENGTHS)}
    with (
        context(model, need_embd_pre_norm=True, **several) as ours,
        context(model, tap="all", **several) as upstreams,
    ):
        ours.decode_batch(batch)
        upstreams.decode_batch(batch)
        found, same_graphs = ours.hidden_rows().copy(), upstreams.hidden_rows().copy()
    # Upstream's rows come in the order of its ubatches: as a set they are equal to the bit.
    assert len(np.unique(found, axis=0)) == len(batch.tokens)
    assert np.array_equal(np.unique(found, axis=0), np.unique(same_graphs, axis=0))
    for seq in range(len(LENGTHS)):
        mine = batch.seqs == seq
        wanted = rows(model, batch.tokens[mine], none, tap="all")
        off = np.abs(found[mine] - wanted).max()
        assert off < scaled(1e-3) * np.abs(wanted).max(), f"sequence {seq} is off by {off}"


@pytest.mark.parametrize("hidden", ["post-norm", "pre-norm"])
def test_a_context_of_the_block_keeps_its_own_rows(model: Model, hidden: str) -> None:
    """Those of every token, by its index; of qwen3next those of output rows, so all are."""
    n, marks = 37, every(37) if model.architecture == "qwen3next" else some(37)
    states = rows(model, text(model, n), none, tap="all")
    with (
        context(model, mtp_head=True, need_embd_pre_norm=True, hidden=hidden) as block,
        context(model, mtp_head=True, tap="all") as upstreams,
    ):
        for one in (block, upstreams):
            one.decode(text(model, n), 0, marks, states)
        found, wanted = block.hidden_rows(), upstreams.hidden_rows()
        assert len(np.unique(wanted, axis=0)) == n
        if hidden == "pre-norm":
            assert not np.allclose(found, wanted, rtol=0.05)
            found = normalized(model, found, mtp=True)
            np.testing.assert_allclose(
                found, wanted, rtol=scaled(1e-4), atol=scaled(1e-5) * np.abs(wanted).max()
            )
        else:
            assert found.tobytes() == wanted.tobytes()


# -- before and after the norm ---------------------------------------------------------------------


def normalized(model: Model, data: Floats, mtp: bool = False) -> Floats:
    """The model's final RMS norm, computed here: x / sqrt(mean(x^2) + eps) * weight."""
    reader = GGUFReader(model.path)
    weights = {tensor.name: tensor for tensor in reader.tensors}
    field = reader.get_field(f"{model.architecture}.attention.layer_norm_rms_epsilon")
    assert field
    name = next((n for n in weights if n.endswith("nextn.shared_head_norm.weight")), "")
    weight = weights[name if mtp and name else "output_norm.weight"].data.astype(np.float64)
    wide = data.astype(np.float64)
    scale = np.sqrt((wide**2).mean(axis=1, keepdims=True) + float(field.contents()))
    result: Floats = (wide / scale * weight).astype(np.float32)
    return result


def test_rows_before_the_norm_give_those_after_it(model: Model) -> None:
    """Whatever is an output: the norm runs behind the tap. To 0.0001 of each entry: the order of a
    sum of squares in single precision may differ. So nothing was computed in the tapped tensor's
    buffer."""
    tokens, found = text(model, N_BATCH + 1), set()
    for marks in MARKS:
        before = rows(model, tokens, marks, need_embd_pre_norm=True, hidden="pre-norm")
        after = rows(model, tokens, marks, need_embd_pre_norm=True)
        assert not np.allclose(before, after, rtol=0.05)
        wanted = normalized(model, before)
        np.testing.assert_allclose(wanted, after, rtol=scaled(1e-4), atol=scaled(1e-6))
        found.add(before.tobytes())
    assert len(found) == 1


# -- a switch of its own ---------------------------------------------------------------------------


def decoded(target: Context, tokens: Ints, marks: Of) -> tuple[list[object], bytes]:
    """Graph nodes and logits of a batch in an empty cache."""
    target.clear()
    target.decode(tokens, 0, marks(len(tokens)))
    logits = [target.logits(int(i)).copy() for i in np.flatnonzero(marks(len(tokens)))]
    return list(target.nodes()), b"".join(row.tobytes() for row in logits)


def embeddings(target: Context) -> int | None:
    """Address of llama.cpp's own embeddings output, which the bindings do not declare."""
    function = ctypes.CDLL(str(target.library.folder / "libllama.so.0")).llama_get_embeddings
    function.restype, function.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    found: int | None = function(int(target.library.ffi.cast("uintptr_t", target.handle)))
    return found


@pytest.mark.parametrize("hidden", ["post-norm", "pre-norm"])
@pytest.mark.parametrize("marks", MARKS)
def test_the_tap_makes_no_row_an_output(model: Model, marks: Of, hidden: str) -> None:
    """The logits are those without a tap, of the rows asked for alone; embeddings, a second output,
    are off. When it is off, the graph is that of a context that never had one, and no rows are
    there, as before the first decode. What is computed: test_graph.py."""
    tokens = text(model, 37)
    with (
        context(model, trace=True) as plain,
        context(model, need_embd_pre_norm=True, hidden=hidden, trace=True) as target,
    ):
        with pytest.raises(UsageError, match="no such rows"):
            target.hidden_rows()
        wanted = decoded(plain, tokens, marks)
        assert decoded(target, tokens, marks)[1] == wanted[1]
        assert embeddings(target) is None
        for row in np.flatnonzero(marks(37) == 0):
            assert not target._rows(target.library.lib.pyllama_get_logits, int(row))
        before = target.hidden_rows().copy()
        target.set_tap(False)
        assert decoded(target, tokens, marks) == wanted
        with pytest.raises(UsageError, match="no such rows"):
            target.hidden_rows()
        target.set_tap(True)
        decoded(target, tokens, marks)
        assert target.hidden_rows().tobytes() == before.tobytes()


# -- without it --------------------------------------------------------------------------------


def test_other_architectures_are_told_which_have_it(at_once: None, tmp_path: Path) -> None:
    settings = Settings(n_ctx=256, n_threads=1)
    with (
        Model(write_model(tmp_path / "m.gguf", "gemma3")) as model,
        Session(model, settings) as session,
        pytest.raises(UsageError, match="one for qwen35, qwen35moe, qwen3next"),
    ):
        session.hidden_states("x")
