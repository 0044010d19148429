#!/usr/bin/env python3
"""What attention costs on this CPU, by rows, length of the context and type of the cache.

    python bench/attention.py                              # as a Qwen3.5-0.8B has it, all cores
    python bench/attention.py --cells 1024 --rows 1,4 --threads 1 --heads 24,4

Each operator reads K and V of layers of its own, so that they come from memory, as they do in a
model. "upstream" is the same library with the patches of attention off; the two take turns. Every
figure is the least of many, because other programs can only add to it. bench/results/cpus.md
condenses what it prints.
"""

from __future__ import annotations

import argparse
import os
import time
from contextlib import ExitStack
from typing import Any

from benchkit import results

from pyllama_mtp.llama import native
from tests.ffi.attentioncalls import TYPES, Attention, Case, case

DECLARATIONS = """
void * ggml_backend_cpu_init(void);
void   ggml_backend_cpu_set_n_threads(void * backend, int n_threads);
int    ggml_backend_graph_compute(void * backend, void * graph);
void   ggml_backend_free(void * backend);
"""
FEW = 8  # rows that the kernel for a few takes


class Layers(Attention):
    """Attention of some layers, one after another."""

    def __init__(self, n_threads: int) -> None:
        super().__init__()
        self.ffi.cdef(DECLARATIONS)
        self.backend = self.ggml_backend_cpu_init()
        self.ggml_backend_cpu_set_n_threads(self.backend, n_threads)

    def graph(self, stack: ExitStack, one: Case, n: int) -> Any:
        """The graph of the operator in n layers."""
        size = one.k.nbytes + one.v.nbytes + 2 * one.q.nbytes
        assert one.mask is not None
        ctx = stack.enter_context(self.context(2**26 + n * (size + one.mask.nbytes)))
        graph = self.ggml_new_graph(ctx)
        for _ in range(n):
            self.ggml_build_forward_expand(graph, self.operator(ctx, one))
        return graph

    def seconds(self, graph: Any, rows: int, on: bool) -> float:
        """The time of all layers, with our patches or without."""
        switch = "few_rows_attention" if rows <= FEW else "large_batch"
        native.load().set_cpu_switch(switch, on)
        start = time.perf_counter()
        self.ggml_backend_graph_compute(self.backend, graph)
        taken = time.perf_counter() - start
        native.load().set_cpu_switch(switch, True)
        return taken


def measure(layers: Layers, args: argparse.Namespace) -> list[list[str]]:
    """Rows of the table."""
    table = []
    for name in args.types:
        kind = TYPES[name]
        for cells in args.cells:
            n_bytes = (
                2 * args.layers * cells * args.heads[1] * layers.ggml_row_size(kind, args.size)
            )
            for rows in args.rows:
                one = case(cells, rows, *args.heads, args.size, type_k=kind, type_v=kind)
                with ExitStack() as stack:
                    graph = layers.graph(stack, one, args.layers)
                    least, end = {True: 1e9, False: 1e9}, time.monotonic() + args.seconds
                    while time.monotonic() < end:
                        for on in (True, False):
                            least[on] = min(least[on], layers.seconds(graph, rows, on))
                ours, theirs = least[True], least[False]
                read = f"{n_bytes / ours / 1e9:.1f}" if rows <= FEW else ""
                times = [f"{1e3 * theirs:.2f}", f"{1e3 * ours:.2f}", f"{theirs / ours:.2f}", read]
                table.append([name, str(cells), str(rows), *times])
                print("\t".join(table[-1]), flush=True)
    return table


def main(argv: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="What attention costs on this CPU.")
    add = parser.add_argument
    add("--types", default="f16,q8_0", metavar="T,...", help=f"of {', '.join(TYPES)} (%(default)s)")
    add("--cells", default="512,16384", metavar="N,...", help="default: %(default)s")
    add("--rows", default="1,2,4,512", metavar="N,...", help="default: %(default)s")
    add("--heads", default="8,2", metavar="N,KV", help="of queries, of K and V (%(default)s)")
    add("--size", type=int, default=256, metavar="N", help="of a head (default: %(default)s)")
    add("--layers", type=int, default=6, metavar="N", help="default: %(default)s")
    cores = len(os.sched_getaffinity(0))
    add("--threads", type=int, default=cores, metavar="N", help="default: all cores")
    add("--seconds", type=float, default=3, metavar="S", help="of each (default: %(default)s)")
    args = parser.parse_args(argv)
    args.types = args.types.split(",")
    if unknown := set(args.types) - set(TYPES):
        parser.error(f"--types: no {', '.join(sorted(unknown))}; there are {', '.join(TYPES)}")
    args.cells, args.rows, args.heads = (
        [int(word) for word in words.split(",")] for words in (args.cells, args.rows, args.heads)
    )
    if len(args.heads) != 2 or min(*args.cells, *args.rows, *args.heads) < 1:
        parser.error("--cells, --rows and --heads are numbers from 1 on, and --heads are two")
    if args.heads[0] % args.heads[1]:
        parser.error("--heads: heads of queries are a multiple of those of K and V")
    table = measure(Layers(args.threads), args)
    head = ["cache", "cells", "rows", "upstream, ms", "ours, ms", "upstream / ours", "ours, GB/s"]
    shape = f"{args.layers} layers, {args.heads[0]} heads on {args.heads[1]} of {args.size} numbers"
    print()
    about = f"{shape}, {args.threads} thread(s); the least of {args.seconds:g} seconds"
    results.show([about], head, table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
