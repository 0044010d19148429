"""A delta net reads its states where they are kept, and writes them there.

The same values as with the copies, and only where nobody else can tell.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest

from pyllama_mtp.llama import native

from ..marks import usual
from .ggmlcalls import Floats, Ggml

S, H = 32, 3  # of a state: [S, S, H]
D = S * S * H
MARK = np.float32(-77.0)
SPARE = 5  # floats between two sequences' states in the cache


@dataclass
class Outcome:
    """attention output, the cache afterwards, and whether there were no copies.

    Without copies, the memory for them still holds what it held before: `outcome()` looks at the
    new states in the operator's output, `kept()` at the gathered states that it begins with.
    """

    attention: bytes
    cache: bytes
    direct: bool


class Net:
    """A delta net, views of its output, and the copy of its states into a cache."""

    def __init__(self, ggml: Ggml, ctx: Any, n_tokens: int, n_seqs: int, n_snaps: int) -> None:
        self.ggml, self.ctx = ggml, ctx
        self.n_tokens, self.n_seqs = n_tokens, n_seqs
        self.n_attention = S * H * n_tokens * n_seqs
        self.n_written = min(n_tokens, n_snaps)
        tensor = partial(ggml.random, ctx, np.random.default_rng(n_tokens))
        parts = [tensor(S, H, n_tokens, n_seqs) for _ in range(3)]
        gates = [tensor(1, H, n_tokens, n_seqs) for _ in range(2)]
        self.stride = D + SPARE
        self.cache = tensor(self.stride, n_seqs, n_snaps, 1)
        self.first = tensor(S, S, H, n_seqs)
        self.inputs, self.n_snaps = (*parts, *gates), n_snaps

    def compute(self, state: Any) -> None:
        """The operator, its states as they are copied, and its attention output."""
        ggml, ctx, row = self.ggml, self.ctx, 4 * self.stride
        self.out = ggml.ggml_gated_delta_net(ctx, *self.inputs, state, self.n_snaps)
        ggml.data(self.out)[:] = MARK
        self.states = self.view(self.out, self.n_written, 4 * D, 4 * D * self.n_seqs)
        into = self.view(self.cache, self.n_written, row, row * self.n_seqs, 0)
        self.copy = ggml.ggml_cpy(ctx, self.states, into)
        self.attention = self.attention_view(self.n_tokens)

    def view(self, of: Any, n: int, nb1: int, nb2: int, offset: int | None = None) -> Any:
        """[D, n_seqs, n]: states, in the operator's output or in the cache."""
        offset = 4 * self.n_attention if offset is None else offset
        return self.ggml.ggml_view_3d(self.ctx, of, D, self.n_seqs, n, nb1, nb2, offset)

    def attention_view(self, n_tokens: int) -> Any:
        """[S, H, n_tokens, n_seqs] of the operator's output."""
        row = 4 * S * H
        strides = (4 * S, row, row * n_tokens)
        return self.ggml.ggml_view_4d(self.ctx, self.out, S, H, n_tokens, self.n_seqs, *strides, 0)

    def run(self, tensors: list[Any], n_threads: int) -> Outcome:
        """Compute these tensors, in this order."""
        self.ggml.compute(self.ctx, tensors, n_threads)
        out = self.ggml.data(self.out)
        states = out[self.n_attention :]
        return Outcome(
            out[: self.n_attention].tobytes(),
            self.ggml.data(self.cache).tobytes(),
            bool((states == MARK).all()),
        )


