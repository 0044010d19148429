"""Unpacking: which files are taken, a tree is complete or absent, bad archives are refused."""

from __future__ import annotations

import errno
import os
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
    assert not (place.dest / "LICENSE").stat().st_mode & 0o111
    assert place.leftovers == []
    # Times of the archive could be older than objects that were built from another release.
    assert time.time() - (place.dest / "src/llama.cpp").stat().st_mtime < 60


def test_the_other_package(place, tmp_path):
    """xllamacpp: another folder, no git; its version's third number is llama.cpp's build."""
    version = "2026.10.11549.1"
    archive = make_sdist(tmp_path / "x.tar.gz", version=version, package="xllamacpp")
    make_pin(place.pin, archive, f"xllamacpp=={version}")
    tree = fetch.ensure_tree(place.dest, archive, place.pin)
    assert names(place.dest) == set(NEEDED) | {tree_module.STAMP}
    assert (tree.commit, tree.date) == ("b11549", "2026-10-10")
    assert fetch.ensure_tree(place.dest, None, place.pin) == tree


def test_second_run_reads_no_archive_and_writes_nothing(place):
    first = fetch.ensure_tree(place.dest, place.archive, place.pin)
    times = {n: (place.dest / n).stat().st_mtime_ns for n in names(place.dest)}
    place.archive.unlink()
    assert fetch.ensure_tree(place.dest, None, place.pin) == first
    assert {n: (place.dest / n).stat().st_mtime_ns for n in names(place.dest)} == times


def half_unpack(how: str, dest: Path) -> None:
    """Leave `dest` as an interrupted copy or a careless hand would."""
    if how in WRITTEN:
        name, text = WRITTEN[how]
        (dest / name).write_text(text)
    elif how == "link to a folder":
        (dest / "src/more").symlink_to("../src")
    else:
        for name in REMOVED[how] or names(dest):
            (dest / name).unlink()


WRITTEN = {
    "file cut short": ("src/llama.cpp", "int"),
    "extra file": ("src/extra.cpp", "int extra;\n"),
    "broken stamp": (tree_module.STAMP, '{"commit": '),
    "stamp of no object": (tree_module.STAMP, "3"),
    "edited in place": ("src/llama.cpp", NEEDED["src/llama.cpp"].replace("return 7", "return 8")),
}
REMOVED = {"no stamp": [tree_module.STAMP], "file missing": ["src/llama.cpp"], "empty folder": []}
HALF = ["link to a folder", *REMOVED, *WRITTEN][:-1]  # an edit is found by --check alone


@pytest.mark.parametrize("how", HALF)
def test_half_unpacked_tree_is_repaired(place, how):
    fetch.ensure_tree(place.dest, place.archive, place.pin)
    half_unpack(how, place.dest)
    fetch.ensure_tree(place.dest, place.archive, place.pin)
    assert names(place.dest) == set(NEEDED) | {tree_module.STAMP}
    assert fetch.check_tree(place.dest, read_pin(place.pin)).commit == COMMIT
    assert place.leftovers == []


@pytest.mark.parametrize("how", [*HALF, "edited in place", "absent"])
def test_check_reports_and_changes_nothing(place, how, capsys):
    fetch.ensure_tree(place.dest, place.archive, place.pin)
    assert fetch.main(["--check", "--dest", str(place.dest)]) == 0
    if how == "absent":
        place.dest.rename(place.dest.parent / "elsewhere")
    else:
        half_unpack(how, place.dest)
    before = names(place.dest.parent)
    assert fetch.main(["--check", "--dest", str(place.dest)]) == 2
    message = capsys.readouterr().err
    assert "expected: llama-cpp-python==9.9.9" in message
    assert "do:       run: rm -rf" in message and str(place.dest) in message
    assert names(place.dest.parent) == before


