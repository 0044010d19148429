"""Move the pin: rebase the queue onto another release, then write queue, pin and tree together.

The rebase happens in a work tree. Until the last conflict is mended nothing outside it changes, so
that giving up means to remove it. What has to be remembered between the stops lies in its git
folder.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from . import git, worktree
from .apply import pristine
from .conflicts import conflicts, unmerged
from .release import called, two_trees, unpack_release
from .series import VARIANTS, PatchError, read_series

# apply has put vendor/ on the module path
from sdist import Pin, cache_dir, download_release, named, read_pin, sha256_of  # isort: skip
from tree import unpack  # isort: skip

STATE = "pyllama-bump.json"


@dataclass(frozen=True)
class State:
    """A bump that is under way."""

    package: str
    version: str
    sha256: str
    commit: str
    date: str
    archive: str  # the release's source archive
    series: str  # stamp of the queue that is being rebased


@dataclass(frozen=True)
class Project:
    """What a bump changes: the queue's folder, the pristine tree, the pin."""

    patches: Path
    tree: Path
    pin: Path


def start(project: Project, wanted: str, archive: Path | None, work: Path) -> int:
    """Begin to move to a release, "VERSION" of the pin's package or "PACKAGE==VERSION"; 0 when the
    pin has been moved, 1 at a conflict to mend."""
    series = read_series(project.patches)
    pin = read_pin(project.pin)
    if pristine(project.tree).sha256 != pin.sha256:
        raise PatchError(f"{project.tree} is not the pin's\nnext:\n  python vendor/fetch.py")
    package, version = named(wanted, pin.package)
    new = Pin(package, version, "", project.pin)
    if pin.requirement == new.requirement:
        raise PatchError(f"{pin.requirement} is the pin already\nnext:\n  name another release")
    if work.exists() and any(work.iterdir()):
        raise PatchError(
            f"{work} is not empty\nnext:\n"
            "  python patches/patchqueue.py bump --continue   # when a bump stopped there\n"
            f"  rm -rf {work}                                 # to give it up"
        )
    work.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{work.name}.tmp-", dir=work.parent) as temporary:
        root = Path(temporary)
        kept = archive.resolve() if archive else _keep_archive(new, root)
        release = unpack_release(kept, root)
        if release.requirement != new.requirement:
            raise PatchError(f"{archive} is {release.requirement}, not {new.requirement}")
        two_trees(series, project.tree, release.path, work)
        print(f"{pin.requirement} -> {release.requirement}, {called(release)}")
    what = release.sha256, release.commit, release.date
    state = State(package, version, *what, str(kept), series.stamp("patched"))
    (work / ".git" / STATE).write_text(json.dumps(asdict(state)), encoding="utf-8")
    arguments = ("--empty=drop", "--onto", "upstream", "pinned", "queue")
    return _go_on(project, work, state, *arguments)


def resume(project: Project, work: Path) -> int:
    """Go on after a conflict was mended; 0 when the pin has been moved, 1 at the next conflict."""
    try:
        state = State(**json.loads((work / ".git" / STATE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise PatchError(
            f"no bump is under way in {work}\nnext:\n  python patches/patchqueue.py bump RELEASE"
        ) from error
    if not git.under_way(work):
        return _finish(project, work, state)
    marked = [name for name in sorted(unmerged(work)) if _has_markers(work / name)]
    if marked:
        raise PatchError(
            f"conflict markers are left in {', '.join(marked)}\nnext:\n"
            f"  mend them in {work}, then: python patches/patchqueue.py bump --continue"
        )
    git.must(work, "add", "--all")
    return _go_on(project, work, state, "--continue")


def _go_on(project: Project, work: Path, state: State, *arguments: str) -> int:
    """Run git rebase to its end or to the next conflict."""
    settings = ("-c", "core.editor=true", "-c", "merge.conflictStyle=diff3")
    result = git.run(work, *settings, "rebase", *arguments)
    if result.returncode == 0:
        return _finish(project, work, state)
    if not git.under_way(work):
        raise PatchError(f"git rebase failed in {work}:\n{result.stdout}")
    commits = git.must(work, "rev-list", "--reverse", "pinned..queue").split()
    stopped = git.must(work, "rev-parse", "REBASE_HEAD").strip()
    names = [patch.name for patch in read_series(project.patches).patches]
    print(f"conflict: {names[commits.index(stopped)]}")
    for conflict in conflicts(work, "REBASE_HEAD"):
        print(f"  {conflict}")
    print(
        "next:\n"
        f"  cd {work}; git show REBASE_HEAD   # what the patch did\n"
        "  mend the files (or, when the patch is not needed any more: git rebase --skip)\n"
        f"  python patches/patchqueue.py bump --continue --work {work}"
    )
    return 1


def _finish(project: Project, work: Path, state: State) -> int:
    """Write queue, pin and tree; only now the project changes. Can be repeated when it fails."""
    series = read_series(project.patches)
    archive = Path(state.archive)
    if not archive.is_file() or sha256_of(archive) != state.sha256:
        raise PatchError(f"{archive} is gone or changed\nnext:\n  rm -rf {work}, and bump again")
    pin = Pin(state.package, state.version, state.sha256, project.pin)
    if series.stamp("patched") != state.series and read_pin(project.pin) != pin:
        raise PatchError(
            "the queue in patches/ changed since the bump began\nnext:\n"
            f"  rm -rf {work}, and bump again, or take the changes back"
        )
    print(worktree.export(series, work))
    _write_pin(project.pin, pin, state)
    unpack(archive, project.tree, pin)
    series = read_series(project.patches)
    print(f"pinned: {pin.requirement}, llama.cpp {state.commit}")
    for variant in VARIANTS:
        print(f"stamp of {variant}: {series.stamp(variant)}")
    try:
        print(worktree.check(series, project.tree))
    except PatchError as error:
        print(f"check: {error}")
    print("next:\n  patches/README.md, 'Moving the pin': build, test, commit")
    (work / ".git" / STATE).unlink()
    return 0


def _keep_archive(pin: Pin, root: Path) -> Path:
    """Download an archive, and keep it where builds look for it."""
    target = cache_dir() / pin.archive_name
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(download_release(pin.requirement, root), target)
    return target


def _write_pin(path: Path, pin: Pin, state: State) -> None:
    """Replace the line about llama.cpp and the requirement; other comments stay."""
    old = path.read_text(encoding="utf-8").splitlines()
    comments = [
        line for line in old if line.startswith("#") and not line.startswith("# llama.cpp ")
    ]
    lines = [
        *comments,
        f"# llama.cpp {state.commit} ({state.date})",
        f"{pin.requirement} --hash=sha256:{pin.sha256}",
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _has_markers(path: Path) -> bool:
    if not path.is_file():
        return False
    return re.search(rb"^(<<<<<<<|>>>>>>>) ", path.read_bytes(), re.M) is not None
