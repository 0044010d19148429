"""Result files: JSON with every raw sample, Markdown to read; they name no host and no folder."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchkit import RESULTS
from pyllama_mtp.files import write_whole
from pyllama_mtp.machine import describe_machine
from pyllama_mtp.measure.request import without_folders
from pyllama_mtp.measure.text import to_markdown


def command_line() -> str:
    """The command as typed, without the folders of its paths."""
    program, *words = sys.argv
    return " ".join(["python", f"bench/{Path(program).name}", *map(without_folders, words)])


def project_commit() -> str:
    """The commit of this checkout, "-dirty" if more than results changed; "unknown" without git."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(RESULTS.parent.parent), *words]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()

    try:
        commit = git("rev-parse", "--short=12", "HEAD")
        changes = git("status", "--porcelain", "-uno", "--", ".", ":(exclude)bench/results")
    except OSError:
        return "unknown"
    return f"{commit}{'-dirty' if changes else ''}" if commit else "unknown"


def header(build: dict[str, Any]) -> dict[str, Any]:
    """What every result file begins with; `build` is the stamp of a library."""
    return {
        "schema": 1,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "command": command_line(),
        "project_commit": project_commit(),
        "machine": describe_machine(),
        "build": {key: value for key, value in build.items() if key != "pyllama_stamp"},
    }


def header_lines(result: dict[str, Any]) -> list[str]:
    """The header as a Markdown list."""
    machine, build = result["machine"], result["build"]
    memory = machine.get("memory_bytes")
    size = f", {memory / 2**30:.0f} GiB" if memory else ""
    return [
        f"- Date: {result['date']}",
        f"- Command: `{result['command']}`",
        f"- Machine: {machine['cpu']}, {machine['cores']} cores{size}, {machine['os']}",
        f"- llama.cpp {build['upstream_commit'][:12]}, compiled by {build['compiler']}; "
        f"CPU features: {build['cpu_features']}",
        f"- Our library: {build['variant']}, patch series {build['series'][:12]}, "
        f"commit {result['project_commit']}",
    ]


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table whose first column has words, and the others figures."""
    return to_markdown(head, rows, [i == 0 for i in range(len(head))]).splitlines()


def write(result: dict[str, Any], markdown: str, name: str, folder: Path = RESULTS) -> None:
    """Write NAME.json and NAME.md, each as a whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    for suffix, text in ((".json", json.dumps(result, indent=1)), (".md", markdown.rstrip())):
        write_whole(folder / f"{name}{suffix}", f"{text}\n".encode())
