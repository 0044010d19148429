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
    """A project's folder: pin, pinned tree, two patches, a source of ours; and places to work."""

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
        where = {"edit": self.work, "export": self.work, "bump": self.work}.get(name)
        words = [name, *options, "--patches", self.folder, "--tree", self.tree]
        return patchqueue.main([*map(str, words), *(["--work", str(where)] if where else [])])

    def edit(self, message: str = "", name: str = LIBRARY, **replaced: str) -> None:
        """Make the work tree; with a message, replace texts of a file, commit and export."""
        if not self.work.exists():
            git.edit(self.series, self.tree, self.work)
        if message:
            self.replace(name, **replaced)
            git.must(self.work, "commit", "--quiet", "--all", "--message", message)
            git.export(self.series, self.work)

    def replace(self, name: str = LIBRARY, **replaced: str) -> None:
        """Let functions of a file in the work tree return something else: f20="2020"."""
        text = (self.work / name).read_text()
        for function, value in replaced.items():
            text = re.sub(rf"(\b{function}\b.*) \d+;", rf"\1 {value};", text)
        (self.work / name).write_text(text)

    def release(self, changes: dict[str, str | None], name: str = "", **more: Any) -> Path:
        """The archive of a release whose files differ from the pinned ones; None removes a file."""
        changed = fake_sdist.NEEDED | changes
        files = {name: text for name, text in changed.items() if text is not None}
        name = name or f"index/llama_cpp_python-{more.get('version', '9.9.9')}.tar.gz"
        target = self.root / name
        target.parent.mkdir(exist_ok=True)
        return fake_sdist.make_sdist(target, files, **more)

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
    for name in ("ggml-cpu/kernel.cpp", "ggml-cuda/kernel.cu", "llama/mtp.h"):
        (queue.root / "bindings" / name).parent.mkdir(parents=True)
        (queue.root / "bindings" / name).write_text("int ours;\n")
    queue.folder.mkdir()
    (queue.folder / "series").write_text("")
    queue.edit("ggml: fix two", "ggml/src/ggml.c", two="22")
    queue.edit("llama : return more\n\nProblem: none.\n", f20="2020")
    series = queue.folder / "series"
    series.write_text(series.read_text().replace("two.patch patched", "two.patch both"))
    table = [f"| `{path.name}` |\n" for path in queue.series.patches]
    (queue.folder / "README.md").write_text("".join(table))
    shutil.rmtree(queue.work)
    return queue.root


@pytest.fixture
def queue(_template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Queue:
    """A queue of the test's own: patch 1 for both variants, patch 2 for one."""
    shutil.copytree(_template, tmp_path / "project")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, value in {"CONFIG_FILE": "/dev/null", "NO_INDEX": "1"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "project/index"))
    return Queue(tmp_path / "project")


@pytest.fixture(scope="session")
def pinned_tree() -> Path:
    """The real pristine tree; laid out if it is not there yet."""
    return fetch.ensure_tree().path
