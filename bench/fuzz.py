#!/usr/bin/env python3
"""Damaged and hostile files: does every one end in a clean error, or work?

    python bench/fuzz.py                   # 10,000 models, 2,000 of several files, 1,000 of others
    python bench/fuzz.py --seed 7 --count model=500     # other cases, fewer of them
    python bench/fuzz.py --seed 7 --only model:123      # one case again: its edits and its end
    python bench/fuzz.py --base FILE.gguf --count 2000  # copies of another small model

Worker processes load changed copies of the demo model and generate a few tokens with MTP. The
changes concern header, metadata, tensor table, length, single bits, types, counts, strings, shapes
and weights. Other copies have their MTP head in a file of its own, or are split into parts, and one
of the files is changed. Files of processed prompts and of draft vocabularies are changed, too. Each
case has limits of address space, memory and time. A finding is the end of a process, an exception
of another package, or a limit exceeded: it is printed with the options that reproduce it, and the
exit code is 1. Cases depend on the seed only. --write NAME writes bench/results/NAME.md; Ctrl-C
ends the run early, with a summary.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from benchkit import RESULTS


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; the exit code is 1 if there are findings."""
    options = _parser().parse_args(arguments)
    from fuzzkit import summary
    from fuzzkit.cases import FINDING, KINDS
    from fuzzkit.pool import Case, Limits, Pool

    from pyllama_mtp.models.demo import demo_path

    base = options.base or demo_path()
    limits = Limits(options.timeout, options.peak, options.address_space)
    counts = _counts(options.count, KINDS)

    def cases() -> Iterator[Case]:
        if options.only:
            (kind, index), *_ = _counts(options.only.replace(":", "="), KINDS).items()
            yield Case(kind, _seed(options.seed, index))
            return
        for kind, n in counts.items():
            for index in range(n):
                yield Case(kind, _seed(options.seed, index))

    began, tally = time.monotonic(), summary.Tally()
    with Pool(base, options.jobs, limits) as pool, suppress(KeyboardInterrupt):
        for outcome in pool.run(cases()):
            tally.add(outcome)
            if outcome.outcome == FINDING or options.only:
                _show(outcome, options.seed)
            if options.findings and outcome.outcome == FINDING:
                with options.findings.open("a") as file:
                    file.write(json.dumps(summary.record(outcome)) + "\n")
            elif sum(tally.total.values()) % 500 == 0:
                print(f"{tally.line()}  {time.monotonic() - began:.0f} s", file=sys.stderr)
    text = tally.markdown(base, limits, options.jobs, time.monotonic() - began)
    print(text)
    if options.write:
        (RESULTS / f"{options.write}.md").write_text(text)
    return 1 if tally.total[FINDING] else 0


def _seed(seed: int, index: int) -> int:
    return seed * 1_000_000 + index


def _show(outcome: object, seed: int) -> None:
    from fuzzkit.pool import Outcome

    assert isinstance(outcome, Outcome)
    index = outcome.case.seed - seed * 1_000_000
    print(f"--seed {seed} --only {outcome.case.kind}:{index}  {outcome.outcome}")
    print(f"  {outcome.detail.strip()[-1200:]}")
    if outcome.edits:
        print(f"  edits: {json.dumps(outcome.edits)[:2000]}")


def _counts(text: str, kinds: Sequence[str]) -> dict[str, int]:
    """How many of each kind; of models where the text is just a number."""
    if text.isdigit():
        return {kinds[0]: int(text)}
    counts = {}
    for part in text.split(","):
        kind, _, n = part.partition("=")
        if kind not in kinds or not n.isdigit():
            raise SystemExit(f"{text!r}: give a number, or KIND=N of {', '.join(kinds)}")
        counts[kind] = int(n)
    return counts


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    usual = "model=10000,head=2000,split=2000,prompt=1000,draft-vocab=1000"
    add("--count", default=usual, help="how many (default: %(default)s); a number is of models")
    add("--seed", type=int, default=1, help="which cases (default: %(default)s)")
    add("--only", metavar="KIND:INDEX", help="one case of that seed, with its edits")
    add("--base", type=Path, help="the model that is copied; small (default: the demo model)")
    add("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="workers (default: CPUs)")
    add("--timeout", type=float, default=30, metavar="S", help="per case (default: %(default)s)")
    add("--peak", type=int, default=512, metavar="MIB", help="memory of a case (%(default)s)")
    add("--address-space", type=int, default=4096, metavar="MIB", help="limit (%(default)s)")
    add("--findings", type=Path, metavar="FILE", help="append findings as lines of JSON")
    add("--write", metavar="NAME", help="write bench/results/NAME.md")
    return parser


if __name__ == "__main__":
    memory = Path("/dev/shm")  # every case writes a file; in containers it may be small
    if os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 4 << 30:
        tempfile.tempdir = str(memory)
    raise SystemExit(main())
