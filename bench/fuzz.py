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
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchkit import RESULTS
from benchkit.results import header, header_lines, markdown_table
from fuzzkit.cases import FINDING, KINDS, LATER, NATIVE, OUTCOMES, REFUSED
from fuzzkit.pool import Case, Limits, Outcome, Pool

from pyllama_mtp.llama import native
from pyllama_mtp.models.demo import demo_path

#: Cases of a seed.
PER_SEED = 1_000_000
#: Errors that the page names.
TOP = 15


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; the exit code is 1 if there are findings."""
    options = _parser().parse_args(arguments)
    base = options.base or demo_path()
    limits = Limits(options.timeout, options.peak, options.address_space)
    if options.only:
        chosen = {kind: (index,) for kind, index in _counts(options.only.replace(":", "=")).items()}
    else:
        chosen = {kind: range(n) for kind, n in _counts(options.count).items()}
    first = options.seed * PER_SEED
    cases = (Case(kind, first + index) for kind, some in chosen.items() for index in some)
    began, tally = time.monotonic(), Tally()
    with Pool(base, options.jobs, limits) as pool, suppress(KeyboardInterrupt):
        for outcome in pool.run(cases):
            tally.add(outcome)
            if outcome.outcome == FINDING or options.only:
                _show(outcome)
            if options.findings and outcome.outcome == FINDING:
                with options.findings.open("a") as file:
                    file.write(json.dumps(_record(outcome)) + "\n")
            elif sum(tally.total.values()) % 500 == 0:
                print(f"{tally.line()}  {time.monotonic() - began:.0f} s", file=sys.stderr)
    text = tally.markdown(base, limits, options.jobs, time.monotonic() - began)
    print(text)
    if options.write:
        (RESULTS / f"{options.write}.md").write_text(text)
    return 1 if tally.total[FINDING] else 0


class Tally:
    """Counts outcomes as they come."""

    def __init__(self) -> None:
        self.total: Counter[str] = Counter()
        self.by_kind: dict[str, Counter[str]] = {}
        self.errors: Counter[str] = Counter()
        self.seconds, self.peak_mib = 0.0, 0

    def add(self, outcome: Outcome) -> None:
        """One more."""
        self.total[outcome.outcome] += 1
        self.by_kind.setdefault(outcome.case.kind, Counter())[outcome.outcome] += 1
        if outcome.outcome in (REFUSED, NATIVE, LATER):
            self.errors[f"{outcome.outcome}: {_words(outcome.detail)}"] += 1
        self.seconds = max(self.seconds, outcome.seconds)
        self.peak_mib = max(self.peak_mib, outcome.peak_mib)

    def line(self) -> str:
        """The counts so far."""
        counts = ", ".join(f"{self.total[o]} {o}" for o in OUTCOMES if self.total[o])
        return f"{sum(self.total.values())} cases: {counts}"

    def markdown(self, base: Path, limits: Limits, jobs: int, seconds: float) -> str:
        """The page."""
        rows = [
            [kind, *(str(counts[outcome]) for outcome in OUTCOMES), str(counts.total())]
            for kind, counts in self.by_kind.items()
        ]
        words = "\n".join(f"- {n} times {text}" for text, n in self.errors.most_common(TOP))
        about = header_lines(header(native.load().stamp))
        return "\n".join(
            [
                "# Damaged and hostile files",
                "",
                *about,
                f"- Copies of: {base.name}",
                f"- Limits of a case: {limits.seconds:.0f} s, {limits.peak_mib} MiB of memory, "
                f"{limits.address_space_mib} MiB of address space; {jobs} workers, one thread each",
                f"- Took {seconds:.0f} s; the longest case {self.seconds:.1f} s, the largest "
                f"{self.peak_mib} MiB",
                "",
                *markdown_table(["cases", *OUTCOMES, "all"], rows),
                "",
                "A finding is the end of the process, an exception that is none of this package's, "
                "or a limit\nexceeded.",
                "",
                f"Most frequent errors (of {len(self.errors)} kinds):",
                "",
                words,
                "",
            ]
        )


def _words(detail: str) -> str:
    """An error without the parts that differ from case to case."""
    text = re.sub(r"\S*/case[-\w]*\.(gguf|bin):? ?", "", detail.splitlines()[0] if detail else "")
    text = re.sub(r"'[^']*'|\"[^\"]*\"|\b[a-z_]+(\.[\w.]+)+", "...", text)
    text = re.sub(r"\(?-?\b\d[\d.e+, ]*\)?", "N ", text)
    return text[:90].strip()


def _show(outcome: Outcome) -> None:
    seed, index = divmod(outcome.case.seed, PER_SEED)
    print(f"--seed {seed} --only {outcome.case.kind}:{index}  {outcome.outcome}")
    print(f"  {outcome.detail.strip()[-1200:]}")
    if outcome.edits:
        print(f"  edits: {json.dumps(outcome.edits)[:2000]}")


def _record(outcome: Outcome) -> dict[str, Any]:
    """A finding for --findings: the edits of the file, and the outcome."""
    about = {"kind": outcome.case.kind, "seed": outcome.case.seed}
    return {**about, "edits": outcome.edits, "was": outcome.detail[-400:]}


def _counts(text: str) -> dict[str, int]:
    """How many of each kind; of models where the text is just a number."""
    if text.isdigit():
        return {KINDS[0]: int(text)}
    counts = {}
    for part in text.split(","):
        kind, _, n = part.partition("=")
        if kind not in KINDS or not n.isdigit():
            raise SystemExit(f"{text!r}: give a number, or KIND=N of {', '.join(KINDS)}")
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
