"""The results of a run: counts by kind and outcome, as a line and as a page."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

from benchkit.results import header, header_lines, markdown_table

from fuzzkit.cases import LATER, NATIVE, OUTCOMES, REFUSED
from fuzzkit.pool import Limits, Outcome
from pyllama_mtp.llama import native

_TOP = 15


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
        words = "\n".join(f"- {n} times {text}" for text, n in self.errors.most_common(_TOP))
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


def record(outcome: Outcome) -> dict[str, Any]:
    """A finding for --findings: the edits of the file, and the outcome."""
    return {
        "kind": outcome.case.kind,
        "seed": outcome.case.seed,
        "edits": outcome.edits,
        "was": outcome.detail[-400:],
    }


def _words(detail: str) -> str:
    """An error without the parts that differ from case to case."""
    text = re.sub(r"\S*/case[-\w]*\.(gguf|bin):? ?", "", detail.splitlines()[0] if detail else "")
    text = re.sub(r"'[^']*'|\"[^\"]*\"|\b[a-z_]+(\.[\w.]+)+", "...", text)
    text = re.sub(r"\(?-?\b\d[\d.e+, ]*\)?", "N ", text)
    return text[:90].strip()
