"""The summary as Markdown: what ran, and the findings in our code apart from upstream's."""

from __future__ import annotations

import platform
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sanitizers.findings import TOUCHED, UPSTREAM, Finding


@dataclass(frozen=True)
class Run:
    """How one test file ended."""

    file: str
    result: str
    failed: list[str]
    seconds: float


def write_summary(
    path: Path,
    runs: list[Run],
    found: Counter[Finding],
    leaks: str,
    left_out: dict[str, str],
    build: dict[str, Any],
    when: str,
) -> None:
    """Write the summary to `path`."""
    version = subprocess.run(["g++", "--version"], capture_output=True, text=True).stdout
    failed = [name for run in runs for name in run.failed]
    lines = [
        "# The native tests under AddressSanitizer and UBSan",
        "",
        f"- Date: {when}",
        "- Command: `python tests/sanitize.py`",
        f"- Compiler: {version.splitlines()[0] if version else '?'}; -O1; Python "
        f"{platform.python_version()}",
        f"- llama.cpp {build['upstream_commit'][:12]}, patch series "
        f"{build['series']['patched'][:12]}",
        "- Instrumented: ggml with its CPU and RPC backends, the shim, the extension, and the "
        "files of libllama that a patch changes or adds (`bindings/cmake/Sanitize.cmake`). The "
        "upstream variant, which the tests compare with, is the ordinary build's.",
        "- Before the run each sanitizer reported a deliberate error in the shim.",
        "",
    ]
    for whose in (TOUCHED, UPSTREAM):
        lines += [f"## Findings in {whose}", "", *_table(found, whose), ""]
    lines += ["## Leaks", "", "A program that loads, generates with and without drafts, and ends: "
              + leaks, ""]  # fmt: skip
    lines += ["## What ran", "", "| file | result | seconds |", "|---|---|---:|"]
    lines += [f"| {run.file} | {run.result} | {run.seconds:.0f} |" for run in runs]
    lines += ["", *(f"Failed: `{name}`" for name in failed)]
    lines += ["", "Left out:", "", *(f"- {name}: {why}" for name, why in left_out.items())]
    path.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


def _table(found: Counter[Finding], whose: str) -> list[str]:
    mine = sorted((f.file, f.line, f.kind, f.function, n) for f, n in found.items()
                  if f.whose == whose)  # fmt: skip
    if not mine:
        return ["None."]
    rows = [f"| {file}:{line} | `{function}` | {kind} | {n} |"
            for file, line, kind, function, n in mine]  # fmt: skip
    return ["| place | function | kind | reports |", "|---|---|---|---:|", *rows]
