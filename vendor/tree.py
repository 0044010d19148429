"""The unpacked tree: which files are needed, safe extraction, and the stamp that seals it."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import sys
import tarfile
import tempfile
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from sdist import PACKAGES, FetchError, Pin

STAMP = ".pyllama-mtp-tree.json"
GIT = ".git/modules/vendor/llama.cpp/"  # llama-cpp-python: git's notes on the submodule
GIT_HEAD, GIT_LOG = f"{GIT}HEAD", f"{GIT}logs/HEAD"

# What the build reads: the libraries, the tools that upstream's own figures are measured with, and
# those of upstream's tests that concern what the patches touch (tests/upstream runs them), or what
# devices compute (tests/devices).
KEEP = (
    "AUTHORS", "CMakeLists.txt", "LICENSE", "cmake/", "common/", "ggml/", "include/", "licenses/",
    "scripts/ui-assets.cmake", "src/", "tools/", "vendor/",
    "tests/test-backend-ops.cpp", "tests/test-backend-sampler.cpp", "tests/test-batch-alloc.cpp",
    "tests/test-llama-archs.cpp", "tests/test-recurrent-state-rollback.cpp",
    "tests/test-save-load-state.cpp", "tests/test-state-restore-fragmented.cpp",
    "tests/test-thread-safety.cpp", "tests/testing.h",
)  # fmt: skip
# Of those, what it does not read: backends that we never build, test data, the web interface.
DROP = (
    "ggml/src/ggml-cann/", "ggml/src/ggml-et/", "ggml/src/ggml-hexagon/", "ggml/src/ggml-opencl/",
    "ggml/src/ggml-openvino/", "ggml/src/ggml-sycl/", "ggml/src/ggml-virtgpu/",
    "ggml/src/ggml-webgpu/", "ggml/src/ggml-zdnn/", "ggml/src/ggml-zendnn/",
    "tools/mtmd/test", "tools/server/tests/", "tools/server/themes/", "tools/ui/",
)  # fmt: skip
KEEP_ANYWAY = tuple(  # the server links a library of the interface, empty when there is none
    f"tools/ui/{name}" for name in ("CMakeLists.txt", "sources.cmake", "ui.cpp.in", "ui.h.in")
)
STALE_AFTER = 3600.0  # seconds after which another run's temporary folder counts as abandoned


@dataclass(frozen=True)
class Tree:
    """A complete tree of upstream: where it is and what it is.

    commit: 40 hex digits, or "b11549" where the archive names llama.cpp's build only.
    date: of the archive's making, as in "2026-10-01".
    """

    path: Path
    commit: str
    date: str
    requirement: str
    sha256: str
    files: int
    bytes: int
    content: str


def is_needed(name: str) -> bool:
    """Whether the build reads this file (a path relative to llama.cpp's root)."""
    if name in KEEP_ANYWAY:
        return True
    kept = any(name.startswith(k) if k.endswith("/") else name == k for k in KEEP)
    return kept and not name.startswith(DROP)


def layout() -> str:
    """Digest of the rules above: changing them makes existing trees out of date."""
    return hashlib.sha256(repr((KEEP, DROP, KEEP_ANYWAY)).encode()).hexdigest()[:16]


def files_below(root: Path) -> Iterator[tuple[str, Path]]:
    """Every file and link below `root` but the stamp, with its path relative to `root`."""

    def failed(error: OSError) -> None:
        raise error

    for folder, folders, names in os.walk(root, onerror=failed):
        links = [name for name in folders if Path(folder, name).is_symlink()]
        for path in (Path(folder, name) for name in [*names, *links]):
            if (relative := path.relative_to(root).as_posix()) != STAMP:
                yield relative, path


def measure(root: Path) -> tuple[int, int]:
    """Number and total size of the files below `root`: the cheap test for a complete tree."""
    sizes = [path.lstat().st_size for _, path in files_below(root)]
    return len(sizes), sum(sizes)


def read_stamp(root: Path) -> Tree | None:
    """What the stamp in `root` says, or None without a readable stamp."""
    try:
        raw = json.loads((root / STAMP).read_text(encoding="utf-8"))
        content = raw.pop("content") if raw.pop("layout") == layout() else ""
        return Tree(root, **(raw | {"content": content}))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def read_tree(root: Path, pin: Pin) -> Tree | None:
    """The tree in `root` when it is the pinned one and complete, else None."""
    tree = read_stamp(root)
    if tree is None or tree.sha256 != pin.sha256 or not tree.content:
        return None
    return tree if measure(root) == (tree.files, tree.bytes) else None


def check_tree(root: Path, pin: Pin) -> Tree:
    """Verify `root` against the pin, byte for byte; raises FetchError where they differ."""
    tree = read_stamp(root)
    if tree is None:
        why = "no stamp: half unpacked, or not ours" if root.exists() else "not there"
        found = f"{root}: {why}"
    elif tree.sha256 != pin.sha256 or not tree.content:
        found = f"{root}: {tree.requirement}, sha256 {tree.sha256}, or other unpacking rules"
    else:
        links = {name for name, path in files_below(root) if path.is_dir()}
        hashes = {n: _sha256(b"" if n in links else p.read_bytes()) for n, p in files_below(root)}
        if _content(hashes) == tree.content:
            return tree
        found = f"{root}: {len(hashes)} files of {tree.files}, or files edited in place"
    raise FetchError(
        "the llama.cpp tree is not the pinned one",
        expected=f"{pin.requirement}, sha256 {pin.sha256}, unpacked and unchanged",
        found=found,
        todo=f"run: rm -rf {root} && python vendor/fetch.py --dest {root}",
    )


def unpack(archive: Path, dest: Path, pin: Pin) -> Tree:
    """Unpack the needed part of `archive` and put it at `dest` in one rename.

    Whatever stands at `dest` is replaced, if it consists of files of ours only. File times are
    the time of unpacking: the archive's could be older than objects built from another release.
    """
    _refuse_foreign(dest)
    dest.parent.mkdir(parents=True, exist_ok=True)
    _remove_stale(dest)
    temporary = Path(tempfile.mkdtemp(prefix=f".{dest.name}.tmp-", dir=dest.parent))
    try:
        new = temporary / "new"
        new.mkdir()
        tree = _extract(archive, new, pin)
        document = {k: v for k, v in vars(tree).items() if k != "path"} | {"layout": layout()}
        write_file(new / STAMP, (json.dumps(document, indent=1) + "\n").encode())
        with _alone(dest.parent):
            other = read_tree(dest, pin)
            if other is not None:  # another run was quicker: its tree will do
                return other
            if dest.exists():
                dest.rename(temporary / "old")
            new.rename(dest)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Tree(**(vars(tree) | {"path": dest}))


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Let one run at a time change what lies in `folder`."""
    file = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def write_file(path: Path, data: bytes) -> None:
    """Write one file of the tree."""
    path.write_bytes(data)


def _extract(archive: Path, root: Path, pin: Pin) -> Tree:
    """Extract the needed files below `root`, plain files only, and find commit and date."""
    hashes: dict[str, str] = {}
    git = {GIT_HEAD: "", GIT_LOG: ""}
    total, newest = 0, 0.0
    folder = PACKAGES[pin.package]
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                _, _, name = member.name.partition("/")
                if name in git and member.isreg():
                    git[name] = tar.extractfile(member).read().decode(errors="replace").strip()  # type: ignore[union-attr]
                if not name.startswith(folder) or member.isdir():
                    continue
                name = name[len(folder) :]
                if not is_needed(name):
                    continue
                _refuse_unsafe(name, member, archive)
                data = tar.extractfile(member).read()  # type: ignore[union-attr]
                target = root / name
                target.parent.mkdir(parents=True, exist_ok=True)
                write_file(target, data)
                if member.mode & 0o100:
                    target.chmod(target.stat().st_mode | 0o111)
                hashes[name] = _sha256(data)
                total += len(data)
                newest = max(newest, member.mtime)
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise _bad_archive(archive, f"a damaged archive: {error}") from error
    if "CMakeLists.txt" not in hashes:
        raise _bad_archive(archive, f"no CMakeLists.txt under {folder}")
    commit = _commit(pin, git[GIT_HEAD])
    if commit is None:
        raise _bad_archive(archive, f"no commit in {GIT_HEAD}, and no build in {pin.requirement}")
    # llama-cpp-python: file times mean nothing there, git wrote down when it checked the tree out
    noted = re.findall(r"> (\d+) [+-]\d{4}\t", git[GIT_LOG])
    date = time.strftime("%Y-%m-%d", time.gmtime(float(noted[-1]) if noted else newest))
    sizes = len(hashes), total
    return Tree(root, commit, date, pin.requirement, pin.sha256, *sizes, _content(hashes))


def _commit(pin: Pin, git_head: str) -> str | None:
    """What llama.cpp's tree is: git's commit, or the build in xllamacpp's year.month.build."""
    if pin.package == "xllamacpp":
        build = re.match(r"\d{4}\.\d+\.(\d+)", pin.version)
        return f"b{build[1]}" if build else None
    return git_head if re.fullmatch("[0-9a-f]{40}", git_head) else None


def _refuse_unsafe(name: str, member: tarfile.TarInfo, archive: Path) -> None:
    """Links, devices and paths that leave the tree have no business in a source archive."""
    parts = PurePosixPath(name).parts
    if not member.isreg() or ".." in parts or name.startswith("/") or "\\" in name or ":" in name:
        kind = "not a plain file" if not member.isreg() else "a path that leaves the tree"
        raise _bad_archive(archive, f"{member.name!r}: {kind}")


def _bad_archive(archive: Path, found: str) -> FetchError:
    return FetchError(
        "the archive cannot be used",
        expected=f"a source archive of {' or '.join(PACKAGES)}, with a llama.cpp that it names",
        found=f"{found} ({archive})",
        todo="use the pinned archive; for another release, teach vendor/ its layout",
    )


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _content(hashes: dict[str, str]) -> str:
    """One digest over the names and bytes of all files."""
    return _sha256("".join(f"{hashes[n]}  {n}\n" for n in sorted(hashes)).encode())


def _refuse_foreign(dest: Path) -> None:
    """Never delete a folder that somebody else filled."""
    if not dest.exists() and not dest.is_symlink():
        return
    ours = {k.split("/")[0] for k in KEEP} | {STAMP}
    real = dest.is_dir() and not dest.is_symlink()
    foreign = sorted({path.name for path in dest.iterdir()} - ours) if real else [dest.name]
    if foreign:
        raise FetchError(
            "the destination holds something else",
            expected=f"{dest}: absent, empty, or a llama.cpp tree unpacked by this script",
            found=f"{foreign[0]!r}" + (f" and {len(foreign) - 1} more" if foreign[1:] else ""),
            todo="move it away, or choose another place with --dest",
        )


def _remove_stale(dest: Path) -> None:
    """Remove what runs that were killed left beside `dest`."""
    for old in dest.parent.glob(f".{dest.name}.tmp-*"):
        try:
            if time.time() - old.stat().st_mtime > STALE_AFTER:
                print(f"vendor: removing {old}, left by an interrupted run", file=sys.stderr)
                shutil.rmtree(old, ignore_errors=True)
        except OSError:
            continue
