#!/usr/bin/env python3
"""Which operators give row i of n rows the bits that it has alone, on this CPU.

    python bench/bits.py                       # everything, about two minutes on one core
    python bench/bits.py --only mul_mat,attention --n 1,8,9,512
    python bench/bits.py --off large_batch     # with kernels of ours switched off

A cell is "=" where all n rows have the bits that each has by itself (one row, one thread), else how
many of the n rows differ and by how much at most, as a part of the largest number. "t" is the same
for two threads against one. Run it where pyllama_mtp is installed; tests/ must lie beside it, or
in the folder that --tests names.
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent.parent
sys.path = [one for one in sys.path if Path(one or ".").resolve() != HERE]

MORE = """
void * ggml_rms_norm(void * ctx, void * a, float eps);
void * ggml_norm(void * ctx, void * a, float eps);
void * ggml_l2_norm(void * ctx, void * a, float eps);
void * ggml_soft_max_ext(void * ctx, void * a, void * mask, float scale, float max_bias);
void * ggml_swiglu_split(void * ctx, void * a, void * b);
void * ggml_geglu_split(void * ctx, void * a, void * b);
void * ggml_silu(void * ctx, void * a);
void * ggml_sigmoid(void * ctx, void * a);
void * ggml_softplus(void * ctx, void * a);
void * ggml_exp(void * ctx, void * a);
void * ggml_add(void * ctx, void * a, void * b);
void * ggml_div(void * ctx, void * a, void * b);
void * ggml_sum_rows(void * ctx, void * a);
void * ggml_rope_ext(void * ctx, void * a, void * b, void * c, int n_dims, int mode, int n_ctx_orig,
                     float freq_base, float freq_scale, float ext_factor, float attn_factor,
                     float beta_fast, float beta_slow);
