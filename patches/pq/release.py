"""Another release of upstream: try the series on it patch by patch, or move the pin to it.

Both happen in a repository with the pinned tree, the queue over it (branch ``queue``), and the
release's tree as another commit over the pinned one (tag ``upstream``). A bump changes nothing
outside of it until the last conflict is mended, so that giving up means to remove it.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from sdist import PACKAGES, Pin, cache_dir, download_release, named, sha256_of
from tree import Tree, unpack

from . import git
from .series import PIN, PatchError, Series, pristine, read_series


def latest(series: Series, source: Path, version: str | None, archive: Path | None) -> int:
    """Report how each patch fares on a release (default: the one of all packages whose llama.cpp is
    the newest); 1 when any does not fit."""
    pin = pristine(source)
    with tempfile.TemporaryDirectory(prefix="patchqueue-") as temporary:
        root = Path(temporary)
        wanted = [named(version, pin.requirement)] if version else [*PACKAGES]
        archives = [archive] if archive else [download_release(name, root) for name in wanted]
        releases = [unpack(path, root / path.stem, pin_of(path)) for path in archives]
        for tree in releases:
            print(f"{tree.requirement}, {called(tree)}, sha256 {tree.sha256}")
        print(f"pinned: {pin.requirement}, {called(pin)}")
        release = max(releases, key=age)
        if len(releases) > 1 and age(release) <= age(pin):
            print("the pin is the newest tree of both packages")
            return 0
        print(f"tried: {release.requirement}")
        commits = both_trees(series, source, release, root / "work")
        fits = [_fits(root / "work", *pair) for pair in zip(series.patches, commits, strict=True)]
    print(f"{len(fits)} patches, {fits.count(False)} to mend")
    return int(not all(fits))


def both_trees(series: Series, source: Path, release: Tree, work: Path) -> list[str]:
    """Make `work` the repository that the module describes; the commits of the patches."""
    git.build(series, source, work)
    git.must(work, "checkout", "--quiet", "--detach", "upstream")
    git.commit_tree(work, release.path, release.requirement)
    return git.must(work, "rev-list", "--reverse", "upstream~..queue").split()


def _fits(work: Path, patch: Path, commit: str) -> bool:
    """Commit one patch over those before it, and print whether it fits, and how. Where it conflicts
    its own side is taken, so that the report on a later one says what that one needs."""
    fits, how = True, "applies"
    result = git.run(work, *git.AM, str(patch))
    if result.returncode != 0:
        fits, how = False, "; ".join(git.conflicts(work, result.stdout))
        git.must(work, "am", "--skip")
        git.run(work, "cherry-pick", "--no-commit", "--strategy-option=theirs", commit)
        git.must(work, "add", "--all", "--force")
        git.must(work, "commit", "--quiet", "--allow-empty", "--message", patch.name)
    elif "Patch already applied" in result.stdout:
        fits, how = False, "already in this release: drop it"
    elif "3-way merge" in result.stdout:
        how = "applies with a three-way merge"
    print(f"{'ok  ' if fits else 'FAIL'} {patch.name}: {how}")
    return fits


def bump(series: Series, source: Path, work: Path, wanted: str | None, archive: Path | None) -> int:
    """Replay the queue on the release `wanted`, or (None) go on with that; 0 when queue, pin and
    tree have been moved, 1 at a conflict to mend."""
    state, step = work / ".git/pyllama-bump", [*map(str, series.patches)]
    if wanted:
        archive = _start(series, source, work, wanted, archive)
    elif not state.is_file():
        raise PatchError(f"no bump is under way in {work}\nnext:\n  bump RELEASE")
    elif left := git.conflicts(work):
        raise PatchError(f"conflict markers are left: {', '.join(left)}\nnext:\n  mend them")
    else:
        archive = Path(state.read_text(encoding="utf-8"))
        step = ["--continue"] * any((work / ".git").glob("rebase-*"))
    if series.files() != git.format_patches(work, "upstream~..queue"):
        raise PatchError(f"{series.folder} has other patches than those that are moved\nnext:\n"
                         f"  {git.QUEUE} check, or rm -rf {work}, and bump again")  # fmt: skip
    state.write_text(str(archive), encoding="utf-8")
    git.must(work, "add", "--all")
    if stopped := git.replay(work, *step):
        print(f"{stopped}\n{git.MEND.format(work=work)}")
        print(f"  {git.QUEUE} bump --continue --work {work}")
        return 1
    pin, pinned = pin_of(archive), source.parent / PIN
    tree, text = unpack(archive, source, pin), pinned.read_text(encoding="utf-8")
    text = re.sub(r"^# llama\.cpp .*", f"# llama.cpp {tree.commit} ({tree.date})", text, flags=re.M)
    text = re.sub(r"^\S+==.*", f"{pin.requirement} --hash=sha256:{pin.sha256}", text, flags=re.M)
    pinned.write_text(text, encoding="utf-8")
    git.export(series, work)
    state.unlink()
    print(f"pinned: {pin.requirement}, llama.cpp {tree.commit}")
    git.check(read_series(series.folder), source)
    return 0


def _start(series: Series, source: Path, work: Path, wanted: str, archive: Path | None) -> Path:
    """Make the repository of a bump; returns the path of the release's archive."""
    pin = pristine(source)
    requirement = named(wanted, pin.requirement)
    archive = (archive or download_release(requirement, cache_dir())).resolve()
    if pin_of(archive).requirement != requirement:
        raise PatchError(f"{archive} is not {requirement}\nnext:\n  name the release that it is")
    with tempfile.TemporaryDirectory() as temporary:
        release = unpack(archive, Path(temporary) / "tree", pin_of(archive))
        both_trees(series, source, release, work)
        print(f"{pin.requirement} -> {requirement}, {called(release)}")
    return archive


def pin_of(archive: Path) -> Pin:
    """The pin of an archive, by its bytes and the name that pip gives it."""
    name = re.fullmatch(r"(.+)-([^-]+)\.tar\.gz", archive.name)
    if name is None or (package := name[1].replace("_", "-")) not in PACKAGES:
        raise PatchError(f"{archive} has no name like {' or '.join(PACKAGES)}-VERSION.tar.gz")
    return Pin(package, name[2], sha256_of(archive), archive)


def age(tree: Tree) -> tuple[list[int], str]:
    """Orders trees: by llama.cpp's version, then ggml's, then the date of the archive."""
    names = ("CMakeLists.txt", "ggml/CMakeLists.txt")
    text = "\n".join((tree.path / name).read_text(encoding="utf-8") for name in names)
    pattern = r"^set\((?:LLAMA|GGML)_VERSION_(?:MAJOR|MINOR|PATCH) +(\d+)\)"
    return [int(number) for number in re.findall(pattern, text, re.M)], tree.date


def called(tree: Tree) -> str:
    """How a tree is named in reports."""
    version = ".".join(map(str, age(tree)[0][:3]))
    return f"llama.cpp {tree.commit[:12]} ({version}, {tree.date})"
