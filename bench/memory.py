#!/usr/bin/env python3
"""Peak memory of our driver with MTP off and on, and what the difference is made of.

    python bench/memory.py                            # 0.8B shape, Q8_0, synthetic weights
    python bench/memory.py --model FILE.gguf --n-ctx 32768 --n-prompt 8192
    python bench/memory.py --peers build/peers        # beside upstream's llama-bench
    python bench/memory.py --dry-run                  # a few tokens, nothing is written

Every configuration runs in a fresh process: load, make the contexts, generate; then the process
reads its own high-water mark. llama-bench processes a prompt of the same length. Writes
bench/results/NAME.json and .md. Needs Linux (/proc).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchkit import memory_of, results
from benchkit.model import model_file, random_prompt, synthetic

from pyllama_mtp import Model, PyllamaMtpError, Session, Settings
from pyllama_mtp.llama import native
from pyllama_mtp.measure.peers import PeerError
from pyllama_mtp.measure.peers.find import built
from pyllama_mtp.measure.peers.options import Options
from pyllama_mtp.measure.peers.process import Program
from pyllama_mtp.models.ggufinfo import validate_model_file
from pyllama_mtp.models.modelinfo import GGUFInfo
from pyllama_mtp.settings import CACHE_TYPES, available_threads

MIB = 2**20
LOOK_S, TIMEOUT_S = 0.02, 3600.0
OFF, ON = "MTP off", "MTP on"
#: name | is the MTP head loaded | draft depth (None: the --depth option)
CONFIGURATIONS: dict[str, tuple[bool, int | None]] = {
    OFF: (False, 0),
    "head loaded, depth 0": (True, 0),
    ON: (True, None),
}
MINIATURE = "tiny"
DRY_RUN = {"repeat": 1, "n_ctx": 512, "n_prompt": 16, "n_decode": 8}

DEFINITIONS = """\
## How to read this

- `peak RSS` is the high-water mark of resident memory (VmHWM) of the whole process: Python, the
  libraries, weights (the pages of the mapped file that were touched, and repacked copies), caches
  and buffers. `anonymous` and `file` are its parts at the end (RssAnon, RssFile). `before the
  model` is what Python and the libraries have taken before a model is loaded.
- The lines below are what llama.cpp allocated, by `session.memory()`. `weights` is the size of the
  mapped file, which is the same when the head is not loaded; its pages are then not touched.
- The second table takes "MTP on" minus "MTP off" apart:
  - target context: what the target's caches and states grow by: the head's KV cache, state
    snapshots for {depth} drafts, the rows of a draft head;
  - draft context, draft compute: KV cache and graph buffers of upstream's way, which has a context
    of its own for the head (0 in ours);
  - target compute: graph buffers, as a difference;
  - output rows: computed; logits of {depth} rows more (upstream's way: of a draft row and hidden
    rows of a batch as well);
  - graph objects: llama.cpp's descriptions of graphs, up to three per context, whose size follows
    from n_ubatch and not from the model; measured as what remains of the same difference on a
    miniature model ({miniature}), where everything else is next to nothing;
  - not explained: the rest. It holds what is copied on the hidden rows' way into a draft context
    (a few times n_ubatch rows), head weights that become resident, and what is freed but not given
    back to the system. Cache pages count once they are written, so a context longer than prompt and
    answer makes this line smaller.
