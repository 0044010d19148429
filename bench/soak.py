#!/usr/bin/env python3
"""Random use for a long time: memory stays flat, and answers stay those of a fresh context.

    python bench/soak.py                       # 30 minutes on the demo model
    python bench/soak.py --minutes 1 --seed 7
    python bench/soak.py --steps 40            # as many steps instead of a time, nothing is written

Prompts, settings, follow-ups, cancellations, stop strings, saved and restored prompts, several
prompts at once and bad input follow each other at random; the seed decides the order. Every greedy
answer is compared with that of a new session without MTP. Resident memory is read whenever no
session is open. Writes results/NAME.json and .md. Exit codes: 0 all is well, 1 an answer differed
or memory grew. Needs psutil.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from benchkit import results
from benchkit.soaking import Different, Soak

from pyllama_mtp import Model
from pyllama_mtp.llama import native
from pyllama_mtp.measure.prompts import CLASSES, prompts_for
from pyllama_mtp.models.demo import demo_path

WARM_UP = 0.2  # share of the run whose memory readings do not count
#: Growth that still counts as flat, because it is the allocator's, in a run of any length.
SLACK = 8 * 2**20
#: (seconds since the start, resident bytes that are not a file's), with no session open.
Readings = list[tuple[float, int]]


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Random use for a long time.")
    add = parser.add_argument
    add("--minutes", type=float, default=30, metavar="M", help="default: %(default)s")
    add("--steps", type=int, metavar="N", help="this many steps instead; nothing is written")
    add("--seed", type=int, default=1, help="default: %(default)s")
    add("--model", type=Path, metavar="FILE", help="GGUF with an MTP head (default: demo)")
    add("--threads", type=int, default=1, metavar="N", help="default: %(default)s")
    add("--name", default="soak", help="of the result files")
    args = parser.parse_args(argv)
    if args.minutes <= 0 or args.threads < 1 or (args.steps is not None and args.steps < 1):
        parser.error("minutes, threads and steps must be above 0")
    return args


def resident() -> int:
    """Bytes of this process in memory that do not belong to a file.

    The allocator first returns freed memory to the system: how much of it the allocator would keep
    depends on the order of sizes, and would hide or feign growth.
    """
    import psutil

    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc
    if trim:
        trim(0)
    memory = psutil.Process().memory_info()
    return int(memory.rss - memory.shared)


def soak(work: Soak, minutes: float, steps: int | None) -> Readings:
    """Step until the time is over or the steps are done; returns the memory readings."""
    begin = shown = time.monotonic()
    readings: Readings = []
    count = 0
    while (count < steps) if steps else (time.monotonic() - begin < 60 * minutes):
        count += 1
        if work.step() == "switch":
            now = time.monotonic()
            readings.append((now - begin, resident()))
            if now - shown > 30:
                shown = now
                mib = readings[-1][1] / 2**20
                print(f"{(now - begin) / 60:5.1f} min, {count} steps, {mib:.1f} MiB", flush=True)
    work.close()
    readings.append((time.monotonic() - begin, resident()))
    return readings


def growth(readings: Readings) -> dict[str, float]:
    """Memory after the warm-up: median of its first and last tenth, and the slope of a line.

    Returns:
        start, end, most: bytes; slope: bytes per hour, least squares; grown: end - start.
    """
    last = readings[-1][0]
    settled = [r for r in readings if r[0] >= WARM_UP * last]
    seconds, size = (np.array(column, dtype=float) for column in zip(*settled, strict=True))
    tenth = max(len(size) // 10, 1)
    start, end = float(np.median(size[:tenth])), float(np.median(size[-tenth:]))
    slope = float(np.polyfit(seconds / 3600, size, 1)[0]) if len(set(seconds)) > 1 else 0.0
    return {"start": start, "end": end, "most": float(size.max()), "slope": slope,
            "grown": end - start, "readings": float(len(size))}  # fmt: skip


def render(result: dict[str, Any]) -> str:
    """The summary as Markdown."""
    memory, mib = result["memory"], 2**20
    lines = [
        "# Soak: random use for a long time",
        "",
        *results.header_lines(result),
        f"- Model: {result['model']}; seed {result['seed']}, threads {result['threads']}",
        "",
        f"{result['steps']} steps in {result['seconds'] / 60:.1f} minutes, {result['tokens']} "
        "tokens generated (those of the fresh contexts not counted).",
        "",
        f"- Greedy answers compared with a fresh context's: {result['equal']} equal, "
        f"{result['near_ties']} parted where the two best logits lie within rounding (1 % of their "
        f"range), {result['different']} different.",
        f"- Resident memory with no session open, after the first {WARM_UP:.0%} of the time: "
        f"{memory['start'] / mib:.1f} MiB at first, {memory['end'] / mib:.1f} MiB at last, "
        f"{memory['most'] / mib:.1f} MiB at most; slope {memory['slope'] / mib:+.2f} MiB per hour "
        f"({memory['readings']:.0f} readings).",
        f"- sha256 over steps and equal answers: {result['digest'][:16]}",
        "",
    ]
    rows = [[name, str(n)] for name, n in sorted(result["by_step"].items())]
    return "\n".join([*lines, *results.markdown_table(["step", "times"], rows)])


def run(args: argparse.Namespace) -> dict[str, Any]:
    """The whole soak; returns the result document."""
    path = args.model or demo_path()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, Model(path) as model:
        prompts = [prompt.tokens(model) for prompt in prompts_for(path, CLASSES)]
        work = Soak(model, prompts, args.seed, args.threads, Path(folder))
        different = ""
        try:
            readings = soak(work, args.minutes, args.steps)
        except Different as error:
            different, readings = str(error), [(time.monotonic() - begin, resident())]
        finally:
            work.close()
    tally = work.tally
    return {
        **results.header(native.load().stamp),
        "model": Path(path).name, "seed": args.seed, "threads": args.threads,
        "steps": sum(tally.steps.values()), "by_step": dict(tally.steps), "tokens": tally.tokens,
        "equal": tally.equal, "near_ties": tally.near_ties, "different": int(bool(different)),
        "difference": different, "seconds": time.monotonic() - begin,
        "memory": growth(readings), "digest": tally.digest.hexdigest(), "readings": readings,
    }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    args = parse_arguments(argv)
    os.environ.setdefault("OMP_NUM_THREADS", str(args.threads))
    result = run(args)
    text = render(result)
    print(text)
    if not args.steps:
        results.write(result, text, args.name)
    if result["different"]:
        print(f"\nan answer differs after step {result['steps']}:\n{result['difference']}")
    if result["memory"]["grown"] > SLACK:
        print(f"\nmemory grew by {result['memory']['grown'] / 2**20:.1f} MiB")
    return 1 if result["different"] or result["memory"]["grown"] > SLACK else 0


if __name__ == "__main__":
    raise SystemExit(main())
