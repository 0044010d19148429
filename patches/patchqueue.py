#!/usr/bin/env python3
"""The patch queue over llama.cpp: apply, check, edit, export, try or move to another release.

Standard library and git. Exit codes: 0 done, 1 `latest` or `bump` found a patch that does not
apply, 2 an error whose message names the patch and the next commands. README.md has examples.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from pq import PATCHES
from pq.apply import apply_series
from pq.git import check, edit, export
from pq.release import bump, latest
from pq.series import VARIANTS, PatchError, read_series
from sdist import FetchError  # of vendor/

ROOT = PATCHES.parent
RELEASE = "as in xllamacpp==2026.10.11549, or a version of the package that is pinned"
DEST = ("--dest", {"type": Path, "required": True, "help": "the patched copy"})
WORK = ("--work", {"type": Path, "required": True, "help": "the repository's folder"})
VARIANT = ("--variant", {"choices": VARIANTS, "default": "patched"})
ARCHIVE = ("--archive", {"type": Path, "help": "the release's archive, under the name it has"})
VERSION = ("--version", {"metavar": "RELEASE", "help": RELEASE})
STAT = ("--stat", {"action": "store_true", "help": "print the lines that differ, and ours"})
COMMANDS = {
    "apply": ("copy the pristine tree and apply a variant's patches", DEST, VARIANT,
              lambda queue, a: apply_series(queue, a.tree, a.dest, a.variant)),
    "check": ("the series applies to the pin, exports to the same bytes and keeps its rules", STAT,
              lambda queue, a: check(queue, a.tree, a.stat)),
    "edit": ("make a git repository with one commit per patch", WORK,
             lambda queue, a: edit(queue, a.tree, a.work.resolve())),
    "export": ("write the patches from the repository that edit made", WORK,
               lambda queue, a: export(queue, a.work.resolve())),
    "stamp": ("print the sha256 of a variant's patches and sources", VARIANT,
              lambda queue, a: print(queue.stamp(a.variant))),
    "latest": ("try the series on a release (default: the newest), patch by patch", VERSION,
               ARCHIVE, lambda queue, a: latest(queue, a.tree, a.version, a.archive)),
    "bump": ("move the pin to another release: rebase the queue onto it", ARCHIVE,
             ("--work", {"type": Path, "default": ROOT / "build/bump"}),
             lambda queue, a: bump(queue, a.tree, a.work.resolve(), a.version, a.archive)),
}  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="The patch queue over llama.cpp.")
    commands = parser.add_subparsers(required=True)
    for name, (text, *options, function) in COMMANDS.items():
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(function=function)
        sub.add_argument("--patches", type=Path, default=PATCHES, help="the queue's folder")
        sub.add_argument("--tree", type=Path, default=ROOT / "vendor/llama.cpp", help="pristine")
        for option, settings in options:
            sub.add_argument(option, **settings)
    which = sub.add_mutually_exclusive_group(required=True)  # of bump, the last
    which.add_argument("version", nargs="?", metavar="RELEASE", help=RELEASE)
    which.add_argument("--continue", action="store_true", help="a conflict is mended")
    args = parser.parse_args(argv)
    try:
        return args.function(read_series(args.patches), args) or 0
    except (PatchError, FetchError, OSError) as error:
        print(f"patches: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
