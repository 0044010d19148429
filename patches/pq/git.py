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
EDIT = f"  {QUEUE} edit --work WORK     # stops where one does not apply"
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


def edit(series: Series, source: Path, work: Path) -> None:
    """Make `work` a repository: the pristine tree (tag ``upstream``), one commit per patch."""
    export_it = f"  {QUEUE} export --work {work}"
    build(series, source, work, f"{MEND.format(work=work)}\n{export_it}")
    print(f"{work}: llama.cpp and {len(series.patches)} patches\nnext:")
    print(f"  cd {work}; change files; git commit, git rebase -i upstream\n{export_it}")


def build(series: Series, source: Path, work: Path, todo: str = f"next:\n{EDIT}") -> None:
    """Do what edit does; `todo` says how to go on where a patch does not apply."""
    if work.exists() and any(work.iterdir()):
        raise PatchError(f"{work} is not empty\nnext:\n  export --work {work}, when it holds your "
                         f"edits, or bump --continue; or rm -rf {work}, to give it up")  # fmt: skip
    commit = pristine(source).commit
    work.mkdir(parents=True, exist_ok=True)
    must(work, "init", "--quiet", "--initial-branch=queue")
    with (work / ".git/config").open("a", encoding="utf-8") as config:
        config.write(SETTINGS)
    commit_tree(work, source, f"llama.cpp {commit}")
    if stopped := replay(work, *map(str, series.patches)):
        raise PatchError(f"{stopped}\n{todo}")


def commit_tree(work: Path, tree: Path, message: str) -> None:
    """Commit the files of `tree`, in place of what `work` has; tag the commit ``upstream``."""
    where = (f"--git-dir={work.resolve() / '.git'}", "--work-tree=.")
    must(tree, *where, "add", "--all", "--force", "--", ".", ":!.pyllama-*")
    must(work, "commit", "--quiet", "--allow-empty", "--message", message)
    must(work, "reset", "--quiet", "--hard")
    must(work, "clean", "--quiet", "--force", "-dx")
    must(work, "tag", "--force", "upstream")


def replay(work: Path, *what: str) -> str:
    """Run git am on patches, or with an option; says which one does not apply, where it stopped."""
    if not what or (result := run(work, *AM, *what)).returncode == 0:
        return ""
    failed = re.findall(r"^Patch failed at (.*)", result.stdout, re.M) or [result.stdout]
    return "\n  ".join([f"{failed[0]} does not apply:", *conflicts(work, result.stdout)])


def conflicts(work: Path, output: str = "") -> list[str]:
    """What git am left undecided: in its words, and the lines of files where markers begin."""
    check = run(work, "diff", "--check").stdout
    markers = re.findall(r"^(.+:\d+): leftover conflict marker", check, re.M)
    return [*re.findall(r"^(?:CONFLICT|error: patch failed).*", output, re.M), *markers[::4]]


def format_patches(work: Path, commits: str = "upstream") -> dict[str, bytes]:
    """The commits after ``upstream`` as mailbox patches, by name; the same bytes at any time."""
    with tempfile.TemporaryDirectory() as folder:
        must(work, "format-patch", *FORMAT, folder, commits)
        files = {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}
    return {n: re.sub(rb"^Date: .*", FIXED_DATE, d, count=1, flags=re.M) for n, d in files.items()}


def export(series: Series, work: Path) -> None:
    """Replace the queue's patches by the commits of `work`; reports file by file."""
    if any((work / ".git").glob("rebase-*")):
        raise PatchError(f"a git am or rebase is under way in {work}\nnext:\n  finish it there")
    if must(work, "status", "--porcelain"):
        raise PatchError(f"{work} has changes that are not committed\nnext:\n  git commit them")
    old, new = series.files(), format_patches(work)
    for name in sorted(old.keys() | new.keys()):
        if name not in new:
            (series.folder / name).unlink()
            print(f"removed {name}")
        elif old.get(name) != new[name]:
            (series.folder / name).write_bytes(new[name])
            print(f"{'changed' if name in old else 'added'} {name}")
    both = {path.name[5:] for path in series.of("upstream")}  # the number before it may change
    lines = [f"{name} {'both' if name[5:] in both else 'patched'}\n" for name in new]
    (series.folder / "series").write_text(HEADER + "".join(lines), encoding="utf-8")
    print(f"{len(new)} patches exported; the README table is yours to keep up")


def check(series: Series, source: Path, stat: bool = False) -> None:
    """Prove that the series applies to the pin, exports to the same bytes and keeps its rules;
    with `stat`, print the lines changed in each file of upstream, and those of our sources."""
    with tempfile.TemporaryDirectory() as temporary:
        build(series, source, work := Path(temporary))
        old, new = series.files(), format_patches(work)
        if stat:
            print(must(work, "diff", "--numstat", "--shortstat", "upstream"), end="")
            for folder in SOURCES:
                sizes = [path.read_bytes().count(b"\n") for path in series.sources(folder)]
                print(f" {len(sizes)} files of ours in bindings/{folder}, {sum(sizes)} lines")
    odd = [f"{n} exports to other bytes or names" for n in old if new.get(n) != old[n]]
    if problems := "\n  ".join(sorted(odd + series.problems())):
        todo = f"next:\n{EDIT}\n  {QUEUE} export --work WORK"
        raise PatchError(f"the queue breaks its rules:\n  {problems}\n{todo}")
    commit = pristine(source).commit[:12]
    print(f"{len(old)} patches apply to llama.cpp {commit} and export to the same bytes")
