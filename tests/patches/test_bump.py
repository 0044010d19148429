"""Moving the pin: conflicts are mended; until the end only the work tree changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fake_sdist
import fetch
import pytest
from pq import git
from pq.series import write_series
from sdist import read_pin, sha256_of

PATCH_1 = "0001-ggml-fix-two.patch"
PATCH_2 = "0002-llama-add-a-file.patch"
NEW = "10.0.0"
COMMIT = "beef" + "0" * 36
LIBRARY = fake_sdist.NEEDED["src/llama.cpp"]
CONFLICT = {"src/llama.cpp": LIBRARY.replace("return 20", "return 21")}


def bump(project: Any, *arguments: str) -> int:
    """Run the command on a project."""
    where = ("--pin", project.root / "llama-cpp.pin", "--work", project.work)
    return project.command("bump", *arguments, *where)


def release(project: Any, changes: dict[str, str | None], folder: str = "") -> str:
    """The archive of a release, as :meth:`Queue.release`."""
    target = project.root / folder / f"llama_cpp_python-{NEW}.tar.gz"
    target.parent.mkdir(exist_ok=True)
    return str(project.release(changes, target, commit=COMMIT, version=NEW))


def state(project: Any) -> dict[str, bytes]:
    """Everything that a bump may change in the end: queue, tree, pin."""
    names = [project.root / "llama-cpp.pin", *project.folder.rglob("*"), *project.tree.rglob("*")]
    return {str(p): p.read_bytes() for p in names if p.is_file()}


@pytest.fixture
def project(queue, monkeypatch):
    """The queue of the other tests, with a pin file that names its tree."""
    stamp = json.loads((queue.tree / ".pyllama-mtp-tree.json").read_text())
    line = f"llama-cpp-python==9.9.9 --hash=sha256:{stamp['sha256']}\n"
    text = f"# why it is here\n# llama.cpp {stamp['commit']} (a date)\n{line}"
    (queue.root / "llama-cpp.pin").write_text(text)
    monkeypatch.setenv("XDG_CACHE_HOME", str(queue.root / "cache"))
    return queue


def assert_moved(project: Any, archive: str) -> None:
    """Pin, tree and queue are the release's, and they agree with each other."""
    pin = read_pin(project.root / "llama-cpp.pin")
    assert (pin.version, pin.sha256) == (NEW, sha256_of(Path(archive)))
    text = pin.path.read_text()
    assert text.startswith(
        f"# why it is here\n# llama.cpp {COMMIT} (2026-10-02)\nllama-cpp-python=="
    )
    assert fetch.check_tree(project.tree, pin).commit == COMMIT
    assert project.command("check") == 0


def test_a_release_that_everything_applies_to(project, capsys):
    archive = release(project, {"src/llama.cpp": "// new\n" * 9 + LIBRARY})
    assert bump(project, NEW, "--archive", archive) == 0
    output = capsys.readouterr().out
    assert (
        f"llama-cpp-python==9.9.9 -> llama-cpp-python=={NEW}, llama.cpp {COMMIT[:12]} (" in output
    )
    series = project.series
    assert f"changed {PATCH_2}" in output and f"changed {PATCH_1}" not in output
    assert f"stamp of patched: {series.stamp('patched')}" in output
    assert "2 patches apply to llama.cpp beef" in output
    assert [p.marker for p in series.patches] == ["both", "patched"]
    assert b"@@ -27,7 +27,7 @@" in series.patches[1].data
    assert_moved(project, archive)


def test_a_conflict_stops_it_and_continue_goes_on(project, capsys):
    archive = release(project, CONFLICT)
    before = state(project)
    assert bump(project, NEW, "--archive", archive) == 1
    output = capsys.readouterr().out
    assert f"conflict: {PATCH_2}\n  src/llama.cpp (hunk 1 of 1)\n" in output
    assert "bump --continue --work" in output
    assert bump(project, "--continue") == 2
    assert "conflict markers are left in src/llama.cpp" in capsys.readouterr().err
    assert state(project) == before
    source = project.work / "src/llama.cpp"
    source.write_text(LIBRARY.replace("return 20", "return 2121"))
    assert bump(project, "--continue") == 0
    patch = project.series.patches[1].data
    assert b"-int f20() { return 21; }\n+int f20() { return 2121; }\n" in patch
    assert_moved(project, archive)
    assert bump(project, "--continue") == 2
    assert "no bump is under way" in capsys.readouterr().err


