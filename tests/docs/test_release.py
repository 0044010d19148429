""".ci/release and Dockerfile, with programs in place of those that take long."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from pyllama_mtp.cli import build_parser

ROOT = Path(__file__).parents[2]
WHEEL = """
import pathlib, sys
_, kind, _, folder = sys.argv[1:]
pathlib.Path(folder, f"pyllama_mtp-{kind}.whl").write_text(kind)
"""


def git(*words: str, cwd: Path) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    command = ["git", *who, *words]
    return subprocess.run(command, cwd=cwd, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A repository with a release, a commit after it, and programs that end at once."""
    clone = tmp_path / "clone"
    for folder in (".ci", "bindings", "build"):
        (clone / folder).mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / "release", clone / ".ci")
    shutil.copy(ROOT / ".gitignore", clone)
    (clone / "pyproject.toml").write_text('[project]\nversion = "0.1.0"\nname = "a"\n')
    (clone / "bindings" / "wheel.py").write_text(WHEEL)
    (clone / ".ci" / "run").write_text("#!/bin/sh\necho 12 passed, 1 skipped in 3 s\n")
    (clone / ".ci" / "run").chmod(0o755)
    git("init", "-q", cwd=clone)
    for message in ("Before", "A feature"):
        (clone / "file").write_text(message)
        git("add", "-A", cwd=clone)
        git("commit", "-qm", message, cwd=clone)
        if message == "Before":
            git("tag", "v0.1.0", cwd=clone)
    return clone


def release(clone: Path, tests: str) -> subprocess.CompletedProcess[str]:
    programs = clone.parent / "programs"
    programs.mkdir(exist_ok=True)
    (programs / "pytest").write_text(f"#!/bin/sh\n{tests}\n")
    (programs / "pytest").chmod(0o755)
    author = {
        f"GIT_{who}_{what}": "a" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
    }
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    command = [clone / ".ci" / "release", "0.2.0"]
    environment = {**os.environ, **author, "PATH": path}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_a_release(clone: Path) -> None:
    done = release(clone, "echo 2 passed in 9 s")
    assert done.returncode == 0, done.stderr
    assert git("tag", cwd=clone).split() == ["v0.1.0", "v0.2.0"]
    assert not git("status", "--porcelain", cwd=clone)
    assert 'version = "0.2.0"' in git("show", "v0.2.0:pyproject.toml", cwd=clone)
    changes = (clone / "CHANGELOG.md").read_text()
    assert "## 0.2.0" in changes and "- A feature" in changes and "Before" not in changes
    out = clone / "dist" / "0.2.0"
    kinds = ("x86_64", "aarch64", "vulkan")
    hashes = {hashlib.sha256(name.encode()).hexdigest() for name in kinds}
    assert {line.split()[0] for line in (out / "SHA256SUMS").read_text().splitlines()} == hashes
    tested = (out / "TESTED.md").read_text()
    assert "12 passed, 1 skipped in 3 s" in tested and "2 passed in 9 s" in tested


def test_no_release_of_what_fails_or_is_not_committed(clone: Path) -> None:
    assert release(clone, "echo 1 failed; exit 1").returncode != 0
    assert git("tag", cwd=clone).split() == ["v0.1.0"]
    refused = release(clone, "echo 2 passed in 9 s")  # the first try left a version behind
    assert refused.returncode != 0 and "pyproject.toml" in refused.stdout
    assert git("tag", cwd=clone).split() == ["v0.1.0"]


def test_the_dockerfile() -> None:
    """What it starts is a command of ours; its extras and its build option are there."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    (entry,) = re.findall(r"^ENTRYPOINT (.*)$", text, re.M)
    program, *words = json.loads(entry)
    assert program == "pyllama-mtp"
    build_parser(words[0]).parse_args([*words, "-m", "model.gguf"])
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for extra in {
        name for group in re.findall(r"\[(\w+(?:,\w+)*)\]'", text) for name in group.split(",")
    }:
        assert f"\n{extra} = [" in project
    options = re.findall(r"cmake\.define\.(\w+)", text)
    assert options and all(f"option({name} " in cpu_options() for name in options)


def cpu_options() -> str:
    return (ROOT / "bindings" / "cmake" / "CpuFeatures.cmake").read_text(encoding="utf-8")