def outcome(
    ggml: Ggml, n_tokens: int, n_seqs: int, n_snaps: int, threads: int, how: str
) -> Outcome:
    """What comes of a graph. `how`: "plain" as llama.cpp builds it, or a reason to copy."""
    with ggml.context(2**24) as ctx:
        net = Net(ggml, ctx, n_tokens, n_seqs, n_snaps)
        state = net.first
        if how == "the state lies in the cache":
            ggml.data(net.cache)[: D * n_seqs] = ggml.data(net.first)
            strides = (4 * S, 4 * S * S, 4 * D)
            state = ggml.ggml_view_4d(ctx, net.cache, S, S, H, n_seqs, *strides, 0)
        if how == "the values lie in the cache":
            values = net.inputs[2]
            ggml.data(net.cache)[: net.n_attention] = ggml.data(values)
            strides = (4 * S, 4 * S * H, 4 * S * H * n_tokens)
            view = ggml.ggml_view_4d(ctx, net.cache, S, H, n_tokens, n_seqs, *strides, 0)
            net.inputs = (*net.inputs[:2], view, *net.inputs[3:])
        net.compute(state)
        total = ggml.ggml_sum(ctx, net.attention)
        tensors = [net.copy, total]
        if how == "the states are read again":
            tensors.append(ggml.ggml_sum(ctx, net.states))
        if how == "the whole output is read":
            tensors[1:] = [ggml.ggml_sum(ctx, net.out)]
        if how == "the whole output is read as well":
            tensors.append(ggml.ggml_sum(ctx, net.out))
        if how == "the attention view is too long":
            tensors[1] = ggml.ggml_sum(ctx, net.attention_view(n_tokens + 1))
        if how == "something is computed before the copy":
            tensors.reverse()
        if how == "the output is kept":
            ggml.ggml_set_output(net.out)
        if how == "the states are kept":
            ggml.ggml_set_output(net.states)
        if how == "only some states are copied":
            net.n_written -= 1
            net.compute(state)
            tensors = [net.copy, ggml.ggml_sum(ctx, net.attention)]
        return net.run(tensors, threads)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("n_seqs", [1, 2])
@pytest.mark.parametrize("n_snaps", [1, 2, 4])
@pytest.mark.parametrize("n_tokens", [1, 3, 4, 7])
def test_the_states_are_those_of_the_copy(
    ggml: Ggml, n_tokens: int, n_snaps: int, n_seqs: int, threads: int
) -> None:
    found = outcome(ggml, n_tokens, n_seqs, n_snaps, threads, "plain")
    copied = outcome(ggml, n_tokens, n_seqs, n_snaps, 1, "the states are read again")
    assert found.direct and not copied.direct
    assert found.attention == copied.attention
    assert found.cache == copied.cache


@pytest.mark.parametrize(
    "how",
    [
        "the states are read again",
        "the whole output is read",
        "the whole output is read as well",
        "the attention view is too long",
        "something is computed before the copy",
        "the output is kept",
        "the states are kept",
        "only some states are copied",
    ],
)
def test_what_others_can_see_is_copied(ggml: Ggml, how: str) -> None:
    found, plain = (outcome(ggml, 4, 1, 3, 2, way) for way in (how, "plain"))
    assert plain.direct and not found.direct
    assert found.attention == plain.attention
    if how != "only some states are copied":
        assert found.cache == plain.cache


def test_a_state_within_the_cache_is_copied(ggml: Ggml) -> None:
    """It is read while the first new states are written already."""
    found = outcome(ggml, 4, 1, 3, 2, "the state lies in the cache")
    assert not found.direct
    assert found.cache == outcome(ggml, 4, 1, 3, 1, "the state lies in the cache").cache


def test_values_within_the_cache_are_copied(ggml: Ggml) -> None:
    found = outcome(ggml, 4, 1, 3, 2, "the values lie in the cache")
    assert not found.direct
    assert found.attention == outcome(ggml, 4, 1, 3, 1, "plain").attention


def test_it_can_be_switched_off(ggml: Ggml) -> None:
    assert native.load().set_cpu_switch("direct_states", False)
    off = outcome(ggml, 4, 1, 3, 2, "plain")
    assert native.load().set_cpu_switch("direct_states", True)
    on = outcome(ggml, 4, 1, 3, 2, "plain")
    assert (off.direct, on.direct) == (False, True)
    assert (off.attention, off.cache) == (on.attention, on.cache)


