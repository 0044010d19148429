"""The series, and its git history: same commits, same bytes; check tells the truth."""

from __future__ import annotations

import pytest
from pq import git, series

PATCH_1, PATCH_2 = "0001-ggml-fix-two.patch", "0002-llama-return-more.patch"


def test_export_depends_on_the_commits_alone(queue):
    """Not on the clock, nor on the settings and the repository around it: see the fixture."""
    before = queue.bytes("patches", "../.git")
    assert queue.command("edit") == 0
    git.must(queue.work, "commit", "--quiet", "--amend", "--no-edit", "--date=2001-02-03T04:05:06")
    assert queue.command("export") == 0
    assert queue.bytes("patches", "../.git") == before
    assert b"Somebody" not in b"".join(queue.series.files().values())


def test_new_changed_and_dropped_commits(queue, capsys):
    queue.commit("third thing", f30="3030")
    git.must(queue.work, "rebase", "--quiet", "--onto", "HEAD~2", "HEAD~1")
    queue.replace(f1="11")
    before = queue.bytes("patches")
    assert queue.command("export") == 2 and queue.bytes("patches") == before, "not committed"
    git.must(queue.work, "checkout", "--quiet", ".")
    assert queue.command("export") == 0
    report = capsys.readouterr().out
    assert f"removed {PATCH_2}" in report and "added 0002-third-thing.patch" in report
    assert [path.name for path in queue.series.patches] == [PATCH_1, "0002-third-thing.patch"]
    assert [path.name for path in queue.series.of("upstream")] == [PATCH_1]


def test_edit_stops_at_the_patch_that_fails_and_can_be_continued(queue, capsys):
    path = queue.folder / PATCH_2
    good = path.read_text()
    path.write_text(good.replace("-int f20() { return 20; }", "-int f20() { return 7; }"))
    assert queue.command("edit") == 2
    message = capsys.readouterr().err
    assert "0002 llama : return more does not apply" in message
    assert "git add -A; git am --continue" in message and f"export --work {queue.work}" in message
    queue.replace(f20="2020")
    git.must(queue.work, "add", "-A")
    git.must(queue.work, "am", "--continue")
    assert queue.command("export") == 0
    assert path.read_text() == good


@pytest.mark.parametrize(
    ("file", "old", "new", "problem"),
    [
        (PATCH_2, "@@ -18,7 +18,7 @@", "@@ -16,7 +16,7 @@", "exports to other bytes"),
        ("series", PATCH_2, "0003-gone.patch", "series must list the folder's patches in order"),
        ("README.md", PATCH_2, "0002", f"{PATCH_2} has no row in the table of README.md"),
        ("LINES_OF_ALL", "", "", "all patches have 37 lines, more than 19"),
        ("a file", "", "", f"{PATCH_2} adds a file: put sources of ours in a folder of bindings/"),
    ],
)
def test_check_fails(queue, file, old, new, problem, monkeypatch, capsys):
    if new:
        path = queue.folder / file
        path.write_text(path.read_text().replace(old, new))
    elif file == "a file":
        assert queue.command("edit") == 0
        (queue.work / "src/mtp.cpp").write_text("int mtp;\n")
        git.must(queue.work, "add", "--all")
        git.must(queue.work, "commit", "--quiet", "--amend", "--no-edit")
        assert queue.command("export") == 0
    else:
        monkeypatch.setattr(series, file, 19)
    assert queue.command("check") == 2
    message = capsys.readouterr().err
    assert problem in message and "\nnext:\n" in message


def test_sources_of_ours_are_in_the_patched_stamp(queue):
    """A build that went on with objects of other sources would be another library."""
    source = queue.root / "bindings/ggml-cuda/kernel.cu"
    source.parent.mkdir(parents=True)
    source.write_text("int ours;\n")
    before, seen = queue.series.stamp("upstream"), {queue.series.stamp("patched")}
    for file in (queue.folder / PATCH_2, source):
        file.write_text(file.read_text() + "\n")
        seen.add(queue.series.stamp("patched"))
        assert queue.series.stamp("upstream") == before
    assert len({before, *seen}) == 4
    (queue.folder / PATCH_1).write_text("other\n")
    assert queue.series.stamp("upstream") != before


def test_the_real_queue(pinned_tree):
    """The committed series applies to the pin and exports to the same bytes."""
    git.check(series.read_series(), pinned_tree)
