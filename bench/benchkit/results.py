"""What pages of results begin with, and their tables; they name no host and no folder."""

from __future__ import annotations

import filecmp
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pyllama_mtp
from benchkit import ROOT
from pyllama_mtp.llama import native
from pyllama_mtp.machine import describe_machine
from pyllama_mtp.measure.request import without_folders
from pyllama_mtp.measure.text import to_markdown


def is_installed() -> bool:
    """Whether the package that runs has the Python files, patches and C++ of this checkout."""
    ours, package = ROOT / "pyllama_mtp", Path(pyllama_mtp.__file__).parent
    names = [str(file.relative_to(ours)) for file in ours.rglob("*.py")]
    if filecmp.cmpfiles(ours, package, names, shallow=False)[0] != names:
        return False
    words = [sys.executable, ROOT / "patches" / "patchqueue.py", "stamp", "--variant", "patched"]
    stamp = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    return bool(stamp == native.expected_stamp()["series"]["patched"])


def project_commit() -> str:
    """The commit of this checkout, "-dirty" if more than results changed, with a warning if
    another one is installed; "unknown" without git."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(ROOT), *words]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()

    try:
        commit = git("rev-parse", "--short=12", "HEAD")
        changes = git("status", "--porcelain", "-uno", "--", ".", ":(exclude)bench/results")
    except OSError:
        return "unknown"
    told = f"{commit}{'-dirty' if changes else ''}" if commit else "unknown"
    return told if is_installed() else f"{told}, **but another one is installed**"


def heading(*notes: str, stamp: dict[str, Any] | None = None) -> str:
    """A list in Markdown: date, command, machine, build, then the `notes`. `stamp`: of the library
    that is measured, if it is not the one that is loaded here."""
    machine, build = describe_machine(), stamp or native.load().stamp
    memory = machine["memory_bytes"]
    size = f", {memory / 2**30:.0f} GiB" if memory else ""
    program, *words = sys.argv
    command = " ".join(["python", f"bench/{Path(program).name}", *map(without_folders, words)])
    lines = [
        f"Date: {datetime.now(timezone.utc):%Y-%m-%d}",
        f"Command: `{command}`",
        f"Machine: {machine['cpu']}, {machine['cores']} cores{size}, {machine['os']}",
        f"llama.cpp {build['upstream_commit'][:12]}, compiled by {build['compiler']}; "
        f"CPU features: {build['cpu_features']}",
        f"Our library: {build['variant']}, patch series {build['series'][:12]}, "
        f"commit {project_commit()}",
        *notes,
    ]
    return "\n".join(f"- {line}" for line in lines)


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table whose first column has words, and the others figures."""
    return to_markdown(head, rows, [i == 0 for i in range(len(head))]).splitlines()


def show(notes: Sequence[str], head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print :func:`heading` and a table."""
    print(heading(*notes), "", *markdown_table(head, rows), sep="\n", flush=True)
