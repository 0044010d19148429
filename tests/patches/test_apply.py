"""Applying: the right patches for a variant, nothing touched that need not be, clear failures."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from pq import git
from pq.apply import STAMP, apply_series
from pq.series import PatchError, write_series

PATCH_1 = "0001-ggml-fix-two.patch"
PATCH_2 = "0002-llama-add-a-file.patch"


def snapshot(root: Path) -> dict[str, tuple[bytes, int]]:
    files = (p for p in root.rglob("*") if p.is_file())
    return {str(p.relative_to(root)): (p.read_bytes(), p.stat().st_mtime_ns) for p in files}


def contents(root: Path) -> dict[str, bytes]:
    return {n: data for n, (data, _) in snapshot(root).items() if not n.startswith(".pyllama")}


def age(root: Path) -> None:
    """Make every file look an hour old, so that a rewritten one stands out."""
    for path in root.rglob("*"):
        os.utime(path, (path.stat().st_mtime - 3600,) * 2)


def test_variants(queue):
    before = snapshot(queue.tree)
    for variant in ("upstream", "patched"):
        apply_series(queue.series, queue.tree, queue.root / variant, variant)
    pristine, upstream, patched = (
        contents(queue.root / n) for n in ("tree", "upstream", "patched")
    )
    assert {n for n in pristine if upstream[n] != pristine[n]} == {"ggml/src/ggml.c"}
    assert upstream.keys() == pristine.keys()
    assert patched.keys() - pristine.keys() == {"src/mtp.cpp"}
    changed = {n for n in pristine if patched[n] != pristine[n]}
    assert changed == {"ggml/src/ggml.c", "src/llama.cpp"}
    assert b"two = 22" in patched["ggml/src/ggml.c"] and b"2020" in patched["src/llama.cpp"]
    assert snapshot(queue.tree) == before


def test_second_run_writes_nothing_and_does_not_even_patch(queue, monkeypatch):
    dest = queue.root / "copy"
    apply_series(queue.series, queue.tree, dest, "patched")
    before = snapshot(dest)
    monkeypatch.setattr("pq.apply.stage", lambda *_: pytest.fail("patched again"))
    done = apply_series(queue.series, queue.tree, dest, "patched")
    assert (done.written, done.removed) == (0, 0)
    assert snapshot(dest) == before


def test_only_changed_files_get_a_new_time(queue):
    """Dropping patch 2 must rewrite its file (with a time of now) and leave the others alone."""
    dest = queue.root / "copy"
    apply_series(queue.series, queue.tree, dest, "patched")
    age(dest)
    age(queue.tree)
    before = snapshot(dest)
    done = apply_series(queue.series, queue.tree, dest, "upstream")
    after = snapshot(dest)
    assert (done.written, done.removed) == (1, 1)
    moved = {n for n in after if after[n][1] != before[n][1]} - {STAMP}
    assert moved == {"src/llama.cpp"}
    assert after["src/llama.cpp"][1] - before["src/llama.cpp"][1] > 3000 * 10**9
    assert "src/mtp.cpp" not in after


@pytest.mark.parametrize("damage", ["missing", "cut short", "extra", "no stamp", "broken stamp"])
def test_damaged_copy_is_repaired(queue, damage):
    dest = queue.root / "copy"
    apply_series(queue.series, queue.tree, dest, "patched")
    good = contents(dest)
    if damage == "missing":
        (dest / "src/llama.cpp").unlink()
    elif damage == "cut short":
        (dest / "src/llama.cpp").write_text("")
    elif damage == "extra":
        (dest / "src/extra.cpp").write_text("")
    elif damage == "no stamp":
        shutil.rmtree(dest)
    else:
        (dest / STAMP).write_text("[]")
    apply_series(queue.series, queue.tree, dest, "patched")
    assert contents(dest) == good


def test_no_disk_space_is_told_and_the_next_run_completes(queue, monkeypatch, capsys):
    def full(origin, target):
        raise OSError(errno.ENOSPC, "No space left on device", str(target))

    with monkeypatch.context() as patched:
        patched.setattr("pq.apply.shutil.copyfile", full)
        assert queue.command("apply", "--dest", queue.root / "copy") == 2
    message = capsys.readouterr().err
    assert "No space left on device" in message and "next:" in message
    assert queue.command("apply", "--dest", queue.root / "copy") == 0


def test_executable_bit_is_kept(queue):
    (queue.tree / "src/llama.cpp").chmod(0o755)
    apply_series(queue.series, queue.tree, queue.root / "copy", "patched")
    assert os.access(queue.root / "copy/src/llama.cpp", os.X_OK)


def spoil(queue) -> None:
    """Make patch 2 expect a line that is not there."""
    path = queue.folder / PATCH_2
    path.write_text(
        path.read_text().replace("-int f20() { return 20; }", "-int f20() { return 7; }")
    )


@pytest.mark.parametrize("tool", ["git", "patch"])
def test_failure_names_patch_file_and_next_commands(queue, capsys, monkeypatch, tool):
    dest = queue.root / "copy"
    if tool == "patch":
        monkeypatch.setattr(git, "available", lambda: False)
    apply_series(queue.series, queue.tree, dest, "patched")
    before = snapshot(dest)
    spoil(queue)
    assert queue.command("apply", "--dest", dest) == 2
    message = capsys.readouterr().err
    assert f"{PATCH_2} does not apply to llama.cpp c0ffee" in message
    assert "src/llama.cpp" in message and PATCH_1 not in message
    assert re.search(r"src/llama.cpp:\d+|Hunk #1 FAILED", message)
    assert "next:" in message and "patchqueue.py edit" in message and "git am" in message
    assert snapshot(dest) == before
    assert [p.name for p in queue.root.glob(".copy*")] == []


def test_without_git_patch_does_the_same(queue, monkeypatch):
    apply_series(queue.series, queue.tree, queue.root / "a", "patched")
    monkeypatch.setattr(git, "available", lambda: False)
    apply_series(queue.series, queue.tree, queue.root / "b", "patched")
    assert contents(queue.root / "a") == contents(queue.root / "b")


def test_without_git_and_patch(queue, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(PatchError, match="neither git nor patch was found"):
        apply_series(queue.series, queue.tree, queue.root / "copy", "patched")


def test_inside_another_repository(queue):
    """Builds happen below repositories that ignore the build folder, or have hooks and settings."""
    outer = queue.root / "outer"
    outer.mkdir()
    subprocess.run(["git", "init", "--quiet"], cwd=outer, check=True)
    (outer / ".gitignore").write_text("build/\n")
    (outer / ".gitattributes").write_text("* text eol=crlf\n")
    dest = outer / "build/tree/patched"
    apply_series(queue.series, queue.tree, dest, "patched")
    apply_series(queue.series, queue.tree, queue.root / "plain", "patched")
    assert contents(dest) == contents(queue.root / "plain")


def test_settings_of_the_user_do_not_matter(queue, monkeypatch):
    settings = queue.root / "gitconfig"
    settings.write_text("[core]\n autocrlf = true\n[apply]\n whitespace = error-all\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(settings))
    apply_series(queue.series, queue.tree, queue.root / "copy", "patched")
    data = (queue.root / "copy/src/llama.cpp").read_bytes()
    assert b"2020" in data and b"\r" not in data


def test_foreign_destination_is_refused(queue):
    dest = queue.root / "copy"
    dest.mkdir()
    (dest / "thesis.tex").write_text("precious")
    with pytest.raises(PatchError, match="not a patched copy made by this tool"):
        apply_series(queue.series, queue.tree, dest, "patched")
    assert (dest / "thesis.tex").exists()


@pytest.mark.parametrize("dest", ["tree", "tree/build", "."])
def test_destination_and_tree_must_be_apart(queue, dest):
    before = snapshot(queue.tree)
    with pytest.raises(PatchError, match="must be apart"):
        apply_series(queue.series, queue.tree, queue.root / dest, "patched")
    assert snapshot(queue.tree) == before


@pytest.mark.parametrize("state", ["absent", "incomplete"])
def test_pristine_tree_that_cannot_be_used(queue, state):
    if state == "absent":
        shutil.rmtree(queue.tree)
    else:
        (queue.tree / "LICENSE").unlink()
    with pytest.raises(PatchError, match=r"python vendor/fetch\.py"):
        apply_series(queue.series, queue.tree, queue.root / "copy", "patched")


def test_stamp_depends_on_bytes_names_and_order(queue):
    stamps = {queue.series.stamp("upstream"), queue.series.stamp("patched")}
    path = queue.folder / PATCH_2
    path.write_bytes(path.read_bytes().replace(b"Problem: none", b"Problem: some"))
    stamps.add(queue.series.stamp("patched"))
    path.rename(queue.folder / "0002-other.patch")
    write_series(queue.folder, [(PATCH_1, "both"), ("0002-other.patch", "patched")])
    stamps.add(queue.series.stamp("patched"))
    write_series(queue.folder, [("0002-other.patch", "both"), (PATCH_1, "both")])
    stamps.add(queue.series.stamp("patched"))
    assert len(stamps) == 5
    assert queue.series.stamp("upstream") == queue.series.stamp("patched")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (f"{PATCH_1}\n", "expected 'NAME.patch both'"),
        (f"{PATCH_1} upstream\n", "expected 'NAME.patch both'"),
        ("0009-gone.patch both\n", "no such file"),
        (f"{PATCH_2} patched\n{PATCH_1} both\n", "come before the others"),
        (f"{PATCH_1} both\n{PATCH_1} both\n", "twice"),
        (f"{PATCH_1} both\n", f"not in the series: {PATCH_2}"),
        (None, "cannot be read"),
    ],
)
def test_bad_series(queue, text, problem):
    if text is None:
        (queue.folder / "series").unlink()
    else:
        (queue.folder / "series").write_text(text)
    with pytest.raises(PatchError, match=re.escape(problem)) as caught:
        _ = queue.series
    assert "next:" in str(caught.value)
