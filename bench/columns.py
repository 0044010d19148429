#!/usr/bin/env python3
"""What n columns cost in a matrix product on this CPU, by type, in products of one column.

    python bench/columns.py                       # 2048 x 2048, in cache, one thread, every type
    python bench/columns.py --rows 200000 --threads 2 --types q4_K,q6_K
    python bench/columns.py -n 1,512                # a column, and as many as prompts have

"before" is what upstream does with such a matrix: if it repacks the type, its gemv and gemm; else
vec_dot column by column, its tiled kernels, tinyBLAS. "now" is what the CPU patches do. The two
take turns, with the same matrix if neither repacks it. Every figure is the least of many, because
other programs can only add to it.
bench/results/kernels.md condenses what it prints.
"""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack
from typing import Any

import numpy as np
from benchkit import results

from pyllama_mtp.llama import native
from pyllama_mtp.models.ggufheader import TENSOR_TYPES
from tests.ffi.ggmlcalls import F32, Ggml

TYPES = "Q8_0 Q4_K Q5_K Q6_K IQ4_XS Q4_0 IQ4_NL Q3_K Q2_K IQ3_S IQ3_XXS IQ2_S IQ2_XS IQ2_XXS "
TYPES += "Q5_0 MXFP4 NVFP4 Q4_1 Q5_1 IQ1_S IQ1_M F32 F16 BF16"
KINDS = {name: kind for kind, (name, *_) in TENSOR_TYPES.items()}
REPACKED = ("Q4_0", "Q4_K", "Q2_K", "IQ4_NL", "MXFP4")  # by upstream on x86; Q2_K with AVX-512
DECLARATIONS = """
int    ggml_cpu_has_avx512(void);
void * ggml_backend_reg_dev_get(void * reg, size_t index);
void * ggml_backend_cpu_buffer_type(void);
void * ggml_backend_alloc_ctx_tensors_from_buft(void * ctx, void * type);
void   ggml_backend_buffer_free(void * buffer);
void   ggml_backend_tensor_set(void * tensor, const void * data, size_t offset, size_t size);
void * ggml_backend_cpu_init(void);
void   ggml_backend_cpu_set_n_threads(void * backend, int n_threads);
int    ggml_backend_graph_compute(void * backend, void * graph);
void   ggml_backend_free(void * backend);
const char * ggml_backend_buft_name(void * type);
"""


class Products:
    """Products of an [m, k] matrix with 1 to 8 columns, in upstream's way or ours."""

    def __init__(
        self, stack: ExitStack, name: str, args: argparse.Namespace, other: Products | None = None
    ) -> None:
        """Our way; or upstream's, with ours as `other`, whose matrix is used if both want the same
        layout: two copies would share the last cache, and the figures would be those of memory."""
        self.now, self.library, self.ggml = not other, native.load(), Ggml()
        m, k, kind, g = args.rows, args.columns, KINDS[name], self.ggml
        g.ffi.cdef(DECLARATIONS)
        self.library.set_cpu_switch("small_batch", self.now)
        self.backend = g.ggml_backend_cpu_init()
        stack.callback(g.ggml_backend_free, self.backend)
        g.ggml_backend_cpu_set_n_threads(self.backend, args.threads)
        cpu = g.ggml_backend_cpu_buffer_type()
        rng, layout = np.random.default_rng(0), self._layout(name) if other else None
        self.matrix: Any
        if other and not layout:
            address = int(other.ggml.ffi.cast("intptr_t", other.matrix))
            self.matrix = g.ffi.cast("void *", address)
        else:
            self.matrix = self._tensors(stack, [(kind, k, m)], layout or cpu)[0]
            data, ones = g.ffi.new("char[]", m * g.ggml_row_size(kind, k)), g.ffi.new("float[]", k)
            rows = g.ffi.from_buffer("float[]", rng.standard_normal(m * k, dtype=np.float32))
            g.ffi.buffer(ones)[:] = np.ones(k, np.float32).tobytes()  # an importance matrix
            g.ggml_quantize_chunk(kind, rows, data, 0, m, k, ones)
            g.ggml_backend_tensor_set(self.matrix, data, 0, len(data))
        columns = self._tensors(stack, [(F32, k, n) for n in args.n], cpu)
        for column in columns:
            g.data(column)[:] = rng.standard_normal(g.data(column).size)
        self.graphs = {}
        for n, column in zip(args.n, columns, strict=True):
            ctx = stack.enter_context(g.context(16 * n * m))
            self.graphs[n] = g.ggml_new_graph(ctx)
            g.ggml_build_forward_expand(self.graphs[n], g.ggml_mul_mat(ctx, self.matrix, column))
            self.seconds(n)

    def _tensors(self, stack: ExitStack, shapes: list[tuple[int, ...]], kind: Any) -> list[Any]:
        g = self.ggml
        ctx = g.ggml_init({"mem_size": 2**20, "mem_buffer": g.ffi.NULL, "no_alloc": True})
        stack.callback(g.ggml_free, ctx)
        found = [g.ggml_new_tensor_2d(ctx, *shape) for shape in shapes]
        buffer = g.ggml_backend_alloc_ctx_tensors_from_buft(ctx, kind)
        stack.callback(g.ggml_backend_buffer_free, buffer)
        return found

    def _layout(self, name: str) -> Any:
        """The buffer type of repacked weights; None if upstream repacks no such type on x86."""
        g = self.ggml
        cpu = g.ggml_backend_cpu_reg()
        get = g.ggml_backend_reg_get_proc_address(cpu, b"ggml_backend_dev_get_extra_bufts")
        kinds = g.ffi.cast("void ** (*)(void *)", get)(g.ggml_backend_reg_dev_get(cpu, 0))
        repacked = name in REPACKED and (name != "Q2_K" or g.ggml_cpu_has_avx512())
        while repacked and kinds[0] != g.ffi.NULL:
            if g.ffi.string(g.ggml_backend_buft_name(kinds[0])) == b"CPU_REPACK":
                return kinds[0]
            kinds += 1
        return None

    def seconds(self, n: int) -> float:
        """The time of one product with `n` columns."""
        self.library.set_cpu_switch("small_batch", self.now)
        start = time.perf_counter()
        self.ggml.ggml_backend_graph_compute(self.backend, self.graphs[n])
        return time.perf_counter() - start


