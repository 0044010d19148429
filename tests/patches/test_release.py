"""Another release: latest says what each patch needs there; bump moves queue, pin and tree."""

from __future__ import annotations

import fake_sdist
import fetch
import pytest
from pq import git
from pq.series import PIN
from sdist import read_pin, sha256_of

from ..marks import usual

PATCH_1, PATCH_2 = "0001-ggml-fix-two.patch", "0002-llama-return-more.patch"
NEW, OTHER = "10.0.0", "xllamacpp==2026.10.77"
LIBRARY = "src/llama.cpp"
TEXT = fake_sdist.NEEDED[LIBRARY]
CONFLICT = TEXT.replace("return 20", "return 21")
TAKEN = TEXT.replace("return 20", "return 2020")
DROP_IT = "already in this release: drop it"
CASES = {
    "the same": (TEXT, "applies\n"),
    "moved": ("// new\n" * 9 + TEXT, "applies\n"),
    "near": (TEXT.replace("int f18()", "long f18()"), "applies with a three-way merge"),
    "conflict": (CONFLICT, f"CONFLICT (content): Merge conflict in {LIBRARY}; {LIBRARY}:21\n"),
    "gone": (None, f"CONFLICT (modify/delete): {LIBRARY} deleted in HEAD"),
    "taken over": (TAKEN, DROP_IT),
    "taken over and moved on": (TAKEN.replace("f18()", "f(18)"), DROP_IT),
}


@pytest.mark.parametrize("case", CASES)
def test_latest(queue, case, capsys):
    text, how = CASES[case]
    archive = queue.release({LIBRARY: text})
    before, fits = queue.bytes(), how.startswith("applies")
    assert queue.command("latest", "--archive", archive) == (not fits)
    output = capsys.readouterr().out
    assert f"ok   {PATCH_1}: applies\n" in output
    assert f"{'ok  ' if fits else 'FAIL'} {PATCH_2}: {how}" in output
    assert f"2 patches, {int(not fits)} to mend" in output
    assert queue.bytes() == before


def test_a_later_patch_is_tried_over_an_earlier_one_that_conflicts(queue, capsys):
    """The later patch changes a line of the earlier one, and would conflict without it."""
    queue.edit("third", f20="3030", f5="55", f38="3838")
    archive = queue.release({LIBRARY: CONFLICT.replace("f30()", "f30(void)")})
    assert queue.command("latest", "--archive", archive) == 1
    output = capsys.readouterr().out
    assert f"FAIL {PATCH_2}: CONFLICT" in output and "ok   0003-third.patch: applies\n" in output


#: llama.cpp's version, ggml's, when the other package's archive was made: is it the newest tree?
#: The pin is of 0.5.2, 0.25.3 and 2 October, and so is the newest release of its package.
NEWEST = {
    "numbers, not texts": ((0, 10, 0), (0, 25, 3), 0, True),
    "llama.cpp before ggml": ((0, 4, 9), (0, 26, 0), fake_sdist.MADE, False),
    "then ggml": ((0, 5, 2), (0, 26, 0), 0, True),
    "then the date": ((0, 5, 2), (0, 25, 3), fake_sdist.MADE, True),
    "an older date": ((0, 5, 2), (0, 25, 3), 0, False),
}
FEW = ("numbers, not texts",)


@pytest.mark.parametrize("case", usual(*FEW, long=[case for case in NEWEST if case not in FEW]))
def test_latest_tries_the_newest_tree_of_both_packages(queue, case, capsys):
    llama, ggml, made, newest = NEWEST[case]
    files = {"CMakeLists.txt": ("LLAMA", *llama), "ggml/CMakeLists.txt": ("GGML", *ggml)}
    changes = {name: fake_sdist.versions(*what) for name, what in files.items()}
    package, _, version = OTHER.partition("==")
    queue.release(changes, f"index/{OTHER.replace('==', '-')}.tar.gz", version=version,
                  package=package, made=made)  # fmt: skip
    assert queue.command("latest") == 0
    output = capsys.readouterr().out
    assert f"{OTHER}, llama.cpp b77 ({'.'.join(map(str, llama))}, " in output
    assert (f"\ntried: {OTHER}\nok   {PATCH_1}: applies\n" in output) == newest
    assert output.endswith("the pin is the newest tree of both packages\n") != newest


def assert_moved(queue, archive, start: str = f"# llama.cpp beef{'0' * 36} (2026-10-02)") -> None:
    """Pin, tree and queue are the release's, and they agree with each other."""
    pin = read_pin(queue.root / PIN)
    assert f"{pin.package.replace('-', '_')}-{pin.version}.tar.gz" == archive.name
    assert pin.sha256 == sha256_of(archive)
    assert pin.path.read_text() == (
        f"# a comment\n{start}\n{pin.requirement} --hash=sha256:{pin.sha256}\n"
    )
    assert start.split()[2] == fetch.check_tree(queue.tree, pin).commit
    assert queue.command("check") == 0


