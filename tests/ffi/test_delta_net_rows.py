"""A delta net that reads its states, and what is pending, where they are kept: bit for bit what
comes of gathering them, upstream's operator, and copies. ggml.h says what the operator does."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from pyllama_mtp.llama import native

from ..marks import usual
from .ggmlcalls import Floats, Ggml

H, FEW_H = 4, 2  # heads of v and of what is pending
N_CELLS, FIRST, N_MAX = 7, 1, 5


@pytest.fixture(autouse=True, params=[True, False], ids=["vectors", "plain"])
def switched(kernels_on: None, request: pytest.FixtureRequest) -> None:
    assert native.load().set_cpu_switch("large_batch", request.param)


@dataclass
class Case:
    """Cells that `first` and the next ones take, and how many tokens are pending for each sequence;
    the other cells are only moved."""

    reads: list[int]
    n_pend: list[int] | None = None  # None: nothing can be pending
    n_tokens: int = 1
    keep: bool = False
    size: int = 32
    repeated: bool = False  # k has as many heads as v
    n_seqs: int = field(init=False)

    def __post_init__(self) -> None:
        self.n_seqs = len(self.reads if self.n_pend is None else self.n_pend)
        rng = np.random.default_rng([self.size, self.n_tokens, *self.reads])

        def some(*shape: int) -> Floats:
            return (rng.standard_normal(shape) / 4).astype(np.float32)

        shape = self.n_seqs, self.n_tokens
        self.q, self.k = (some(*shape, H if self.repeated else FEW_H, self.size) for _ in range(2))
        if self.repeated:
            self.k[:, :, FEW_H:] = self.k[:, :, :FEW_H]
        self.v, self.g, self.beta = (some(*shape, H, n) for n in (self.size, 1, 1))
        self.states = some(N_CELLS, H, self.size, self.size)
        self.pend = some(N_CELLS * N_MAX + 1, FEW_H + H, self.size)
        self.gates = some(2, N_CELLS * N_MAX + 1, H)


SIZES = (16, 24, 32, 48, 64, 128, 256)
Result = tuple[bytes, bytes, bytes, bytes]


def found(ggml: Ggml, case: Case, threads: int) -> Result:
    with ggml.context(2**25) as ctx:
        parts = [ggml.tensor(ctx, one) for one in (case.q, case.k, case.v, case.g, case.beta)]
        states = ggml.tensor(ctx, case.states.reshape(1, 1, N_CELLS, -1))
        pend = ggml.tensor(ctx, case.pend.reshape(1, 1, len(case.pend), -1))
        gates = ggml.tensor(ctx, case.gates.reshape(1, 1, -1, H))
        ids = ggml.ints(ctx, case.reads + (case.n_pend or []))
        some = (pend, gates) if case.n_pend is not None else (ggml.ffi.NULL, ggml.ffi.NULL)
        n_max = N_MAX if case.n_pend is not None else 0
        out = ggml.ggml_gated_delta_net_rows(
            ctx, *parts, states, *some, ids, FIRST, n_max, case.keep
        )
        ggml.compute(ctx, [out], threads)
        bits = [ggml.data(one).tobytes() for one in (out, states, pend, gates)]
        return bits[0], bits[1], bits[2], bits[3]


def net(ggml: Ggml, state: Floats, *parts: Floats) -> tuple[Floats, Floats]:
    """Upstream's operator for a sequence: what its tokens give, and its state then."""
    with ggml.context(2**23) as ctx:
        made = [ggml.tensor(ctx, part[None]) for part in (*parts, state)]
        out = ggml.computed(ctx, ggml.ggml_gated_delta_net(ctx, *made, 1), 1)
    return out[: -state.size], out[-state.size :].reshape(state.shape)


