#!/usr/bin/env python3
"""Lay out the pinned llama.cpp tree: get the archive, verify it, unpack the part that is needed.

The pin (``llama-cpp.pin``, next to this file) is one pip requirement line with a hash. The archive
is looked for in this order, and its sha256 is checked every time, whoever supplied it:

1. ``--archive FILE``, 2. the environment variable ``PYLLAMA_MTP_SDIST``, 3. the user's cache folder
(``$XDG_CACHE_HOME/pyllama-mtp`` or ``~/.cache/pyllama-mtp``), 4. ``pip download`` into it.

The tree appears under its final name in one rename, with its stamp inside, so an interrupted run
leaves no half tree behind. Standard library only: this also runs in an isolated build environment.
Exit codes: 0 the tree is there, 2 it is not and the message says why and what to do.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from sdist import DISK_FULL, FetchError, Pin, cache_dir, download, read_pin, sha256_of
from tree import Tree, check_tree, read_tree, unpack

HERE = Path(__file__).resolve().parent
PIN_FILE = HERE / "llama-cpp.pin"
DROP_IN_PIN_FILE = HERE / "drop-in.pin"
DEFAULT_DEST = HERE / "llama.cpp"
ARCHIVE_VARIABLE = "PYLLAMA_MTP_SDIST"


def ensure_tree(
    dest: Path = DEFAULT_DEST, archive: Path | None = None, pin_file: Path = PIN_FILE
) -> Tree:
    """Make sure that `dest` holds the pinned tree, and describe it.

    A complete tree is recognised by its stamp, file count and total size (milliseconds, nothing is
    downloaded). Anything less is unpacked again. Raises FetchError with a message for the user.
    """
    dest = dest.resolve()
    pin = read_pin(pin_file)
    tree = read_tree(dest, pin)
    if tree is not None:
        return tree
    named_by = "--archive"
    if archive is None and os.environ.get(ARCHIVE_VARIABLE):
        archive, named_by = Path(os.environ[ARCHIVE_VARIABLE]), ARCHIVE_VARIABLE
    try:
        return unpack(verified_archive(pin, archive, named_by), dest, pin)
    except OSError as error:
        raise disk_error(error, dest) from error


def verified_archive(pin: Pin, archive: Path | None = None, named_by: str = "--archive") -> Path:
    """The path of an archive whose sha256 is the pin's; downloads it when nobody has it."""
    if archive is not None:
        _verify_given(archive, pin, named_by)
        return archive
    cached = cache_dir() / pin.archive_name
    if cached.is_file():
        if sha256_of(cached) == pin.sha256:
            return cached
        print(f"vendor: {cached} is damaged, it is downloaded again", file=sys.stderr)
    return download(pin, cached)


def _verify_given(archive: Path, pin: Pin, named_by: str) -> None:
    """Refuse an archive given by hand that is missing or is not the pinned one."""
    if not archive.is_file():
        raise FetchError(
            f"the archive given with {named_by} cannot be read",
            expected=f"a file, {pin.archive_name}",
            found=f"{archive}: {'a folder' if archive.is_dir() else 'no such file'}",
            todo=f"give the path of the archive, or leave {named_by} out to let pip download it",
        )
    digest = sha256_of(archive)
    if digest != pin.sha256:
        raise FetchError(
            f"the archive given with {named_by} is not the pinned one",
            expected=f"sha256 {pin.sha256} ({pin.requirement})",
            found=f"sha256 {digest} ({archive}, {archive.stat().st_size} bytes)",
            todo=f"give the source archive of {pin.requirement}, whole and unchanged; "
            f"to move to another release, change {pin.path.name}",
        )


def disk_error(error: OSError, dest: Path) -> FetchError:
    """Translate an operating system error met while writing `dest` into a message for the user."""
    if error.errno in DISK_FULL:
        return FetchError(
            "no space left while unpacking llama.cpp",
            expected=f"about 50 MB free in {dest.parent}",
            found=f"{error}",
            todo=f"free some space, or choose another place than {dest} with --dest; "
            "what was unpacked so far has been removed",
        )
    return FetchError(
        "the llama.cpp tree cannot be written",
        expected=f"a folder that can be written: {dest.parent}",
        found=f"{error}",
        todo="mend the permissions, or choose another place with --dest",
    )


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Lay out the pinned llama.cpp tree.")
    parser.add_argument(
        "--archive", type=Path, metavar="FILE", help="use this source archive, no download"
    )
    parser.add_argument(
        "--dest", type=Path, metavar="DIR", default=DEFAULT_DEST, help="default: %(default)s"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="only verify that DIR holds the pinned tree, byte for byte; changes nothing",
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    args = parse_arguments(argv)
    try:
        if args.check:
            tree = check_tree(args.dest, read_pin(PIN_FILE))
        else:
            tree = ensure_tree(args.dest, args.archive, PIN_FILE)
    except FetchError as error:
        print(f"vendor: {error}", file=sys.stderr)
        return 2
    print(f"llama.cpp {tree.commit} ({tree.requirement}, {tree.files} files) in {tree.path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
