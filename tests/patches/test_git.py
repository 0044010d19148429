"""The series, and its git history: same commits, same bytes; check tells the truth."""

from __future__ import annotations

import pytest
from pq import git, series

PATCH_1, PATCH_2 = "0001-ggml-fix-two.patch", "0002-llama-return-more.patch"
LIBRARY = "src/llama.cpp"


def change(path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_export_depends_on_the_commits_alone(queue, monkeypatch):
    """Not on settings, on the clock, or on the repository that the environment names in a hook."""
    settings, outer = queue.root / "gitconfig", queue.root / "outer"
    settings.write_text("[diff]\n noprefix = true\n context = 9\n[format]\n signature = me\n")
    outer.mkdir()
    git.must(outer, "init", "--quiet")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(settings))
    monkeypatch.setenv("GIT_AUTHOR_NAME", "Somebody")
    monkeypatch.setenv("GIT_DIR", str(outer / ".git"))
    before = queue.bytes("patches")
    assert queue.command("edit") == 0
    git.must(queue.work, "commit", "--quiet", "--amend", "--no-edit", "--date=2001-02-03T04:05:06")
    assert queue.command("export") == 0
    assert queue.bytes("patches") == before
    assert git.must(outer, "tag") == ""


def test_new_changed_and_dropped_commits(queue, capsys):
    queue.edit("third thing", f30="3030")
    git.must(queue.work, "rebase", "--quiet", "--onto", "HEAD~2", "HEAD~1")
    queue.replace(f30="33")
    git.must(queue.work, "commit", "--quiet", "--amend", "--all", "--no-edit")
    assert queue.command("export") == 0
    report = capsys.readouterr().out
    assert f"removed {PATCH_2}" in report and "added 0002-third-thing.patch" in report
    assert [p.name for p in queue.series.patches] == [PATCH_1, "0002-third-thing.patch"]
    assert [p.name for p in queue.series.of("upstream")] == [PATCH_1]
    assert b"return 33;" in queue.series.files()["0002-third-thing.patch"]


@pytest.mark.parametrize("state", ["uncommitted", "no repository", "am under way", "in use"])
def test_export_and_edit_refuse(queue, state, capsys):
    if state != "no repository":
        queue.edit()
    if state == "uncommitted":
        queue.replace(f1="11")
    elif state == "am under way":
        (queue.work / ".git/rebase-apply").mkdir()
    before = queue.bytes()
    assert queue.command("edit" if state == "in use" else "export") == 2
    assert state == "no repository" or "\nnext:\n" in capsys.readouterr().err
    assert queue.bytes() == before


def test_edit_stops_at_the_patch_that_fails_and_can_be_continued(queue, capsys):
    path = queue.folder / PATCH_2
    good = path.read_bytes()
    change(path, "-int f20() { return 20; }", "-int f20() { return 7; }")
    assert queue.command("edit") == 2
    message = capsys.readouterr().err
    assert "0002 llama : return more does not apply" in message
    assert "git add -A; git am --continue" in message and f"export --work {queue.work}" in message
    queue.replace(f20="2020")
    git.must(queue.work, "add", "-A")
    git.must(queue.work, "am", "--continue")
    assert queue.command("export") == 0
    assert path.read_bytes() == good


@pytest.mark.parametrize(
    ("file", "old", "new", "problem"),
    [
        (PATCH_2, "@@ -18,7 +18,7 @@", "@@ -16,7 +16,7 @@", "exports to other bytes"),
        (PATCH_1, "1 Oct 2026", "2 Oct 2026", "exports to other bytes"),
        (PATCH_2, "Subject: [PATCH] llama", "Subject: [PATCH] lama", "exports to other bytes"),
        (PATCH_2, "return 19", "return 91", "0002 llama : return more does not apply"),
        ("README.md", PATCH_2, "0002", f"{PATCH_2} has no row in the table of README.md"),
        ("README.md", "LINES_OF_ONE", "", f"{PATCH_2} has 20 lines, more than 19"),
        ("README.md", "LINES_OF_ALL", "", "all patches have 37 lines, more than 19"),
    ],
)
def test_check_fails(queue, file, old, new, problem, monkeypatch, capsys):
    if new:
        change(queue.folder / file, old, new)
    else:
        monkeypatch.setattr(series, old, 19)
    assert queue.command("check") == 2
    message = capsys.readouterr().err
    assert problem in message and "\nnext:\n" in message


def test_check_names_a_patch_that_adds_a_file(queue, capsys):
    queue.edit()
    (queue.work / "src/mtp.cpp").write_text("int mtp;\n")
    git.must(queue.work, "add", "--all")
    git.must(queue.work, "commit", "--quiet", "--amend", "--no-edit")
    assert queue.command("export") == 0
    assert queue.command("check") == 2
    message = capsys.readouterr().err
    assert f"{PATCH_2} adds a file: put sources of ours in a folder of bindings/" in message


def test_check_shows_what_differs_and_what_is_ours(queue, capsys):
    assert queue.command("check", "--stat") == 0
    assert capsys.readouterr().out.splitlines() == [
        "1\t1\tggml/src/ggml.c",
        "1\t1\tsrc/llama.cpp",
        " 2 files changed, 2 insertions(+), 2 deletions(-)",
        " 1 files of ours in bindings/ggml-cpu, 1 lines",
        " 1 files of ours in bindings/ggml-cuda, 1 lines",
        " 1 files of ours in bindings/llama, 1 lines",
        "2 patches apply to llama.cpp c0ffee000000 and export to the same bytes",
    ]


def test_stamps_cover_the_patches_and_sources_of_a_variant(queue, capsys):
    def stamps() -> tuple[str, str]:
        for variant in ("upstream", "patched"):
            assert queue.command("stamp", "--variant", variant) == 0
        return tuple(capsys.readouterr().out.split())

    before, upstream = stamps()
    assert before != upstream
    seen = {upstream}
    sources = ["ggml-cpu/kernel.cpp", "ggml-cuda/kernel.cu", "llama/mtp.h"]
    for file in [queue.folder / PATCH_2, *(queue.root / "bindings" / name for name in sources)]:
        file.write_text(file.read_text() + "\n")
        same, other = stamps()
        assert same == before and other not in seen
        seen.add(other)
    (queue.folder / PATCH_1).write_text("other\n")
    assert stamps()[0] != before


@pytest.mark.parametrize(
    "text",
    [
        f"{PATCH_1}\n{PATCH_2} patched\n",
        f"{PATCH_1} upstream\n{PATCH_2} patched\n",
        f"{PATCH_1} patched\n{PATCH_2} both\n",
        f"{PATCH_2} both\n{PATCH_1} patched\n",
        f"{PATCH_1} both\n",
        f"{PATCH_1} both\n{PATCH_2} patched\n0003-gone.patch patched\n",
    ],
)
def test_a_series_that_does_not_fit_its_folder(queue, text, capsys):
    (queue.folder / "series").write_text(text)
    assert queue.command("stamp") == 2
    assert "series must list the folder's patches in order" in capsys.readouterr().err


def test_the_real_queue(pinned_tree):
    """The committed series applies to the pin and exports to the same bytes."""
    assert "export to the same bytes" in git.check(series.read_series(), pinned_tree)
