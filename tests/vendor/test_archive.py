"""Getting the archive: where it is looked for, its hash, failures of pip."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import fetch
import pytest
import sdist
from fake_sdist import COMMIT
from sdist import FetchError, read_pin


def stub_python(folder: Path, output: str) -> str:
    """A program that prints `output` and fails, to stand for an interpreter whose pip fails."""
    path = folder / "python-stub"
    path.write_text(f"#!/bin/sh\necho '{output}'\nexit 1\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def no_pip(monkeypatch, tmp_path):
    """Fail the test's download attempts at once."""
    monkeypatch.setattr(sdist.sys, "executable", stub_python(tmp_path, "ERROR: pip was called"))


def test_pip_fetches_verifies_and_caches(place, monkeypatch):
    """Real pip, from a folder instead of an index."""
    monkeypatch.setenv("PIP_FIND_LINKS", str(place.archive.parent))
    assert fetch.ensure_tree(place.dest, None, place.pin).commit == COMMIT
    cached = place.cache / place.archive.name
    assert cached.read_bytes() == place.archive.read_bytes()
    assert [p.name for p in place.cache.iterdir()] == [cached.name]


@pytest.mark.parametrize("where", ["cache", "environment"])
def test_an_archive_that_is_there_is_used(place, monkeypatch, no_pip, where):
    if where == "cache":
        place.cache.mkdir(parents=True)
        shutil.copy(place.archive, place.cache)
    else:
        monkeypatch.setenv("PYLLAMA_MTP_SDIST", str(place.archive))
    assert fetch.ensure_tree(place.dest, None, place.pin).commit == COMMIT


def test_damaged_cache_is_downloaded_again(place, monkeypatch, capsys):
    monkeypatch.setenv("PIP_FIND_LINKS", str(place.archive.parent))
    place.cache.mkdir(parents=True)
    cached = place.cache / place.archive.name
    cached.write_bytes(place.archive.read_bytes()[:-1])
    fetch.ensure_tree(place.dest, None, place.pin)
    assert f"{cached} is damaged" in capsys.readouterr().err
    assert cached.read_bytes() == place.archive.read_bytes()


@pytest.mark.parametrize("named_by", ["--archive", "PYLLAMA_MTP_SDIST"])
def test_wrong_hash_of_a_given_archive(place, monkeypatch, capsys, tmp_path, named_by):
    other = tmp_path / "other.tar.gz"
    other.write_bytes(place.archive.read_bytes() + b"x")
    arguments = ["--dest", str(place.dest)]
    if named_by == "--archive":
        arguments += ["--archive", str(other)]
    else:
        monkeypatch.setenv(named_by, str(other))
    assert fetch.main(arguments) == 2
    message = capsys.readouterr().err
    assert f"the archive given with {named_by} is not the pinned one" in message
    assert f"expected: sha256 {read_pin(place.pin).sha256}" in message
    assert f"found:    sha256 {sdist.sha256_of(other)} ({other}" in message
    assert "do:       give the source archive" in message
    assert not place.dest.exists()


@pytest.mark.parametrize("kind", ["no such file", "a folder"])
def test_given_archive_that_is_no_file(place, tmp_path, kind):
    path = tmp_path if kind == "a folder" else tmp_path / "gone.tar.gz"
    with pytest.raises(FetchError, match=kind):
        fetch.ensure_tree(place.dest, path, place.pin)


def test_wrong_hash_of_a_download(place, monkeypatch):
    """pip itself refuses the archive; nothing reaches the cache."""
    monkeypatch.setenv("PIP_FIND_LINKS", str(place.archive.parent))
    digest = read_pin(place.pin).sha256
    place.pin.write_text(place.pin.read_text().replace(digest, "0" * 64))
    with pytest.raises(FetchError, match="not the pinned one") as caught:
        fetch.ensure_tree(place.dest, None, place.pin)
    assert digest in caught.value.found
    assert not place.dest.exists() and list(place.cache.iterdir()) == []


def test_no_network(place, monkeypatch, capsys):
    """An index at a port where nobody listens."""
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    assert fetch.main(["--dest", str(place.dest)]) == 2
    message = capsys.readouterr().err
    assert "no network" in message and "expected: llama-cpp-python==9.9.9" in message
    assert "--archive" in message and "PYLLAMA_MTP_SDIST" in message
    assert str(place.cache / place.archive.name) in message
    assert not place.dest.exists() and list(place.cache.iterdir()) == []


@pytest.mark.parametrize(
    ("output", "problem", "todo"),
    [
        ("/usr/bin/python: No module named pip", "pip is missing", "install pip"),
        (
            "OSError: [Errno 28] No space left on device",
            "no space left while downloading",
            "350 MB",
        ),
        ("", "pip could not download", "--archive"),
    ],
)
def test_pip_failures(place, monkeypatch, tmp_path, output, problem, todo):
    monkeypatch.setattr(sdist.sys, "executable", stub_python(tmp_path, output))
    with pytest.raises(FetchError, match=problem) as caught:
        fetch.ensure_tree(place.dest, None, place.pin)
    assert todo in caught.value.todo
    assert (output or "no output") in caught.value.found
    assert not place.dest.exists() and list(place.cache.iterdir()) == []


def test_unwritable_cache(place, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(FetchError, match="cache folder cannot be written") as caught:
        fetch.ensure_tree(place.dest, None, place.pin)
    assert "XDG_CACHE_HOME" in caught.value.todo


def test_an_enclosing_pip_does_not_reach_the_inner_one(monkeypatch):
    monkeypatch.setenv("PIP_BUILD_TRACKER", "/gone")
    monkeypatch.setenv("PIP_RETRIES", "7")
    environment = sdist._pip_environment()
    assert "PIP_BUILD_TRACKER" not in environment and environment["PIP_RETRIES"] == "7"


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "llama-cpp-python==1.0",
        "other==1.0 --hash=sha256:" + "0" * 64,
        "llama-cpp-python>=1.0 --hash=sha256:" + "0" * 64,
        "llama-cpp-python==1.0 --hash=sha256:123",
        ("llama-cpp-python==1.0 --hash=sha256:" + "0" * 64 + "\n") * 2,
    ],
)
def test_a_bad_pin(place, text):
    if text is None:
        place.pin.unlink()
    else:
        place.pin.write_text(text)
    problem = "pin cannot be read" if text is None else "pin is not understood"
    with pytest.raises(FetchError, match=problem):
        fetch.ensure_tree(place.dest, place.archive, place.pin)


def test_cache_follows_the_home_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert sdist.cache_dir() == tmp_path / ".cache" / "pyllama-mtp"


def test_runs_from_any_folder_without_the_package(place, tmp_path):
    """As the build calls it: another working folder, nothing of ours on the path."""
    script = Path(fetch.__file__)
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    command = [sys.executable, "-I", str(script), "--archive", str(place.archive)]
    command += ["--dest", str(place.dest)]
    result = sdist.subprocess.run(
        command, cwd=tmp_path, env=environment, text=True, capture_output=True
    )
    assert result.returncode == 2  # the real pin, so the fake archive is refused
    assert "is not the pinned one" in result.stderr and "Traceback" not in result.stderr
