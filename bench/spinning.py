#!/usr/bin/env python3
"""What it is worth that OpenMP's threads spin little, on an idle machine and on a busy one.

    python bench/spinning.py                    # the 0.8B shape, none and one busy core
    python bench/spinning.py --model FILE --busy 0,1,2 --rounds 5

Every round decodes the same tokens with libgomp's own default and with the one of
`pyllama_mtp/llama/spinning.py`, without MTP and with, each in a process of its own, one after the
other.
Busy cores are made by processes that count. Writes results/spinning.json and .md.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from benchkit import ours, results
from benchkit.model import dimensions, model_file
from benchkit.paths import ensure_driver
from benchkit.plan import random_prompt

#: Rounds of libgomp where nothing is said (its manual, GOMP_SPINCOUNT).
LIBGOMP = 300_000
DEPTH, RATES = 3, (0.8, 0.8, 0.8)
N_PROMPT = 64


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Decode speed by how long OpenMP's threads spin.")
    add = parser.add_argument
    add("--model", type=Path, metavar="FILE", help="GGUF with an MTP head (default: 0.8B shape)")
    add("--busy", default="0,1", metavar="N,...", help="busy cores (default: %(default)s)")
    add("--rounds", type=int, default=3, metavar="R", help="default: %(default)s")
    add("--tokens", type=int, default=32, metavar="N", help="decoded (default: %(default)s)")
    add("--threads", type=int, default=os.cpu_count(), metavar="N", help="default: all cores")
    add("--name", default="spinning", help="of the result files")
    args = parser.parse_args(argv)
    try:
        args.busy = [int(word) for word in args.busy.split(",")]
    except ValueError:
        parser.error(f"--busy {args.busy} is no list of numbers")
    if args.rounds < 1 or args.tokens < 2 or min(args.busy) < 0:
        parser.error("--rounds must be 1 or more, --tokens 2 or more, --busy 0 or more")
    return args


@contextmanager
def busy(cores: int) -> Iterator[None]:
    """So many processes that do nothing but keep a core."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(cores)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def decode_tps(args: argparse.Namespace, model: Path, spin: int, depth: int) -> ours.Answer:
    """One sample in a process of its own."""
    os.environ["GOMP_SPINCOUNT"] = str(spin)
    settings: dict[str, Any] = {"n_ctx": 512, "draft_n_max": depth, "n_threads": args.threads}
    if depth:
        settings["synthetic_acceptance"] = RATES
    prompt = random_prompt(N_PROMPT, dimensions(model).n_vocab)
    request = ours.Request(
        str(model), "patched", depth > 0, settings, prompt, args.tokens + 1, N_PROMPT, 4
    )
    return ours.measure(request)


def measure(args: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """One row for each number of busy cores and depth, and the stamp of the library."""
    from pyllama_mtp.llama.spinning import ROUNDS

    model, rows, stamp = model_file(args.model), [], {}
    for cores in args.busy:
        with busy(cores):
            samples: dict[int, dict[int, list[float]]] = {d: {} for d in (0, DEPTH)}
            for number in range(args.rounds):
                for depth, found in samples.items():
                    for spin in sorted((LIBGOMP, ROUNDS), reverse=bool(number % 2)):
                        answer = decode_tps(args, model, spin, depth)
                        stamp = answer.stamp
                        found.setdefault(spin, []).append(answer.telemetry["decode_tps"])
                        print(cores, depth, spin, f"{found[spin][-1]:.1f}", file=sys.stderr)
        for depth, found in samples.items():
            pairs = zip(found[ROUNDS], found[LIBGOMP], strict=True)
            ratios = [ours / theirs for ours, theirs in pairs]
            rows.append(
                {"busy": cores, "depth": depth, "tps": found, "ratios": ratios, "rounds": ROUNDS}
            )
    return rows, stamp


def markdown(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    lines = ["# How long OpenMP's threads spin at a barrier", "", *results.header_lines(result)]
    lines += [
        f"- model: {result['model']}; {result['tokens']} tokens decoded after {N_PROMPT}, "
        f"{result['threads']} threads, {result['n_rounds']} rounds; acceptance imposed: "
        f"{RATES[0]:g} at every position",
        "",
        "Decoded tokens per second, medians; the ratio is the median of the rounds' ratios.",
        "",
    ]
    head = ["busy cores", "drafts", "libgomp's default", "ours", "ratio", "ratios of the rounds"]
    table = []
    for row in result["rows"]:
        theirs, own = (median(row["tps"][spin]) for spin in (LIBGOMP, row["rounds"]))
        ratios = ", ".join(f"{ratio:.2f}" for ratio in row["ratios"])
        cells = (row["busy"], row["depth"], f"{theirs:.1f}", f"{own:.1f}")
        table.append([*map(str, cells), f"{median(row['ratios']):.2f}", ratios])
    return "\n".join([*lines, *results.markdown_table(head, table)])


def main(argv: list[str] | None = None) -> int:
    """Measure, print, write."""
    args = parse_arguments(argv)
    ensure_driver()
    from pyllama_mtp.measure.machine import describe_machine

    rows, stamp = measure(args)
    result = {
        **results.header(describe_machine(), stamp),
        "model": model_file(args.model).name,
        "tokens": args.tokens,
        "threads": args.threads,
        "n_rounds": args.rounds,
        "rows": rows,
    }
    text = markdown(result)
    print(text)
    results.write(result, text, args.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
