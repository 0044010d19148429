"""Another release: latest says what each patch needs there; bump moves queue, pin and tree."""

from __future__ import annotations

import fake_sdist
import fetch
import pytest
from pq import git
from pq.series import PIN
from sdist import read_pin, sha256_of

PATCH_1, PATCH_2 = "0001-ggml-fix-two.patch", "0002-llama-return-more.patch"
NEW, OTHER = "llama-cpp-python==10.0.0", "xllamacpp==2026.10.77"
LIBRARY = "src/llama.cpp"
TEXT = fake_sdist.NEEDED[LIBRARY]
CONFLICT = TEXT.replace("return 20", "return 21")
CASES = {
    "moved": ("// new\n" * 9 + TEXT, "applies\n"),
    "near": (TEXT.replace("int f18()", "long f18()"), "applies with a three-way merge"),
    "conflict": (CONFLICT, f"CONFLICT (content): Merge conflict in {LIBRARY}; {LIBRARY}:21\n"),
    "taken": (TEXT.replace("return 20", "return 2020"), "already in this release: drop it"),
}


@pytest.mark.parametrize("case", CASES)
def test_latest(queue, case, capsys):
    text, how = CASES[case]
    archive, before = queue.release({LIBRARY: text}), queue.bytes()
    fits = how.startswith("applies")
    assert queue.command("latest", "--archive", archive) == (not fits)
    output = capsys.readouterr().out
    assert f"ok   {PATCH_1}: applies\n" in output
    assert f"{'ok  ' if fits else 'FAIL'} {PATCH_2}: {how}" in output
    assert f"2 patches, {int(not fits)} to mend" in output
    assert queue.bytes() == before


def test_latest_tries_the_newest_tree_of_both_packages(queue, capsys):
    """By llama.cpp's version: the pin is of 0.5.2."""
    queue.release({"CMakeLists.txt": fake_sdist.versions("LLAMA", 0, 10, 0)}, OTHER, made=0)
    assert queue.command("latest") == 0
    output = capsys.readouterr().out
    assert f"\ntried: {OTHER}\nok   {PATCH_1}: applies\n" in output


def assert_moved(queue, requirement: str, archive, about: str = "") -> None:
    """Pin, tree and queue are the release's, and they agree with each other."""
    pin = read_pin(queue.root / PIN)
    assert fetch.check_tree(queue.tree, pin).requirement == requirement
    about = about or f"{fake_sdist.COMMIT} (2026-10-02)"
    line = f"{requirement} --hash=sha256:{sha256_of(archive)}"
    assert pin.path.read_text() == f"# a comment\n# llama.cpp {about}\n{line}\n"
    assert queue.command("check") == 0


def test_a_release_that_everything_applies_to(queue, capsys):
    """Also where a file has another name there."""
    archive = queue.release({LIBRARY: None, "src/core.cpp": TEXT}, NEW)
    assert queue.command("bump", "10.0.0", "--archive", archive) == 0
    output = capsys.readouterr().out
    assert f"llama-cpp-python==9.9.9 -> {NEW}, llama.cpp c0ffee" in output
    assert f"changed {PATCH_2}" in output and f"changed {PATCH_1}" not in output
    assert b"src/core.cpp" in queue.series.files()[PATCH_2]
    assert_moved(queue, NEW, archive)


@pytest.mark.parametrize("how", ["mended", "skipped"])
def test_a_conflict_stops_it_and_continue_goes_on(queue, how, capsys):
    archive, before = queue.release({LIBRARY: CONFLICT}, NEW), queue.bytes()
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
    assert_moved(queue, NEW, archive)


def test_a_patch_that_upstream_took_over_is_dropped(queue, capsys):
    text = "// fixed\n" + fake_sdist.NEEDED["ggml/src/ggml.c"].replace("two = 2", "two = 22")
    archive = queue.release({"ggml/src/ggml.c": text}, NEW)
    assert queue.command("bump", NEW, "--archive", archive) == 2
    output, errors = capsys.readouterr()
    assert f"removed {PATCH_1}" in output and f"pinned: {NEW}" in output
    assert [path.name for path in queue.series.patches] == ["0001-llama-return-more.patch"]
    assert queue.series.both == 0
    assert "0001-llama-return-more.patch has no row in the table" in errors


def test_to_the_other_package_through_pip(queue):
    archive = queue.release({}, OTHER)
    assert queue.command("bump", OTHER) == 0
    assert_moved(queue, OTHER, archive, "b77 (2026-10-10)")


def test_a_release_that_is_not_the_one_asked_for(queue, capsys):
    archive, before = queue.release({LIBRARY: CONFLICT}, NEW), queue.bytes()
    assert queue.command("bump", "10.0.1", "--archive", archive) == 2
    assert "is not llama-cpp-python==10.0.1" in capsys.readouterr().err
    assert queue.bytes() == before
