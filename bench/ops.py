#!/usr/bin/env python3
"""Which operations of our graphs can CUDA, Metal and Vulkan compute? Asked of their own code.

    python bench/ops.py                      # every graph; writes results/ops.md
    python bench/ops.py --only chain         # cases whose name has the word; writes nothing

Small models with the head sizes and vocabulary of Qwen3.5 and 3.6 generate with every setting that
changes a graph. They lie on an RPC worker, so their graphs are those of a device with memory of its
own. llama.cpp's evaluation callback sees every node with its sources, and asks each backend's
`supports_op`, which is cut out of the pinned tree and compiled here: no GPU, driver or toolkit is
needed. An operation that a device cannot compute would go to the CPU and back in every round. Exit
code 1: there is such an operation. What lies in host memory on purpose does not count.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import math
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from benchkit import BENCH, RESULTS, ROOT, results

import pyllama_mtp.drafting.upstream as upstream
import pyllama_mtp.engine as engine
import pyllama_mtp.llama.context as context
from pyllama_mtp import BatchSession, Model, Sampling, Session, Settings
from pyllama_mtp.llama import native
from pyllama_mtp.models.synth import write_synthetic
from tests.trimmed import write_trimmed
from tests.workers import worker

#: The letters of a verdict, in the order of ops.cpp.
CAPABILITIES = ("7.5", "8.0", "8.6", "8.9", "9.0", "12.0")
DEVICES = (*(f"CUDA {number}" for number in CAPABILITIES), "Metal", "Vulkan")
MEANING = {"y": "yes", "n": "**no**", "!": "**aborts**"}
#: Nodes with more elements are computed for one kind of graph only: filling them takes long.
LARGE = 2**21
#: The backends' code that answers: functions, enums and lines (by their beginning) of ggml/src.
PARTS: dict[str, dict[str, tuple[str, ...]]] = {
    "cuda.inc": {
        "ggml-common.h": ("#define QK_K ",),
        "ggml-cuda/common.cuh": (
            *("#define GGML_CUDA_CC_", "amd_mfma_available", "amd_wmma_available"),
            *("volta_mma_available", "turing_mma_available"),
        ),
        "ggml-cuda/fattn-common.cuh": ("#define FATTN_KQ_STRIDE",),
        "ggml-cuda/fattn-mma-f16.cuh": ("ggml_cuda_flash_attn_ext_mma_f16_may_use_sparse",),
        "ggml-cuda/fattn.cu": (
            *("enum best_fattn_kernel", "ggml_cuda_flash_attn_ext_mma_f16_shall_use_sparse"),
            *("ggml_cuda_fattn_kv_type_supported", "ggml_cuda_get_best_fattn_kernel"),
            "ggml_cuda_flash_attn_ext_supported",
        ),
        "ggml-cuda/fwht.cu": ("ggml_cuda_op_mul_mat_use_fwht",),
        "ggml-cuda/ggml-cuda.cu": ("ggml_backend_cuda_device_supports_op",),
    },
    "metal.inc": {
        "ggml-metal/ggml-metal-impl.h": ("#define OP_LIGHTNING_INDEXER_",),
        "ggml-metal/ggml-metal-common.cpp": (
            *("ggml_metal_fwht_supported_size", "ggml_metal_op_mul_mat_use_fwht"),
            *("ggml_metal_op_mul_mat_use_mm", "ggml_metal_op_mul_mat_id_use_mm"),
        ),
        "ggml-metal/ggml-metal-device.m": (
            *("ggml_metal_supports_mul_mat_op", "ggml_metal_device_supports_op"),
        ),
    },
    "vulkan.inc": {
        "ggml-vulkan/ggml-vulkan-types.h": (
            *("static constexpr uint32_t num_argsort_", "static constexpr uint32_t num_topk_"),
        ),
        "ggml-vulkan/ggml-vulkan.cpp": (
            *("ggml_vk_dim01_contiguous", "ggml_vk_concat_supported", "ggml_vk_get_cpy_pipeline"),
            "ggml_backend_vk_device_supports_op",
        ),
    },
}


class OpsError(Exception):
    """Says what is missing, and what to do."""


def cut_out(text: str, what: str) -> str:
    """A function by its name, an enum, or lines by their beginning. Raises OpsError if missing."""
    if what.startswith(("#", "static ")):
        found = re.findall(rf"^{re.escape(what)}.*$", text, re.M)
    else:
        name = re.escape(what) if what.startswith("enum ") else rf"[^\n;#/]*\b{what}\([^;{{}}]*\)"
        found = re.findall(rf"^{name} *\{{.*?^\}};?$", text, re.M | re.S)[:1]
    if not found:
        raise OpsError(f"the tree has no {what!r} any more; bench/ops.py must follow upstream")
    return "\n".join(found)


def tree() -> Path:
    """The patched tree of the last build, else upstream's."""
    built = sorted(ROOT.glob("build/*/tree/patched"), key=lambda path: path.stat().st_mtime)
    found = built[-1] if built else ROOT / "vendor" / "llama.cpp"
    if not (found / "ggml").is_dir():
        raise OpsError("upstream's tree is not here; build first, or run vendor/fetch.py")
    return found