def measure(name: str, args: argparse.Namespace) -> dict[str, dict[int, float]]:
    """The least seconds of a product, by way and number of columns."""
    with ExitStack() as stack:
        now = Products(stack, name, args)
        ways = {"before": Products(stack, name, args, now), "now": now}
        least: dict[str, dict[int, float]] = {way: dict.fromkeys(args.n, 1e9) for way in ways}
        end = time.monotonic() + args.seconds
        while time.monotonic() < end:
            for n in args.n:
                for way, products in ways.items():
                    least[way][n] = min(least[way][n], *(products.seconds(n) for _ in range(5)))
    return least


def rows_of(name: str, ways: dict[str, dict[int, float]]) -> list[list[str]]:
    """Of each way a product of the first number of columns, and of n columns in units of that; and
    the time before to the time now."""
    rows = []
    for way, least in ways.items():
        one, *more = least.values()
        rows.append([name, way, f"{1e6 * one:.1f}", *(f"{n / one:.2f}" for n in more)])
    pairs = zip(ways["before"].values(), ways["now"].values(), strict=True)
    return [*rows, [name, "before / now", *(f"{before / now:.2f}" for before, now in pairs)]]


def main(argv: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="What n columns cost, by type.")
    add = parser.add_argument
    add("--types", default=",".join(TYPES.split()), metavar="T,...", help="default: all")
    add("--rows", type=int, default=2048, metavar="N", help="default: %(default)s")
    add("--columns", type=int, default=2048, metavar="K", help="of the matrix (%(default)s)")
    add("--threads", type=int, default=1, metavar="N", help="default: %(default)s")
    add("-n", default="1,2,3,4,5,6,7,8", metavar="N,...", help="columns (default: %(default)s)")
    add("--seconds", type=float, default=3, metavar="S", help="per type (default: %(default)s)")
    args = parser.parse_args(argv)
    args.types = [word.upper() for word in args.types.split(",")]
    args.n = [int(word) for word in args.n.split(",")]
    unknown = set(args.types) - set(TYPES.split())
    if unknown:
        parser.error(f"--types: no kernels for {', '.join(sorted(unknown))}; there are: {TYPES}")
    if min(args.rows, args.columns, args.threads, *args.n) < 1 or args.columns % 256:
        parser.error("rows, columns and threads must be 1 or more, columns a multiple of 256")
    rows = []
    try:
        for name in args.types:
            rows += rows_of(name, measure(name, args))
            print(*map("\t".join, rows[-3:]), sep="\n", flush=True)
    finally:
        native.load().set_cpu_switch("small_batch", True)
    about = (
        f"A matrix of {args.rows} x {args.columns}, {args.threads} thread(s); before: upstream's "
        "ways, repacked where it repacks; now: the CPU patches",
        "First microseconds of a product, then products of more columns in units of that. The "
        "least of many; the two take turns",
    )
    print()
    results.show(about, ["type", "", f"{args.n[0]}, us", *map(str, args.n[1:])], rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
