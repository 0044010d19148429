#!/usr/bin/env python3
"""The patch queue over llama.cpp: apply, check, edit, export, try or move to another release.

    python patches/patchqueue.py apply --dest DIR --variant patched
    python patches/patchqueue.py check
    python patches/patchqueue.py edit --work DIR      # change, commit, then:
    python patches/patchqueue.py export --work DIR
    python patches/patchqueue.py latest
    python patches/patchqueue.py bump RELEASE         # and after each conflict: bump --continue

Standard library and git. Exit codes: 0 done, 1 `latest` or `bump` found a patch that does not
apply, 2 an error whose message names the patch and the next commands.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from pq.apply import apply_series
from pq.series import PATCHES, VARIANTS, PatchError, read_series
from pq.worktree import check, edit, export
from sdist import FetchError  # vendor/, which pq.apply has put on the module path

TREE = PATCHES.parent / "vendor" / "llama.cpp"
PIN = PATCHES.parent / "vendor" / "llama-cpp.pin"
BUMP = PATCHES.parent / "build" / "bump"
RELEASE = "as in xllamacpp==2026.10.11549, or a version of the package that is pinned"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(description="The patch queue over llama.cpp.")
    top.add_argument("--patches", type=Path, default=PATCHES, help="the queue's folder")
    commands = top.add_subparsers(dest="command", required=True)

    def command(name: str, text: str, *, tree: bool = True) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        if tree:
            sub.add_argument("--tree", type=Path, default=TREE, help="the pristine tree")
        return sub

    sub = command("apply", "copy the pristine tree and apply a variant's patches")
    sub.add_argument("--dest", type=Path, required=True, help="the patched copy")
    sub.add_argument("--variant", choices=VARIANTS, default="patched")
    command("check", "the series applies to the pin and exports to the same bytes")
    sub = command("edit", "make a git repository with one commit per patch")
    sub.add_argument("--work", type=Path, required=True, help="an empty or new folder")
    sub = command("export", "write the patches from the repository that edit made", tree=False)
    sub.add_argument("--work", type=Path, required=True)
    sub = command("stamp", "print the sha256 of a variant's patches", tree=False)
    sub.add_argument("--variant", choices=VARIANTS, default="patched")
    sub = command("latest", "try the series on a release (default: the newest), patch by patch")
    given = sub.add_mutually_exclusive_group()
    given.add_argument("--version", metavar="RELEASE", help=RELEASE)
    given.add_argument("--archive", type=Path, help="its source archive, already downloaded")
    sub = command("bump", "move the pin to another release: rebase the queue onto it")
    sub.add_argument("version", nargs="?", metavar="RELEASE", help=RELEASE)
    sub.add_argument("--continue", dest="resume", action="store_true", help="a conflict is mended")
    sub.add_argument("--archive", type=Path, help="its source archive, already downloaded")
    sub.add_argument("--work", type=Path, default=BUMP, help="default: %(default)s")
    sub.add_argument("--pin", type=Path, default=PIN, help="default: %(default)s")
    return top


def run(args: argparse.Namespace) -> int:
    """Carry out one command; returns the exit code."""
    if args.command == "bump":
        return run_bump(args)
    series = read_series(args.patches)
    if args.command == "apply":
        done = apply_series(series, args.tree, args.dest, args.variant)
        change = f"{done.written} files written, {done.removed} removed"
        state = change if done.written or done.removed else "up to date"
        print(f"{args.variant}: llama.cpp {done.commit[:12]} + {done.patches} patches: {state}")
    elif args.command == "check":
        print(check(series, args.tree))
    elif args.command == "edit":
        print(edit(series, args.tree, args.work.resolve()))
    elif args.command == "export":
        print(export(series, args.work.resolve()))
    elif args.command == "stamp":
        print(series.stamp(args.variant))
    else:
        from pq.release import latest

        return latest(series, args.tree, args.version, args.archive)
    return 0


def run_bump(args: argparse.Namespace) -> int:
    """Begin a bump, or go on with the one that stopped."""
    from pq import bump

    if args.resume == bool(args.version):
        raise PatchError("bump takes a release, or --continue\nnext:\n  bump RELEASE")
    project = bump.Project(args.patches.resolve(), args.tree.resolve(), args.pin.resolve())
    if args.resume:
        return bump.resume(project, args.work.resolve())
    return bump.start(project, args.version, args.archive, args.work.resolve())


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    try:
        return run(parser().parse_args(argv))
    except (PatchError, FetchError) as error:
        print(f"patches: {error}", file=sys.stderr)
    except OSError as error:
        hint = "next:\n  free some space or mend the permissions, and run the same command again"
        print(f"patches: files cannot be written: {error}\n{hint}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    raise SystemExit(main())
