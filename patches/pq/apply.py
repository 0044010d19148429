"""Make a patched copy of the pristine tree, writing only the files whose content changes.

Files that are already right keep their modification time, so that a build over the copy compiles
only what a changed patch touches. The pristine tree is only read.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from tree import files_below

from . import git
from .series import PatchError, Series, pristine, touched

MARK = ".pyllama-mtp-patched.json"  # is in a copy made here, also in one that was interrupted


def apply_series(series: Series, source: Path, dest: Path, variant: str) -> None:
    """Make `dest` the pinned tree plus a variant's patches; unchanged if one does not apply."""
    commit, patches = pristine(source).commit[:12], series.of(variant)
    source, dest = source.resolve(), dest.resolve()
    if dest == source or source in dest.parents or dest in source.parents:
        raise PatchError(f"{dest} and {source} must be apart\nnext:\n  choose another --dest")
    if dest.exists() and any(dest.iterdir()) and not (dest / MARK).is_file():
        raise PatchError(f"{dest} is not a patched copy made here\nnext:\n  choose another --dest")
    with tempfile.TemporaryDirectory() as staging:
        stage(patches, source, Path(staging))
        changed = touched(patches)
        wanted = {name: path for name, path in files_below(source) if name not in changed}
        wanted |= dict(files_below(Path(staging)))
        dest.mkdir(parents=True, exist_ok=True)
        (dest / MARK).touch()
        written = sum(_write_if_changed(path, dest / name) for name, path in wanted.items())
    surplus = [path for name, path in files_below(dest) if name not in {*wanted, MARK}]
    for path in surplus:
        path.unlink()
    print(f"{variant}: llama.cpp {commit} + {len(patches)} patches: ", end="")
    print(f"{written} files written, {len(surplus)} removed")


def stage(patches: list[Path], source: Path, staging: Path) -> None:
    """Copy the files that the patches touch from `source` to `staging`, and patch them there."""
    staging.mkdir(parents=True, exist_ok=True)
    for name in touched(patches):
        if (source / name).is_file():
            _write_if_changed(source / name, staging / name)
    for path in patches:
        result = git.run(staging, "apply", "--whitespace=nowarn", str(path))
        if result.returncode != 0:
            raise PatchError(f"{path.name} does not apply:\n{result.stdout}next:\n{git.EDIT}\n"
                             "  python vendor/fetch.py --check   # when none does")  # fmt: skip


def _write_if_changed(origin: Path, target: Path) -> bool:
    """Copy content and mode unless the content is there; the time becomes the present."""
    if target.is_file() and target.read_bytes() == origin.read_bytes():
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    shutil.copy(origin, target)
    return True