def build(source: Path, folder: Path) -> ctypes.CDLL:
    """Compile ops.cpp in `folder` with the parts that are cut out of a tree, and load it."""
    libraries = Path(native.load().folder)
    for name, files in PARTS.items():
        texts = {file: (source / "ggml" / "src" / file).read_text() for file in files}
        parts = [cut_out(texts[file], what) for file, of in files.items() for what in of]
        (folder / name).write_text("\n".join(parts) + "\n")
    names = set(re.findall(r"->(pipeline_\w+)", (folder / "vulkan.inc").read_text()))
    (folder / "vulkan-pipelines.inc").write_text("".join(f"pipeline {name};\n" for name in names))
    bases = [path for at in (libraries, libraries.parent) for path in at.glob("libggml-base.so*")]
    made = folder / "ops.so"
    command = ["c++", "-std=c++17", "-O0", "-w", "-shared", "-fPIC", str(BENCH / "ops.cpp")]
    command += [f"-I{folder}", f"-I{source}/ggml/include", f"-I{source}/ggml/src", str(bases[0])]
    done = subprocess.run([*command, "-o", str(made)], capture_output=True, text=True)
    if done.returncode:
        raise OpsError(f"what was cut out of the tree does not compile:\n{done.stderr[-3000:]}")
    library = ctypes.CDLL(str(made))
    library.ops_report.restype = ctypes.c_char_p
    return library


@dataclass(frozen=True)
class Found:
    """A node of a graph: `tensors` are sources and result as "type[shape]", with an asterisk if not
    contiguous; `test` is the line by which upstream's test-backend-ops computes it again.
    """

    case: str
    graph: str
    op: str
    tensors: str
    place: str
    verdict: str
    test: str

    @property
    def types(self) -> str:
        """The tensors without their shapes."""
        return re.sub(r"\[[^\]]*\]", "", self.tensors)

    @property
    def size(self) -> int:
        """Elements of all its tensors; 0 if one is empty."""
        shapes = re.findall(r"\[([^\]]*)\]", self.tensors)
        sizes = [math.prod(map(int, shape.split(","))) for shape in shapes]
        return sum(sizes) if all(sizes) else 0

    @property
    def refused(self) -> bool:
        """Whether a device cannot compute it."""
        return self.place == "device" and set(self.verdict) != {"y"}


def read(report: str) -> list[Found]:
    """Lines of ops_report()."""
    found = []
    for line in report.splitlines():
        graph, *others = line.split("\t")
        found.append(Found(*graph.split(": "), *others))
    return found


#: What a decode computes, by the letter of the tables.
GRAPHS = {
    **{"P": "prompt batch", "S": "plain step", "V": "verification", "C": "chain of drafts"},
    **{"D": "a draft in upstream's way", "F": "full sync of upstream's draft context"},
}
#: What may follow the letter.
MARKS = {"0": "without the MTP head", "c": "with candidates of its output rows"}


def graph_of(context: Any, batch: Any) -> str:
    """What a decode computes: a letter of GRAPHS, then MARKS."""
    n, rows, options = len(batch.tokens), int(batch.outputs.sum()), context.options
    if options.mtp_head:
        name = "D" if rows else "F"
    else:
        name = "S" if n == 1 else "V" if rows == n else "P"
        name += "" if options.with_mtp else "0"
    return f"{name}c" if rows and context.n_candidates else name


