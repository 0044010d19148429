"""Files are written as a whole or not at all, whatever goes wrong; what is no file is not read."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyllama_mtp import promptfile
from pyllama_mtp.drafting import vocabulary
from pyllama_mtp.errors import (
    DiskFullError,
    DraftVocabError,
    ModelFileError,
    PromptFileError,
    UsageError,
)
from pyllama_mtp.files import write_whole
from pyllama_mtp.models.ggufheader import read_header
from pyllama_mtp.models.tokenizer import Tokenizer

from ..processes import disk_full_at


@pytest.fixture
def good(tmp_path: Path) -> Path:
    """A file that was written well."""
    path = tmp_path / "file"
    write_whole(path, b"good")
    return path


def unharmed(path: Path) -> bool:
    """The file is as it was, and there is nothing else."""
    return path.read_bytes() == b"good" and [*path.parent.iterdir()] == [path]


def test_disk_that_fills_up(good: Path) -> None:
    """The file size limit strikes in the middle."""
    with disk_full_at(4000), pytest.raises(DiskFullError, match="/file: File too large"):
        write_whole(good, bytes(5000))
    assert unharmed(good)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(28, "No space left on device"), DiskFullError),
        (OSError(5, "Input/output error"), UsageError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
def test_failure_before_the_last_step(
    good: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, expected: type[BaseException]
) -> None:
    seen: list[list[Path]] = []

    def fail(fd: int) -> None:
        seen.append([*good.parent.iterdir()])
        raise error

    monkeypatch.setattr("pyllama_mtp.files.os.fsync", fail)
    with pytest.raises(expected):
        write_whole(good, b"other")
    assert len(seen[0]) == 2, "written beside the file, brought to the disk before the renaming"
    assert unharmed(good)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (".", "no regular file"),
        ("pipe", "no regular file"),
        ("absent/r", "No such file"),
        ("file/below", "Not a directory"),
        ("long" * 100, "File name too long"),
    ],
)
def test_paths_that_cannot_be_written(good: Path, name: str, message: str) -> None:
    os.mkfifo(good.with_name("pipe"))
    with pytest.raises(UsageError, match=f"cannot write .*{message}"):
        write_whole(good.parent / name, b"other")
    good.with_name("pipe").unlink()
    assert unharmed(good)


#: What reads files, and what it says of a path where there is none, a folder, a pipe (opening it
#: would wait until somebody writes), a file that has nothing below it, and a name that cannot be.
READERS: dict[str, tuple[Callable[[Any], object], tuple[str, ...]]] = {
    "model": (
        read_header,
        ("no such model file", "is a directory", "no regular file", "cannot read", "cannot read"),
    ),
    "prompt": (
        lambda path: promptfile.read(path, {}),
        ("no such file", "is not a file", "is not a file", "cannot read", "null byte"),
    ),
    "draft vocabulary": (
        lambda path: vocabulary.load(path, Tokenizer([b"a"], np.ones(1, np.int32), [])),
        ("No such file", "not a file", "not a file", "Not a directory", "null byte"),
    ),
}


@pytest.mark.parametrize("kind", READERS)
def test_what_is_no_file_is_not_read(good: Path, kind: str) -> None:
    read, said = READERS[kind]
    os.mkfifo(good.with_name("pipe"))
    names = ("absent", ".", "pipe", "file/below", "a\0b")
    for name, words in zip(names, said, strict=True):
        with pytest.raises((ModelFileError, PromptFileError, DraftVocabError), match=words):
            read(good.parent / name)


def test_links_and_permissions_stay(good: Path) -> None:
    good.chmod(0o600)
    link = good.with_name("link")
    link.symlink_to(good)
    write_whole(link, b"new")
    assert link.is_symlink() and good.read_bytes() == b"new"
    assert good.stat().st_mode & 0o777 == 0o600