def test_a_patch_that_upstream_took_over_is_dropped(project, capsys):
    taken = fake_sdist.NEEDED["ggml/src/ggml.c"].replace("two = 2", "two = 22")
    archive = release(project, {"ggml/src/ggml.c": "// fixed\n" + taken})
    assert bump(project, NEW, "--archive", archive) == 0
    output = capsys.readouterr().out
    assert f"removed {PATCH_1}" in output and "added 0001-llama-add-a-file.patch" in output
    names = [(p.name, p.marker) for p in project.series.patches]
    assert names == [("0001-llama-add-a-file.patch", "patched")]
    # renumbered: the README's table is the maintainer's, and check says so
    assert "check: the queue is not in its exported form:\n  0001-llama-add-a-file" in output
    assert read_pin(project.root / "llama-cpp.pin").version == NEW


@pytest.mark.parametrize("given", ["--archive", "through pip"])
def test_to_the_other_package(project, given, monkeypatch, capsys):
    version = "2026.10.77"
    archive = project.root / "index" / f"xllamacpp-{version}.tar.gz"
    archive.parent.mkdir()
    project.release(CONFLICT, archive, version=version, package="xllamacpp")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(archive.parent))
    arguments = ("--archive", str(archive)) if given == "--archive" else ()
    assert bump(project, f"xllamacpp=={version}", *arguments) == 1
    (project.work / "src/llama.cpp").write_text(LIBRARY.replace("return 20", "return 2020"))
    assert bump(project, "--continue") == 0
    pin = read_pin(project.root / "llama-cpp.pin")
    assert (pin.requirement, pin.sha256) == (f"xllamacpp=={version}", sha256_of(archive))
    text = pin.path.read_text()
    assert text.startswith("# why it is here\n# llama.cpp b77 (2026-10-10)\nxllamacpp==")
    assert fetch.check_tree(project.tree, pin).commit == "b77"
    if given == "through pip":
        assert fetch.verified_archive(pin).parent == project.root / "cache" / "pyllama-mtp"
    capsys.readouterr()
    assert bump(project, version) == 2, "a bare version is one of the pin's package"
    assert f"xllamacpp=={version} is the pin already" in capsys.readouterr().err


@pytest.mark.parametrize("how", ["skipped", "mended to nothing"])
def test_a_patch_can_be_dropped(project, how):
    archive = release(project, CONFLICT)
    assert bump(project, NEW, "--archive", archive) == 1
    if how == "skipped":
        git.must(project.work, "rebase", "--skip")
    else:
        git.must(project.work, "checkout", "upstream", "--", "src/llama.cpp")
        (project.work / "src/mtp.cpp").unlink()
    assert bump(project, "--continue") == 0
    assert [p.name for p in project.series.patches] == [PATCH_1]
    assert_moved(project, archive)


def test_a_file_that_upstream_moved_is_followed(project):
    archive = release(project, {"src/llama.cpp": None, "src/core.cpp": LIBRARY})
    assert bump(project, NEW, "--archive", archive) == 0
    assert "src/core.cpp" in project.series.patches[1].touched()
    assert_moved(project, archive)


def test_a_queue_that_changed_meanwhile_is_not_overwritten(project, capsys):
    archive = release(project, CONFLICT)
    assert bump(project, NEW, "--archive", archive) == 1
    (project.work / "src/llama.cpp").write_text(LIBRARY.replace("return 20", "return 2020"))
    (project.folder / PATCH_2).unlink()
    write_series(project.folder, [(PATCH_1, "both")])
    before = state(project)
    assert bump(project, "--continue") == 2
    assert "changed since the bump began" in capsys.readouterr().err
    assert state(project) == before


@pytest.mark.parametrize(
    ("case", "problem"),
    [
        ("no release", "bump takes a release, or --continue"),
        ("both", "bump takes a release, or --continue"),
        ("the pin", "9.9.9 is the pin already"),
        ("work in use", "is not empty"),
        ("another archive", f"is llama-cpp-python=={NEW}, not llama-cpp-python==10.0.1"),
        ("another package", f"is llama-cpp-python=={NEW}, not xllamacpp=={NEW}"),
        ("another tree", "is not the pin's"),
        ("nothing under way", "no bump is under way"),
    ],
)
def test_refusals(project, case, problem, capsys):
    archive = release(project, {})
    arguments = {
        "no release": [],
        "both": [NEW, "--continue"],
        "the pin": ["9.9.9"],
        "another archive": ["10.0.1", "--archive", archive],
        "another package": [f"xllamacpp=={NEW}", "--archive", archive],
        "nothing under way": ["--continue"],
    }.get(case, [NEW, "--archive", archive])
    if case == "work in use":
        project.work.mkdir()
        (project.work / "mine").write_text("mine\n")
    if case == "another tree":
        pin = project.root / "llama-cpp.pin"
        pin.write_text(pin.read_text().replace("sha256:", "sha256:" + "0" * 64)[:-65] + "\n")
    before = state(project)
    assert bump(project, *arguments) == 2
    message = capsys.readouterr().err
    assert problem in message
    assert state(project) == before
