"""Commands that read measurements: compare them, make a page of them."""

from __future__ import annotations

import argparse
import json
import shlex
import sys

from pyllama_mtp.cli import PROGRAM, parsing
from pyllama_mtp.errors import UsageError

SLOWER = 1


def percent(text: str) -> float:
    """An argparse type: "3%" or "0.03", both as 0.03."""
    number, sign, rest = text.strip().partition("%")
    try:
        value = float(number) / 100 if sign else float(number)
    except ValueError:
        value = -1.0
    if rest or not 0 <= value < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a share of a speed; give it as 3% or 0.03, from 0% to below 100%"
        )
    return value


def variant_pair(text: str) -> tuple[str, str]:
    """An argparse type: "OLD,NEW"."""
    names = [name.strip() for name in text.split(",")]
    if len(names) != 2 or not all(names):
        raise argparse.ArgumentTypeError(f"{text!r} is not two names, as in upstream,patched")
    return names[0], names[1]


class Compare:
    """Compare two files of 'pyllama-mtp matrix', or two library variants in one file,
    cell by cell. Exit with 1 if something got slower than the threshold allows.

    Sample by sample, NEW is divided by OLD; above 1 is faster. A line is SLOWER if
    its ratio is past the threshold and its whole interval below 1: noise alone does
    that in at most one of 20 comparisons. It is 'unclear' if the ratio is past the
    threshold, but noise can be the reason. To find a slow-down of 5 %, leave the
    threshold at 3 % and take 7 repeats or more.

    Two files are from different times, so their speeds also depend on how busy the
    machine was. Two variants in the file of one run, given with --variants, do not.

    Exit codes: 0 nothing is slower, 1 something is, 2 the comparison failed.

    examples:
      pyllama-mtp compare before.jsonl after.jsonl
      pyllama-mtp compare matrix.jsonl --variants upstream,patched
      pyllama-mtp compare main.jsonl branch.jsonl --threshold 2% --format markdown
    """

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        """Add the options."""
        parser.add_argument(
            "files", nargs="*", metavar="FILE.jsonl", help="OLD and NEW; or one, with --variants"
        )
        parser.add_argument(
            "--variants",
            type=variant_pair,
            metavar="OLD,NEW",
            help="compare these library variants of one file, as in upstream,patched",
        )
        parser.add_argument(
            "--threshold",
            type=percent,
            default="3%",
            metavar="PERCENT",
            help="how much slower is too much, as 3%% or 0.03",
        )
        parsing.add_format_option(parser)

    @staticmethod
    def run(args: argparse.Namespace) -> int:
        """Compare, print, and say by the exit code whether something got slower."""
        from pyllama_mtp.measure.compare import compare, markdown, of_variants, print_comparison
        from pyllama_mtp.measure.records import read_cells

        names: tuple[str, str]
        if args.variants:
            if len(args.files) != 1:
                raise UsageError("--variants compares within one file; give one")
            names = args.variants
            old, new = of_variants(read_cells(args.files[0]), *names)
        elif len(args.files) == 2:
            names = args.files[0], args.files[1]
            old, new = (read_cells(path) for path in names)
            for path, side in zip(names, (old, new), strict=True):
                if not any(cell.samples for cell in side):
                    raise UsageError(f"{path} holds no measured cell")
        else:
            raise UsageError("give two files, or one file and --variants OLD,NEW")
        found = compare(old, new, threshold=args.threshold)
        if args.format == "json":
            print(json.dumps({"old": names[0], "new": names[1], **found.to_dict()}, indent=1))
        elif args.format == "markdown":
            print(markdown(found, names))
        else:
            print_comparison(found, names, sys.stdout)
        return SLOWER if found.slower else 0


class Report:
    """Make a self-contained HTML page with plots, and tables, of files that
    'pyllama-mtp matrix' wrote.

    Writes index.html, one page that needs no network and no other file; every plot
    as SVG (prefill and decode against prompt size, their ratios to no MTP,
    acceptance by draft position, and a chart over several models); tables.md and
    tables.csv. Each model, machine and class of prompts has a section. Of a cell
    that was measured more than once, the last measurement counts.

    The plots need matplotlib: pip install 'pyllama-mtp[report]'

    examples:
      pyllama-mtp report matrix.jsonl
      pyllama-mtp report upstream.jsonl patched.jsonl -o comparison
    """

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        """Add the options."""
        parser.add_argument(
            "files", nargs="+", metavar="FILE.jsonl", help="cells to report together"
        )
        parser.add_argument(
            "-o", "--output", default="report", metavar="DIR", help="folder to write to"
        )

    @staticmethod
    def run(args: argparse.Namespace) -> int:
        """Read, draw, write, and say where."""
        from pyllama_mtp.measure.page import write_report
        from pyllama_mtp.measure.records import read_file

        files = [read_file(name) for name in args.files]
        cells = [cell for file in files for cell in file.cells]
        if not cells:
            raise UsageError(f"no cell in {', '.join(args.files)}; nothing to report")
        words = shlex.join([PROGRAM, "report", *args.files, "-o", args.output])
        commands = {run: typed for file in files for run, typed in file.commands.items()}
        written = write_report(cells, args.output, command=words, commands=commands)
        print(written[0])
        print(f"and beside it: {', '.join(path.name for path in written[1:])}", file=sys.stderr)
        return 0
