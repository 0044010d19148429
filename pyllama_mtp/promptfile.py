"""A processed prompt in a file: tokens, the states of the caches, and what they were made with.

Format, version 1. All numbers are little-endian; nothing is aligned, nothing follows the end.

    offset  size  what
    0       8     magic, b"PYMTP-PP"
    8       4     version, u32: 1. A reader looks no further in a version that it does not know.
    12      4     n, length of the header, u32, at most 65,536
    16      4     CRC-32 of bytes 0 to 15 and of the header, u32
    20      n     header: a JSON object, UTF-8, with exactly these keys
                    identity      {name: text or whole number}; see ProcessedPrompt
                    draft_n_past  whole number
                    sections      [[name, size in bytes, CRC-32], ...], in file order
    20 + n        the sections back to back:
                    tokens        token ids, i32
                    target        state of the target cache, as llama.cpp gave it
                    draft         of a draft context (upstream's way), likewise; may be absent
                    carry         its hidden state of the last position, f32; may be absent

Every byte lies under the magic, the version or a checksum. CRC-32 because the enemy is a truncated
copy or a bad disk, and states run to gigabytes: zlib computes it 3 times as fast as SHA-256 with
the CPU's SHA instructions (7 against 2 GB/s where it was tried), and it misses no burst of up to 32
bits and one in 4 billion of other damages. Neither would stop a forger, who could write the
checksum anew: the states go to native code, so read files of people you trust only.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import struct
import zlib
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np
import numpy.typing as npt

from .errors import DiskFullError, InsufficientMemoryError, PromptFileError, UsageError
from .files import FULL, replace_whole
from .models.ggufheader import ArraySummary, Value
from .models.ggufinfo import GGUFInfo
from .models.memory import available_memory

MAGIC = b"PYMTP-PP"
VERSION = 1
MAX_HEADER = 1 << 16
SECTIONS = ("tokens", "target", "draft", "carry")
_START = struct.Struct("<8sII")
_CRC = struct.Struct("<I")

Floats = npt.NDArray[np.float32]
Identity = Mapping[str, str | int]


@dataclass(frozen=True, eq=False)
class ProcessedPrompt:
    """What a session needs to go on after a prompt without processing it.

    Attributes:
        tokens: ids of the prompt, position 0 first; the caller checks them against its vocabulary.
        target: state of the target cache, which holds exactly `tokens`.
        draft: state of the draft cache; None without MTP.
        draft_n_past: positions of the draft cache in step with the target; 0 without one.
        carry: [n_embd] float32, hidden state of position draft_n_past - 1; None when not known.
        identity: what must be equal for the states to fit, by name: the model's fingerprint, the
            upstream commit, cache types and the like. Text or whole numbers of 64 bits.
    """

    tokens: list[int]
    target: bytes | bytearray
    draft: bytes | bytearray | None
    draft_n_past: int
    carry: Floats | None
    identity: dict[str, str | int]


def fingerprint(info: GGUFInfo) -> str:
    """A model's identity as 64 hex digits: SHA-256 of its metadata, tensor table and file size.

    The table gives every tensor's name, type, shape and place. The weights themselves are left out,
    because reading them takes as long as loading the model, and so are the elements of metadata
    arrays that the header reader does not keep (of vocabulary and merges, only their length and
    where the tensors start after them). So it tells models, quantizations and conversions apart,
    and survives moving or renaming the file; but two fine-tunes of one model with the same
    metadata, the name included, look the same, and the state of one gives wrong text with the
    other.
    """
    described = {
        "architecture": info.architecture,
        "size": info.size,
        "metadata": {key: _plain(value) for key, value in info.metadata.items()},
        "tensors": [[t.name, t.type, t.shape, t.offset] for t in info.tensors],
    }
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def _plain(value: Value) -> Any:
    if isinstance(value, ArraySummary):
        return {"type": value.type, "length": value.length, "distinct": value.n_distinct}
    return value


# --- writing ------------------------------------------------------------------------------------


def write(path: str | os.PathLike[str], prompt: ProcessedPrompt) -> None:
    """Write a file, or replace one: as a whole or not at all.

    How: see :func:`.files.replace_whole`.

    Raises:
        UsageError: values that the format cannot hold; `path` is no regular file, or its folder
            cannot be written.
        DiskFullError: no space, a quota or a size limit.
    """
    sections = _sections(prompt)
    start = _encode_start(prompt, sections)
    try:
        replace_whole(path, [start, *sections.values()])
    except OSError as error:
        needed = len(start) + sum(map(len, sections.values()))
        _explain(error, path, needed)


def _explain(error: OSError, path: str | os.PathLike[str], needed: int) -> NoReturn:
    reason = error.strerror or str(error)
    if error.errno in FULL:
        raise DiskFullError(
            f"cannot write {path} ({needed / 1e6:.1f} MB): {reason}; free some space or choose "
            "another folder"
        ) from error
    raise UsageError(f"cannot write {path}: {reason}; choose another file") from error


def _sections(prompt: ProcessedPrompt) -> dict[str, bytes | bytearray]:
    """The sections by name, in file order."""
    if not 0 <= prompt.draft_n_past <= (len(prompt.tokens) if prompt.draft is not None else 0):
        raise UsageError(
            f"draft_n_past is {prompt.draft_n_past} with {len(prompt.tokens)} tokens and "
            f"{'no' if prompt.draft is None else 'a'} draft state"
        )
    try:
        tokens = np.array(array("i", prompt.tokens), dtype="<i4")  # numpy would cut 1.5 to 1
    except (OverflowError, TypeError):
        raise UsageError("token ids must be whole numbers of 32 bits") from None
    sections: dict[str, bytes | bytearray] = {"tokens": tokens.tobytes(), "target": prompt.target}
    if prompt.draft is not None:
        sections["draft"] = prompt.draft
    if prompt.carry is not None:
        if prompt.carry.ndim != 1:
            raise UsageError(f"a carry of shape {prompt.carry.shape}; it must be [n_embd]")
        sections["carry"] = prompt.carry.astype("<f4").tobytes()
    return sections


def _encode_start(prompt: ProcessedPrompt, sections: dict[str, bytes | bytearray]) -> bytes:
    """Everything before the sections."""
    if not _is_identity(prompt.identity):
        raise UsageError(f"an identity is text or whole numbers by name: {prompt.identity!r}")
    header = {
        "identity": prompt.identity,
        "draft_n_past": prompt.draft_n_past,
        "sections": [[name, len(data), zlib.crc32(data)] for name, data in sections.items()],
    }
    text = json.dumps(header).encode()
    if len(text) > MAX_HEADER:
        raise UsageError(f"the identity is too long: a header of {len(text)} bytes")
    start = _START.pack(MAGIC, VERSION, len(text))
    return start + _CRC.pack(zlib.crc32(text, zlib.crc32(start))) + text


def _is_identity(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    values = value.values()
    return all(isinstance(name, str) for name in value) and all(
        isinstance(v, str) or (_is_int(v) and -(1 << 63) <= v < 1 << 63) for v in values
    )


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


# --- reading ------------------------------------------------------------------------------------


def read(path: str | os.PathLike[str], identity: Identity) -> ProcessedPrompt:
    """Read a file, every byte of it checked, that was made with `identity`.

    Args:
        identity: of this session. A name that only one side has is a difference too.

    Raises:
        PromptFileError: no such file, unreadable, damaged, of an unknown version, or made with
            something else; the message says which and gives both values.
        InsufficientMemoryError: the states do not fit into memory.
    """
    try:
        if not stat.S_ISREG(Path(path).stat().st_mode):  # opening a pipe would wait for ever
            raise PromptFileError(f"{path} is not a file", path)
        with Path(path).open("rb") as file:
            return _Reader(file, path).read(identity)
    except FileNotFoundError:
        raise PromptFileError(f"no such file: {path}", path) from None
    except OSError as error:
        raise PromptFileError(f"cannot read {path}: {error.strerror or error}", path) from error


@dataclass(frozen=True)
class _Section:
    name: str
    size: int
    crc: int


@dataclass(frozen=True)
class _Header:
    """The checked header: sizes are not negative, sections are known and in order."""

    identity: dict[str, str | int]
    draft_n_past: int
    sections: list[_Section]


class _Reader:
    """One file from front to back; nothing is allocated before the file's size allows it."""

    def __init__(self, file: BinaryIO, path: str | os.PathLike[str]) -> None:
        self.file, self.path = file, path
        self.size = os.fstat(file.fileno()).st_size

    def fail(self, message: str) -> PromptFileError:
        return PromptFileError(f"{self.path}: {message}", self.path)

    def damaged(self, message: str) -> PromptFileError:
        return self.fail(f"damaged: {message}; process the prompt again and save it anew")

    def take(self, n: int, what: str) -> bytes:
        data = self.file.read(n)
        if len(data) < n:
            raise self.damaged(f"the file ends within {what}")
        return data

    def read(self, identity: Identity) -> ProcessedPrompt:
        header = self.header()
        self.compare(header.identity, identity)
        total = sum(section.size for section in header.sections)
        if total > available_memory():
            raise InsufficientMemoryError(
                f"{self.path} holds {total / 1e6:.1f} MB of states, "
                f"{available_memory() / 1e6:.1f} MB of memory are available"
            )
        found = {section.name: self.section(section) for section in header.sections}
        carry = found.get("carry")
        return ProcessedPrompt(
            tokens=np.frombuffer(found["tokens"], dtype="<i4").tolist(),
            target=found["target"],
            draft=found.get("draft"),
            draft_n_past=header.draft_n_past,
            carry=None if carry is None else np.frombuffer(carry, "<f4").astype(np.float32),
            identity=header.identity,
        )

    def header(self) -> _Header:
        magic = self.file.read(len(MAGIC))
        if magic != MAGIC:
            what = "the file is empty" if not magic else f"it starts with {magic!r}"
            raise self.fail(f"not a processed prompt: {what}, expected {MAGIC!r}")
        start = magic + self.take(_START.size - len(magic), "its first bytes")
        _, version, length = _START.unpack(start)
        if version != VERSION:
            raise self.fail(f"format version {version} is not known; known: {VERSION}")
        if length > MAX_HEADER:
            raise self.damaged(f"a header of {length} bytes, {MAX_HEADER} are possible")
        (crc,) = _CRC.unpack(self.take(_CRC.size, "its first bytes"))
        text = self.take(length, "the header")
        if zlib.crc32(text, zlib.crc32(start)) != crc:
            raise self.damaged("the checksum of the header is wrong")
        return self.shape(text)

    def shape(self, text: bytes) -> _Header:
        """Check the header's contents; also that its sections fill the file exactly."""
        try:
            header = json.loads(text)
        except (ValueError, RecursionError):
            raise self.damaged("the header is not JSON") from None
        keys = {"identity", "draft_n_past", "sections"}
        if not isinstance(header, dict) or header.keys() != keys:
            raise self.damaged(f"the header lacks a key or has another than {sorted(keys)}")
        if not _is_identity(header["identity"]):
            raise self.damaged("the identity is not text or whole numbers by name")
        sections = self.table(header["sections"])
        n_past, sizes = header["draft_n_past"], {s.name: s.size for s in sections}
        most = sizes["tokens"] // 4 if "draft" in sizes else 0
        if not _is_int(n_past) or not 0 <= n_past <= most:
            raise self.damaged(f"draft_n_past is {n_past!r}, at most {most} is possible")
        expected = _START.size + _CRC.size + len(text) + sum(sizes.values())
        if expected != self.size:
            raise self.damaged(f"it has {self.size} bytes, its header says {expected}")
        return _Header(header["identity"], n_past, sections)

    def table(self, rows: Any) -> list[_Section]:
        if not isinstance(rows, list) or len(rows) > len(SECTIONS):
            raise self.damaged("the section table is no list of sections")
        for row in rows:
            well_formed = isinstance(row, list) and len(row) == 3 and isinstance(row[0], str)
            if not well_formed or not all(_is_int(n) and 0 <= n < 1 << 63 for n in row[1:]):
                raise self.damaged("a row of the section table is not [name, size, checksum]")
        sections = [_Section(*row) for row in rows]
        names = [section.name for section in sections]
        if names != [n for n in SECTIONS if n in names] or not {"tokens", "target"} <= {*names}:
            raise self.damaged(f"sections {names}; possible are {list(SECTIONS)}, in this order")
        for section in sections:
            if section.name in ("tokens", "carry") and section.size % 4:
                raise self.damaged(f"section {section.name} has {section.size} bytes, not 4 each")
        return sections

    def section(self, section: _Section) -> bytes:
        try:
            data = self.take(section.size, f"section {section.name}")
        except MemoryError:
            raise InsufficientMemoryError(
                f"{self.path}: no memory for section {section.name} ({section.size / 1e6:.1f} MB)"
            ) from None
        if zlib.crc32(data) != section.crc:
            raise self.damaged(f"the checksum of section {section.name} is wrong")
        return data

    def compare(self, made_with: Identity, wanted: Identity) -> None:
        """Raises PromptFileError when the two identities differ, with every difference."""

        def describe(values: Identity, name: str) -> str:
            return f"{values[name]}" if name in values else "unknown"

        differences = [
            f"made with {name} {describe(made_with, name)}, this session uses "
            f"{describe(wanted, name)}"
            for name in sorted({*made_with, *wanted})
            if made_with.get(name) != wanted.get(name)
        ]
        if differences:
            raise self.fail("; ".join(differences))
