"""Faults on a large scale: too little memory, and signals at random moments.

Runs every scenario of tests/faults/memory.py at many limits of the address space, and sends signals
to every command of tests/faults/signalled.py. Prints a row when one is done, and writes a report.
Exit code 1: a scenario or command did not end as it should.

    python bench/faults.py --steps 60 --trials 20 --output bench/results/faults-memory.md
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shlex
import signal
import sys
import tempfile
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

import benchkit  # noqa: F401 - for tests.*

from pyllama_mtp import native
from pyllama_mtp.models.demo import demo_path
from tests.faults import memory, memory_child, signalled

NUMBERS = (signal.SIGINT, signal.SIGTERM)


def memory_rows(args: argparse.Namespace, model: Path) -> Iterator[tuple[str, list[str]]]:
    """Rows of the table, each with its problems."""
    names = args.scenarios.split(",") if args.scenarios else [*memory_child.SCENARIOS]
    for name, threads in itertools.product(names, args.threads):
        sweep = memory.sweep(model, name, threads, args.steps, args.jobs)
        bad = [f"{one.headroom} bytes: {one.kind}: {one.detail[-400:]}" for one in sweep.bad]
        yield sweep.row(), bad


def signal_rows(args: argparse.Namespace) -> Iterator[tuple[str, list[str]]]:
    """Rows of the table, each with its problems."""
    draw = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as name:
        measured = signalled.measure(Path(name))
    for command in signalled.COMMANDS:
        with tempfile.TemporaryDirectory() as name:
            signalled.prepare(Path(name), measured)
            most_s = signalled.duration(command, Path(name))
        ends = []
        for i, after_s in enumerate(signalled.moments(draw, args.trials, most_s)):
            with tempfile.TemporaryDirectory() as name:
                signalled.prepare(Path(name), measured)
                number = NUMBERS[i // 2 % 2]
                what = signalled.trial(command, Path(name), number, after_s)
                ends.append(what and f"{number.name} after {after_s:.3f} s: {what}")
        bad = [what for what in ends if what]
        stopped = sum(what is None for what in ends)
        yield f"| {command} | {len(ends)} | {stopped} | {ends.count('')} | {len(bad)} |", bad


def main() -> int:
    """Run both, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=60, help="limits per scenario; 0: none")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="of computing")
    parser.add_argument("--scenarios", help="only these, separated by commas")
    parser.add_argument("--trials", type=int, default=20, help="signals per command; 0: none")
    parser.add_argument("--jobs", type=int, default=2, help="processes at once")
    parser.add_argument("--seed", type=int, default=1, help="of the random moments")
    parser.add_argument("--model", type=Path, help="for the memory (default: the demo model)")
    parser.add_argument("--output", type=Path, help="file to write the report to")
    args = parser.parse_args()
    stamp, model = native.load().stamp, args.model or demo_path()
    words = ["--model", model.name] if args.model else []
    words += ["--steps", args.steps, "--threads", *args.threads, "--trials", args.trials]
    words += ["--seed", args.seed]
    command = shlex.join(["python", "bench/faults.py", *map(str, words)])
    lines = [
        "# Faults",
        "",
        f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC, `{command}`  ",
        f"Model {model.name}; {json.dumps(stamp)}",
    ]
    wrong = 0

    def table(title: str, about: str, head: str, rows: Iterator[tuple[str, list[str]]]) -> None:
        nonlocal wrong
        columns = head.count("|") - 1
        lines.extend(["", f"## {title}", "", about, "", head, "|" + "---|" * columns])
        print(f"\n{title}\n{head}", flush=True)
        for row, bad in rows:
            print(row, *(f"    {what}" for what in bad), sep="\n", flush=True)
            lines.append(row)
            lines.extend(f"<!-- {what} -->" for what in bad)
            wrong += len(bad)

    if args.steps:
        table("Too little memory", memory.ABOUT, memory.HEAD, memory_rows(args, model))
    if args.trials:
        table("Signals", signalled.ABOUT, signalled.HEAD, signal_rows(args))
    if args.output:
        args.output.write_text("\n".join(lines) + "\n")
    print(f"{wrong} did not end as they should")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
