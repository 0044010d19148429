"""Make vendor/ and patches/ importable; a small pristine tree with a queue of its own."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "vendor"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "vendor"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "patches"))

import fake_sdist
import fetch
import patchqueue
from pq import git, worktree
from pq.series import Series, read_series, write_series


@dataclass(frozen=True)
class Queue:
    """A pristine tree, a folder with two patches over it, and a place for copies."""

    tree: Path
    folder: Path
    root: Path

    @property
    def series(self) -> Series:
        """The queue as it is on disk now."""
        return read_series(self.folder)

    @property
    def work(self) -> Path:
        """Where the queue is edited or rebased."""
        return self.root / "work"

    def edit(self) -> Path:
        """A work tree of the queue."""
        worktree.edit(self.series, self.tree, self.work)
        return self.work

    def command(self, name: str, *options: object) -> int:
        """Run a command on this queue; the exit code."""
        where = [] if name == "stamp" else ["--tree", str(self.tree)]
        words = ["--patches", str(self.folder), name, *map(str, options), *where]
        return patchqueue.main(words)

    def release(
        self, changes: dict[str, str | None], target: Path | None = None, **more: Any
    ) -> Path:
        """The archive of a release whose files differ from the pinned ones; None removes a file."""
        changed = fake_sdist.NEEDED | changes
        files = {name: text for name, text in changed.items() if text is not None}
        return fake_sdist.make_sdist(target or self.root / "newer.tar.gz", files, **more)

    @staticmethod
    def commit(work: Path, message: str, files: dict[str, str]) -> None:
        """Commit new contents of files in a work tree."""
        for name, text in files.items():
            (work / name).write_text(text)
        git.must(work, "add", "--all")
        git.must(work, "commit", "--quiet", "--message", message)


@pytest.fixture(scope="session")
def _queue_template(tmp_path_factory: pytest.TempPathFactory) -> Queue:
    root = tmp_path_factory.mktemp("queue")
    archive = fake_sdist.make_sdist(root / "a.tar.gz")
    pin = fake_sdist.make_pin(root / "a.pin", archive)
    fetch.ensure_tree(root / "tree", archive, pin)
    (root / "patches").mkdir()
    write_series(root / "patches", [])
    queue = Queue(root / "tree", root / "patches", root)
    work = queue.edit()
    ggml = (work / "ggml/src/ggml.c").read_text()
    queue.commit(work, "ggml: fix two", {"ggml/src/ggml.c": ggml.replace("two = 2", "two = 22")})
    library = (work / "src/llama.cpp").read_text().replace("return 20", "return 2020")
    files = {"src/llama.cpp": library, "src/mtp.cpp": "int mtp;\n"}
    queue.commit(work, "llama : add a file\n\nProblem: none.\n", files)
    worktree.export(queue.series, work)
    names = [p.name for p in queue.series.patches]
    write_series(queue.folder, [(names[0], "both"), (names[1], "patched")])
    (queue.folder / "README.md").write_text("".join(f"| `{n}` |\n" for n in names))
    return queue


@pytest.fixture
def queue(_queue_template: Queue, tmp_path: Path) -> Queue:
    """A queue of the test's own: patch 1 for both variants, patch 2 (with a new file) for one."""
    for name in ("tree", "patches"):
        shutil.copytree(_queue_template.root / name, tmp_path / name)
    return Queue(tmp_path / "tree", tmp_path / "patches", tmp_path)


@pytest.fixture(scope="session")
def pinned_tree() -> Path:
    """The real pristine tree; laid out if it is not there yet."""
    return fetch.ensure_tree().path