def wanted(ggml: Ggml, case: Case) -> Result:
    native.load().set_cpu_switch("large_batch", False)
    states, pend, gates = case.states.copy(), case.pend.copy(), case.gates.copy()
    of_cell = pend[:-1].reshape(N_CELLS, N_MAX, -1), gates[:, :-1].reshape(2, N_CELLS, N_MAX, H)
    cells = slice(FIRST, FIRST + len(case.reads))
    states[cells] = case.states[case.reads]
    if case.n_pend is not None:
        of_cell[0][cells] = of_cell[0][case.reads]
        of_cell[1][:, cells] = of_cell[1][:, case.reads]
    outs = []
    for seq in range(case.n_seqs):
        cell, n = FIRST + seq, (case.n_pend or [0] * case.n_seqs)[seq]
        if n:
            kv = pend[cell * N_MAX : cell * N_MAX + n]
            factors = gates[:, cell * N_MAX : cell * N_MAX + n, :, None]
            k = kv[:, :FEW_H]
            _, states[cell] = net(ggml, states[cell], k, k, kv[:, FEW_H:], *factors)
        now = [part[seq] for part in (case.q, case.k, case.v, case.g, case.beta)]
        out, state = net(ggml, states[cell], *now)
        outs.append(out.tobytes())
        if case.keep:
            rows = slice(cell * N_MAX, cell * N_MAX + case.n_tokens)
            pend[rows] = np.concatenate([now[1][:, :FEW_H], now[2]], axis=1)
            gates[:, rows] = np.stack(now[3:])[..., 0]
        else:
            states[cell] = state
    return b"".join(outs), states.tobytes(), pend.tobytes(), gates.tobytes()


def check(ggml: Ggml, case: Case, threads: int = 2) -> None:
    got = found(ggml, case, threads)
    for name, one, other in zip(
        ("outputs", "states", "pending", "gates"), got, wanted(ggml, case), strict=True
    ):
        assert one == other, name


#: Cells that are read: those that are written; another one; each where the other one is; one state
#: for both; round in a circle; where another one was.
READS = ([FIRST, FIRST + 1], [0], [2, 1], [6, 6], [3, 1, 2], [2, 2, 3])


@pytest.mark.parametrize("seed", usual(*range(40), long=range(40, 400)))
def test_states_and_what_is_pending_for_them(ggml: Ggml, seed: int) -> None:
    """Of sequences without tokens, too: their cells only move."""
    rng = np.random.default_rng(seed)
    n_tokens, size = int(rng.choice([1, 3, 4, 5, 16, 17, 21])), int(rng.choice(SIZES))
    reads, n_pend = READS[seed % len(READS)], None
    if rng.random() < 0.7:
        n_pend = rng.integers(0, N_MAX + 1, rng.integers(1, len(reads) + 1)).tolist()
    keep = n_pend is not None and n_tokens <= N_MAX and rng.random() < 0.6
    one = Case(reads, n_pend, n_tokens, keep, size, repeated=rng.random() < 0.2)
    check(ggml, one, int(rng.choice([1, 2, 5])))


@pytest.mark.parametrize("threads", usual(2, long=[1]))
@pytest.mark.parametrize("size", usual(24, 128, long=(32, 48, 64, 256)))
@pytest.mark.parametrize("seed", range(3))
def test_any_cut_of_a_prompt_gives_the_same(ggml: Ggml, size: int, threads: int, seed: int) -> None:
    """Some parts are drafts: they stay pending, the next part takes in those that were right and
    begins with the first wrong one."""
    n_tokens, cell, rng = 70, [FIRST], np.random.default_rng(seed)
    whole = Case(cell, n_tokens=n_tokens, size=size)
    outputs, states, *_ = found(ggml, whole, threads)
    part = Case(cell, [0], size=size)
    part.states = whole.states
    rows, at, n_pending = [], 0, 0
    while at < n_tokens:
        part.keep = bool(rng.integers(2)) and at + N_MAX < n_tokens
        part.n_tokens = int(rng.integers(1, N_MAX + 1 if part.keep else n_tokens - at + 1))
        part.n_pend = [n_pending]
        for name in ("q", "k", "v", "g", "beta"):
            setattr(part, name, getattr(whole, name)[:, at : at + part.n_tokens])
        right = int(rng.integers(1, part.n_tokens + 1)) if part.keep else part.n_tokens
        out, *left = (np.frombuffer(x, np.float32) for x in found(ggml, part, threads))
        part.states, part.pend, part.gates = (
            new.reshape(old.shape)
            for new, old in zip(left, (part.states, part.pend, part.gates), strict=True)
        )
        rows.append(out.reshape(part.n_tokens, -1)[:right])
        at, n_pending = at + right, right if part.keep else 0
    assert np.concatenate(rows).tobytes() == outputs
    assert part.states.tobytes() == states
