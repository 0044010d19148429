"""The queue as a git history: edit it, export it, and prove that the export is exact.

No user setting and no enclosing repository changes what git does here.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from .series import HEADER, SOURCES, PatchError, Series, pristine

FIXED = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "LC_ALL": "C"}
#: Of the repositories made here, also for the commands that a maintainer types in them.
SETTINGS = """
[user]\n name = pyllama-mtp\n email = pyllama-mtp@example.invalid
[core]\n autocrlf = false\n safecrlf = false
[commit]\n gpgsign = false\n[gc]\n auto = 0\n[merge]\n conflictStyle = diff3
"""
AM = ("am", "--3way", "--keep-cr", "--keep-non-patch", "--no-scissors")
FORMAT = ("--zero-commit", "--full-index", "--no-signature", "--no-stat", "--no-numbered",
          "--no-renames", "--quiet", "--output-directory")  # fmt: skip
FIXED_DATE = b"Date: Thu, 1 Oct 2026 00:00:00 +0000"
QUEUE = "python patches/patchqueue.py"
MEND = """next:
  cd {work}; git am --show-current-patch=diff     # what it wanted
  mend the files; git add -A; git am --continue   # or, when it is not needed: --skip"""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run git in `folder`; the caller looks at the return code."""
    if shutil.which("git") is None:
        raise PatchError("git was not found\nnext:\n  install git, and run the same command again")
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    env |= FIXED | {"GIT_CEILING_DIRECTORIES": os.path.realpath(folder.parent)}
    return subprocess.run(["git", *arguments], cwd=folder, env=env, text=True, errors="replace",
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip


def must(folder: Path, *arguments: str) -> str:
    """Run git in `folder` and return its output; a failure is an error."""
    result = run(folder, *arguments)
    if result.returncode != 0:
        raise PatchError(f"git {' '.join(arguments[:2])} failed in {folder}:\n{result.stdout}")
    return result.stdout


def edit(series: Series, source: Path, work: Path) -> str:
    """Make `work` a repository: the pristine tree (tag ``upstream``), one commit per patch."""
    export_it = f"  {QUEUE} export --work {work}"
    if work.exists() and any(work.iterdir()):
        raise PatchError(f"{work} is not empty\nnext:\n{export_it}   # when it holds your edits\n"
                         f"  rm -rf {work}   # when it does not, or to give a bump up")  # fmt: skip
    if stopped := build(series, source, work):
        raise PatchError(f"{stopped}\n{MEND.format(work=work)}\n{export_it}")
    done = f"{work}: llama.cpp and {len(series.patches)} patches\nnext:"
    return f"{done}\n  cd {work}; change files; git commit, git rebase -i upstream\n{export_it}"


def build(series: Series, source: Path, work: Path) -> str:
    """Do what edit does; what stopped it, or nothing."""
    commit = pristine(source).commit
    work.mkdir(parents=True, exist_ok=True)
    must(work, "init", "--quiet", "--initial-branch=queue")
    with (work / ".git/config").open("a", encoding="utf-8") as config:
        config.write(SETTINGS)
    commit_tree(work, source, f"llama.cpp {commit}")
    return replay(work, series.patches)


def commit_tree(work: Path, tree: Path, message: str) -> None:
    """Commit the files of `tree`, in place of what `work` has; tag the commit ``upstream``."""
    where = (f"--git-dir={work.resolve() / '.git'}", "--work-tree=.")
    must(tree, *where, "add", "--all", "--force", "--", ".", ":!.pyllama-*")
    must(work, "commit", "--quiet", "--allow-empty", "--message", message)
    must(work, "reset", "--quiet", "--hard")
    must(work, "clean", "--quiet", "--force", "-dx")
    must(work, "tag", "--force", "upstream")


def replay(work: Path, patches: list[Path] | None = None) -> str:
    """Commit patches, or go on with that; says which one does not apply, where git am stopped."""
    step = ["--continue"] if patches is None else [*map(str, patches)]
    if not step or (result := run(work, *AM, *step)).returncode == 0:
        return ""
    failed = re.findall(r"^Patch failed at (.*)", result.stdout, re.M) or [result.stdout]
    return "\n  ".join([f"{failed[0]} does not apply:", *conflicts(work, result.stdout)])


def conflicts(work: Path, output: str = "") -> list[str]:
    """What git am left undecided: in its words, and the lines of files where markers begin."""
    check = run(work, "diff", "--check").stdout
    markers = re.findall(r"^(.+:\d+): leftover conflict marker", check, re.M)
    return [*re.findall(r"^(?:CONFLICT|error: patch failed).*", output, re.M), *markers[::4]]


def under_way(work: Path) -> bool:
    """Whether a ``git am`` or a rebase has stopped in `work`."""
    return any((work / ".git" / name).exists() for name in ("rebase-apply", "rebase-merge"))


def format_patches(work: Path, commits: str = "upstream") -> dict[str, bytes]:
    """The commits after ``upstream`` as mailbox patches, by name; the same bytes at any time."""
    with tempfile.TemporaryDirectory() as folder:
        must(work, "format-patch", *FORMAT, folder, commits)
        files = {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}
    return {n: re.sub(rb"^Date: .*", FIXED_DATE, d, count=1, flags=re.M) for n, d in files.items()}


def export(series: Series, work: Path) -> str:
    """Replace the queue's patches by the commits of `work`; reports file by file."""
    if under_way(work):
        raise PatchError(f"a git am or rebase is under way in {work}\nnext:\n  finish it there")
    if must(work, "status", "--porcelain"):
        raise PatchError(f"{work} has changes that are not committed\nnext:\n  git commit them")
    old, new, report = series.files(), format_patches(work), []
    for name in sorted(old.keys() | new.keys()):
        if name not in new:
            (series.folder / name).unlink()
            report.append(f"removed {name}")
        elif old.get(name) != new[name]:
            (series.folder / name).write_bytes(new[name])
            report.append(f"{'changed' if name in old else 'added'} {name}")
    both = {path.name[5:] for path in series.of("upstream")}  # the number before it may change
    lines = [f"{name} {'both' if name[5:] in both else 'patched'}\n" for name in new]
    (series.folder / "series").write_text(HEADER + "".join(lines), encoding="utf-8")
    report.append(f"{len(new)} patches exported; the README table is yours to keep up")
    return "\n".join(report)


def check(series: Series, source: Path, stat: bool = False) -> str:
    """Prove that the series applies to the pin, exports to the same bytes and keeps its rules;
    with `stat`, print the lines changed in each file of upstream, and those of our sources."""
    todo = f"next:\n  {QUEUE} edit --work WORK; mend; {QUEUE} export --work WORK"
    with tempfile.TemporaryDirectory() as temporary:
        if stopped := build(series, source, work := Path(temporary)):
            raise PatchError(f"{stopped}\n{todo}")
        old, new = series.files(), format_patches(work)
        if stat:
            print(must(work, "diff", "--numstat", "--shortstat", "upstream"), end="")
            for folder in SOURCES:
                sizes = [path.read_bytes().count(b"\n") for path in series.sources(folder)]
                print(f" {len(sizes)} files of ours in bindings/{folder}, {sum(sizes)} lines")
    odd = [f"{n} exports to other bytes or names" for n in old if new.get(n) != old[n]]
    if problems := "\n  ".join(sorted(odd + series.problems())):
        raise PatchError(f"the queue breaks its rules:\n  {problems}\n{todo}")
    commit = pristine(source).commit[:12]
    return f"{len(old)} patches apply to llama.cpp {commit} and export to the same bytes"