def test_another_pin_and_other_rules_replace_the_tree(place, tmp_path, monkeypatch):
    fetch.ensure_tree(place.dest, place.archive, place.pin)
    monkeypatch.setattr(tree_module, "DROP", (*tree_module.DROP, "tools/"))
    fetch.ensure_tree(place.dest, place.archive, place.pin)
    assert not (place.dest / "tools/server").exists()
    archive = make_sdist(tmp_path / "newer.tar.gz", {"CMakeLists.txt": "project(newer)\n"})
    fetch.ensure_tree(place.dest, archive, make_pin(place.pin, archive))
    assert names(place.dest) == {"CMakeLists.txt", tree_module.STAMP}


@pytest.mark.parametrize(
    ("number", "said"), [(errno.ENOSPC, "no space"), (errno.EACCES, "cannot be written")]
)
def test_a_disk_that_takes_no_more_leaves_the_old_tree(place, monkeypatch, tmp_path, number, said):
    old = fetch.ensure_tree(place.dest, place.archive, place.pin)
    archive = make_sdist(tmp_path / "newer.tar.gz", NEEDED | {"src/newer.cpp": "\n"})
    newer = make_pin(tmp_path / "newer.pin", archive)
    write, left = tree_module.write_file, iter(range(3))

    def full(path: Path, data: bytes) -> None:
        if next(left, None) is None:
            raise OSError(number, "full")
        write(path, data)

    monkeypatch.setattr(tree_module, "write_file", full)
    with pytest.raises(FetchError, match=said):
        fetch.ensure_tree(place.dest, archive, newer)
    assert fetch.check_tree(place.dest, read_pin(place.pin)) == old
    assert place.leftovers == []


def test_what_a_killed_run_left_is_removed_when_old(place):
    old, young = (place.dest.parent / f".llama.cpp.tmp-{n}" for n in ("old", "young"))
    old.mkdir()
    young.mkdir()
    os.utime(old, (1, 1))
    fetch.ensure_tree(place.dest, place.archive, place.pin)
    assert place.leftovers == [young.name]


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_foreign_destination_is_refused(place, kind):
    if kind == "folder":
        place.dest.mkdir()
        (place.dest / "thesis.tex").write_text("precious")
    else:
        place.dest.write_text("precious")
    with pytest.raises(FetchError, match="holds something else") as caught:
        fetch.ensure_tree(place.dest, place.archive, place.pin)
    assert ("thesis.tex" if kind == "folder" else "llama.cpp") in caught.value.found
    assert place.dest.exists() and place.leftovers == []


BAD = {
    "link": {"links": {"src/evil.cpp": "/etc/passwd"}},
    "dotdot": {"files": NEEDED | {"src/../../../evil": "out\n"}},
    "absolute": {"files": NEEDED | {"src//opt/evil\\x": "out\n"}},
    "no commit": {"commit": "ref: refs/heads/gone"},
    "no tree": {"files": {"README.md": "moved\n"}},
    "no build": {"package": "xllamacpp"},
}


@pytest.mark.parametrize(
    ("case", "found"),
    [
        ("link", "not a plain file"),
        ("dotdot", "leaves the tree"),
        ("absolute", "leaves the tree"),
        ("no commit", "no commit"),
        ("no build", "no build in xllamacpp==9.9.9"),
        ("no tree", "no CMakeLists.txt"),
        ("cut short", "damaged archive"),
        ("not gzip", "damaged archive"),
    ],
)
def test_bad_archives_are_refused(place, tmp_path, case, found):
    archive = tmp_path / "bad.tar.gz"
    make_sdist(archive, **BAD.get(case, {}))
    if case == "cut short":
        archive.write_bytes(place.archive.read_bytes()[:-200])
    elif case == "not gzip":
        archive.write_bytes(b"<html>no such page</html>")
    package = BAD.get(case, {}).get("package", "llama-cpp-python")
    make_pin(place.pin, archive, f"{package}=={VERSION}")
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
    assert names(place.dest) == set(NEEDED) | {tree_module.STAMP}
    assert place.leftovers == []
