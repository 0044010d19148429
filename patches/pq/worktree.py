"""The queue as a git history: edit it, export it, and prove that the export is exact."""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path

from . import git
from .apply import copy_touched, pristine, stage
from .series import VARIANTS, PatchError, Series, write_series

FIXED_DATE = "Thu, 1 Oct 2026 00:00:00 +0000"
FORMAT = (
    "--zero-commit", "--full-index", "--no-signature", "--no-stat", "--no-numbered",
    "--no-renames", "--no-ext-diff", "--no-color", "--no-attach", "--no-thread", "--no-base",
    "--unified=3", "--diff-algorithm=myers", "--src-prefix=a/", "--dst-prefix=b/",
    "--filename-max-length=64",
)  # fmt: skip


def edit(series: Series, source: Path, work: Path) -> str:
    """Make `work` a repository: the pristine tree (tag ``upstream``), one commit per patch."""
    tree = pristine(source)
    if work.exists() and any(work.iterdir()):
        raise PatchError(
            f"{work} is not empty\nnext:\n"
            f"  python patches/patchqueue.py export --work {work}   # when it holds your edits\n"
            f"  rm -rf {work}                                       # when it does not"
        )
    shutil.copytree(source, work, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".pyllama-*"))
    git.new_repository(work, f"llama.cpp {tree.commit}")
    replay(series, work)
    return (
        f"{work}: llama.cpp {tree.commit[:12]} and {len(series.patches)} patches\nnext:\n"
        f"  cd {work}; change files; git commit --amend, or git rebase -i upstream\n"
        f"  python patches/patchqueue.py export --work {work}"
    )


def replay(series: Series, work: Path) -> None:
    """Turn the patches into commits; on a conflict git am stops there, to be continued by hand."""
    if not series.patches:
        return
    paths = [str(patch.path) for patch in series.patches]
    result = git.run(work, "am", "--3way", "--keep-cr", "--keep-non-patch", "--no-scissors", *paths)
    if result.returncode != 0:
        failed = re.search(r"Patch failed at (\d+)", result.stdout)
        name = series.patches[int(failed.group(1)) - 1].name if failed else "a patch"
        where = "\n".join(f"  {line}" for line in result.stdout.strip().splitlines()[-12:])
        raise PatchError(
            f"{name} does not apply:\n{where}\nnext:\n"
            f"  cd {work}; git am --show-current-patch=diff     # what it wanted\n"
            "  mend the files; git add -A; git am --continue   # the later patches follow\n"
            f"  python patches/patchqueue.py export --work {work}"
        )


def format_patches(work: Path, folder: Path) -> list[Path]:
    """Write the commits after ``upstream`` as mailbox patches whose bytes depend on them alone."""
    git.must(
        work, "format-patch", "--quiet", *FORMAT, "--output-directory", str(folder), "upstream"
    )
    paths = sorted(folder.glob("*.patch"))
    for path in paths:
        head, blank, rest = path.read_bytes().partition(b"\n\n")
        head = re.sub(rb"^Date: .*$", f"Date: {FIXED_DATE}".encode(), head, flags=re.M)
        path.write_bytes(head + blank + rest)
    return paths


def export(series: Series, work: Path) -> str:
    """Replace the queue's patches by the commits of `work`; reports file by file."""
    if not (work / ".git").is_dir():
        raise PatchError(
            f"{work} is not a work tree of the queue\nnext:\n"
            f"  python patches/patchqueue.py edit --work {work}"
        )
    if git.under_way(work):
        raise PatchError(f"a git am or rebase is under way in {work}\nnext:\n  finish it there")
    if git.must(work, "status", "--porcelain").strip():
        raise PatchError(f"{work} has changes that are not committed\nnext:\n  git commit them")
    if left := git.must(work, "diff", "--name-only", "upstream", "--", "*.orig", "*.rej").split():
        raise PatchError(
            f"commits of {work} hold files that a merge left\nnext:\n"
            f"  cd {work}; git rm {' '.join(left)}; commit that into the patch they are in"
        )
    markers = {patch.topic: patch.marker for patch in series.patches}
    report: list[str] = []
    with tempfile.TemporaryDirectory() as temporary:
        paths = format_patches(work, Path(temporary))
        for path in paths:
            target = series.folder / path.name
            data = path.read_bytes()
            state = "added" if not target.exists() else "changed"
            if state == "added" or target.read_bytes() != data:
                target.write_bytes(data)
                report.append(f"{state} {path.name}")
    names = [path.name for path in paths]
    for patch in series.patches:
        if patch.name not in names:
            patch.path.unlink()
            report.append(f"removed {patch.name}")
    pairs = [(n, markers.get(re.sub(r"^\d+-", "", n), "patched")) for n in names]
    write_series(series.folder, pairs)
    report.append(f"{len(names)} patches exported; the README table is yours to keep up")
    return "\n".join(report)


def check(series: Series, source: Path) -> str:
    """Prove that the series applies to the pin and exports to the same bytes, names included."""
    tree = pristine(source)
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        for variant in VARIANTS:
            stage(series.of(variant), source, root / variant, tree.commit)
        work = root / "work"
        copy_touched(series.patches, source, work)
        git.new_repository(work, f"llama.cpp {tree.commit}")
        replay(series, work)
        exported = {p.name: p.read_bytes() for p in format_patches(work, root / "out")}
    committed = {patch.name: patch.data for patch in series.patches}
    readme = series.folder / "README.md"
    table = readme.read_text(encoding="utf-8") if readme.exists() else ""
    problems = [
        *(f"{n}: exports to other bytes" for n in committed if exported.get(n) != committed[n]),
        *(f"{n}: the name it exports to is not in the series" for n in exported.keys() - committed),
        *(f"{n}: not in the table of README.md" for n in committed if n not in table),
    ]
    if problems:
        raise PatchError(
            "\n  ".join(["the queue is not in its exported form:", *sorted(problems)]) + "\nnext:\n"
            "  python patches/patchqueue.py edit --work WORK\n"
            "  python patches/patchqueue.py export --work WORK"
        )
    count, commit = len(committed), tree.commit[:12]
    return f"{count} patches apply to llama.cpp {commit} and export to the same bytes"
