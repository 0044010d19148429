"""Make a patched copy of the pristine tree, writing only the files whose content changes.

Files that are already right keep their modification time, so that a build over the copy compiles
only what a changed patch touches. The pristine tree is only read.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from . import git
from .series import PATCHES, Patch, PatchError, Series

sys.path.insert(0, str(PATCHES.parent / "vendor"))

from tree import STAMP as TREE_STAMP
from tree import Tree, files_below, measure, read_stamp

STAMP = ".pyllama-mtp-patched.json"


@dataclass(frozen=True)
class Applied:
    """What a patched copy is made of, and what making it did."""

    commit: str
    patches: int
    written: int
    removed: int


def pristine(path: Path) -> Tree:
    """The pristine tree at `path`, or an error that says how to get it."""
    tree = read_stamp(path)
    if tree is not None and measure(path) == (tree.files, tree.bytes):
        return tree
    state = "no unpacked" if tree is None else "an incomplete or changed"
    raise PatchError(f"{state} llama.cpp in {path}\nnext:\n  python vendor/fetch.py --dest {path}")


def apply_series(series: Series, source: Path, dest: Path, variant: str) -> Applied:
    """Make `dest` the tree in `source` plus the variant's patches; does nothing when it is that.

    Raises PatchError when a patch does not apply; `dest` is then as it was.
    """
    tree = pristine(source)
    source, dest = source.resolve(), dest.resolve()
    if dest == source or source in dest.parents or dest in source.parents:
        raise PatchError(
            f"{dest} and the pristine tree {source} must be apart\nnext:\n  choose --dest"
        )
    patches = series.of(variant)
    wanted = {"upstream_commit": tree.commit, "content": tree.content, "variant": variant,
              "series": series.stamp(variant), "patches": [p.name for p in patches]}  # fmt: skip
    if _is_current(dest, wanted):
        return Applied(tree.commit, len(patches), 0, 0)
    _refuse_foreign(dest)
    dest.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{dest.name}.tmp-", dir=dest.parent) as temporary:
        staging = Path(temporary) / "tree"
        stage(patches, source, staging, tree.commit)
        written, removed = _sync(source, staging, touched(patches), dest)
    files, size = _size(dest)
    document = wanted | {"files": files, "bytes": size}
    (dest / STAMP).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return Applied(tree.commit, len(patches), written, removed)


def stage(patches: tuple[Patch, ...], source: Path, staging: Path, commit: str) -> None:
    """Copy the files that the patches touch from `source` to `staging` and patch them there."""
    copy_touched(patches, source, staging)
    for patch in patches:
        result = _apply_one(patch, staging)
        if result.returncode != 0:
            raise _apply_failure(patch, result.stdout, commit)


def touched(patches: tuple[Patch, ...]) -> set[str]:
    """The files that the patches change, add or remove."""
    return {name for patch in patches for name in patch.touched()}


def copy_touched(patches: tuple[Patch, ...], source: Path, dest: Path) -> None:
    """Copy the files that the patches touch, unpatched, to the new folder `dest`."""
    dest.mkdir(parents=True)
    for name in sorted(touched(patches)):
        if (source / name).is_file():
            (dest / name).parent.mkdir(parents=True, exist_ok=True)
            _copy(source / name, dest / name)


def _apply_one(patch: Patch, folder: Path) -> subprocess.CompletedProcess[str]:
    """Apply one patch in `folder`, strictly: with git where there is one, else with patch."""
    if git.available():
        return git.run(folder, "apply", "--whitespace=nowarn", str(patch.path))
    tool = shutil.which("patch")
    if tool is None:
        raise PatchError("neither git nor patch was found\nnext:\n  install git, and build again")
    command = [tool, "-p1", "--batch", "--fuzz=0", "--no-backup-if-mismatch", "-i", str(patch.path)]
    return subprocess.run(
        command, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def _apply_failure(patch: Patch, output: str, commit: str) -> PatchError:
    """The error of a patch that does not apply: which, where, and what to type next."""
    where = "\n".join(f"  {line}" for line in output.strip().splitlines()[-8:])
    return PatchError(
        f"{patch.name} does not apply to llama.cpp {commit[:12]}:\n{where}\n"
        "next:\n"
        "  python vendor/fetch.py --check                      # is the tree the pinned one?\n"
        "  python patches/patchqueue.py edit --work WORK       # stops at the patch that fails\n"
        "  cd WORK, mend the files, git add -A, git am --continue\n"
        "  python patches/patchqueue.py export --work WORK"
    )


def _is_current(dest: Path, wanted: dict[str, object]) -> bool:
    """Whether `dest` carries the wanted stamp and is complete."""
    try:
        stamp = json.loads((dest / STAMP).read_text(encoding="utf-8"))
        size = (stamp.pop("files"), stamp.pop("bytes"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return stamp == wanted and _size(dest) == size


def _size(dest: Path) -> tuple[int, int]:
    """Number and total size of the files of the copy, its own stamp not counted."""
    files, total = measure(dest)
    return files - 1, total - (dest / STAMP).stat().st_size


def _refuse_foreign(dest: Path) -> None:
    """Never fill or clean a folder that is not a copy made here.

    A copy has the stamp, also where the run that made it was interrupted.
    """
    if not dest.exists() or (dest / STAMP).is_file() or (dest.is_dir() and not any(dest.iterdir())):
        return
    raise PatchError(
        f"{dest} exists and is not a patched copy made by this tool\n"
        f"next:\n  move it away, or choose another --dest"
    )


def _sync(source: Path, staging: Path, touched: set[str], dest: Path) -> tuple[int, int]:
    """Bring `dest` to the wanted content; returns how many files were written and removed."""
    wanted = {name: path for name, path in files_below(source) if name not in touched}
    wanted |= dict(files_below(staging))
    dest.mkdir(parents=True, exist_ok=True)
    (dest / STAMP).write_text("{}\n", encoding="utf-8")  # an interrupted run is recognised as ours
    written = removed = 0
    for name, origin in wanted.items():
        written += _write_if_changed(origin, dest / name)
    for name, path in list(files_below(dest)):
        if name not in wanted and name not in (STAMP, TREE_STAMP):
            path.unlink()
            removed += 1
    return written, removed


def _write_if_changed(origin: Path, target: Path) -> bool:
    """Copy content and mode unless they are already there."""
    if target.is_symlink() or (target.exists() and not target.is_file()):
        raise PatchError(f"{target} is not a plain file\nnext:\n  rm -rf the copy and apply again")
    try:
        same = target.stat().st_size == origin.stat().st_size
        if same and target.read_bytes() == origin.read_bytes():
            return False
    except FileNotFoundError:
        target.parent.mkdir(parents=True, exist_ok=True)
    _copy(origin, target)
    return True


def _copy(origin: Path, target: Path) -> None:
    """Copy content and mode; the time becomes the present."""
    shutil.copyfile(origin, target)
    shutil.copymode(origin, target)
