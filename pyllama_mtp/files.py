"""Files: text that is read; files that are written as a whole or not at all, and line by line, so
that a full disk harms nothing."""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from .errors import DiskFullError, PyllamaMtpError, UsageError

#: What a system says when a file cannot grow.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def cache_folder() -> Path:
    """The package's folder in the user's cache: in XDG_CACHE_HOME, or in ~/.cache. Raises
    UsageError: neither is known, as in a container whose user has no home."""
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    except RuntimeError:
        raise UsageError("there is no home folder; set HOME or XDG_CACHE_HOME") from None
    return cache / "pyllama-mtp"


def read_text(path: str | os.PathLike[str], what: str = "prompt") -> str:
    """A file as text; `what` names it in the error.

    Raises:
        UsageError: no such file, not UTF-8 (the message gives the byte offset), or empty.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read the {what} file {path}: {error.strerror}") from None
    return decode_text(data, f"the {what} file {path}")


def decode_text(data: bytes, source: str) -> str:
    """Bytes as text; `source` names them in the error.

    Raises:
        UsageError: not UTF-8, or nothing but white space.
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{source} is not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start} "
            f"({error.reason}); convert it first, for example with iconv -t UTF-8"
        ) from None
    if not text.strip():
        raise UsageError(f"{source} is empty; a prompt needs at least one token of text")
    return text


def write_error(error: OSError, path: str | os.PathLike[str]) -> PyllamaMtpError:
    """The exception for a file that could not be written; its message names the file.

    An error of this package, such as that of :func:`check_room`, stays as it is.
    """
    if isinstance(error, PyllamaMtpError):
        return error
    reason = error.strerror or str(error)
    if error.errno in FULL:
        return DiskFullError(
            f"cannot write {os.fspath(path)}: {reason}; free some space or choose another folder"
        )
    return UsageError(f"cannot write {os.fspath(path)}: {reason}; choose another file")


def check_target(path: Path, force: bool, *read: str | os.PathLike[str]) -> None:
    """Refuse a place where no new file can be. Raises UsageError: a directory, a folder that does
    not exist, one of the files that are `read`, or, without `force`, any file."""
    if path.is_dir():
        raise UsageError(f"{path} is a directory; give a file name")
    if not path.parent.is_dir():
        raise UsageError(f"folder {path.parent} does not exist; create it first")
    if path.exists() and any(path.samefile(source) for source in read):
        raise UsageError(f"{path} is the file that is read; choose another name")
    if path.exists() and not force:
        raise UsageError(f"{path} exists; choose another name or overwrite it with --force")


def check_room(path: Path, needed: int) -> None:
    """Refuse to begin a file of `needed` bytes that its disk has no room for. Raises DiskFullError:
    says how much there is."""
    free = shutil.disk_usage(path.parent).free
    if needed > free:
        raise DiskFullError(
            f"{path} needs {needed / 1e9:.2f} GB, {free / 1e9:.2f} GB are free in {path.parent}; "
            "free some space or choose another folder"
        )


def write_whole(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file, or replace one: as a whole or not at all; see :func:`replacing`."""
    with replacing(path) as file:
        file.write(data)


@contextmanager
def replacing(
    path: str | os.PathLike[str], name: str = "", most: int = 0o777
) -> Iterator[BinaryIO]:
    """A file to write into, which becomes `path`, or replaces it, when all is on the disk; see
    :func:`complete`, also for the errors and `most`."""

    def opener(part: str, flags: int) -> int:
        return os.open(part, flags, 0o666 & most)

    with complete(path, name, most) as part, open(part, "xb", opener=opener) as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def complete(path: str | os.PathLike[str], name: str = "", most: int = 0o777) -> Iterator[Path]:
    """A path beside `path` to write to, which becomes `path`, or replaces it, when the block has
    ended. An exception, Ctrl-C too, removes it and leaves an existing file as it was. A file that
    is replaced hands its permissions on.

    Args:
        name: of the file, for messages, if not `path`.
        most: permissions that are handed on at most.

    Raises:
        DiskFullError, UsageError: see :func:`write_error`; also where `path` is no regular file.
    """
    target = Path(os.path.realpath(path))  # a link stays one
    part = target.parent / f".{secrets.token_hex(8)}.part"
    try:
        if target.exists() and not target.is_file():
            raise UsageError(f"cannot write {os.fspath(path)}: it exists and is no regular file")
        yield part
        with suppress(FileNotFoundError):
            part.chmod(target.stat().st_mode & most)
        part.replace(target)
    except OSError as error:
        raise write_error(error, name or path) from error
    finally:
        with suppress(OSError):
            part.unlink()


def append(file: int, data: bytes, path: str | os.PathLike[str]) -> None:
    """Append `data`, whole lines, to an open file and bring it to the disk; all or nothing.

    Args:
        file: a descriptor opened with O_APPEND, or at the file's end.
        path: of the file, for the message.

    Raises:
        DiskFullError, UsageError: see :func:`write_error`; the file is as long as it was.
    """
    before = os.fstat(file).st_size
    rest = memoryview(data)
    try:
        while rest:  # a disk that fills up takes a part first
            rest = rest[os.write(file, rest) :]
        os.fsync(file)
    except OSError as error:
        with suppress(OSError):
            os.ftruncate(file, before)
            os.lseek(file, before, os.SEEK_SET)
        raise write_error(error, path) from error


class JsonLines:
    """A new file of JSON lines. A context manager.

    Raises:
        UsageError: the file exists, or cannot be created.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        try:
            self._file = Path(path).open("xb", buffering=0)  # noqa: SIM115 - closed by __exit__
        except OSError as error:
            raise UsageError(f"cannot create {path}: {error.strerror}; name another file") from None
        self._path, self._written = Path(path), 0

    def write(self, *items: dict[str, Any]) -> None:
        """Append all of them. Raises DiskFullError: none of them, the file is unharmed."""
        if items:
            lines = "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in items)
            append(self._file.fileno(), lines.encode(), self._path)
            self._written += len(items)

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        """Close; a failure before anything was written leaves no file."""
        self._file.close()
        if kind is not None and not self._written:
            self._path.unlink(missing_ok=True)
