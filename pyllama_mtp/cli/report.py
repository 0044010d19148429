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
  pyllama-mtp report matrix.jsonl --published
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
    parser.add_argument(
        "--published",
        nargs="?",
        const="",
        metavar="FILE.csv",
        help="draw published figures behind, from this file or else those of the package",
    )


def run(args: argparse.Namespace) -> int:
    """Read, draw, write, and say where."""
    from pyllama_mtp.measure.published import read_published
    from pyllama_mtp.measure.recordfile import read_file
    from pyllama_mtp.measure.records import run_commands
    from pyllama_mtp.measure.report.page import write_report

    found = [read_file(path) for path in args.files]
    cells = [cell for file in found for cell in file.cells]
    commands = {run: words for file in found for run, words in run_commands(file).items()}
    if not cells:
        raise UsageError(f"no cell in {', '.join(args.files)}; nothing to report")
    words = [PROGRAM, "report", *args.files, "-o", args.output]
    published = [] if args.published is None else read_published(args.published or None)
    if args.published is not None:
        words += ["--published", *filter(None, [args.published])]
    files = write_report(
        cells, args.output, published=published, command=shlex.join(words), commands=commands
    )
    print(files[0])
    print(f"and beside it: {', '.join(path.name for path in files[1:])}", file=sys.stderr)
    return 0
