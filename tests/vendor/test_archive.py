"""Getting the archive: where it is looked for, its hash, and what is said where there is none."""

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


@pytest.mark.parametrize("cached", ["nothing", "a damaged archive"])
def test_pip_fetches_verifies_and_caches(place, monkeypatch, cached):
    """Real pip, from a folder instead of an index."""
    monkeypatch.setenv("PIP_FIND_LINKS", str(place.archive.parent))
    file = place.cache / place.archive.name
    if cached != "nothing":
        place.cache.mkdir(parents=True)
        file.write_bytes(place.archive.read_bytes()[:-1])
    assert fetch.ensure_tree(place.dest, None, place.pin).commit == COMMIT
    assert file.read_bytes() == place.archive.read_bytes()
    assert [p.name for p in place.cache.iterdir()] == [file.name]


@pytest.mark.parametrize("where", ["cache", "environment"])
def test_an_archive_that_is_there_is_used(place, monkeypatch, tmp_path, where):
    monkeypatch.setattr(sdist.sys, "executable", stub_python(tmp_path, "ERROR: pip was called"))
    if where == "cache":
        place.cache.mkdir(parents=True)
        shutil.copy(place.archive, place.cache)
    else:
        monkeypatch.setenv("PYLLAMA_MTP_SDIST", str(place.archive))
    assert fetch.ensure_tree(place.dest, None, place.pin).commit == COMMIT


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


#: What pip prints, the problem, and a word of what to do; None: real pip, where nobody listens.
PIP_FAILS = [
    (None, "no network", "PYLLAMA_MTP_SDIST"),
    ("/usr/bin/python: No module named pip", "pip is missing", "install pip"),
    ("OSError: [Errno 28] No space left on device", "no space left while downloading", "350 MB"),
    ("", "pip could not download", "--archive"),
]


@pytest.mark.parametrize(("output", "problem", "todo"), PIP_FAILS)
def test_pip_fails(place, monkeypatch, tmp_path, output, problem, todo):
    if output is None:
        monkeypatch.delenv("PIP_NO_INDEX")
        monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
        monkeypatch.setenv("PIP_RETRIES", "0")
    else:
        monkeypatch.setattr(sdist.sys, "executable", stub_python(tmp_path, output))
    with pytest.raises(FetchError, match=problem) as caught:
        fetch.ensure_tree(place.dest, None, place.pin)
    assert todo in caught.value.todo
    assert not place.dest.exists() and list(place.cache.iterdir()) == []


def test_unwritable_cache(place, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(FetchError, match="cache folder cannot be written") as caught:
        fetch.ensure_tree(place.dest, None, place.pin)
    assert "XDG_CACHE_HOME" in caught.value.todo


HASH = "--hash=sha256:" + "0" * 64
PINS = (
    *("", "llama-cpp-python==1.0", f"other==1.0 {HASH}", f"llama-cpp-python>=1.0 {HASH}"),
    *("llama-cpp-python==1.0 --hash=sha256:123", f"llama-cpp-python==1.0 {HASH}\n" * 2),
)


@pytest.mark.parametrize("text", PINS)
def test_a_bad_pin(place, text):
    place.pin.write_text(text)
    with pytest.raises(FetchError, match="pin is not understood"):
        fetch.ensure_tree(place.dest, place.archive, place.pin)


def test_runs_from_any_folder_without_the_package(place, tmp_path):
    """As the build calls it: another working folder, nothing of ours on the path."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    command = [sys.executable, "-I", fetch.__file__, "--archive", str(place.archive)]
    command += ["--dest", str(place.dest)]
    result = sdist.subprocess.run(
        command, cwd=tmp_path, env=environment, text=True, capture_output=True
    )
    assert result.returncode == 2  # the real pin, so the fake archive is refused
    assert "is not the pinned one" in result.stderr and "Traceback" not in result.stderr