@pytest.mark.parametrize("moved", [False, True])
def test_a_release_that_everything_applies_to(queue, moved, capsys):
    """Also where a file has another name there."""
    changes = {LIBRARY: None, "src/core.cpp": TEXT} if moved else {LIBRARY: "// new\n" + TEXT}
    archive = queue.release(changes, version=NEW, commit="beef" + "0" * 36)
    assert queue.command("bump", NEW, "--archive", archive) == 0
    output = capsys.readouterr().out
    assert f"llama-cpp-python==9.9.9 -> llama-cpp-python=={NEW}, llama.cpp beef" in output
    assert f"changed {PATCH_2}" in output and f"changed {PATCH_1}" not in output
    assert b"src/core.cpp" in queue.series.files()[PATCH_2] or not moved
    assert [path.name for path in queue.series.of("upstream")] == [PATCH_1]
    assert_moved(queue, archive)


@pytest.mark.parametrize("how", ["mended", "skipped"])
def test_a_conflict_stops_it_and_continue_goes_on(queue, how, capsys):
    archive = queue.release({LIBRARY: CONFLICT}, version=NEW, commit="beef" + "0" * 36)
    before = queue.bytes()
    assert queue.command("bump", NEW, "--archive", archive) == 1
    output = capsys.readouterr().out
    assert "0002 llama : return more does not apply:\n  CONFLICT (content): Merge" in output
    assert f"{LIBRARY}:21\n" in output and "bump --continue --work" in output
    assert queue.command("bump", "--continue") == 2
    assert f"conflict markers are left: {LIBRARY}:21" in capsys.readouterr().err
    assert queue.bytes() == before
    if how == "skipped":
        git.must(queue.work, "am", "--skip")
    else:
        (queue.work / LIBRARY).write_text(TEXT.replace("return 20", "return 2121"))
    assert queue.command("bump", "--continue") == 0
    patches = b"".join(queue.series.files().values())
    assert (b"return 21; }\n+int f20() { return 2121; }\n" in patches) == (how == "mended")
    assert_moved(queue, archive)
    assert queue.command("bump", "--continue") == 2
    assert "no bump is under way" in capsys.readouterr().err


def test_a_patch_that_upstream_took_over_is_dropped(queue, capsys):
    text = "// fixed\n" + fake_sdist.NEEDED["ggml/src/ggml.c"].replace("two = 2", "two = 22")
    archive = queue.release({"ggml/src/ggml.c": text}, version=NEW)
    assert queue.command("bump", NEW, "--archive", archive) == 2
    output, errors = capsys.readouterr()
    assert f"removed {PATCH_1}" in output and f"pinned: llama-cpp-python=={NEW}" in output
    assert [path.name for path in queue.series.patches] == ["0001-llama-return-more.patch"]
    assert queue.series.both == 0
    assert "0001-llama-return-more.patch has no row in the table" in errors


def test_to_the_other_package_through_pip(queue):
    package, _, version = OTHER.partition("==")
    archive = queue.release({LIBRARY: TEXT}, f"index/{OTHER.replace('==', '-')}.tar.gz",
                            version=version, package=package)  # fmt: skip
    assert queue.command("latest", "--version", OTHER) == 0
    assert queue.command("bump", OTHER) == 0
    assert_moved(queue, archive, "# llama.cpp b77 (2026-10-10)")
    archive.unlink()  # what was downloaded lies where builds look for it
    assert fetch.verified_archive(read_pin(queue.root / PIN)).name == archive.name


@pytest.mark.parametrize(
    ("case", "problem"),
    [
        ("the queue changed", "has other patches than those that are moved"),
        ("work in use", "is not empty"),
        ("another release", f"is not llama-cpp-python=={NEW}1"),
        ("another package", f"is not xllamacpp=={NEW}"),
        ("another tree", "is not the pin's llama.cpp"),
        ("nothing under way", "no bump is under way"),
        ("no archive", "No such file or directory"),
        ("a bad archive", "a damaged archive"),
        ("a bad name", "has no name like"),
    ],
)
def test_refusals_change_nothing(queue, case, problem, capsys):
    archive = queue.release({LIBRARY: CONFLICT}, version=NEW)
    words = {
        "another release": [f"{NEW}1"],
        "another package": [f"xllamacpp=={NEW}"],
        "nothing under way": ["--continue"],
    }.get(case, [NEW])
    if case == "the queue changed":
        assert queue.command("bump", NEW, "--archive", archive) == 1
        queue.replace(f20="2020")
        (queue.work / LIBRARY).write_text(TAKEN)
        (queue.folder / PATCH_2).write_text("mine\n")
        words = ["--continue"]
    elif case == "work in use":
        queue.edit()
    elif case == "another tree":
        pin = queue.root / PIN
        pin.write_text(pin.read_text().replace("sha256:", "sha256:" + "0" * 64)[:-65] + "\n")
    elif case == "no archive":
        archive.unlink()
    elif case == "a bad archive":
        archive.write_bytes(b"no archive")
    elif case == "a bad name":
        archive = archive.rename(queue.root / "newer.tar.gz")
    before = queue.bytes()
    assert queue.command("bump", *words, "--archive", archive) == 2
    assert problem in capsys.readouterr().err
    assert queue.bytes() == before
