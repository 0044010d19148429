"""Editing and exporting: same commits, same bytes; check and latest tell the truth."""

from __future__ import annotations

import re

import fake_sdist
import pytest
from pq import git, release, worktree
from pq.series import PatchError, read_series

from ..marks import usual

PATCH_1 = "0001-ggml-fix-two.patch"
PATCH_2 = "0002-llama-add-a-file.patch"


def bytes_of(queue) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in queue.folder.iterdir()}


def test_export_does_not_depend_on_settings_or_clock(queue, monkeypatch, tmp_path):
    settings = tmp_path / "gitconfig"
    settings.write_text(
        "[diff]\n noprefix = true\n context = 9\n[format]\n signature = me\n numbered = true\n"
        "[user]\n name = Somebody\n email = somebody@example.org\n"
    )
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(settings))
    monkeypatch.setenv("GIT_AUTHOR_NAME", "Somebody")
    before = bytes_of(queue)
    work = queue.edit()
    git.must(work, "commit", "--quiet", "--amend", "--no-edit", "--date=2001-02-03T04:05:06")
    worktree.export(queue.series, work)
    assert bytes_of(queue) == before
    assert b"Somebody" not in before[PATCH_2] and b"Feb 2001" not in before[PATCH_2]


def test_a_repository_named_by_the_environment_is_left_alone(queue, monkeypatch):
    """As inside a git hook, where GIT_DIR names the repository that runs the hook."""
    outer = queue.root / "outer"
    outer.mkdir()
    git.must(outer, "init", "--quiet")
    monkeypatch.setenv("GIT_DIR", str(outer / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(outer))
    work = queue.edit()
    assert (work / ".git").is_dir()
    assert git.must(outer, "tag") == ""


def test_new_changed_and_dropped_commits(queue, capsys):
    work = queue.edit()
    queue.commit(work, "third thing", {"src/third.cpp": "int third;\n"})
    assert f"added {'0003-third-thing.patch'}" in worktree.export(queue.series, work)
    markers = [(p.name, p.marker) for p in queue.series.patches]
    assert markers[:2] == [(PATCH_1, "both"), (PATCH_2, "patched")]
    assert markers[2:] == [("0003-third-thing.patch", "patched")]
    git.must(work, "rebase", "--quiet", "--onto", "HEAD~2", "HEAD~1")
    report = worktree.export(queue.series, work)
    assert f"removed {PATCH_2}" in report and "added 0002-third-thing.patch" in report
    markers = [(p.name, p.marker) for p in queue.series.patches]
    assert markers == [(PATCH_1, "both"), ("0002-third-thing.patch", "patched")]


@pytest.mark.parametrize("state", ["uncommitted", "no work tree", "am under way", "merge leftover"])
def test_export_refuses(queue, state):
    work = queue.edit()
    if state == "uncommitted":
        (work / "LICENSE").write_text("mine\n")
    elif state == "no work tree":
        work = queue.root
    elif state == "merge leftover":
        queue.commit(work, "third thing", {"src/third.cpp.orig": "int third;\n"})
    else:
        (work / ".git/rebase-apply").mkdir()
    before = bytes_of(queue)
    with pytest.raises(PatchError, match="next:"):
        worktree.export(queue.series, work)
    assert bytes_of(queue) == before


def test_edit_refuses_a_folder_in_use(queue):
    work = queue.edit()
    with pytest.raises(PatchError, match="is not empty") as caught:
        worktree.edit(queue.series, queue.tree, work)
    assert f"export --work {work}" in str(caught.value)


def test_edit_stops_at_the_patch_that_fails_and_can_be_continued(queue):
    """The commands that the error of a failed apply names bring the queue in order."""
    path = queue.folder / PATCH_2
    good = path.read_bytes()
    path.write_text(
        path.read_text().replace("-int f20() { return 20; }", "-int f20() { return 7; }")
    )
    work = queue.root / "work"
    with pytest.raises(PatchError) as caught:
        worktree.edit(queue.series, queue.tree, work)
    message = str(caught.value)
    assert message.startswith(f"{PATCH_2} does not apply") and "git am --continue" in message
    source = work / "src/llama.cpp"
    source.write_text(source.read_text().replace("return 20;", "return 2020;"))
    (work / "src/mtp.cpp").write_text("int mtp;\n")
    git.must(work, "add", "--all")
    git.must(work, "am", "--continue")
    worktree.export(queue.series, work)
    assert path.read_bytes() == good


@pytest.mark.parametrize(
    ("case", "problem"),
    [
        ("moved hunk", f"{PATCH_2}: exports to other bytes"),
        ("date", f"{PATCH_1}: exports to other bytes"),
        ("renamed", "0002-llama-add-a-file.patch: the name it exports to"),
        ("readme", f"{PATCH_2}: not in the table"),
        ("context", f"{PATCH_2} does not apply"),
    ],
)
def test_check_fails(queue, case, problem, capsys):
    one, two = (queue.folder / n for n in (PATCH_1, PATCH_2))
    if case == "moved hunk":
        two.write_text(re.sub(r"@@ -18,7 \+18,7 @@", "@@ -16,7 +16,7 @@", two.read_text()))
    elif case == "date":
        one.write_text(
            one.read_text().replace(worktree.FIXED_DATE, "Fri, 2 Oct 2026 01:00:00 +0000")
        )
    elif case == "renamed":
        two.rename(queue.folder / "0002-other.patch")
        series = queue.folder / "series"
        series.write_text(series.read_text().replace(PATCH_2, "0002-other.patch"))
    elif case == "readme":
        (queue.folder / "README.md").write_text(f"| `{PATCH_1}` |\n")
    elif case == "context":
        two.write_text(two.read_text().replace("return 19", "return 91"))
    assert queue.command("check") == 2
    message = capsys.readouterr().err
    assert problem in message and "next:" in message


def test_git_is_needed(queue, monkeypatch):
    monkeypatch.setattr(git, "available", lambda: False)
    with pytest.raises(PatchError, match="git is needed"):
        worktree.edit(queue.series, queue.tree, queue.root / "work")


LIBRARY = fake_sdist.NEEDED["src/llama.cpp"]
TAKEN = LIBRARY.replace("return 20", "return 2020")
MTP = {"src/mtp.cpp": "int mtp;\n"}
DROP_IT = "already in this release: drop it"
CASES = {
    "the same": ({}, 0, "applies\n"),
    "moved": ({"src/llama.cpp": "// new\n" * 9 + LIBRARY}, 0, "applies (1 hunks moved)"),
    "near": (
        {"src/llama.cpp": LIBRARY.replace("int f18()", "long f18()")},
        0,
        "applies with a three-way merge",
    ),
    "conflict": (
        {"src/llama.cpp": LIBRARY.replace("return 20", "return 21")},
        1,
        "conflicts in src/llama.cpp",
    ),
    "file gone": ({"src/llama.cpp": None}, 1, "conflicts in src/llama.cpp"),
    "file there": ({"src/mtp.cpp": "int theirs;\n"}, 1, "conflicts in src/mtp.cpp"),
    "taken over": ({"src/llama.cpp": TAKEN, **MTP}, 1, DROP_IT),
    "taken over and moved on": (
        *({"src/llama.cpp": TAKEN.replace("f18()", "f(18)"), **MTP}, 1, DROP_IT),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_latest(queue, case, capsys):
    changes, code, how = CASES[case]
    archive = queue.release(changes)
    before = bytes_of(queue)
    assert queue.command("latest", "--archive", archive) == code
    output = capsys.readouterr().out
    assert "llama-cpp-python==9.9.9, llama.cpp c0ffee" in output
    assert f"ok   {PATCH_1}: applies\n" in output
    assert f"{'FAIL' if code else 'ok  '} {PATCH_2}: {how}" in output
    assert f"2 patches, {code} to mend" in output
    assert bytes_of(queue) == before


def test_a_later_patch_is_tried_over_an_earlier_one_that_conflicts(queue, capsys):
    """The later patch changes lines of the earlier one, and would conflict without it."""
    work = queue.edit()
    library = (work / "src/llama.cpp").read_text().replace("return 2020", "return 3030")
    queue.commit(work, "third", {"src/llama.cpp": library, "src/mtp.cpp": "int mtp2;\n"})
    worktree.export(queue.series, work)
    both = LIBRARY.replace("return 20", "return 21").replace("f30()", "f30(void)")
    archive = queue.release({"src/llama.cpp": both})
    assert release.latest(queue.series, queue.tree, None, archive) == 1
    output = capsys.readouterr().out
    assert f"FAIL {PATCH_2}: conflicts in src/llama.cpp (hunk 1 of 1)" in output
    assert "ok   0003-third.patch: applies\n" in output
    assert "3 patches, 1 to mend" in output


def test_hunks_that_conflict_are_told_from_those_that_do_not(queue, capsys):
    work = queue.edit()
    library = (work / "src/llama.cpp").read_text()
    for number in (1, 10, 38):
        library = library.replace(f"return {number};", f"return {number}000;")
    queue.commit(work, "three places", {"src/llama.cpp": library})
    worktree.export(queue.series, work)
    archive = queue.release({"src/llama.cpp": LIBRARY.replace("return 38", "return 39")})
    assert release.latest(queue.series, queue.tree, None, archive) == 1
    line = "FAIL 0003-three-places.patch: conflicts in src/llama.cpp (hunk 3 of 3)\n"
    assert line in capsys.readouterr().out


@pytest.fixture
def index(queue, monkeypatch):
    """A folder that real pip takes the newest releases from; the pin's own is there. Of the other
    package there are wheels as well, which carry no sources."""
    folder = queue.root / "index"
    folder.mkdir()
    (folder / "xllamacpp-2026.10.77-py3-none-any.whl").write_bytes(b"")
    fake_sdist.make_sdist(folder / f"{fake_sdist.TOP}.tar.gz")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


OTHER, NEWER_OWN = "xllamacpp==2026.10.77", "llama-cpp-python==10.0.0"
GGML = "ggml/CMakeLists.txt"
#: llama.cpp's version, ggml's, when the other package's archive was made: which release is tried.
#: The pin is of 0.5.2, 0.25.3 and 2 October, and so is the newest release of its package.
NEWEST = {
    "llama.cpp decides": ((0, 6, 0), (0, 25, 3), 0, OTHER),
    "numbers, not texts": ((0, 10, 0), (0, 25, 3), 0, OTHER),
    "llama.cpp before ggml": ((0, 4, 9), (0, 26, 0), fake_sdist.MADE, None),
    "then ggml": ((0, 5, 2), (0, 26, 0), 0, OTHER),
    "ggml before the date": ((0, 5, 2), (0, 25, 2), fake_sdist.MADE, None),
    "then the date": ((0, 5, 2), (0, 25, 3), fake_sdist.MADE, OTHER),
    "an older date": ((0, 5, 2), (0, 25, 3), 0, None),
    "a newer one of its own": ((0, 5, 3), (0, 25, 3), fake_sdist.MADE, NEWER_OWN),
}


FEW = ("llama.cpp decides",)


@pytest.mark.parametrize("case", usual(*FEW, long=[case for case in NEWEST if case not in FEW]))
def test_latest_tries_the_newest_tree_of_both_packages(queue, index, case, capsys):
    llama, ggml, made, tried = NEWEST[case]
    changes = {
        "CMakeLists.txt": fake_sdist.versions("LLAMA", *llama),
        GGML: fake_sdist.versions("GGML", *ggml),
    }
    other = {"version": "2026.10.77", "package": "xllamacpp", "made": made}
    queue.release(changes, index / "xllamacpp-2026.10.77.tar.gz", **other)
    if tried == NEWER_OWN:
        newer = {"CMakeLists.txt": fake_sdist.versions("LLAMA", 0, 6, 0)}
        queue.release(newer, index / "llama_cpp_python-10.0.0.tar.gz", version="10.0.0")
    assert queue.command("latest") == 0
    output = capsys.readouterr().out
    assert f"{OTHER}, llama.cpp b77 ({'.'.join(map(str, llama))}, " in output
    if tried is None:
        assert output.endswith("the pin is the newest tree of both packages\n")
    else:
        assert f"\ntried: {tried}\nok   {PATCH_1}: applies\n" in output


@pytest.mark.parametrize(
    "version", usual("xllamacpp==2026.10.77", long=["9.9.9", "llama-cpp-python==9.9.9"])
)
def test_latest_of_a_release_that_is_named(queue, index, version, capsys):
    queue.release(
        {}, index / "xllamacpp-2026.10.77.tar.gz", version="2026.10.77", package="xllamacpp"
    )
    assert queue.command("latest", "--version", version) == 0
    output = capsys.readouterr().out
    assert f"{version}, llama.cpp " in output
    assert "2 patches, 0 to mend" in output and "newest" not in output


@pytest.mark.parametrize("content", [None, b"no archive"])
def test_latest_with_a_bad_archive(queue, content, capsys):
    archive = queue.root / "bad.tar.gz"
    if content:
        archive.write_bytes(content)
    assert queue.command("latest", "--archive", archive) == 2
    assert str(archive) in capsys.readouterr().err


def test_the_real_queue(pinned_tree):
    """The committed series applies to the pin and exports to the same bytes."""
    assert "export to the same bytes" in worktree.check(read_series(), pinned_tree)
