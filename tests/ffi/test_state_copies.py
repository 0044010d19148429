"""Patch 8: a delta net writes its states where the copy after it would put them.

The same values as with the copy, and only where nobody else can tell: `Outcome.direct` says whether
the operator's own output still holds what it held before: the states were not written there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from pyllama_mtp.llama import native

from .ggmlcalls import F32, Floats, Ggml

S, H = 32, 3  # of a state: [S, S, H]
D = S * S * H
MARK = np.float32(-77.0)
SPARE = 5  # floats between two sequences' states in the cache


@pytest.fixture(scope="module")
def ggml() -> Ggml:
    return Ggml()


@dataclass
class Outcome:
    """attention output, the cache afterwards, and whether the states went there directly."""

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
        rng = np.random.default_rng(n_tokens)

        def tensor(*dims: int) -> Any:
            made = ggml.ggml_new_tensor_4d(ctx, F32, *dims)
            ggml.data(made)[:] = rng.standard_normal(ggml.data(made).size) / 4
            return made

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
        graph = self.ggml.ggml_new_graph(self.ctx)
        for tensor in tensors:
            self.ggml.ggml_build_forward_expand(graph, tensor)
        assert self.ggml.ggml_graph_compute_with_ctx(self.ctx, graph, n_threads) == 0
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
    try:
        assert native.load().set_direct_states(False)
        off = outcome(ggml, 4, 1, 3, 2, "plain")
    finally:
        assert native.load().set_direct_states(True)
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
