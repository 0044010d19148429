"""Try the series on another release of upstream, patch by patch, without touching pin or queue."""

from __future__ import annotations

import re
import shutil
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

from . import git, worktree
from .apply import pristine
from .series import Patch, PatchError, Series

# apply has put vendor/ on the module path
from sdist import FetchError, Pin, download_release, sha256_of  # isort: skip
from tree import Tree, unpack  # isort: skip


@dataclass(frozen=True)
class Outcome:
    """How one patch fared on the other release."""

    name: str
    fits: bool
    how: str


def latest(series: Series, source: Path, version: str | None, archive: Path | None) -> int:
    """Report how each patch fares on a release (default: the newest); 1 when any does not fit."""
    pin = pristine(source)
    with tempfile.TemporaryDirectory(prefix="patchqueue-") as temporary:
        root = Path(temporary)
        release = _unpack_release(version, archive, root)
        print(f"{release.requirement}, llama.cpp {release.commit[:12]}, {release.sha256}")
        print(f"pinned: {pin.requirement}, llama.cpp {pin.commit[:12]}")
        outcomes = try_series(series, source, release.path, root / "work")
    for outcome in outcomes:
        print(f"{'ok  ' if outcome.fits else 'FAIL'} {outcome.name}: {outcome.how}")
    failed = sum(not outcome.fits for outcome in outcomes)
    print(f"{len(outcomes)} patches, {failed} to mend")
    return 1 if failed else 0


def _unpack_release(version: str | None, archive: Path | None, root: Path) -> Tree:
    """Get the release's archive, which nothing verifies, and unpack it below `root`."""
    try:
        if archive is None:
            archive = download_release(version, root)
        pin = Pin(_version_of(archive), sha256_of(archive), archive)
        return unpack(archive, root / "release", pin)
    except (FetchError, OSError) as error:
        raise PatchError(str(error)) from error


def _version_of(archive: Path) -> str:
    """The version in the name of the archive's top folder."""
    try:
        with tarfile.open(archive, "r:gz") as tar:
            first = tar.next()
    except tarfile.TarError as error:
        raise PatchError(f"{archive} is not a source archive: {error}") from error
    top = first.name.split("/")[0] if first else ""
    return top.rpartition("-")[2] or "unknown"


def try_series(series: Series, pinned: Path, release: Path, work: Path) -> list[Outcome]:
    """Apply the series to `release` in a scratch repository that knows the pinned files too.

    The pinned files and the patched ones are in its history, which is what a three-way merge needs.
    A patch that does not fit is left out, and the later ones are tried without it.
    """
    worktree.stage_untouched(series, pinned, work)
    git.new_repository(work, "pinned")
    worktree.replay(series, work)
    git.must(work, "checkout", "--quiet", "-b", "release", "upstream")
    for name in sorted({n for patch in series.patches for n in patch.touched()}):
        (work / name).unlink(missing_ok=True)
        if (release / name).is_file():
            (work / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(release / name, work / name)
    git.must(work, "add", "--all", "--force")
    git.must(work, "commit", "--quiet", "--allow-empty", "--message", "release")
    return [_try_patch(patch, work) for patch in series.patches]


def _try_patch(patch: Patch, work: Path) -> Outcome:
    """Apply one patch to the scratch repository and commit it, or leave things as they were."""
    path = str(patch.path)
    strict = git.run(work, "apply", "--index", "--verbose", "--whitespace=nowarn", path)
    if strict.returncode == 0:
        git.must(work, "commit", "--quiet", "--message", patch.name)
        moved = re.findall(r"offset (-?\d+) lines?", strict.stdout)
        return Outcome(
            patch.name, True, f"applies ({len(moved)} hunks moved)" if moved else "applies"
        )
    if git.run(work, "apply", "--check", "--reverse", path).returncode == 0:
        return Outcome(patch.name, False, "already in this release: drop it")
    merged = git.run(work, "apply", "--index", "--3way", "--whitespace=nowarn", path)
    if merged.returncode == 0:
        git.must(work, "commit", "--quiet", "--allow-empty", "--message", patch.name)
        return Outcome(patch.name, True, "applies with a three-way merge: export it anew")
    files = git.must(work, "diff", "--name-only", "--diff-filter=U").split()
    reasons = re.findall(r"^error: (?:patch failed: )?(\S+?):", strict.stdout, re.M)
    git.must(work, "reset", "--quiet", "--hard")
    return Outcome(patch.name, False, f"conflicts in {', '.join(sorted(set(files or reasons)))}")
