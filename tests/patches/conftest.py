"""Make vendor/ and patches/ importable; a small pinned tree with a queue of its own."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "vendor"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "patches"))

import fake_sdist
import patchqueue
from pq import git
from pq.series import PIN, Series, read_series

import fetch  # of vendor/, which pq puts on the module path  # isort: skip

LIBRARY = "src/llama.cpp"


class Queue(NamedTuple):
    """A project's folder: pin, pinned tree, two patches, sources of ours; and places to work."""

    root: Path

    tree = property(lambda self: self.root / "tree")
    folder = property(lambda self: self.root / "patches")
    work = property(lambda self: self.root / "work")
    copy = property(lambda self: self.root / "copy")

    @property
    def series(self) -> Series:
        """The queue as it is on disk now."""
        return read_series(self.folder)

    def command(self, name: str, *options: object) -> int:
        """Run a command on this queue; the exit code."""
        work = ["--work", self.work] if name in ("edit", "export", "bump") else []
        words = [name, *options, *work, "--patches", self.folder, "--tree", self.tree]
        return patchqueue.main([*map(str, words)])

    def replace(self, name: str = LIBRARY, **values: str) -> None:
        """Let functions (or variables) of a file in the work tree have other values: f20="2020"."""
        text = (self.work / name).read_text()
        for what, value in values.items():
            text = re.sub(rf"(\b{what}\b.*) \d+;", rf"\1 {value};", text)
        (self.work / name).write_text(text)

    def commit(self, message: str, name: str = LIBRARY, **values: str) -> None:
        """Replace values in the work tree, commit and export them."""
        self.work.exists() or git.build(self.series, self.tree, self.work)
        self.replace(name, **values)
        git.must(self.work, "commit", "--quiet", "--all", "--message", message)
        git.export(self.series, self.work)

    def release(
        self, changes: dict[str, str | None], wanted: str = "llama-cpp-python==9.9.9", **more: Any
    ) -> Path:
        """The archive of a release whose files differ from the pinned ones; None removes a file."""
        files = {k: v for k, v in (fake_sdist.NEEDED | changes).items() if v is not None}
        package, _, version = wanted.partition("==")
        target = self.root / f"index/{package.replace('-', '_')}-{version}.tar.gz"
        target.parent.mkdir(exist_ok=True)
        return fake_sdist.make_sdist(target, files, package=package, version=version, **more)

    def bytes(self, *names: str) -> dict[str, bytes]:
        """Every file of what is named, or of all that a bump may change."""
        found = [self.root / name for name in names or ("patches", "tree", PIN)]
        found += [path for folder in found for path in folder.rglob("*")]
        return {str(p.relative_to(self.root)): p.read_bytes() for p in found if p.is_file()}


@pytest.fixture(scope="session")
def _template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    queue = Queue(tmp_path_factory.mktemp("queue"))
    archive = queue.release(fake_sdist.NOT_NEEDED)
    pin = fake_sdist.make_pin(queue.root / PIN, archive)
    pin.write_text(pin.read_text().replace("\n", "\n# llama.cpp c0ffee (a date)\n", 1))
    fetch.ensure_tree(queue.tree, archive, pin)
    queue.folder.mkdir()
    (queue.folder / "series").write_text("")
    queue.commit("[ggml] fix two", "ggml/src/ggml.c", two="22")
    series = queue.folder / "series"
    series.write_text(series.read_text().replace(".patch patched", ".patch both"))
    queue.commit("llama : return more\n\nProblem: none.\n", f20="2020")
    (queue.folder / "README.md").write_text("".join(f"`{name}`" for name in queue.series.files()))
    shutil.rmtree(queue.work)
    return queue.root


HOSTILE = """[core]\n autocrlf = true\n[apply]\n whitespace = error-all\n[format]\n signature = me
[diff]\n noprefix = true\n context = 9\n[user]\n name = Somebody\n email = somebody@here\n"""


@pytest.fixture
def queue(_template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Queue:
    """A queue of the test's own: patch 1 for both variants, patch 2 for one.

    It lies in a repository that ignores it and has attributes, as build folders do; the variables
    are those of a hook there; the user has settings; pip sees the folder "index" only.
    """
    root = shutil.copytree(_template, tmp_path / "project")
    git.must(tmp_path, "init", "--quiet")
    (tmp_path / ".gitignore").write_text("*\n")
    (tmp_path / ".gitattributes").write_text("* text eol=crlf\n")
    (tmp_path / ".gitconfig").write_text(HOSTILE)
    for name, value in {
        "GIT_DIR": tmp_path / ".git", "HOME": tmp_path, "XDG_CACHE_HOME": tmp_path / "cache",
        "PIP_CONFIG_FILE": "/dev/null", "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": root / "index", "GIT_AUTHOR_NAME": "Somebody",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return Queue(root)


@pytest.fixture(scope="session")
def pinned_tree() -> Path:
    """The real pristine tree; laid out if it is not there yet."""
    return fetch.ensure_tree().path
