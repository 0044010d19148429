"""Try the series on another release of upstream, patch by patch, without touching pin or queue."""

from __future__ import annotations

import re
import shutil
import tarfile
import tempfile
from pathlib import Path

from . import git, worktree
from .apply import pristine
from .conflicts import conflicts, take_the_patchs_side
from .series import Patch, PatchError, Series

# apply has put vendor/ on the module path
from sdist import PACKAGES, Pin, download_release, named, sha256_of  # isort: skip
from tree import Tree, unpack  # isort: skip


def latest(series: Series, source: Path, version: str | None, archive: Path | None) -> int:
    """Report how each patch fares on a release (default: the one of all packages whose llama.cpp is
    the newest); 1 when any does not fit.

    Each is applied to the release in a scratch repository, over those before it. Where one
    conflicts its own side is taken, so that what is said of the later ones is what they need
    themselves, and not that an earlier one is missing.
    """
    pin = pristine(source)
    with tempfile.TemporaryDirectory(prefix="patchqueue-") as temporary:
        root = Path(temporary)
        if version is None and archive is None:
            found = [unpack_release(download_release(p, root), root) for p in PACKAGES]
            release = max(found, key=age)
        else:
            found, package = [], pin.requirement.partition("==")[0]
            wanted = "==".join(named(version, package)) if version else ""
            release = unpack_release(archive or download_release(wanted, root), root)
        for tree in found or [release]:
            print(f"{tree.requirement}, {called(tree)}, sha256 {tree.sha256}")
        print(f"pinned: {pin.requirement}, {called(pin)}")
        if found and age(release) <= age(pin):
            print("the pin is the newest tree of both packages")
            return 0
        print(f"tried: {release.requirement}")
        work = root / "work"
        two_trees(series, source, release.path, work)
        commits = git.must(work, "rev-list", "--reverse", "pinned..queue").split()
        pairs = zip(series.patches, commits, strict=True)
        outcomes = [_try_patch(patch, commit, work) for patch, commit in pairs]
    for patch, (fits, how) in zip(series.patches, outcomes, strict=True):
        print(f"{'ok  ' if fits else 'FAIL'} {patch.name}: {how}")
    failed = sum(not fits for fits, _ in outcomes)
    print(f"{len(outcomes)} patches, {failed} to mend")
    if failed:
        print("each was tried over those before it, their conflicts decided for the patch")
    return 1 if failed else 0


def age(tree: Tree) -> tuple[list[int], str]:
    """Orders trees: by llama.cpp's version, then ggml's, then the date of the archive.

    The build's number would say it alone, but llama-cpp-python does not have it.
    """
    texts = [
        (tree.path / name).read_text("utf-8") for name in ("CMakeLists.txt", "ggml/CMakeLists.txt")
    ]
    pattern = r"^set\((?:LLAMA|GGML)_VERSION_(?:MAJOR|MINOR|PATCH) +(\d+)\)"
    return [int(number) for number in re.findall(pattern, "\n".join(texts), re.M)], tree.date


def called(tree: Tree) -> str:
    """How a tree is named in reports."""
    version = ".".join(map(str, age(tree)[0][:3]))
    return f"llama.cpp {tree.commit[:12]} ({version}, {tree.date})"


def unpack_release(archive: Path, root: Path) -> Tree:
    """Unpack a release's archive, which nothing verifies, below `root`."""
    pin = Pin(*_release_of(archive), sha256_of(archive), archive)
    return unpack(archive, root / pin.package, pin)


def _release_of(archive: Path) -> tuple[str, str]:
    """Package and version, by the name of the archive's top folder."""
    try:
        with tarfile.open(archive, "r:gz") as tar:
            first = tar.next()
    except (tarfile.TarError, OSError) as error:
        raise PatchError(f"{archive} is not a source archive: {error}") from error
    top, _, version = (first.name if first else "").partition("/")[0].rpartition("-")
    package = top.replace("_", "-")
    if package not in PACKAGES:
        raise PatchError(f"{archive} is no source archive of {' or '.join(PACKAGES)}")
    return package, version


def two_trees(series: Series, pinned: Path, release: Path, work: Path) -> None:
    """Make `work` a repository with both trees: what a three-way merge of the patches needs.

    Tag ``pinned`` and branch ``queue``: the pinned tree, and one commit per patch over it.
    Tag ``upstream``: the other release's tree, as one commit over the pinned one.
    """
    hidden = shutil.ignore_patterns(".pyllama-*")
    shutil.copytree(pinned, work, dirs_exist_ok=True, ignore=hidden)
    git.new_repository(work, "the pinned release")
    git.must(work, "tag", "pinned")
    worktree.replay(series, work)
    git.must(work, "checkout", "--quiet", "--detach", "pinned")
    for entry in work.iterdir():
        if entry.name != ".git":
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    shutil.copytree(release, work, dirs_exist_ok=True, ignore=hidden)
    git.must(work, "add", "--all", "--force")
    git.must(work, "commit", "--quiet", "--allow-empty", "--message", "the other release")
    git.must(work, "tag", "--force", "upstream")


def _try_patch(patch: Patch, commit: str, work: Path) -> tuple[bool, str]:
    """Apply one patch to the scratch repository and commit it: whether it fits, and how."""
    path = str(patch.path)
    strict = git.run(work, "apply", "--index", "--verbose", "--whitespace=nowarn", path)
    if strict.returncode == 0:
        _commit(work, patch)
        moved = re.findall(r"offset (-?\d+) lines?", strict.stdout)
        return True, f"applies ({len(moved)} hunks moved)" if moved else "applies"
    taken_over = False, "already in this release: drop it"
    if git.run(work, "apply", "--check", "--reverse", path).returncode == 0:
        return taken_over
    if git.run(work, "cherry-pick", "--no-commit", commit).returncode == 0:
        if git.run(work, "diff", "--cached", "--quiet").returncode == 0:
            return taken_over
        _commit(work, patch)
        return True, "applies with a three-way merge: export it anew"
    found = conflicts(work, commit)
    if not found:
        raise PatchError(f"{patch.name} cannot be tried:\n{strict.stdout}")
    take_the_patchs_side(work)
    _commit(work, patch)
    return False, f"conflicts in {', '.join(found)}"


def _commit(work: Path, patch: Patch) -> None:
    git.must(work, "commit", "--quiet", "--allow-empty", "--message", patch.name)
