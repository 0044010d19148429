"""Getting the archive: where it is looked for, its hash, and what is said where there is none."""

from __future__ import annotations

import shutil
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


def test_pip_fetches_verifies_and_caches(place, monkeypatch):
    """Real pip, from a folder instead of an index; what was damaged in the cache is replaced."""
    monkeypatch.setenv("PIP_FIND_LINKS", str(place.archive.parent))
    file = place.cache / place.archive.name
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


def test_wrong_hash_of_a_given_archive(place, capsys, tmp_path):
    other = tmp_path / "other.tar.gz"
    other.write_bytes(place.archive.read_bytes() + b"x")
    assert fetch.main(["--dest", str(place.dest), "--archive", str(other)]) == 2
    message = capsys.readouterr().err
    assert "the archive given with --archive is not the pinned one" in message
    assert f"expected: sha256 {read_pin(place.pin).sha256}" in message
    assert f"found:    sha256 {sdist.sha256_of(other)} ({other}" in message
    assert not place.dest.exists()


#: What pip prints (None: real pip), the problem, and a word of what to do.
PIP_FAILS = [
    ("its index is not there", None, "no network", "PYLLAMA_MTP_SDIST"),
    ("its archive has another hash", None, "not the pinned one", ""),
    (
        "disk",
        "OSError: [Errno 28] No space left on device",
        "no space left while download",
        "350 MB",
    ),
]


@pytest.mark.parametrize(("how", "output", "problem", "todo"), PIP_FAILS)
def test_pip_fails(place, monkeypatch, tmp_path, how, output, problem, todo):
    """Nothing reaches the cache."""
    if output:
        monkeypatch.setattr(sdist.sys, "executable", stub_python(tmp_path, output))
    elif "hash" in how:
        monkeypatch.setenv("PIP_FIND_LINKS", str(place.archive.parent))
        digest = read_pin(place.pin).sha256
        place.pin.write_text(place.pin.read_text().replace(digest, "0" * 64))
    else:
        monkeypatch.delenv("PIP_NO_INDEX")
        monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
        monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(FetchError, match=problem) as caught:
        fetch.ensure_tree(place.dest, None, place.pin)
    assert todo in caught.value.todo
    assert not place.dest.exists() and list(place.cache.iterdir()) == []


HASH = "--hash=sha256:" + "0" * 64
PINS = ("", "llama-cpp-python==1.0", f"other==1.0 {HASH}", f"llama-cpp-python==1.0 {HASH}\n" * 2)


@pytest.mark.parametrize("text", PINS)
def test_a_bad_pin(place, text):
    place.pin.write_text(text)
    with pytest.raises(FetchError, match="pin is not understood"):
        fetch.ensure_tree(place.dest, place.archive, place.pin)
