"""Read the header of a GGUF file: metadata and tensor table, with every number checked.

The two other parsers do not serve here: ``gguf.GGUFReader`` maps the whole file, takes seconds for
a large vocabulary and raises an IndexError for a damaged file; the native loader writes to a log
and returns a null pointer, or ends the process. This parser allocates nothing by a number in the
file before it has compared that number with the bytes that are there.

Format: ggml's docs/gguf.md; rules and limits as in upstream's ggml/src/gguf.cpp.

A model may be split into several files, NAME-00001-of-00003.gguf and so on. The first file has the
metadata; each file has a tensor table of its own (upstream's tools/gguf-split). Like the loader,
:func:`join_parts` is given the first file and finds the others by their names.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import stat
import struct
from array import array
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import BinaryIO

from gguf import GGML_QUANT_SIZES

from pyllama_mtp.arguments import file_name
from pyllama_mtp.errors import ModelFileError

MAX_HEADER = 128 << 20  # published headers, vocabulary included, stay below 20 MB
MAX_TENSORS = 1 << 17
MAX_ENTRIES = 1 << 16
MAX_STRINGS = 1 << 21  # in one array; vocabularies have 300,000
MAX_NAME = 63  # GGML_MAX_NAME less the terminator
KEPT_ELEMENTS = 4096
_CHUNK = 1 << 20

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"} | {
    12: "d"
}
STRING, _ARRAY = 8, 9
TOKENS = "tokenizer.ggml.tokens"
# Tensor types by number: (name, elements per block, bytes per block). Q2_0 is in the pinned tree
# but not in every release of the gguf package; Q8_1 has 40 bytes there, which is wrong.
TENSOR_TYPES: dict[int, tuple[str, int, int]] = {42: ("Q2_0", 64, 18)} | {
    int(t): (t.name, *size) for t, size in GGML_QUANT_SIZES.items()
}
TENSOR_TYPES[9] = ("Q8_1", 32, 36)

#: Types without blocks; any other type of weights has lost precision already.
FLOATS = ("F32", "F16", "BF16")
#: Types that no kernel takes for weights: numbers, and the types of quantized activations.
NOT_WEIGHTS = ("I8", "I16", "I32", "I64", "F64", "Q8_1", "Q8_K")


@dataclass(frozen=True)
class ArraySummary:
    """An array that was read but not kept: number of its element type, and length.

    Of the vocabulary also the number of distinct strings, and a digest of all strings.
    """

    type: int
    length: int
    n_distinct: int | None = None
    digest: str = field(default="", compare=False)


#: Metadata value: scalar, string, short number array, or a summary of any other array.
Value = int | float | bool | str | tuple[int | float | bool, ...] | ArraySummary


@dataclass(frozen=True)
class TensorEntry:
    """A tensor: ``shape`` in ggml order (fast dimension first), ``offset`` within ``file``."""

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int
    nbytes: int
    file: str = ""

    @property
    def n_rows(self) -> int:
        """Number of rows: the product of all dimensions but the first."""
        return math.prod(self.shape[1:])

    def read(self, *pieces: tuple[int, int]) -> bytes:
        """The bytes of these (start, length) pieces, by default of the whole tensor.

        Raises:
            ModelFileError: the file cannot be read, or has become shorter.
        """
        wanted = pieces or ((0, self.nbytes),)
        try:
            with Path(self.file).open("rb") as file:
                data = [os.pread(file.fileno(), n, self.offset + start) for start, n in wanted]
        except OSError as error:
            raise ModelFileError(f"cannot read {self.file}: {error}", self.file) from error
        if any(len(piece) < n for piece, (_, n) in zip(data, wanted, strict=True)):
            raise ModelFileError(f"{self.file} has become shorter", self.file)
        return b"".join(data)


@dataclass
class Header:
    """What stands before the tensor data of a GGUF file.

    ``size`` is that of the file, in bytes; ``types`` are the numbers of the metadata's value types.
    """

    path: str
    size: int
    version: int
    metadata: dict[str, Value] = field(default_factory=dict)
    types: dict[str, int] = field(default_factory=dict)
    tensors: list[TensorEntry] = field(default_factory=list)

    def error(self, message: str) -> ModelFileError:
        """The exception for a file whose header is wrong in some way."""
        return ModelFileError(f"{self.path}: {message}", self.path)


def read_header(path: str | os.PathLike[str]) -> Header:
    """Parse a file's header and check that the file is long enough for its tensors.

    Raises:
        ModelFileError: no such file, a directory, unreadable, not a GGUF, an unsupported version,
            truncated, or any count, length, type or offset that cannot be right.
        UsageError: `path` is empty, or no path.
    """
    return parse_file(path)[1]


def parse_file(path: str | os.PathLike[str], *arrays: str) -> tuple[Parser, Header]:
    """:func:`read_header`, and the parser, which keeps the strings of these `arrays`, by key."""
    file_path = Path(file_name("path", path, "a .gguf file"))
    if file_path.is_dir():
        raise ModelFileError(f"{path} is a directory; give the .gguf file in it", path)
    try:
        if not stat.S_ISREG(file_path.stat().st_mode):  # opening a pipe would wait for ever
            raise ModelFileError(f"{path} is no regular file; give a .gguf file", path)
        with file_path.open("rb") as file:
            parser = Parser(file, os.fspath(path), *arrays)
            return parser, parser.parse()
    except FileNotFoundError:
        raise ModelFileError(f"no such model file: {path}", path) from None
    except (OSError, ValueError) as exc:  # ValueError: a null character in the name
        reason = getattr(exc, "strerror", None) or exc
        raise ModelFileError(f"cannot read {path}: {reason}", path) from exc


def _distinct(tokens: list[bytes]) -> int:
    """The number of different tokens for the loader, which reads each token up to a null character
    and gives every empty token a name of its own."""
    distinct = {*tokens}
    if len(distinct) == len(tokens) and not any(b"\0" in text or not text for text in distinct):
        return len(distinct)
    seen = (text.partition(b"\0")[0] for text in tokens)
    return len({text or b"[EMPTY_%d]" % i for i, text in enumerate(seen)})


class Parser:
    """A cursor over the growing start of a file; reads are bounded by what the file holds.

    Attributes:
        spans: begin and end of type and value of each key of the metadata.
        strings: of arrays that are kept, by key.
    """

    def __init__(self, file: BinaryIO, path: str, *arrays: str) -> None:
        """`arrays`: keys of arrays of strings to keep, in place of a count and a digest."""
        self.spans: dict[str, tuple[int, int]] = {}
        self.strings: dict[str, list[bytes]] = {key: [] for key in arrays}
        self.file = file
        self.path = path
        self.size = os.fstat(file.fileno()).st_size
        self.buffer = bytearray()
        self.pos = 0
        self.in_header = False

    def raw(self, key: str) -> bytes:
        """Type and value of a key as the file has them; b"": there is no such key."""
        return bytes(self.buffer[slice(*self.spans.get(key, (0, 0)))])

    def fail(self, message: str) -> ModelFileError:
        at = f" (at byte {self.pos})" if self.in_header else ""
        return ModelFileError(f"{self.path}: {message}{at}", self.path)

    def need(self, n: int, what: str) -> int:
        """Make ``n`` more bytes available, move past them and return where they start."""
        start, end = self.pos, self.pos + n
        if end > self.size:
            raise self.fail(
                f"truncated: {what} needs {end - self.size} bytes more than the file has"
                f" ({self.size}); download or copy it again"
            )
        if end > MAX_HEADER:
            raise self.fail(f"{what} ends {end} bytes into the file; no real header is that long")
        while end > len(self.buffer):
            piece = self.file.read(_CHUNK)
            if not piece:
                raise self.fail(f"{what}: the file became shorter while it was read")
            self.buffer += piece
        self.pos = end
        return start

    def number(self, code: str, what: str) -> int:
        start = self.need(struct.calcsize(code), what)
        value: int = struct.unpack_from("<" + code, self.buffer, start)[0]
        return value

    def string(self, what: str) -> str:
        n = self.number("Q", what)
        start = self.need(n, what)
        try:
            return self.buffer[start : start + n].decode()
        except UnicodeDecodeError:
            raise self.fail(f"{what} is not valid UTF-8; the file is damaged") from None

    def name(self, what: str) -> str:
        """A key or a tensor's name. The native code ends names at a null character, so it would
        find others than were checked here."""
        name = self.string(what)
        if "\0" in name:
            raise self.fail(f"{what} {name[:80]!r} holds a null character; the file is damaged")
        return name

    def parse(self) -> Header:
        if self.size == 0:
            raise self.fail("the file is empty")
        magic = self.file.read(4)
        self.file.seek(0)
        if magic != b"GGUF":
            raise self.fail(f"not a GGUF file: it starts with {magic!r}, expected b'GGUF'")
        self.in_header = True
        self.need(4, "magic")
        version = self.number("I", "version")
        if version not in (2, 3):
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            why = "big-endian files" if swapped in (2, 3) else f"GGUF version {version}"
            raise self.fail(f"{why} cannot be read; versions 2 and 3 (little-endian) can")
        n_tensors = self.count("Q", "tensor count", MAX_TENSORS, 24)
        n_entries = self.count("Q", "metadata count", MAX_ENTRIES, 13)
        header = Header(self.path, self.size, version)
        for _ in range(n_entries):
            key = self.name("metadata key")
            if key in header.metadata:
                raise self.fail(f"metadata key {key!r} appears twice")
            start = self.pos
            header.types[key] = self.number("I", f"type of {key!r}")
            header.metadata[key] = self.value(key, header.types[key])
            self.spans[key] = start, self.pos
        self.tensors(header, n_tensors)
        return header

    def count(self, code: str, what: str, limit: int, least: int) -> int:
        """A number of items of at least ``least`` bytes each; a number too large is refused."""
        n = self.number(code, what)
        if n > limit:
            raise self.fail(f"{what} is {n}, more than {limit}; the file is damaged")
        if n * least > self.size - self.pos:
            raise self.fail(
                f"truncated or damaged: {what} is {n}, which needs at least {n * least} bytes, "
                f"and {self.size - self.pos} are left"
            )
        return n

    def value(self, key: str, kind: int) -> Value:
        what = f"value of {key!r}"
        if kind in _SCALARS:
            return self.number(_SCALARS[kind], what)
        if kind == STRING:
            return self.string(what).partition("\0")[0]  # as much as the loader reads
        if kind != _ARRAY:
            raise self.fail(f"{what} has unknown type {kind}")
        kind = self.number("I", what)
        if kind == STRING:
            return self.string_array(key, self.count("Q", f"length of {key!r}", MAX_STRINGS, 8))
        if kind not in _SCALARS:
            raise self.fail(f"{what} is an array of unknown type {kind}")
        width = struct.calcsize(_SCALARS[kind])
        n = self.count("Q", f"length of {key!r}", 1 << 30, width)
        start = self.need(n * width, what)
        if n > KEPT_ELEMENTS:
            return ArraySummary(kind, n)
        return struct.unpack_from(f"<{n}{_SCALARS[kind]}", self.buffer, start)

    def string_array(self, key: str, n: int) -> ArraySummary:
        """Read ``n`` strings; duplicate tokens are counted, because the loader aborts on them."""
        texts = self.read_strings(key, n, keep=key == TOKENS or key in self.strings)
        if key in self.strings:
            self.strings[key] = texts
        if not texts or key in self.strings:
            return ArraySummary(STRING, n)
        digest = hashlib.sha256(b"\0".join(texts)).hexdigest()
        return ArraySummary(STRING, n, _distinct(texts), digest)

    def read_strings(self, key: str, n: int, keep: bool) -> list[bytes]:
        """Move past ``n`` strings; with ``keep``, return them."""
        what = f"element of {key!r}"
        length = struct.Struct("<Q").unpack_from
        ends = array("Q")
        start = pos = self.pos
        have = len(self.buffer)
        for _ in range(n):  # 500,000 times in a published model: calls would take a second
            at = pos + 8
            if at > have:
                self.pos = pos
                self.need(8, what)
                have = len(self.buffer)
            pos = at + length(self.buffer, pos)[0]
            if pos > have:
                self.pos = at
                self.need(pos - at, what)
                have = len(self.buffer)
            if keep:
                ends.append(pos - start)
        self.pos = pos
        if not keep:
            return []
        data, begins = bytes(self.buffer[start:pos]), chain((0,), ends)
        return [data[begin + 8 : end] for begin, end in zip(begins, ends, strict=False)]

    def tensors(self, header: Header, n: int) -> None:
        alignment = header.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self.fail(f"general.alignment is {alignment!r}, it must be a power of 2")
        entries = [self.tensor() for _ in range(n)]
        self.in_header = False
        data = -(-self.pos // alignment) * alignment
        end, seen = 0, set()
        for name, shape, kind, offset, nbytes in entries:
            if name in seen:
                raise self.fail(f"tensor {name!r} appears twice")
            seen.add(name)
            if offset != end:
                raise self.fail(f"tensor {name!r} starts at {offset}, expected {end}")
            end += -(-nbytes // alignment) * alignment
            header.tensors.append(TensorEntry(name, shape, kind, data + offset, nbytes, self.path))
        last = header.tensors[-1] if header.tensors else None
        missing = last.offset + last.nbytes - self.size if last else 0
        if last and missing > 0:
            raise self.fail(
                f"truncated: {missing} bytes of tensor data are missing (the last tensor, "
                f"{last.name!r}, ends at {last.offset + last.nbytes}, the file has {self.size} "
                "bytes); download or copy it again"
            )

    def tensor(self) -> tuple[str, tuple[int, ...], str, int, int]:
        name = self.name("tensor name")
        if not 1 <= len(name.encode()) <= MAX_NAME:
            raise self.fail(f"tensor name {name[:80]!r} is empty or longer than {MAX_NAME} bytes")
        what = f"table entry of {name!r}"
        n_dims = self.number("I", what)
        if not 1 <= n_dims <= 4:
            raise self.fail(f"tensor {name!r} has {n_dims} dimensions, 1 to 4 are possible")
        shape = tuple(self.number("Q", what) for _ in range(n_dims))
        kind = self.number("I", what)
        if kind not in TENSOR_TYPES:
            raise self.fail(
                f"tensor {name!r} has unknown type {kind}; this version knows "
                + ", ".join(t[0] for t in TENSOR_TYPES.values())
            )
        type_name, block, block_bytes = TENSOR_TYPES[kind]
        if min(shape) < 1 or math.prod(shape) >= 1 << 62:
            raise self.fail(f"tensor {name!r} has the impossible shape {shape}")
        if shape[0] % block:
            raise self.fail(
                f"tensor {name!r} has rows of {shape[0]}, {type_name} needs multiples of {block}"
            )
        offset = self.number("Q", what)
        return name, shape, type_name, offset, math.prod(shape) // block * block_bytes


# -- models that are split into several files ------------------------------------------------------

#: Name, number and count of a part.
PART_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
_U16 = 2  # the type of split.no; any other type would end the process in the loader
_MOST_PARTS = 999


def join_parts(header: Header) -> None:
    """Add the tensors and the sizes of a model's other files to the header of its first file.

    A model in one file stays as it is.

    Raises:
        ModelFileError: not the first file, not named as parts are, or a part that is missing,
            damaged or of another model.
    """
    count = _number(header.metadata.get("split.count", 1))
    if count is None or count > _MOST_PARTS:
        raise header.error(f"split.count is {header.metadata['split.count']!r}")
    if count < 2:
        return
    first = part_path(header, 1, count)
    if _number(header.metadata.get("split.no")) != 0:
        raise header.error(f"this is one of {count} parts of a model; give the first, {first.name}")
    if first != Path(header.path):
        raise header.error(f"it is the first of {count} parts, and named as another one")
    names = {tensor.name for tensor in header.tensors}
    for number in range(2, count + 1):
        path = part_path(header, number, count)
        if not path.exists():
            raise header.error(
                f"part {number} of {count} is missing: no file {path.name} beside it"
            )
        part = read_header(path)
        if part.metadata.get("split.no") != number - 1 or part.types["split.no"] != _U16:
            raise part.error(f"it is not part {number} of {header.path}: split.no is another")
        twice = next((tensor.name for tensor in part.tensors if tensor.name in names), None)
        if twice is not None:
            raise part.error(f"tensor {twice!r} is in an earlier part, too")
        names |= {tensor.name for tensor in part.tensors}
        header.tensors += part.tensors
        header.size += part.size
    total = header.metadata.get("split.tensors.count")
    if total != len(names):
        raise header.error(f"its {count} parts have {len(names)} tensors, not {total!r}")


def part_path(header: Header, number: int, count: int) -> Path:
    """The path of part ``number``, counted from 1, beside the file of a header.

    Raises:
        ModelFileError: the header's file is not named as a part of such a model.
    """
    named = PART_NAME.fullmatch(Path(header.path).name)
    if not named or int(named[3]) != count:
        raise header.error(
            f"one of {count} parts of a model, which must be named NAME-00001-of-{count:05}.gguf "
            "and so on; name them so, or join them with 'llama-gguf-split --merge'"
        )
    return Path(header.path).with_name(f"{named[1]}-{number:05}-of-{count:05}.gguf")


def _number(value: Value | None) -> int | None:
    return value if type(value) is int and value >= 0 else None