- Every value is a median of {repeat} processes."""


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Peak memory with MTP off and on.")
    add = parser.add_argument
    add(
        "--model", type=Path, metavar="FILE", help="GGUF file with an MTP head (default: synthetic)"
    )
    add("--depth", type=int, default=3, metavar="K", help="drafts per round (default: %(default)s)")
    add("--n-ctx", type=int, default=4096, metavar="N", help="context (default: %(default)s)")
    add("--n-prompt", type=int, default=4000, metavar="N", help="default: %(default)s")
    add("--n-decode", type=int, default=64, metavar="N", help="default: %(default)s")
    add("--n-batch", type=int, default=2048, metavar="N")
    add("--n-ubatch", type=int, default=512, metavar="N")
    add("--cache-type-k", choices=CACHE_TYPES, default="f16")
    add("--cache-type-v", choices=CACHE_TYPES, default="f16")
    add("--threads", type=int, default=available_threads(), metavar="N")
    add("--lib", default="patched", help="our library: patched, upstream, or a folder")
    add("--peers", type=Path, metavar="FOLDER", help="of llama-bench: measure it, too")
    add("--repeat", type=int, default=3, metavar="N", help="processes each (default: %(default)s)")
    add("--name", default="memory", help="of the result files")
    add("--dry-run", action="store_true", help="a few tokens, once each, nothing is written")
    args = parser.parse_args(argv)
    if args.dry_run:
        vars(args).update(DRY_RUN)
    return args


def settings(args: argparse.Namespace, depth: int | None) -> dict[str, Any]:
    """Fields of `Settings` for so many drafts; None: --depth."""
    names = ("n_ctx", "n_batch", "n_ubatch", "cache_type_k", "cache_type_v")
    return {
        **{name: getattr(args, name) for name in names},
        "n_threads": args.threads,
        "draft_n_max": args.depth if depth is None else depth,
    }


def serve(request: dict[str, Any]) -> dict[str, Any]:
    """In a fresh process: generate once, and say what memory that took, in bytes.

    Returns:
        figures: peak_rss, anonymous and file of the whole process, before_the_model, and the parts
        that llama.cpp allocated; stamp: that of the library.
    """
    library, before = native.load(request["lib"]), memory_of("self", "VmHWM")
    with (
        Model(request["model"], mtp=request["mtp"]) as model,
        Session(model, Settings(**request["settings"])) as session,
    ):
        prompt = random_prompt(request["n_prompt"], model.n_vocab)
        session.generate(prompt, max_tokens=request["n_decode"] + 1, ignore_eos=True).run()
        lines = {"peak_rss": "VmHWM", "anonymous": "RssAnon", "file": "RssFile"}
        whole = {name: memory_of("self", key) for name, key in lines.items()}
        figures = {**whole, "before_the_model": before, **session.memory()}
    return {"figures": figures, "stamp": library.stamp}


def measure(args: argparse.Namespace, model: Path, name: str) -> dict[str, Any]:
    """:func:`serve` of a configuration, in a process of its own.

    Raises:
        PeerError: it failed; the message is what it said.
    """
    mtp, depth = CONFIGURATIONS[name]
    request = {"model": str(model), "lib": args.lib, "mtp": mtp, "settings": settings(args, depth)}
    request |= {"n_prompt": args.n_prompt, "n_decode": args.n_decode}
    command = [sys.executable, __file__, "--serve", json.dumps(request)]
    with Program("the process that is measured", command) as program:
        found: dict[str, Any] = json.loads(program.wait(TIMEOUT_S).splitlines()[-1])
        return found


def medians(samples: list[dict[str, int]]) -> dict[str, int]:
    """Per figure."""
    return {key: int(median(sample[key] for sample in samples)) for key in samples[0]}


def output_rows(size: GGUFInfo, n_batch: int, depth: int, apart: bool) -> int:
    """Bytes of rows that only MTP keeps in output buffers, all float32.

    The target's logits for `depth` verified drafts. With the head in a context of its own (`apart`)
    also a row of its logits, the hidden state of every token of a batch, and one of that context.
    (llama_context::output_reserve)
    """
    more = (n_batch + 1) * size.n_embd + size.n_vocab if apart else 0
    return 4 * (depth * size.n_vocab + more)


def explain(
    on: dict[str, int], off: dict[str, int], rows: int, graph_objects: int
) -> dict[str, int]:
    """Take the difference in peak RSS apart; see DEFINITIONS."""
    grown = {key: on[key] - off.get(key, 0) for key in on}
    parts = {
        "target_context": grown["target_context"],
        "draft_context": on["draft_context"],
        "draft_compute": on["draft_compute"],
        "target_compute": grown["target_compute"],
        "output_rows": rows,
        "graph_objects": graph_objects,
    }
    rest = grown["peak_rss"] - sum(parts.values())
    return {"peak_rss": grown["peak_rss"], **parts, "not_explained": rest}


def sample_all(
    args: argparse.Namespace, model: Path, names: Sequence[str]
) -> tuple[dict[str, list[dict[str, int]]], dict[str, Any]]:
    """Samples of the configurations, which take turns; and the library's stamp."""
    samples: dict[str, list[dict[str, int]]] = {name: [] for name in names}
    for repeat in range(args.repeat):
        for name in names:
            answer = measure(args, model, name)
            samples[name].append(answer["figures"])
            peak = samples[name][-1]["peak_rss"] / MIB
            label = f"[{repeat + 1}/{args.repeat}] {model.name}, {name}"
            print(f"{label}: peak {peak:.1f} MiB", file=sys.stderr, flush=True)
    return samples, answer["stamp"]