@contextlib.contextmanager
def watched(library: ctypes.CDLL, case: str) -> Iterator[None]:
    """Contexts made in this block ask the backends about every node that they compute."""
    address = ctypes.cast(library.ops_node, ctypes.c_void_p).value

    class Asking(context.Trace):
        def __init__(self, native: Any) -> None:
            super().__init__(native)
            kind = "ggml_backend_sched_eval_callback"
            self.callback, self.data = native.ffi.cast(kind, address), native.ffi.NULL

        def clear(self) -> None:
            pass

    class Watched(context.Context):
        def __init__(self, model: Any, options: Any, target: Any = None) -> None:
            super().__init__(model, replace(options, trace=True), target)

        def decode_batch(self, batch: Any) -> None:
            library.ops_graph(f"{case}: {graph_of(self, batch)}".encode())
            super().decode_batch(batch)

        def draft(
            self, tokens: Any, seqs: Any, n: int, n_candidates: int = 0, *drawn: Any, **named: Any
        ) -> Any:
            library.ops_graph(f"{case}: C{'c' if n_candidates else ''}".encode())
            return super().draft(tokens, seqs, n, n_candidates, *drawn, **named)

    with (
        mock.patch.object(context, "Trace", Asking),
        mock.patch.object(engine, "Context", Watched),
        mock.patch.object(upstream, "Context", Watched),
    ):
        yield


#: Settings that change a graph, by what the results call them.
CASES: dict[str, dict[str, Any]] = {
    "no MTP": {"draft_n_max": 0},
    "chain": {},
    "chain, no flash attention": {"flash_attn": "off"},
    "chain, Q8_0 cache": {"cache_type_k": "q8_0", "cache_type_v": "q8_0"},
    "chain, whole vocabulary": {"draft_vocab": "full"},
    "chain, Q4_0 draft head": {"draft_vocab": "full", "draft_head_type": "q4_0"},
    "chain, trimmed head": {},
    "chain, probable drafts only": {"p_min": 0.01},
    "sampled": {"temperature": 0.8},
    "sampled drafts": {"temperature": 0.8, "draft_sampling": True},
    "pre-norm": {"hidden": "pre-norm"},
    "full sync": {"prompt_sync": "full", "draft_vocab": "full"},
    "every prompt row": {"prompt_rows": "all"},
    "replay": {"rollback": "replay"},
    "three sequences": {"n_sequences": 3},
}
ROWS = np.arange(0, 248320, 4)  # tokens of the trimmed head
#: Shape, file type and smaller dimensions; head sizes, vocabulary and kinds of layers stay.
SMALL = {"n_layer": 4, "n_embd": 256, "n_ff_exp": 64, "n_ff_shexp": 64}
MODELS: dict[str, tuple[str, str, dict[str, int]]] = {
    "qwen35": ("qwen3.5-0.8b", "q4_k_m", {"n_layer": 4, "n_embd": 512, "n_ff": 1024}),
    "qwen35moe": ("qwen3.6-35b-a3b", "q8_0", SMALL),
}


def run_case(path: Path, address: str, chosen: dict[str, Any]) -> None:
    """Generate with these settings, after two prompts of several graphs that share a part."""
    options = {"draft_n_max": 3, "draft_vocab": 32768, "n_ctx": 512, "n_ubatch": 64, **chosen}
    sampling = Sampling(temperature=options.pop("temperature", 0.0), seed=1)
    n = options.pop("n_sequences", 1)
    if path.stem.endswith("trimmed"):
        options["draft_vocab"] = "auto"
    settings = Settings(n_threads=1, **options)
    prompts = [[*range(5, 155)], [*range(5, 150), 9, 8]]
    with Model(path, rpc_servers=[address]) as model:
        if n > 1:
            with BatchSession(model, settings, n_sequences=n) as batch:
                batch.generate([prompts[0]] * n, max_tokens=12, sampling=sampling).run()
            return
        with Session(model, settings) as session:
            for prompt in prompts:
                session.generate(prompt, max_tokens=12, sampling=sampling).run()


def ask(source: Path, only: str, models: Sequence[str]) -> list[Found]:
    """Every node of the cases whose name contains `only`, judged by the backends of a tree."""
    with tempfile.TemporaryDirectory() as temporary, worker() as address:
        folder = Path(temporary)
        library = build(source, folder)
        for model in models:
            shape, kind, cut = MODELS[model]
            whole = folder / f"{model}.gguf"
            write_synthetic(whole, shape, kind, head_noise=0.05, **cut)
            for name, case in CASES.items():
                if only not in name:
                    continue
                print(f"ops: {model}, {name}", file=sys.stderr, flush=True)
                path = whole
                if "trimmed" in name:
                    path = write_trimmed(whole, folder / f"{model}-trimmed.gguf", ROWS, ROWS)
                with watched(library, f"{model}, {name}"):
                    run_case(path, address, case)
            for path in folder.glob("*.gguf"):
                path.unlink()
        return read(library.ops_report().decode())


def verdict(letters: str) -> list[str]:
    """The cells of a verdict; one cell for CUDA if all its capabilities agree."""
    cuda, others = letters[:6], letters[6:]
    each = [f"{name} {MEANING[of]}" for name, of in zip(CAPABILITIES, cuda, strict=True)]
    first = MEANING[cuda[0]] if len(set(cuda)) == 1 else ", ".join(each)
    return [first, *(MEANING[of] for of in others)]


