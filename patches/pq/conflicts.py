"""What a merge of a patch left undecided: in which files, and which hunks of the patch."""

from __future__ import annotations

import re
from pathlib import Path

from . import git

REGION = re.compile(rb"^<{7} [^\n]*\n(.*?)^={7}\n(.*?)^>{7} [^\n]*\n", re.M | re.S)
HUNK = re.compile(r"^@@ -\d+(?:,\d+)? \+(\d+)(?:,(\d+))? @@", re.M)
OURS, THEIRS = "2", "3"  # git's stages: what was there, what the patch makes of it


def conflicts(work: Path, commit: str) -> list[str]:
    """The undecided files of the merge of `commit` that is under way in `work`, and their hunks."""
    return [_describe(work, commit, file, stages) for file, stages in unmerged(work).items()]


def take_the_patchs_side(work: Path) -> None:
    """Decide every open conflict for the patch, and stage the outcome."""
    for file, stages in unmerged(work).items():
        path = work / file
        if THEIRS not in stages:
            path.unlink(missing_ok=True)
        elif OURS not in stages:
            git.must(work, "checkout", "--theirs", "--", file)
        else:
            path.write_bytes(REGION.sub(lambda region: region[2], path.read_bytes()))
    git.must(work, "add", "--all", "--force")


def unmerged(work: Path) -> dict[str, set[str]]:
    """Files with a conflict that nobody has marked as mended, and git's stages of each."""
    files: dict[str, set[str]] = {}
    for line in git.must(work, "ls-files", "--unmerged", "-z").split("\0"):
        if line:
            entry, _, name = line.partition("\t")
            files.setdefault(name, set()).add(entry.split()[2])
    return files


def _describe(work: Path, commit: str, file: str, stages: set[str]) -> str:
    if OURS not in stages:
        return f"{file} (gone or moved in the release)"
    if THEIRS not in stages:
        return f"{file} (removed by the patch, changed in the release)"
    text = git.must(work, "show", "--format=", "--unified=3", commit, "--", file)
    hunks = [(int(start), int(size or 1)) for start, size in HUNK.findall(text)]
    result = git.must(work, "show", f"{commit}:{file}").encode().splitlines()
    hit: set[int] = set()
    at = 0
    for region in REGION.finditer((work / file).read_bytes()):
        lines = region[2].splitlines()
        at = _find(lines, result, at)
        last = at + max(len(lines), 1)
        hit |= {n for n, (s, size) in enumerate(hunks, 1) if s - 1 < last and at < s - 1 + size}
    which = ", ".join(map(str, sorted(hit)))
    return f"{file} (hunk{'s' * (len(hit) > 1)} {which} of {len(hunks)})"


def _find(lines: list[bytes], text: list[bytes], start: int) -> int:
    """Index of the first occurrence of `lines` in `text` at or after `start`."""
    for at in range(start, len(text) - len(lines) + 1):
        if text[at : at + len(lines)] == lines:
            return at
    return start
