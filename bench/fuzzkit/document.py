"""A GGUF file as parts that can be changed one by one, and written again with every change kept.

Unlike that of the ``gguf`` package the writer writes anything: wrong counts, lengths, types and
offsets are what it is for.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field
from pathlib import Path

from gguf import GGUFReader

from pyllama_mtp.models.ggufheader import TENSOR_TYPES

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B"}
SCALARS |= {10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
_U16, _I32 = 2, 5
ALIGNMENT = 32

Scalar = int | float | bytes


@dataclass
class Entry:
    """A metadata entry. ``element`` is the element type of an array, else None."""

    key: bytes
    type: int
    value: Scalar | list[Scalar]
    element: int | None = None


@dataclass
class Tensor:
    """A row of the tensor table with its bytes; ``offset`` None: where the last one ends."""

    name: bytes
    shape: list[int]
    type: int
    data: bytes
    offset: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes by shape and type; those of F32 where the type is unknown."""
        _, block, size = TENSOR_TYPES.get(self.type, ("", 1, 4))
        return math.prod(self.shape) // block * size if self.shape else size


@dataclass(frozen=True)
class Field:
    """A number in a written file: where it stands, and how (a struct code)."""

    name: str
    at: int
    code: str


@dataclass
class Document:
    """A model file taken apart: metadata and tensors, in the order of the file."""

    entries: list[Entry] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)

    def entry(self, key: str) -> Entry | None:
        """The first entry of that key."""
        return next((e for e in self.entries if e.key == key.encode()), None)

    def tensor(self, name: str) -> Tensor | None:
        """The first tensor of that name."""
        return next((t for t in self.tensors if t.name == name.encode()), None)


def read_document(path: Path) -> Document:
    """Take a file apart that is known to be good."""
    reader, document = GGUFReader(path), Document()
    for found in reader.fields.values():
        if not found.name.startswith("GGUF."):  # version and counts
            kind, *element = map(int, found.types)
            parts = [found.parts[i] for i in found.data]
            strings = STRING in (kind, *element)
            values = [part.tobytes() if strings else part[0].item() for part in parts]
            value = values if element else values[0]
            document.entries.append(Entry(found.name.encode(), kind, value, *element))
    for tensor in reader.tensors:
        name, shape, kind = tensor.name.encode(), tensor.shape.tolist(), int(tensor.tensor_type)
        document.tensors.append(Tensor(name, shape, kind, tensor.data.tobytes()))
    return document


def split(document: Document, n: int) -> list[Document]:
    """The parts of a model in `n` files, as upstream's llama-gguf-split makes them."""
    size = -(-len(document.tensors) // n)
    parts = []
    for number in range(n):
        entries = [
            Entry(b"general.architecture", STRING, b"qwen35"),
            Entry(b"split.no", _U16, number),
            Entry(b"split.count", _U16, n),
            Entry(b"split.tensors.count", _I32, len(document.tensors)),
        ]
        first = [*document.entries, *entries[1:]]
        tensors = document.tensors[number * size : (number + 1) * size]
        parts.append(Document(entries if number else first, tensors))
    return parts


class Writer:
    """Writes a document.

    Args:
        document: what is written.
        name_fields: remember where each number of the header went, in ``fields``; slower.
    """

    def __init__(self, document: Document, name_fields: bool = True) -> None:
        #: What stands before the tensors' data, and that.
        self.out, self.data = bytearray(), list[bytes]()
        self.fields: list[Field] = []
        self._name_fields = name_fields
        self._number("magic", "I", 0x46554747)
        self._number("version", "I", 3)
        self._number("tensor count", "Q", len(document.tensors))
        self._number("metadata count", "Q", len(document.entries))
        for entry in document.entries:
            self._entry(entry)
        self._tensors(document.tensors)

    def _number(self, name: str, code: str, value: float) -> None:
        if self._name_fields:
            self.fields.append(Field(name, len(self.out), code))
        self.out += pack(code, value)

    def _string(self, name: str, text: bytes) -> None:
        self._number(f"{name} length", "Q", len(text))
        self.out += text

    def _scalar(self, name: str, kind: int, value: Scalar) -> None:
        if kind == STRING:
            self._string(name, value if isinstance(value, bytes) else str(value).encode())
        elif kind in SCALARS:
            self._number(name, SCALARS[kind], 0 if isinstance(value, bytes) else value)
        else:
            self._number(name, "I", 0)

    def _entry(self, entry: Entry) -> None:
        name = entry.key.decode(errors="replace")
        self._string(f"key {name}", entry.key)
        self._number(f"type {name}", "I", entry.type)
        if not isinstance(entry.value, list) or entry.element is None:
            self._scalar(f"value {name}", entry.type, entry.value)  # type: ignore[arg-type]
            return
        self._number(f"element type {name}", "I", entry.element)
        self._number(f"array length {name}", "Q", len(entry.value))
        for i, value in enumerate(entry.value):
            self._scalar(f"value {name}[{i}]", entry.element, value)

    def _tensors(self, tensors: list[Tensor]) -> None:
        end = 0
        for tensor in tensors:
            name = tensor.name.decode(errors="replace")
            self._string(f"name of {name}", tensor.name)
            self._number(f"dimensions of {name}", "I", len(tensor.shape))
            for i, n in enumerate(tensor.shape):
                self._number(f"dimension {i} of {name}", "Q", n)
            self._number(f"type of {name}", "I", tensor.type)
            self._number(f"offset of {name}", "Q", end if tensor.offset is None else tensor.offset)
            end += -(-len(tensor.data) // ALIGNMENT) * ALIGNMENT
        self.out += bytes(-len(self.out) % ALIGNMENT)
        for tensor in tensors:
            padding = -(len(tensor.data)) % ALIGNMENT if tensor is not tensors[-1] else 0
            self.data += [tensor.data, bytes(padding)]


def pack(code: str, value: float) -> bytes:
    """``value`` as the struct code ``code``, cut to its width."""
    if code in "fd":
        try:
            return struct.pack("<" + code, value)
        except OverflowError:
            return struct.pack("<" + code, math.inf)
    width = struct.calcsize("<" + code)
    whole = int(value) if math.isfinite(value) else 0
    return (whole & (1 << 8 * width) - 1).to_bytes(width, "little")


def tiled(data: bytes, n: int) -> bytes:
    """``n`` bytes: the beginning of ``data``, repeated where it is too short."""
    data = data or b"\0"
    return (data * (n // len(data) + 1))[:n]
