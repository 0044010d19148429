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
    assert queue.command("export") == 0
    report = capsys.readouterr().out
    assert f"removed {PATCH_2}" in report and "added 0002-third-thing.patch" in report
    assert [path.name for path in queue.series.patches] == [PATCH_1, "0002-third-thing.patch"]
    assert [path.name for path in queue.series.of("upstream")] == [PATCH_1]


@pytest.mark.parametrize("state", ["uncommitted", "am under way", "in use"])
def test_export_and_edit_refuse(queue, state, capsys):
    assert queue.command("edit") == 0
    if state == "uncommitted":
        queue.replace(f1="11")
    elif state == "am under way":
        (queue.work / ".git/rebase-apply").mkdir()
    before = queue.bytes()
    assert queue.command("edit" if state == "in use" else "export") == 2
    assert "\nnext:\n" in capsys.readouterr().err
    assert queue.bytes() == before


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
        (PATCH_2, "return 19", "return 91", "0002 llama : return more does not apply"),
        ("series", PATCH_2, "0003-gone.patch", "series must list the folder's patches in order"),
        ("README.md", PATCH_2, "0002", f"{PATCH_2} has no row in the table of README.md"),
        ("LINES_OF_ONE", "", "", f"{PATCH_2} has 20 lines, more than 19"),
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


SOURCES = ("ggml-cpu/kernel.cpp", "ggml-cuda/kernel.cu", "llama/mtp.h")


def test_sources_of_ours_are_in_the_figures_and_in_the_patched_stamp(queue, capsys):
    for name in SOURCES:
        (queue.root / "bindings" / name).parent.mkdir(parents=True)
        (queue.root / "bindings" / name).write_text("int ours;\n")
    assert queue.command("check", "--stat") == 0
    assert capsys.readouterr().out.splitlines() == [
        "1\t1\tggml/src/ggml.c",
        "1\t1\tsrc/llama.cpp",
        " 2 files changed, 2 insertions(+), 2 deletions(-)",
        *(f" 1 files of ours in bindings/{name.partition('/')[0]}, 1 lines" for name in SOURCES),
        "2 patches apply to llama.cpp c0ffee000000 and export to the same bytes",
    ]
    before, seen = queue.series.stamp("upstream"), {queue.series.stamp("patched")}
    for file in [queue.folder / PATCH_2, *(queue.root / "bindings" / name for name in SOURCES)]:
        file.write_text(file.read_text() + "\n")
        seen.add(queue.series.stamp("patched"))
        assert queue.series.stamp("upstream") == before
    assert len({before, *seen}) == 6
    (queue.folder / PATCH_1).write_text("other\n")
    assert queue.series.stamp("upstream") != before


def test_the_real_queue(pinned_tree):
    """The committed series applies to the pin and exports to the same bytes."""
    git.check(series.read_series(), pinned_tree)
