"""Writing results: JSON with every raw sample, Markdown to read; no host or folder is named."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchkit.paths import RESULTS


def command_line(argv: Sequence[str] | None = None) -> str:
    """The command as typed, every path cut down to its file name."""
    words = list(sys.argv if argv is None else argv)
    return " ".join(["python", f"bench/{Path(words[0]).name}", *map(_without_folder, words[1:])])


def _without_folder(word: str) -> str:
    option, equals, value = word.rpartition("=")
    return f"{option}{equals}{Path(value).name}" if "/" in value else word


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


def header(machine: dict[str, Any], build: dict[str, Any]) -> dict[str, Any]:
    """What every result file begins with; `build` is a library's stamp, and what else is known."""
    now = datetime.now(timezone.utc)
    return {
        "schema": 1,
        "date": now.strftime("%Y-%m-%d"),
        "command": command_line(),
        "project_commit": project_commit(),
        "machine": machine,
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
        *(f"- Accelerator: {device}" for device in machine["devices"]),
        f"- llama.cpp {build['upstream_commit'][:12]}, compiled by {build['compiler']}; "
        f"CPU features: {build['cpu_features']}",
        f"- Our library: {build['variant']}, patch series {build['series'][:12]}, "
        f"commit {result['project_commit']}",
    ]


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns padded so that the source reads as a table too; all but the first right-aligned."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "| " + " | ".join(padded) + " |"

    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return [line(head), line(rule), *map(line, rows)]


def write(result: dict[str, Any], markdown: str, name: str, folder: Path = RESULTS) -> list[Path]:
    """Write NAME.json and NAME.md, each in one step; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {".json": json.dumps(result, indent=1) + "\n", ".md": markdown.rstrip() + "\n"}
    paths = []
    for suffix, text in texts.items():
        path = folder / (name + suffix)
        part = path.with_name(path.name + ".part")
        part.write_text(text)
        part.replace(path)
        paths.append(path)
    return paths
