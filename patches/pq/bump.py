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
from .release import two_trees, unpack_release
from .series import VARIANTS, PatchError, read_series

# apply has put vendor/ on the module path
from sdist import Pin, cache_dir, read_pin, sha256_of  # isort: skip
from tree import unpack  # isort: skip

STATE = "pyllama-bump.json"


@dataclass(frozen=True)
class State:
    """A bump that is under way."""

    version: str
    sha256: str
    commit: str
    archive: str  # the release's source archive
    series: str  # stamp of the queue that is being rebased


@dataclass(frozen=True)
class Project:
    """What a bump changes: the queue's folder, the pristine tree, the pin."""

    patches: Path
    tree: Path
    pin: Path


def start(project: Project, version: str, archive: Path | None, work: Path) -> int:
    """Begin to move to `version`; 0 when the pin has been moved, 1 at a conflict to mend."""
    series = read_series(project.patches)
    pin = read_pin(project.pin)
    if pristine(project.tree).sha256 != pin.sha256:
        raise PatchError(f"{project.tree} is not the pin's\nnext:\n  python vendor/fetch.py")
    if pin.version == version:
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
        release = unpack_release(version, archive, root)
        if release.requirement.rpartition("==")[2] != version:
            raise PatchError(f"{archive} is {release.requirement}, not {version}")
        kept = archive.resolve() if archive else _keep_archive(root / "release.tar.gz", version)
        two_trees(series, project.tree, release.path, work)
    state = State(version, release.sha256, release.commit, str(kept), series.stamp("patched"))
    (work / ".git" / STATE).write_text(json.dumps(asdict(state)), encoding="utf-8")
    print(f"{pin.requirement} -> {release.requirement}, llama.cpp {release.commit[:12]}")
    arguments = ("--empty=drop", "--onto", "upstream", "pinned", "queue")
    return _go_on(project, work, state, *arguments)


def resume(project: Project, work: Path) -> int:
    """Go on after a conflict was mended; 0 when the pin has been moved, 1 at the next conflict."""
    try:
        state = State(**json.loads((work / ".git" / STATE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise PatchError(
            f"no bump is under way in {work}\nnext:\n  python patches/patchqueue.py bump VERSION"
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
    pin = Pin(state.version, state.sha256, project.pin)
    if series.stamp("patched") != state.series and read_pin(project.pin).version != state.version:
        raise PatchError(
            "the queue in patches/ changed since the bump began\nnext:\n"
            f"  rm -rf {work}, and bump again, or take the changes back"
        )
    print(worktree.export(series, work))
    _write_pin(project.pin, pin, state.commit)
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


def _keep_archive(archive: Path, version: str) -> Path:
    """Keep a downloaded archive where builds look for it."""
    target = cache_dir() / Pin(version, "", archive).archive_name
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(archive, target)
    return target


def _write_pin(path: Path, pin: Pin, commit: str) -> None:
    """Replace the commit's line and the requirement; other comments stay."""
    old = path.read_text(encoding="utf-8").splitlines()
    comments = [line for line in old if line.startswith("#") and "llama.cpp commit " not in line]
    lines = [
        *comments,
        f"# llama.cpp commit {commit}",
        f"{pin.requirement} --hash=sha256:{pin.sha256}",
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _has_markers(path: Path) -> bool:
    if not path.is_file():
        return False
    return re.search(rb"^(<<<<<<<|>>>>>>>) ", path.read_bytes(), re.M) is not None
