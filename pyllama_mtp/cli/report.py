"""Make a self-contained HTML page with plots, and tables, of files that
'pyllama-mtp matrix' wrote.

Writes index.html, one page that needs no network and no other file; every plot
as SVG and PNG (prefill and decode against prompt size, their ratios to no MTP,
acceptance by draft position); tables.md and tables.csv. Each model, machine and
class of prompts has a section. If a cell was measured more than once, the last
measurement counts.

The plots need matplotlib: pip install 'pyllama-mtp[report]'

examples:
  pyllama-mtp report matrix.jsonl
  pyllama-mtp report upstream.jsonl patched.jsonl -o comparison
"""

from __future__ import annotations

import argparse
import shlex
import sys

from pyllama_mtp.cli import PROGRAM
from pyllama_mtp.errors import UsageError


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("files", nargs="+", metavar="FILE.jsonl", help="cells to report together")
    parser.add_argument(
        "-o", "--output", default="report", metavar="DIR", help="folder to write to"
    )


def run(args: argparse.Namespace) -> int:
    """Read, draw, write, and say where."""
    from pyllama_mtp.measure.page import write_report
    from pyllama_mtp.measure.records import read_file

    files = [read_file(path) for path in args.files]
    cells = [cell for file in files for cell in file.cells]
    commands = {run: words for file in files for run, words in file.commands.items()}
    if not cells:
        raise UsageError(f"no cell in {', '.join(args.files)}; nothing to report")
    words = [PROGRAM, "report", *args.files, "-o", args.output]
    written = write_report(cells, args.output, command=shlex.join(words), commands=commands)
    print(written[0])
    print(f"and beside it: {', '.join(path.name for path in written[1:])}", file=sys.stderr)
    return 0
