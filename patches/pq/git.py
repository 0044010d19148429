"""Running git so that no user setting and no enclosing repository changes the outcome."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from .series import PatchError

IDENTITY = ("pyllama-mtp", "pyllama-mtp@example.invalid")


def available() -> bool:
    """Whether there is a git to run."""
    return shutil.which("git") is not None


def environment(folder: Path) -> dict[str, str]:
    """An environment in which git sees no repository but one in `folder`, and no user settings."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    name, mail = IDENTITY
    return env | {
        "GIT_CEILING_DIRECTORIES": os.path.realpath(folder.parent),
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_AUTHOR_NAME": name,
        "GIT_AUTHOR_EMAIL": mail,
        "GIT_COMMITTER_NAME": name,
        "GIT_COMMITTER_EMAIL": mail,
        "LC_ALL": "C",
    }


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run git in `folder`; the caller looks at the return code."""
    if not available():
        raise PatchError("git is needed for this and was not found\nnext:\n  install git")
    return subprocess.run(
        ["git", *arguments],
        cwd=folder,
        env=environment(folder),
        text=True,
        errors="replace",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def must(folder: Path, *arguments: str) -> str:
    """Run git in `folder` and return its output; a failure is an error."""
    result = run(folder, *arguments)
    if result.returncode != 0:
        raise PatchError(f"git {' '.join(arguments[:2])} failed in {folder}:\n{result.stdout}")
    return result.stdout


def under_way(folder: Path) -> bool:
    """Whether a ``git am`` or a rebase has stopped in `folder`."""
    return any((folder / ".git" / name).exists() for name in ("rebase-apply", "rebase-merge"))


def new_repository(folder: Path, message: str) -> None:
    """Make `folder` a repository with everything in it as one commit, tagged ``upstream``."""
    must(folder, "init", "--quiet", "--initial-branch=queue")
    for key, value in {
        "user.name": IDENTITY[0],
        "user.email": IDENTITY[1],
        "core.autocrlf": "false",
        "core.safecrlf": "false",
        "commit.gpgsign": "false",
        "gc.auto": "0",
    }.items():
        must(folder, "config", key, value)
    must(folder, "add", "--all", "--force")
    must(folder, "commit", "--quiet", "--allow-empty", "--message", message)
    must(folder, "tag", "upstream")
