"""What a prompt's rows need besides products is what it was: convolutions, what is
convolved, rows times a number, and the delta net, against numpy in float64.

Each is tried with and without it, so that both are known to be the same, and on both sides of the
16 tokens where it changes its way.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from pyllama_mtp.llama import native

from .ggmlcalls import Floats, Ggml
from .products import normal

Doubles = npt.NDArray[np.float64]


@pytest.fixture(autouse=True, params=[True, False], ids=["on", "off"])
def switched(kernels_on: None, request: pytest.FixtureRequest) -> None:
    assert native.load().set_cpu_switch("large_batch", request.param)


@pytest.mark.parametrize("n_tokens", [1, 2, 5, 13, 15, 16, 17, 37, 64])
@pytest.mark.parametrize(
    ("n_channels", "n_seqs", "n_threads"), [(16, 1, 1), (80, 2, 3), (12, 1, 2)]
)
@pytest.mark.parametrize("side_by_side", [False, True])
def test_convolutions(
    ggml: Ggml, n_tokens: int, n_channels: int, n_seqs: int, n_threads: int, side_by_side: bool
) -> None:
    """What is convolved: the last values of each channel, and then those of the tokens, which come
    with the channels side by side; or all of them come so."""
    before, tokens = normal(n_seqs, n_channels, 3), normal(n_seqs, n_tokens, n_channels)
    weights = normal(n_channels, 4)
    with ggml.context(2**22) as ctx:
        side = ggml.ggml_transpose(ctx, ggml.tensor(ctx, tokens))
        first = ggml.tensor(ctx, before)
        if side_by_side:
            first = ggml.ggml_transpose(ctx, ggml.tensor(ctx, before.transpose(0, 2, 1)))
        both = ggml.ggml_concat(ctx, first, side, 0)
        out = ggml.ggml_ssm_conv(ctx, both, ggml.tensor(ctx, weights))
        found = ggml.computed(ctx, out, n_threads).reshape(n_seqs, n_tokens, n_channels)
        joined = ggml.data(both).reshape(n_seqs, n_channels, 3 + n_tokens).copy()
    right = np.concatenate([before, tokens.transpose(0, 2, 1)], axis=2)
    assert joined.tobytes() == right.tobytes()
    windows = np.lib.stride_tricks.sliding_window_view(right.astype(np.float64), 4, axis=2)
    exact = np.einsum("sctw,cw->stc", windows, weights)
    assert np.abs(found - exact).max() < 2e-6


@pytest.mark.parametrize("n", [1, 15, 16, 33])
@pytest.mark.parametrize("n_threads", [1, 3])
def test_rows_times_a_number_each(ggml: Ggml, n: int, n_threads: int) -> None:
    rows, numbers = normal(2, 7, 3, n), normal(1, 7, 3, 1)
    with ggml.context(2**22) as ctx:
        out = ggml.ggml_mul(ctx, ggml.tensor(ctx, rows), ggml.tensor(ctx, numbers))
        found = ggml.computed(ctx, out, n_threads).reshape(rows.shape)
    assert found.tobytes() == (rows * numbers).tobytes()


def delta_net(
    q: Floats, k: Floats, v: Floats, gate: Floats, beta: Floats, state: Floats
) -> tuple[Doubles, Doubles]:
    """Token by token: output [seqs, tokens, heads, size] and states [seqs, heads, size, size],
    whose rows are what a value's component has for each of the key's."""
    n_seqs, n_tokens, n_heads, size = v.shape
    out, s = np.zeros(v.shape), state.astype(np.float64)
    for seq, head in np.ndindex(n_seqs, n_heads):
        of = head % q.shape[2]
        for t in range(n_tokens):
            one = s[seq, head] * np.exp(np.float64(gate[seq, t, head]))
            delta = beta[seq, t, head] * (v[seq, t, head] - one @ k[seq, t, of])
            s[seq, head] = one + np.outer(delta, k[seq, t, of])
            out[seq, t, head] = s[seq, head] @ q[seq, t, of] / np.sqrt(size)
    return out, s


@pytest.mark.parametrize("n_tokens", [15, 16, 17, 18, 19, 70])
@pytest.mark.parametrize(
    ("size", "n_heads", "n_key_heads", "n_seqs", "n_threads"),
    [(32, 3, 3, 1, 1), (64, 4, 2, 2, 3), (128, 2, 1, 1, 2), (48, 2, 2, 1, 2)],
)
def test_delta_nets(
    ggml: Ggml,
    n_tokens: int,
    size: int,
    n_heads: int,
    n_key_heads: int,
    n_seqs: int,
    n_threads: int,
) -> None:
    """Gates from nothing forgotten to everything."""
    q, k = (normal(n_seqs, n_tokens, n_key_heads, size + i)[..., :size] / 4 for i in range(2))
    v, state = normal(n_seqs, n_tokens, n_heads, size), normal(n_seqs, n_heads, size, size)
    k = k / np.linalg.norm(k, axis=-1, keepdims=True)
    rng = np.random.default_rng(n_tokens)
    gate = rng.choice([0.0, -0.01, -1.0, -30.0, -np.inf], size=(n_seqs, n_tokens, n_heads))
    beta = rng.random((n_seqs, n_tokens, n_heads))
    gates = [x.astype(np.float32) for x in (gate, beta)]
    with ggml.context(2**24) as ctx:
        parts = [ggml.tensor(ctx, np.ascontiguousarray(x)) for x in (q, k, v)]
        parts += [ggml.tensor(ctx, x[..., None]) for x in gates]
        out = ggml.ggml_gated_delta_net(ctx, *parts, ggml.tensor(ctx, state), 1)
        found = ggml.computed(ctx, out, n_threads)
    exact, states = delta_net(q, k, v, *gates, state)
    assert np.abs(found[: v.size].reshape(v.shape) - exact).max() < 2e-5
    assert np.abs(found[v.size :].reshape(state.shape) - states).max() < 2e-5
