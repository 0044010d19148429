"""Unpacking: which files are taken, a tree is complete or absent, bad archives are refused."""

from __future__ import annotations

import os
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fetch
import pytest
import tree as tree_module
from fake_sdist import COMMIT, NEEDED, VERSION, make_pin, make_sdist
from sdist import FetchError, read_pin


def names(root: Path) -> set[str]:
    return {str(p.relative_to(root)) for p in root.rglob("*") if p.is_file()}


def test_unpacks_the_needed_files_only(place):
    tree = fetch.ensure_tree(place.dest, place.archive, place.pin)
    assert names(place.dest) == set(NEEDED) | {tree_module.STAMP}
    assert all((place.dest / n).read_text() == text for n, text in NEEDED.items())
    assert (tree.commit, tree.path, tree.files) == (COMMIT, place.dest, len(NEEDED))
    assert (tree.requirement, tree.date) == ("llama-cpp-python==9.9.9", "2026-10-02")
    assert os.access(place.dest / "cmake/run.sh", os.X_OK)
    assert place.leftovers == []
    # Times of the archive could be older than objects that were built from another release.
    assert time.time() - (place.dest / "src/llama.cpp").stat().st_mtime < 3600


def test_a_second_run_writes_nothing_unless_the_rules_are_others(place, monkeypatch):
    first = fetch.ensure_tree(place.dest, place.archive, place.pin)
    times = {n: (place.dest / n).stat().st_mtime_ns for n in names(place.dest)}
    assert fetch.ensure_tree(place.dest, "no archive", place.pin) == first
    assert {n: (place.dest / n).stat().st_mtime_ns for n in names(place.dest)} == times
    monkeypatch.setattr(tree_module, "DROP", (*tree_module.DROP, "tools/"))
    fetch.ensure_tree(place.dest, place.archive, place.pin)
    assert not (place.dest / "tools/server").exists()


#: What an interrupted copy or a careless hand leaves: a file's new text, or None if it is gone.
HALF = {
    "file cut short": ("src/llama.cpp", "int"),
    "file missing": ("src/llama.cpp", None),
    "extra file": ("src/extra.cpp", "int extra;\n"),
    "broken stamp": (tree_module.STAMP, '{"commit": '),
    "no stamp": (tree_module.STAMP, None),
    "edited in place": ("src/llama.cpp", NEEDED["src/llama.cpp"].replace("return 7", "return 8")),
}


@pytest.mark.parametrize("how", HALF)
def test_a_half_unpacked_tree_is_reported_and_repaired(place, how, capsys):
    fetch.ensure_tree(place.dest, place.archive, place.pin)
    assert fetch.main(["--check", "--dest", str(place.dest)]) == 0
    name, text = HALF[how]
    if text is None:
        (place.dest / name).unlink()
    else:
        (place.dest / name).write_text(text)
    before = names(place.dest.parent)
    assert fetch.main(["--check", "--dest", str(place.dest)]) == 2
    message = capsys.readouterr().err
    assert "expected: llama-cpp-python==9.9.9" in message
    assert "do:       run: rm -rf" in message and str(place.dest) in message
    assert names(place.dest.parent) == before
    if how == "edited in place":
        return  # is found by --check alone
    fetch.ensure_tree(place.dest, place.archive, place.pin)
    assert fetch.check_tree(place.dest, read_pin(place.pin)).commit == COMMIT
    assert place.leftovers == []


def test_a_full_disk_leaves_the_old_tree(place, monkeypatch, tmp_path):
    old = fetch.ensure_tree(place.dest, place.archive, place.pin)
    archive = make_sdist(tmp_path / "newer.tar.gz", NEEDED | {"src/newer.cpp": "\n"})
    newer = make_pin(tmp_path / "newer.pin", archive)
    write, left = tree_module.write_file, iter(range(3))

    def full(path: Path, data: bytes) -> None:
        if next(left, None) is None:
            raise OSError(28, "full")
        write(path, data)

    monkeypatch.setattr(tree_module, "write_file", full)
    with pytest.raises(FetchError, match="no space"):
        fetch.ensure_tree(place.dest, archive, newer)
    assert fetch.check_tree(place.dest, read_pin(place.pin)) == old
    assert place.leftovers == []


def test_a_foreign_destination_is_refused(place):
    place.dest.mkdir()
    (place.dest / "thesis.tex").write_text("precious")
    with pytest.raises(FetchError, match="holds something else") as caught:
        fetch.ensure_tree(place.dest, place.archive, place.pin)
    assert "thesis.tex" in caught.value.found
    assert (place.dest / "thesis.tex").exists() and place.leftovers == []


BAD = {
    "link": ({"links": {"src/evil.cpp": "/etc/passwd"}}, "not a plain file"),
    "dotdot": ({"files": NEEDED | {"src/../../../evil": "out\n"}}, "leaves the tree"),
    "absolute": ({"files": NEEDED | {"src//opt/evil\\x": "out\n"}}, "leaves the tree"),
    "no tree": ({"files": {"README.md": "moved\n"}}, "no CMakeLists.txt"),
    "cut short": ({}, "damaged archive"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_archives_are_refused(place, tmp_path, case):
    archive, (options, found) = tmp_path / "bad.tar.gz", BAD[case]
    make_sdist(archive, **options)
    if case == "cut short":
        archive.write_bytes(place.archive.read_bytes()[:-200])
    make_pin(place.pin, archive, f"llama-cpp-python=={VERSION}")
    with pytest.raises(FetchError, match="cannot be used") as caught:
        fetch.ensure_tree(place.dest, archive, place.pin)
    assert found in caught.value.found and str(archive) in caught.value.found
    assert not place.dest.exists() and place.leftovers == []
    assert not (tmp_path / "evil").exists() and not (place.dest.parent / "evil").exists()


def test_runs_at_once(place, monkeypatch):
    """Four runs reach the last step together; three find the tree of the first one, and keep it:
    it may be in use already."""
    write, together = tree_module.write_file, threading.Barrier(4)

    def wait_for_the_others(path: Path, data: bytes) -> None:
        write(path, data)
        if path.name == tree_module.STAMP:
            together.wait(60)

    monkeypatch.setattr(tree_module, "write_file", wait_for_the_others)

    def run(_: int) -> tuple[str, int]:
        tree = fetch.ensure_tree(place.dest, place.archive, place.pin)
        return tree.commit, place.dest.stat().st_ino

    with ThreadPoolExecutor(4) as pool:
        assert {*pool.map(run, range(4))} == {(COMMIT, place.dest.stat().st_ino)}
    assert place.leftovers == []


def test_the_pinned_tree():
    """The real pin: its tree is laid out, and the comment names the right build."""
    tree = fetch.ensure_tree()
    assert fetch.check_tree(tree.path, read_pin(fetch.PIN_FILE)) == tree
    written = re.search(r"^# llama.cpp (\S+) \((\S+)\)$", fetch.PIN_FILE.read_text(), re.M)
    assert written and written.groups() == (tree.commit, tree.date)
    for name in ("ggml/CMakeLists.txt", "include/llama.h", "tools/llama-bench/CMakeLists.txt"):
        assert (tree.path / name).is_file()
    # llama-server's build generates an empty web interface from these
    for name in ("scripts/ui-assets.cmake", "tools/ui/ui.h.in", "tools/ui/ui.cpp.in"):
        assert (tree.path / name).is_file()
    assert any((tree.path / "licenses").iterdir())