def test_the_values_are_right(ggml: Ggml) -> None:
    """Against the recurrence in float64: https://arxiv.org/abs/2412.06464, equation 10."""
    with ggml.context(2**24) as ctx:
        net = Net(ggml, ctx, 3, 1, 2)
        net.compute(net.first)
        q, k, v, g, beta = (values(ggml, tensor) for tensor in net.inputs)
        # The stored state is transposed: [H, j, i] of S[i][j].
        state = values(ggml, net.first).reshape(H, S, S)
        assert net.run([net.copy, ggml.ggml_sum(ctx, net.attention)], 1).direct
        cache = values(ggml, net.cache).reshape(2, -1)
    found = []
    for t in range(3):
        at = [part.reshape(3, H, -1)[t] for part in (q, k, v, g, beta)]
        state = state * np.exp(at[3])[:, :, None]
        delta = (at[2] - np.einsum("hji,hi->hj", state, at[1])) * at[4]
        state = state + np.einsum("hj,hi->hji", delta, at[1])
        found.append(state.ravel())
    for slot, wanted in enumerate(reversed(found[1:])):
        assert np.allclose(cache[slot, :D], wanted, atol=1e-5)


def values(ggml: Ggml, tensor: Any) -> Floats:
    """A copy in float64."""
    return ggml.data(tensor).astype(np.float64)  # type: ignore[return-value]


N_CELLS, HEAD = 5, 1  # of the cache, and the first that the sequences write

#: The rows that the sequences read: each its own; one that was rolled back by two tokens; a cell
#: outside of those that are written, which both share.
ALLOWED = {1: ([1], [1 + 2 * N_CELLS], [4]), 2: ([1, 2], [1, 2 + 2 * N_CELLS], [4, 4])}


def kept(
    ggml: Ggml,
    size: int,
    n_tokens: int,
    n_snaps: int,
    reads: list[int],
    threads: int = 2,
    how: str = "plain",
) -> Outcome:
    """A delta net of 3 heads whose states come from, and go to, a cache of states: rows of it, a
    part of N_CELLS for each snapshot. `reads`: the row of each sequence. As llama.cpp builds it:
    the states are a view of the rows, and the others, which are none, are copied."""
    rng = np.random.default_rng([size, n_tokens, n_snaps])
    state_size, n_seqs, n_written = size * size * 3, len(reads), min(n_tokens, n_snaps)
    with ggml.context(2**26) as ctx:
        tensor = partial(ggml.random, ctx, rng)
        parts = [tensor(size, 3, n_tokens, n_seqs) for _ in range(3)]
        gates = [tensor(1, 3, n_tokens, n_seqs) for _ in range(2)]
        cache = tensor(state_size, N_CELLS * n_snaps, 1, 1)
        ids = ggml.ints(ctx, reads)
        rows = ggml.ggml_get_rows(ctx, cache, ids)
        ggml.data(rows)[:] = MARK
        row = 4 * state_size
        first = ggml.ggml_view_2d(ctx, rows, state_size, n_seqs, row, 0)
        others = [ggml.ggml_view_2d(ctx, of, state_size, 0, row, 0) for of in (rows, cache)]
        state = ggml.ggml_reshape_4d(ctx, first, size, size, 3, n_seqs)
        out = ggml.ggml_gated_delta_net(ctx, *parts, *gates, state, n_snaps)
        n_attention = size * 3 * n_tokens * n_seqs
        new = (state_size, n_seqs, n_written, row)
        states = ggml.ggml_view_3d(ctx, out, *new, row * n_seqs, 4 * n_attention)
        into = ggml.ggml_view_3d(ctx, cache, *new, row * N_CELLS, row * HEAD)
        shape = (4 * size, 12 * size, 12 * size * n_tokens)
        attention = ggml.ggml_view_4d(ctx, out, size, 3, n_tokens, n_seqs, *shape, 0)
        nothing = ggml.ggml_cpy(ctx, *others)
        tensors = [first, nothing, ggml.ggml_cpy(ctx, states, into), ggml.ggml_sum(ctx, attention)]
        if how == "a cell is written in between":
            one = (state_size, 1, row)
            cells = [ggml.ggml_view_2d(ctx, cache, *one, i * row) for i in (2, HEAD)]
            tensors.insert(2, ggml.ggml_cpy(ctx, *cells))
        if how == "the indices are gone":
            tensors.insert(2, ggml.ggml_cpy(ctx, ggml.ints(ctx, [99] * n_seqs), ids))
        if how == "the rows are read by others":
            tensors.append(ggml.ggml_sum(ctx, rows))
        if how == "their shape is read by others":
            tensors.append(ggml.ggml_sum(ctx, state))
        if how == "a view is read by others":
            tensors.append(ggml.ggml_sum(ctx, first))
        if how == "nothing is copied twice":
            tensors.insert(2, ggml.ggml_cpy(ctx, *others))
        if how == "there is nothing to copy":
            tensors.remove(nothing)
        if how == "nothing is copied later":
            tensors.append(tensors.pop(1))
        if how == "the rows are kept":
            ggml.ggml_set_output(rows)
        if how == "a view is kept":
            ggml.ggml_set_output(first)
        ggml.compute(ctx, tensors, threads)
        direct = (ggml.data(rows)[2 * n_seqs :] == MARK).all()
        bits = ggml.data(out)[:n_attention].tobytes(), ggml.data(cache).tobytes()
        return Outcome(*bits, bool(direct))