"""
TYPES = "Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 IQ4_NL MXFP4 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_XS IQ3_S IQ2_XS IQ1_S F16 BF16 F32"
NUMBERS = "1,2,3,4,5,6,7,8,9,16,17,32,33,512"
M, K, EXPERTS, USED = 67, 2304, 8, 2

Rows = np.ndarray[Any, np.dtype[np.float32]]


def differing(alone: Rows, found: Rows) -> str:
    """Of [n, ...] rows: "=", or how many differ, and by how much at most."""
    a, b = (x.reshape(len(x), -1) for x in (alone, found))
    n = int((a.view(np.int32) != b.view(np.int32)).any(axis=1).sum())
    if not n:
        return "="
    return f"{n} {np.abs(a - b).max() / np.abs(a).max():.0e}".replace("e-0", "e-")


class Bits:
    """The operators, with random rows: f(first, n, n_threads) gives rows [first, first + n)."""

    def __init__(self, numbers: list[int], lines: list[str]) -> None:
        from tests.ffi.attentioncalls import Attention

        self.g = Attention()
        self.g.ffi.cdef(MORE)
        self.numbers, self.lines = numbers, lines

    def line(self, name: str, f: Callable[[int, int, int], Rows], most: int = 1 << 30) -> None:
        numbers = [n for n in self.numbers if n <= most]
        rows = max(numbers)
        some = sorted({*range(min(rows, 40)), *range(0, rows, 37), rows - 1})
        alone = {i: f(i, 1, 1)[0] for i in some}
        cells = []
        for n in numbers:
            own = [i for i in some if i < n]
            one = np.stack([alone[i] for i in own])
            found = f(0, n, 1)
            two = f(0, n, 2)
            cell = differing(one, found[own])
            if found.tobytes() != two.tobytes():
                cell += " t:" + differing(found, two)
            cells.append(cell)
        self.say(name, cells + ["-"] * (len(self.numbers) - len(cells)))

    def say(self, name: str, cells: list[str]) -> None:
        self.lines.append(f"| {name} | " + " | ".join(cells) + " |")
        print(self.lines[-1], flush=True)

    def head(self, title: str, columns: list[str]) -> None:
        for one in (["", f"| {title} | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]):
            self.lines.append(one)
            print(one, flush=True)

    # -- operators

    def columns(self, *shape: int) -> Rows:
        """Like activations: a few channels are far larger than the others."""
        rng = np.random.default_rng(list(shape))
        x = rng.standard_normal(shape)
        x[..., :: 97] *= 30
        return x.astype(np.float32)

    def mul_mat(self, types: list[str]) -> None:
        from tests.ffi.products import KINDS, normal

        x = self.columns(max(self.numbers), K)
        for name in types:
            kind = KINDS[name]
            weights = self.g.quantize(normal(M, K), kind)
            self.line(f"MUL_MAT {name}", lambda i, n, t: self.g.product(weights, M, x[i : i + n], t, kind))

    def mul_mat_id(self, types: list[str]) -> None:
        from tests.ffi.products import KINDS, normal

        most = max(self.numbers)
        rng = np.random.default_rng(1)
        ids = np.stack([rng.permutation(EXPERTS)[:USED] for _ in range(most)]).astype(np.int32)
        x = self.columns(most, 1, K)
        for name in types:
            kind = KINDS[name]
            weights = self.g.quantize(normal(EXPERTS * M, K), kind)
            self.line(
                f"MUL_MAT_ID {name}",
                lambda i, n, t: self.g.experts(weights, (EXPERTS, M), x[i : i + n], ids[i : i + n], t, kind),
            )

    def graph(self, build: Callable[[Any, int, int], Any], n_bytes: int = 2**27) -> Callable[[int, int, int], Rows]:
        def f(i: int, n: int, threads: int) -> Rows:
            with self.g.context(n_bytes) as ctx:
                return self.g.computed(ctx, build(ctx, i, n), threads).reshape(n, -1)

        return f

    def others(self) -> None:
        g, most = self.g, max(self.numbers)
        x, y = self.columns(most, 1000), self.columns(most, 1000, 1)[..., 0]
        small = x[:, :250]

        def one(name: str, op: Callable[[Any, Any], Any], rows: Rows = x) -> None:
            self.line(name, self.graph(lambda ctx, i, n: op(ctx, g.tensor(ctx, np.ascontiguousarray(rows[i : i + n])))))

        def two(name: str, op: Callable[[Any, Any, Any], Any]) -> None:
            self.line(name, self.graph(lambda ctx, i, n: op(ctx, g.tensor(ctx, x[i : i + n]), g.tensor(ctx, y[i : i + n]))))

        one("RMS_NORM", lambda c, a: g.ggml_rms_norm(c, a, 1e-6))
        one("NORM", lambda c, a: g.ggml_norm(c, a, 1e-6))
        one("L2_NORM", lambda c, a: g.ggml_l2_norm(c, a, 1e-6))
        one("SOFT_MAX", lambda c, a: g.ggml_soft_max_ext(c, a, g.ffi.NULL, 0.1, 0.0))
        one("SILU", g.ggml_silu)
        one("SILU, 250", g.ggml_silu, small)
        one("SIGMOID", g.ggml_sigmoid)
        one("SOFTPLUS", g.ggml_softplus)
        one("EXP", g.ggml_exp)
        one("SUM_ROWS", g.ggml_sum_rows)
        two("ADD", g.ggml_add)
        two("MUL", g.ggml_mul)
        two("DIV", g.ggml_div)
        two("SWIGLU", g.ggml_swiglu_split)
        two("GEGLU", g.ggml_geglu_split)
        for mode, name in ((0, "ROPE"), (2, "ROPE neox")):
            def rope(ctx: Any, i: int, n: int, mode: int = mode) -> Any:
                a = g.tensor(ctx, np.ascontiguousarray(x[i : i + n, :512].reshape(n, 4, 128)))
                at = g.ints(ctx, list(range(700 + i, 700 + i + n)))
                return g.ggml_rope_ext(ctx, a, g.ggml_view_2d(ctx, at, n, 1, 4 * n, 0) if False else at1(ctx, at, n), g.ffi.NULL, 64, mode, 0, 1e6, 1.0, 0.0, 1.0, 32.0, 1.0)

            def at1(ctx: Any, at: Any, n: int) -> Any:
                return g.ggml_view_1d(ctx, at, n, 0)

            self.line(name, self.graph(rope))
        for channels in (80, 12):
            before = self.columns(channels, 3 + most)
            weights = self.columns(channels, 4)

            def conv(ctx: Any, i: int, n: int) -> Any:
                own = np.ascontiguousarray(before[None, :, i : i + n + 3])
                return g.ggml_ssm_conv(ctx, g.tensor(ctx, own), g.tensor(ctx, weights))

            self.line(f"SSM_CONV, {channels} channels", self.graph(conv))

    def delta(self) -> None:
        """n tokens one after another, from the same state on: row i is token i, "alone" is token by token."""
        g, most, heads = self.g, 64, 2
        for size in (64, 128):
            rng = np.random.default_rng(size)
            q, k, v = (rng.standard_normal((most, heads, size)).astype(np.float32) for _ in range(3))
            k /= np.linalg.norm(k, axis=-1, keepdims=True)
            gate, beta = -rng.random((2, most, heads, 1)).astype(np.float32) * [[[[0.2]]], [[[-1]]]]
            gate, beta = gate.astype(np.float32), beta.astype(np.float32)
            start = rng.standard_normal((heads, size, size)).astype(np.float32)

            def step(state: Rows, i: int, n: int, threads: int) -> tuple[Rows, Rows]:
                with g.context(2**25) as ctx:
                    parts = [g.tensor(ctx, np.ascontiguousarray(p[None, i : i + n])) for p in (q, k, v, gate, beta)]
                    out = g.ggml_gated_delta_net(ctx, *parts, g.tensor(ctx, state[None]), 1)
                    all_ = g.computed(ctx, out, threads)
                    return all_[: n * heads * size].reshape(n, -1), all_[n * heads * size :].reshape(state.shape)

            state, alone, states = start, [], [start]
            for i in range(most):
                row, state = step(state, i, 1, 1)
                alone.append(row[0])
                states.append(state)
            cells = []
            for n in self.numbers:
                if n > most:
                    cells.append("-")
                    continue
                found, end = step(start, 0, n, 1)
                two = step(start, 0, n, 2)
                cell = differing(np.stack(alone[:n]), found)
                cell += "" if end.tobytes() == states[n].tobytes() else ", state " + differing(states[n], end)
                cell += "" if found.tobytes() == two[0].tobytes() else " t"
                cells.append(cell)
            self.say(f"GATED_DELTA_NET, {size}", cells)
            # cuts of 64 tokens: 32 + 32, 30 + 34, 20 + 20 + 24, against 64 at once
            whole, end = step(start, 0, 64, 1)
            for cut in ((32, 32), (16, 48), (20, 20, 24), (18, 46), (30, 34), (61, 3)):
                at, state, found = 0, start, []
                for n in cut:
                    row, state = step(state, at, n, 1)
                    found.append(row)
                    at += n
                cell = differing(whole, np.concatenate(found))
                self.lines.append(f"  64 tokens as {cut}: {cell}")
                print(self.lines[-1], flush=True)

    def attention(self) -> None:
        from tests.ffi.attentioncalls import TYPES as CACHES
        from tests.ffi.attentioncalls import case

        g = self.g
        most = max(self.numbers)
        for cache in ("f16", "q8_0", "f32"):
            for d, heads, kv in ((64, 9, 3), (128, 8, 2)):
                for cells in (most + 60, 4500):
                    one = case(cells, most, heads, kv, d, type_k=CACHES[cache], type_v=CACHES[cache])
                    one.k[..., 5] *= 20
                    self.line(
                        f"attention {cache}, {heads}/{kv} heads of {d}, {cells} cells",
                        lambda i, n, t: g.run(one.rows(*range(i, i + n)), t)[0],
                    )

    def shown_keys(self) -> None:
        """The same keys, elsewhere or with others beside them: rows of 1, 8, 9, 70."""
        from tests.ffi.attentioncalls import HIDDEN, TYPES as CACHES
        from tests.ffi.attentioncalls import case

        g = self.g
        numbers = [1, 8, 9, 70]
        self.head("the same keys of a context of 300", [f"{n} rows" for n in numbers])
        for cache in ("f16", "q8_0"):
            def moved(one: Any, before: int, behind: int) -> Any:
                width = [(0, 0), (before, behind), (0, 0), (0, 0)]
                k, v = (np.pad(p, width, constant_values=3.0) for p in (one.k, one.v))
                mask = np.pad(one.mask, [(0, 0), (0, 0), (before, behind)], constant_values=HIDDEN)
                return replace(one, k=k, v=v, mask=mask)

            def spread(one: Any, every: int) -> Any:
                cells = one.k.shape[1]
                at = np.arange(cells) + np.arange(cells) // every
                n = int(at[-1]) + 1
                k, v = (np.full((1, n, *p.shape[2:]), 3.0, np.float32) for p in (one.k, one.v))
                mask = np.full((1, one.mask.shape[1], n), HIDDEN, np.float32)
                k[:, at], v[:, at], mask[:, :, at] = one.k, one.v, one.mask
                return replace(one, k=k, v=v, mask=mask)

            def shuffled(one: Any) -> Any:
                at = np.random.default_rng(0).permutation(one.k.shape[1])
                return replace(one, k=one.k[:, at], v=one.v[:, at], mask=one.mask[:, :, at])

            def two_of(one: Any, at: int) -> Any:
                a = np.arange(one.k.shape[1])
                a[[at, at + 1]] = a[[at + 1, at]]
                return replace(one, k=one.k[:, a], v=one.v[:, a], mask=one.mask[:, :, a])

            changes = {
                "1 hidden cell behind": lambda one: moved(one, 0, 1),
                "212 hidden cells behind": lambda one: moved(one, 0, 212),
                "4,500 hidden cells behind": lambda one: moved(one, 0, 4500),
                "1 hidden cell before": lambda one: moved(one, 1, 0),
                "64 hidden cells before": lambda one: moved(one, 64, 0),
                "256 hidden cells before": lambda one: moved(one, 256, 0),
                "every fourth cell another sequence's": lambda one: spread(one, 3),
                "two keys of a tile exchanged": lambda one: two_of(one, 10),
                "two keys of two tiles exchanged": lambda one: two_of(one, 63),
                "all in another order": shuffled,
                "no mask instead of zeros (last row)": lambda one: one,
            }
            for name, change in changes.items():
                found = []
                for n in numbers:
                    one = case(300, n, 8, 2, 64, type_k=CACHES[cache], type_v=CACHES[cache])
                    if name.startswith("no mask"):
                        plain = replace(one, mask=np.zeros_like(one.mask))
                        found.append(differing(g.run(plain, 1)[0], g.run(replace(one, mask=None), 1)[0]))
                        continue
                    found.append(differing(g.run(one, 1)[0], g.run(change(one), 1)[0]))
                self.say(f"{cache}, {name}", found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="mul_mat,mul_mat_id,others,delta,attention,shown_keys")
    parser.add_argument("--types", default=TYPES.replace(" ", ","))
    parser.add_argument("--n", default=NUMBERS)
    parser.add_argument("--off", default="", help="switches to turn off: small_batch,large_batch,few_rows_attention")
    parser.add_argument("--tests", default=str(HERE), help="the folder that tests/ is in")
    args = parser.parse_args()
    sys.path.append(args.tests)
    from pyllama_mtp.llama import native

    library = native.load()
    for name in filter(None, args.off.split(",")):
        assert library.set_cpu_switch(name, False), name
    numbers = [int(n) for n in args.n.split(",")]
    lines: list[str] = []
    bits = Bits(numbers, lines)
    bits.g.ffi.cdef("void * ggml_view_1d(void * ctx, void * a, int64_t ne0, size_t offset);")
    flags = Path("/proc/cpuinfo").read_text().split("flags", 1)[1].split("\n", 1)[0] if sys.platform == "linux" else ""
    has = [f for f in ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "amx_int8") if f" {f}" in flags]
    print(f"{platform.machine()}, {' '.join(has)}; off: {args.off or 'nothing'}; library {library.stamp.get('cpu_features')}")
    types = args.types.split(",")
    for name in args.only.split(","):
        if name in ("mul_mat", "mul_mat_id"):
            bits.head(name, [str(n) for n in numbers])
            getattr(bits, name)(types)
        elif name == "shown_keys":
            bits.shown_keys()
        else:
            bits.head(name, [str(n) for n in numbers])
            getattr(bits, name)()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