def peak(command: Sequence[str]) -> int:
    """Most resident memory of a program, in bytes, by looking again and again while it runs.

    The system's own sum at its end (ru_maxrss) would not be less than that of this process.

    Raises:
        PeerError: the program failed.
    """
    most, away = 0, subprocess.DEVNULL
    with subprocess.Popen(command, stdout=away, stderr=away) as process:
        while process.poll() is None:
            most = max(most, memory_of(process.pid, "VmHWM"))
            time.sleep(LOOK_S)
    if process.returncode:
        raise PeerError(f"{Path(command[0]).name} failed ({process.returncode})")
    return most


def bench_peak(args: argparse.Namespace, model: Path) -> int:
    """Peak of llama-bench with a prompt as long as ours."""
    program = str(built(args.peers).program("llama-bench"))
    options = Options(Settings(**settings(args, 0)), str(model), 0)
    test = ("-p", str(args.n_prompt), "-n", "0", "-r", "1")
    return peak([program, *options.arguments(), *test])


def of_mtp(
    args: argparse.Namespace, model: Path, middle: dict[str, dict[str, int]], fixed: int
) -> dict[str, int]:
    """What "MTP on" takes more than "MTP off"; `fixed`: bytes of graph objects."""
    on, size = middle[ON], validate_model_file(model)
    rows = output_rows(
        size, min(args.n_batch, args.n_ctx), args.depth, apart=on["draft_context"] > 0
    )
    return explain(on, middle[OFF], rows, fixed)


def collect(args: argparse.Namespace) -> dict[str, Any]:
    """Measure everything; the result file's contents."""
    model, small = model_file(args.model), synthetic(MINIATURE)
    samples, _ = sample_all(args, small, (OFF, ON))
    fixed = of_mtp(args, small, {name: medians(samples[name]) for name in samples}, 0)
    samples, stamp = sample_all(args, model, tuple(CONFIGURATIONS))
    middle = {name: medians(given) for name, given in samples.items()}
    plan = {"model": model.name, "miniature": MINIATURE, **settings(args, None)}
    plan |= {name: getattr(args, name) for name in ("depth", "n_prompt", "n_decode", "repeat")}
    return {
        **results.header(stamp),
        "plan": plan,
        "bytes": middle,
        "difference": of_mtp(args, model, middle, fixed["not_explained"]),
        "samples": samples,
        "llama_bench": bench_peak(args, model) if args.peers else None,
    }


def tables(result: dict[str, Any]) -> list[str]:
    """Both tables, in MiB."""
    middle: dict[str, dict[str, int]] = result["bytes"]
    keys = next(iter(middle.values()))
    rows = [
        [key.replace("_", " "), *(f"{given[key] / MIB:.1f}" for given in middle.values())]
        for key in keys
    ]
    parts = [
        [key.replace("_", " "), f"{value / MIB:.1f}"] for key, value in result["difference"].items()
    ]
    beside = []
    if theirs := result["llama_bench"]:
        more = [
            f"{name} {(given['peak_rss'] - theirs) / MIB:+.1f}" for name, given in middle.items()
        ]
        python = middle[OFF]["before_the_model"] / MIB
        beside = [
            "",
            f"llama-bench: peak {theirs / MIB:.1f} MiB; above it: {', '.join(more)} MiB, of which "
            f"Python and the libraries are {python:.1f}.",
        ]
    return [
        *results.markdown_table(["MiB", *middle], rows),
        *beside,
        "",
        *results.markdown_table(["MTP on minus MTP off", "MiB"], parts),
    ]


def render(result: dict[str, Any]) -> str:
    """The Markdown file."""
    plan = result["plan"]
    settings = ", ".join(f"{key} {value}" for key, value in plan.items() if key != "model")
    lines = [
        "# Peak memory with MTP off and on",
        "",
        *results.header_lines(result),
        f"- Model: {plan['model']}",
        f"- Settings: {settings}",
        "",
        *tables(result),
        "",
        DEFINITIONS.format(**plan),
    ]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    args = parse_arguments(argv)
    try:
        if args.peers:
            built(args.peers).program("llama-bench")  # before anything is measured
        result = collect(args)
    except PyllamaMtpError as error:
        print(f"memory: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    if not args.dry_run:
        results.write(result, render(result), args.name)
    print("\n".join(tables(result)))
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        print(json.dumps(serve(json.loads(sys.argv[2]))))
    else:
        raise SystemExit(main())