def worst(letters: Sequence[str]) -> str:
    """The worst of the verdicts on several shapes."""
    return "".join(max(column, key="yn!".index) for column in zip(*letters, strict=True))


def tables(found: Sequence[Found]) -> list[str]:
    """A table of what is refused, and in which graphs; then a table of everything."""
    rows: dict[tuple[str, str, str], list[Found]] = defaultdict(list)
    for node in found:
        rows[node.op, node.types, node.place].append(node)
    heads = ["CUDA", *DEVICES[6:]]
    refused, every = [], []
    for (op, types, place), nodes in sorted(rows.items()):
        graphs = " ".join(sorted({node.graph for node in nodes}))
        shapes = str(len({node.tensors for node in nodes}))
        cells = verdict(worst([node.verdict for node in nodes]))
        every.append([op, f"`{types}`", place, graphs, shapes, *cells])
        if bad := [node for node in nodes if node.refused]:
            of = "; ".join(dict.fromkeys(node.case for node in bad))
            where = f"{' '.join(sorted({node.graph for node in bad}))} of {of}"
            cells = verdict(worst([node.verdict for node in bad]))
            refused.append([op, f"`{bad[0].tensors}`", where, *cells])
    lines = ["## Not supported", ""]
    if refused:
        lines += results.markdown_table(["operation", "for example", "graphs", *heads], refused)
    else:
        lines += ["Nothing: every operation that lies on a device can be computed there."]
    head = ["operation", "types", "lies on", "graphs", "shapes", *heads]
    return [*lines, "", "## All", "", *results.markdown_table(head, every)]


def cases(found: Sequence[Found]) -> list[str]:
    """Lines for test-backend-ops --test-file: the smallest node of each row and kind of graph; of
    large nodes one per row."""
    best: dict[tuple[str, ...], Found] = {}
    for node in sorted(found, key=lambda node: (node.size, node.graph)):
        if node.test and node.size and node.place == "device":
            kind = node.graph[0] if node.size < LARGE else ""
            if node.size < LARGE or not any(key[:2] == (node.op, node.types) for key in best):
                best.setdefault((node.op, node.types, kind), node)
    return [*dict.fromkeys(node.test for _, node in sorted(best.items()))]


def write(found: Sequence[Found]) -> None:
    """Write results/ops.md, and results/ops-cases.txt for test-backend-ops."""
    letters, marks = (", ".join(map(" ".join, names.items())) for names in (GRAPHS, MARKS))
    page = [
        "# What CUDA, Metal and Vulkan can compute of our graphs",
        "",
        "Each backend's `supports_op` of the pinned tree, asked about every node of every graph: "
        "`python bench/ops.py`, no device is needed. Models with the head sizes and vocabulary of "
        "Qwen3.5-0.8B (tied embeddings, Q4_K_M) and Qwen3.6-35B-A3B (Q8_0), on an RPC worker, with "
        f"{len(CASES)} settings each ({'; '.join(CASES)}).",
        "",
        f"- Graphs: {letters}; then {marks}.",
        f"- CUDA: compute capabilities {', '.join(CAPABILITIES)}; one cell where they agree. "
        "Metal: Apple's own GPUs. Vulkan: a desktop GPU; **aborts**: `supports_op` says yes, and "
        "an assertion fails where the copy's pipeline is chosen.",
        "- What lies on the host is computed there on purpose: embeddings that are in its memory.",
        "- Types: sources, then result; `*`: not contiguous.",
        "- [ops-cases.txt](ops-cases.txt): a node of each row and kind of graph, for upstream's "
        "`test-backend-ops --test-file`; `pytest tests/devices/test_ops.py` computes them on the "
        "GPU that is there (on lavapipe in CI) and on the CPU.",
        "",
        *tables(found),
    ]
    (RESULTS / "ops.md").write_text("\n".join(page) + "\n")
    (RESULTS / "ops-cases.txt").write_text("".join(f"{line}\n" for line in cases(found)))


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", metavar="WORD", help="cases whose name has it")
    parser.add_argument("--model", choices=MODELS, help="default: both")
    args = parser.parse_args(argv)
    try:
        found = ask(tree(), args.only, [args.model] if args.model else [*MODELS])
    except OpsError as error:
        print(f"ops: {error}", file=sys.stderr)
        return 2
    print("\n".join(tables(found)))
    if not (args.only or args.model):
        write(found)
    return 1 if any(node.refused for node in found) else 0


if __name__ == "__main__":
    raise SystemExit(main())