def upstream(*arguments: Any, **options: Any) -> Outcome:
    """`kept()` by upstream's own code, which copies states."""
    native.load().lib.pyllama_set_cpu_changes(False)
    found = kept(*arguments, **options)
    native.load().lib.pyllama_set_cpu_changes(True)
    return found


@pytest.mark.parametrize("threads", usual(1, 5, long=[2]))
@pytest.mark.parametrize("n_seqs", [1, 2])
@pytest.mark.parametrize(("n_tokens", "n_snaps"), [(1, 1), (1, 4), (3, 4), (7, 3), (15, 4)])
@pytest.mark.parametrize("size", usual(32, 128, long=(64, 256)))
def test_states_are_read_where_they_are_kept(
    ggml: Ggml, size: int, n_tokens: int, n_snaps: int, n_seqs: int, threads: int
) -> None:
    """Bit for bit as upstream computes them."""
    for reads in ALLOWED[n_seqs]:
        if max(reads) >= N_CELLS * n_snaps:
            continue
        found = kept(ggml, size, n_tokens, n_snaps, reads, threads)
        wanted = upstream(ggml, size, n_tokens, n_snaps, reads)
        assert (found.direct, wanted.direct) == (True, False)
        assert found.attention == wanted.attention
        assert found.cache == wanted.cache


@pytest.mark.parametrize("threads", [1, 3])
def test_indices_need_not_outlive_what_they_gather(ggml: Ggml, threads: int) -> None:
    """The allocator of a graph gives their memory to others."""
    for reads in ALLOWED[2]:
        found = kept(ggml, 64, 3, 3, reads, threads, "the indices are gone")
        wanted = upstream(ggml, 64, 3, 3, reads)
        assert found.direct
        assert (found.attention, found.cache) == (wanted.attention, wanted.cache)


@pytest.mark.parametrize(
    ("reads", "how"),
    [
        ([2, 1], "plain"),  # each where the other one writes
        ([1, 1 + N_CELLS], "plain"),  # where another one's snapshot goes
        ([1], "a cell is written in between"),
        ([1], "the rows are read by others"),
        ([1], "their shape is read by others"),
        ([1], "a view is read by others"),
        ([1], "a view is kept"),
        ([1], "nothing is copied twice"),
        ([1], "nothing is copied later"),
        ([1], "the rows are kept"),
    ],
)
def test_states_that_others_write_or_read_are_gathered(
    ggml: Ggml, reads: list[int], how: str
) -> None:
    found = kept(ggml, 64, 3, 3, reads, how=how)
    assert found == upstream(ggml, 64, 3, 3, reads, how=how)
    assert not found.direct
