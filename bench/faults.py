"""Faults on a large scale: too little memory, and signals at random moments.

Runs every scenario of tests/faults/memory.py at many limits of the address space, and sends signals
to every command of tests/faults/signalled.py. Prints a row when one is done. Exit code 1: a
scenario or command did not end as it should.

    python bench/faults.py --steps 60 --trials 20
"""

from __future__ import annotations

import argparse
import itertools
import random
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchkit import results

from pyllama_mtp.models.demo import demo_path
from tests.faults import memory, memory_child, signalled

NUMBERS = (signal.SIGINT, signal.SIGTERM)


def memory_rows(args: argparse.Namespace) -> Iterator[tuple[str, list[str]]]:
    """Rows of the table, each with its problems."""
    for name, threads in itertools.product(memory_child.SCENARIOS, args.threads):
        sweep = memory.sweep(demo_path(), name, threads, args.steps, args.jobs)
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
    """Run both, and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=60, help="limits per scenario; 0: none")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="of computing")
    parser.add_argument("--trials", type=int, default=20, help="signals per command; 0: none")
    parser.add_argument("--jobs", type=int, default=2, help="processes at once")
    parser.add_argument("--seed", type=int, default=1, help="of the random moments")
    args = parser.parse_args()
    print(results.heading())
    wrong = 0
    for module, rows, n in (
        (memory, memory_rows, args.steps),
        (signalled, signal_rows, args.trials),
    ):
        if n:
            print("", module.ABOUT, "", module.HEAD, sep="\n")
            print("|" + "---|" * (module.HEAD.count("|") - 1), flush=True)
            for row, bad in rows(args):
                print(row, *(f"    {what}" for what in bad), sep="\n", flush=True)
                wrong += len(bad)
    print(f"{wrong} did not end as they should")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
