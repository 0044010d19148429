"""A GGUF file as parts that can be edited one by one, and written again with every edit kept.

Unlike that of the ``gguf`` package the writer writes anything: wrong counts, lengths, types and
offsets are what it is for. An edit is a dictionary with ``op`` and its arguments, so that a case
can be recorded and repeated. Strings are Latin-1 of the bytes that they stand for. An edit of a
missing part does nothing.
"""

from __future__ import annotations

import copy
import math
import struct
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader

from pyllama_mtp.errors import ModelFileError
from pyllama_mtp.models.ggufheader import TENSOR_TYPES
from pyllama_mtp.models.modelinfo import describe
from pyllama_mtp.models.shapes import model_tensors

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B"}
SCALARS |= {10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
_U16, _I32 = 2, 5
ALIGNMENT = 32
#: Files that edits have made larger are cut to this size: full disks are not tested here.
MOST_BYTES = 64 << 20
#: Numbers of so many elements of an array can be edited by their place.
_SOME = 8

Edit = dict[str, Any]
Scalar = int | float | bytes
#: A number in a written file: where it stands, and how (a struct code).
Number = tuple[int, str]


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

    def fit(self) -> None:
        """Let the bytes follow shape and type: cut, or repeated."""
        _, block, size = TENSOR_TYPES.get(self.type, ("", 1, 4))
        n = math.prod(self.shape) // block * size if self.shape else size
        n, data = max(0, min(n, MOST_BYTES // 4)), self.data or b"\0"
        self.data = (data * (n // len(data) + 1))[:n]


@dataclass
class Document:
    """A model file taken apart: metadata and tensors, in the order of the file."""

    entries: list[Entry] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)

    def entry(self, key: str) -> Entry | None:
        """The first entry of that key."""
        return next((e for e in self.entries if e.key == _bytes(key)), None)

    def tensor(self, name: str) -> Tensor | None:
        """The first tensor of that name."""
        return next((t for t in self.tensors if t.name == _bytes(name)), None)


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


def written(document: Document) -> tuple[bytearray, list[Number]]:
    """The file of a document, and the numbers of its header."""
    out, numbers = bytearray(), list[Number]()
    for part in _header(document):
        if isinstance(part, bytes):
            out += part
        else:
            numbers.append((len(out), part[0]))
            out += pack(*part)
    for tensor in document.tensors:
        out += bytes(-len(out) % ALIGNMENT)
        out += tensor.data
    return out, numbers


#: A number by its struct code, or bytes in which no number is edited.
_Part = tuple[str, float] | bytes


def _string(text: bytes) -> Iterator[_Part]:
    yield "Q", len(text)
    yield text


def _scalar(kind: int | None, value: Any) -> Iterator[_Part]:
    if kind == STRING:
        yield from _string(value if isinstance(value, bytes) else str(value).encode())
    else:
        yield SCALARS.get(kind or 0, "I"), 0 if isinstance(value, bytes) else value


def _header(document: Document) -> Iterator[_Part]:
    yield from (("I", 0x46554747), ("I", 3))
    yield from (("Q", len(document.tensors)), ("Q", len(document.entries)))
    for entry in document.entries:
        yield from _string(entry.key)
        yield "I", entry.type
        if not isinstance(entry.value, list):
            yield from _scalar(entry.type, entry.value)
            continue
        yield from (("I", entry.element or 0), ("Q", len(entry.value)))
        for i, value in enumerate(entry.value):
            for part in _scalar(entry.element, value):
                yield part if i < _SOME or isinstance(part, bytes) else pack(*part)
    end = 0
    for tensor in document.tensors:
        yield from _string(tensor.name)
        yield from (("I", len(tensor.shape)), *(("Q", n) for n in tensor.shape))
        yield from (("I", tensor.type), ("Q", end if tensor.offset is None else tensor.offset))
        end += -(-len(tensor.data) // ALIGNMENT) * ALIGNMENT


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


def apply(base: Document, edits: list[Edit]) -> bytes:
    """The edited file of a document, which stays as it is.

    First come the edits of parts, then those of numbers, then those of bytes.
    """
    document = Document([copy.copy(e) for e in base.entries], [copy.copy(t) for t in base.tensors])
    for edit in edits:
        if edit["op"] in _PARTS:
            _PARTS[edit["op"]](document, edit)
    out, numbers = written(document)
    for edit in edits:
        if edit["op"] == "number":
            at, code = numbers[edit["index"] % len(numbers)]
            new = pack(code, edit["value"])
            out[at : at + len(new)] = new
    return apply_bytes(out, edits)


def apply_bytes(data: bytes | bytearray, edits: list[Edit]) -> bytes:
    """Only the edits of bytes, on any file. Places are in bytes, or shares of the file (floats)."""
    out = bytearray(data)
    for edit in edits:
        at = edit.get("at", 0)
        at = min(int(at * len(out)) if isinstance(at, float) else at, len(out))
        text = _bytes(edit.get("text", "")) * edit.get("times", 1)
        if edit["op"] == "bytes":
            out[at : at + len(text)] = text
        elif edit["op"] == "flip" and at < len(out):
            out[at] ^= 1 << edit["bit"]
        elif edit["op"] == "cut":
            del out[at : at + edit["n"] if "n" in edit else None]
        elif edit["op"] == "insert":
            out[at:at] = text
    return bytes(out[: max(MOST_BYTES, len(data))])


def _bytes(value: Any) -> Any:
    return value.encode("latin-1") if isinstance(value, str) else value


def _set(document: Document, edit: Edit) -> None:
    """Give a key a value and a type, or add it. ``element`` makes it an array."""
    value = edit["value"]
    new = [_bytes(v) for v in value] if isinstance(value, list) else _bytes(value)
    kind = ARRAY if "element" in edit else edit["type"]
    entry = Entry(_bytes(edit["key"]), kind, new, edit.get("element"))
    if old := document.entry(edit["key"]):
        document.entries[document.entries.index(old)] = entry
    else:
        document.entries.append(entry)


def _entry(document: Document, edit: Edit) -> None:
    """An entry goes, is renamed, or comes twice."""
    old = document.entry(edit["key"])
    if old and edit["op"] == "delete":
        document.entries.remove(old)
    elif old and edit["op"] == "rename":
        old.key = _bytes(edit["to"])
    elif old:
        document.entries.append(old)


def _element(document: Document, edit: Edit) -> None:
    """An element of an array, or with ``length`` the array's length."""
    entry = document.entry(edit["key"])
    if entry and isinstance(entry.value, list) and entry.value:
        values = list(entry.value)
        if "length" in edit:
            values = (values * (edit["length"] // len(values) + 1))[: edit["length"]]
        else:
            values[edit["index"] % len(values)] = _bytes(edit["value"])
        entry.value = values


def _tensor(document: Document, edit: Edit) -> None:
    """A tensor goes, is copied under another name, or has another name, shape, type or offset;
    ``fit``: its bytes follow."""
    tensor = document.tensor(edit["name"])
    if not tensor:
        return
    if edit["op"] == "drop":
        document.tensors.remove(tensor)
        return
    if edit["op"] == "copy":
        tensor = copy.copy(tensor)
        document.tensors.append(tensor)
    tensor.name = _bytes(edit["to"]) if "to" in edit else tensor.name
    for name in ("shape", "type", "offset"):
        setattr(tensor, name, edit.get(name, getattr(tensor, name)))
    if edit.get("fit"):
        tensor.fit()


def _weights(document: Document, edit: Edit) -> None:
    """Fill a tensor, or ``n`` of its numbers from ``at``, with one number."""
    tensor = document.tensor(edit["name"])
    if tensor and (dtype := {0: "<f4", 1: "<f2"}.get(tensor.type)):
        numbers = np.frombuffer(tensor.data, dtype).copy()
        at = int(edit.get("at", 0) * len(numbers))
        numbers[at : at + edit["n"] if "n" in edit else None] = float(edit["fill"])
        tensor.data = numbers.tobytes()


def _conform(document: Document, edit: Edit) -> None:
    """Give every tensor the shape that follows from the metadata, so that faults lie deeper. Files
    of architectures whose tensors are not known here stay as they are."""
    with tempfile.NamedTemporaryFile(suffix=".gguf") as file:
        file.write(written(document)[0])
        file.flush()
        try:
            info = describe(file.name)
        except ModelFileError:
            return
    if not info.validated:
        return
    specs = model_tensors(info.to_shape(), info.recurrent_layers)
    wanted = {spec.name.encode(): list(spec.shape) for spec in specs}
    if sum(4 * math.prod(shape) for shape in wanted.values()) > MOST_BYTES // 2:
        return
    like = {t.name.split(b".", 2)[-1]: t for t in document.tensors}
    have = {t.name for t in document.tensors}
    for name in wanted:
        if name not in have and (template := like.get(name.split(b".", 2)[-1])):
            document.tensors.append(replace(template, name=name))
    document.tensors = [t for t in document.tensors if t.name in wanted]
    for tensor in document.tensors:
        tensor.shape = wanted[tensor.name]
        tensor.fit()


_PARTS: dict[str, Callable[[Document, Edit], None]] = {
    "set": _set,
    **dict.fromkeys(("delete", "rename", "duplicate"), _entry),
    "element": _element,
    **dict.fromkeys(("tensor", "drop", "copy"), _tensor),
    "weights": _weights,
    "conform": _conform,
}
