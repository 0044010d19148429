"""What a prompt's rows need besides products is what it was: convolutions, what is
convolved, rows times a number, and the delta net, against numpy in float64.

Each is tried with and without it, so that both are known to be the same, and on both sides of the
16 tokens where it changes its way. A prompt may be cut anywhere, bit for bit.
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
def switched(kernels_on: None, request: pytest.FixtureRequest) -> bool:
    on: bool = request.param
    assert native.load().set_cpu_switch("large_batch", on)
    return on


@pytest.mark.parametrize("n_tokens", [1, 5, 15, 16, 17, 64])
@pytest.mark.parametrize(
    ("n_channels", "n_seqs", "n_threads"), [(16, 1, 1), (80, 2, 3), (12, 1, 2)]
)
@pytest.mark.parametrize("side_by_side", [False, True])
def test_convolutions(
    ggml: Ggml,
    switched: bool,
    n_tokens: int,
    n_channels: int,
    n_seqs: int,
    n_threads: int,
    side_by_side: bool,
) -> None:
    """What is convolved: the last values of each channel, and then those of the tokens, which come
    with the channels side by side; or all of them come so. With SILU behind them, the same bits,
    and what is convolved is stored no more."""
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
        apart = ggml.computed(ctx, ggml.ggml_silu(ctx, ggml.tensor(ctx, found)), n_threads)
        ggml.data(both)[:] = 0
        together = ggml.computed(ctx, ggml.ggml_silu(ctx, out), n_threads)
        assert together.tobytes() == apart.tobytes()
        at_once = switched and n_tokens >= 16 and n_channels % 16 == 0
        assert not (at_once and ggml.data(both).any())
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


def cuts(n_tokens: int, seed: int) -> list[slice]:
    """Parts of n_tokens."""
    ends = np.random.default_rng(seed).permutation(np.arange(1, n_tokens))[: seed + 1]
    ends = np.sort(np.append(ends, n_tokens))
    return [slice(*both) for both in zip(np.append(0, ends[:-1]), ends, strict=True)]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("n_channels", [80, 12])
def test_convolutions_in_cuts(ggml: Ggml, n_channels: int, seed: int) -> None:
    tokens, weights = normal(1, 70 + 3, n_channels), normal(n_channels, 4)

    def convolved(part: slice, n_threads: int) -> bytes:
        with ggml.context(2**20) as ctx:
            x = np.ascontiguousarray(tokens[:, part.start : part.stop + 3].swapaxes(1, 2))
            out = ggml.ggml_ssm_conv(ctx, ggml.tensor(ctx, x), ggml.tensor(ctx, weights))
            return ggml.computed(ctx, out, n_threads).tobytes()

    parts = [convolved(part, 1 + seed % 2) for part in cuts(70, seed)]
    assert b"".join(parts) == convolved(slice(0, 70), 1)


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


@pytest.mark.parametrize("n_threads", [1, 2])
@pytest.mark.parametrize(
    ("size", "gates"), [(64, 1), (128, 1), (128, 128), (32, 1), (24, 1), (24, 24)]
)
@pytest.mark.parametrize("seed", range(2))
def test_delta_nets_in_cuts(ggml: Ggml, size: int, gates: int, n_threads: int, seed: int) -> None:
    """With a gate for each head, or for each of its channels; with snapshots of 1 to 4 states, the
    last of which is gone back to."""
    some = [normal(1, 70, n, width) / 4 for n, width in ((1, size), (1, size), (2, size))]
    some += [-np.abs(normal(1, 70, 2, gates)), np.abs(normal(1, 70, 2, 1))]

    def through(state: Floats, part: slice, n_states: int) -> tuple[Floats, Floats]:
        with ggml.context(2**24) as ctx:
            parts = [ggml.tensor(ctx, x) for x in (*(x[:, part] for x in some), state)]
            out = ggml.ggml_gated_delta_net(ctx, *parts, n_states)
            found = ggml.computed(ctx, out, n_threads)
        states = found[-n_states * state.size :].reshape(n_states, *state.shape)
        return found[: -states.size].reshape(-1, 2 * size), states

    first = normal(1, 2, size, size)
    outputs, states = through(first, slice(0, 70), 1)
    rows, state = [], first
    for part in cuts(70, seed):
        n_states = 1 + (part.stop + seed) % 4
        out, left = through(state, part, n_states)
        back = min(n_states, part.stop - part.start) - 1
        rows.append(out[: len(out) - back])
        state = left[back]
        for at in range(part.stop - back, part.stop):
            out, (state,) = through(state, slice(at, at + 1), 1)
            rows.append(out)
    assert np.concatenate(rows).tobytes() == outputs.tobytes()
    assert state.tobytes() == states[0].tobytes()
