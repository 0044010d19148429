#!/usr/bin/env python3
"""Damaged and hostile files: does every one end in a clean error, or work?

    python bench/fuzz.py                   # 10,000 models, 4,000 of several files, 3,000 of others
    python bench/fuzz.py --seed 7 --count model=500     # other cases, fewer of them
    python bench/fuzz.py --seed 7 --only model:123      # one case again: its edits and its end
    python bench/fuzz.py --base FILE.gguf --count 2000  # copies of another small model

Worker processes load changed copies of the demo model and generate a few tokens with MTP. The
changes concern header, metadata, tensor table, length, single bits, types, counts, strings, shapes
and weights. Other copies have their MTP head in a file of its own, or are split into parts, and one
of the files is changed. So are files of processed prompts, of image encoders and of images. Each
case has limits of address space, memory and time. A finding is the end of a process, an exception
of another package, a limit exceeded, or a damaged prompt that goes on in another way: it is printed
with the options that repeat it, and the exit code is 1. Cases depend on the seed only. Ctrl-C ends
the run early, with a summary.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from benchkit import parser_of, results
from fuzzkit.cases import FINDING, KINDS, OUTCOMES
from fuzzkit.pool import Case, Pool

from pyllama_mtp.models.demo import demo_path

#: Cases of a seed.
PER_SEED = 1_000_000


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; the exit code is 1 if there are findings."""
    parser = parser_of(__doc__)
    add, cores = parser.add_argument, len(os.sched_getaffinity(0))
    usual = "model=10000,head=2000,split=2000,prompt=1000,mmproj=1000,image=1000"
    add("--count", default=usual, help="how many (default: %(default)s); a number is of models")
    add("--seed", type=int, default=1, help="which cases (default: %(default)s)")
    add("--only", metavar="KIND:INDEX", help="one case of that seed, with its edits")
    add("--base", type=Path, default=demo_path(), help="the model; small (default: the demo model)")
    add("--jobs", type=int, default=cores, help="workers (default: CPUs)")
    options = parser.parse_args(arguments)
    counts = _counts((options.only or options.count).replace(":", "="))
    chosen = {kind: (n,) if options.only else range(n) for kind, n in counts.items()}
    first = options.seed * PER_SEED
    cases = (Case(kind, first + index) for kind, some in chosen.items() for index in some)
    began, ended = time.monotonic(), Counter[tuple[str, str]]()
    with Pool(options.base, options.jobs) as pool, suppress(KeyboardInterrupt):
        for outcome in pool.run(cases):
            ended[outcome.case.kind, outcome.outcome] += 1
            if outcome.outcome == FINDING or options.only:
                index = outcome.case.seed - first
                print(f"--seed {options.seed} --only {outcome.case.kind}:{index}", end="  ")
                print(f"{outcome.outcome}\n  {outcome.detail.strip()[-1200:]}")
                print(f"  edits: {json.dumps(outcome.edits)[:2000]}")
            if ended.total() % 500 == 0:
                print(f"{ended.total()} cases", file=sys.stderr, flush=True)
    kinds = dict.fromkeys(kind for kind, _ in ended)
    rows = [[kind, *(str(ended[kind, outcome]) for outcome in OUTCOMES)] for kind in kinds]
    rows = [[*row, str(sum(map(int, row[1:])))] for row in rows]
    about = (f"Copies of: {options.base.name}", f"Took {time.monotonic() - began:.0f} s")
    results.show(about, ["cases", *OUTCOMES, "all"], rows)
    return int(any(outcome == FINDING for _, outcome in ended))


def _counts(text: str) -> dict[str, int]:
    """How many of each kind; of models where the text is just a number."""
    parts = dict(part.partition("=")[::2] for part in text.split(","))
    if text.isdigit():
        parts = {KINDS[0]: text}
    if not {*parts} <= {*KINDS} or not all(n.isdigit() for n in parts.values()):
        raise SystemExit(f"{text!r}: give a number, or KIND=N of {', '.join(KINDS)}")
    return {kind: int(n) for kind, n in parts.items()}


if __name__ == "__main__":
    memory = Path("/dev/shm")  # every case writes a file; in containers it may be small
    if os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 4 << 30:
        tempfile.tempdir = str(memory)
    raise SystemExit(main())
