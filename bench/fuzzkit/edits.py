"""Edits of a file as plain data, so that a case can be recorded and repeated.

An edit is a dictionary with ``op`` and its arguments. Edits of parts come first, then the file is
written, then edits of single numbers and of bytes. Strings are Latin-1 of the bytes they stand for.
An edit of a missing part does nothing.
"""

from __future__ import annotations

import copy
import math
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from fuzzkit.document import ARRAY, STRING, Document, Entry, Tensor, Writer, pack, tiled
from pyllama_mtp.models.shapes import KEYS, ModelShape, model_tensors

Edit = dict[str, Any]
Buffer = bytes | bytearray

#: Files are cut to this size: full disks are not tested here.
MOST_BYTES = 64 << 20


def apply(base: Document, edits: list[Edit]) -> list[Buffer]:
    """The edited file of a document, in pieces to save copies; the document stays as it is.

    The edits are applied in the given order within each of the three steps.
    """
    document = Document([copy.copy(e) for e in base.entries], [copy.copy(t) for t in base.tensors])
    for edit in edits:
        if edit["op"] in _PARTS:
            _PARTS[edit["op"]](document, edit)
    by_name = any(edit["op"] == "field" for edit in edits)
    writer = Writer(document, by_name)
    out = writer.out
    for edit in edits:
        if edit["op"] == "field":
            for field in writer.fields:
                if field.name == edit["name"]:
                    width = struct.calcsize("<" + field.code)
                    out[field.at : field.at + width] = pack(field.code, edit["value"])
                    break
    if any(edit["op"] in _BYTES for edit in edits):
        return [apply_bytes(b"".join([out, *writer.data]), edits)]
    return [out, *writer.data]


_BYTES = ("bytes", "flip", "truncate", "cut", "insert")


def apply_bytes(data: bytes, edits: list[Edit]) -> bytes:
    """Only the edits of bytes, on any file. Places are in bytes, or shares of the file (floats)."""
    out = bytearray(data)
    for edit in edits:
        at = edit.get("at", 0)
        at = min(int(at * len(out)) if isinstance(at, float) else at, len(out))
        if edit["op"] == "bytes":
            new = edit["text"].encode("latin-1")
            out[at : at + len(new)] = new
        elif edit["op"] == "flip" and at < len(out):
            out[at] ^= 1 << edit["bit"]
        elif edit["op"] == "truncate":
            del out[at:]
        elif edit["op"] == "cut":
            del out[at : at + edit["n"]]
        elif edit["op"] == "insert":
            out[at:at] = edit["text"].encode("latin-1") * edit.get("times", 1)
    return bytes(out[:MOST_BYTES])


# --- edits of parts -----------------------------------------------------------------------------


def _scalar(value: Any) -> Any:
    return value.encode("latin-1") if isinstance(value, str) else value


def _set(document: Document, edit: Edit) -> None:
    """Give a key a value and a type, or add it. ``element`` makes it an array."""
    value = edit["value"]
    new = [_scalar(v) for v in value] if isinstance(value, list) else _scalar(value)
    kind = ARRAY if "element" in edit else edit["type"]
    entry = Entry(edit["key"].encode("latin-1"), kind, new, edit.get("element"))
    old = document.entry(edit["key"])
    if old:
        document.entries[document.entries.index(old)] = entry
    else:
        document.entries.append(entry)


def _entry(document: Document, edit: Edit) -> None:
    """An entry goes, is renamed, or comes twice."""
    old = document.entry(edit["key"])
    if old and edit["op"] == "delete":
        document.entries.remove(old)
    elif old and edit["op"] == "rename":
        old.key = edit["to"].encode("latin-1")
    elif old:
        document.entries.append(copy.copy(old))


def _element(document: Document, edit: Edit) -> None:
    """One element of an array; ``from``: that of another index."""
    entry = document.entry(edit["key"])
    if entry and isinstance(entry.value, list) and entry.value:
        values = list(entry.value)
        new = values[edit["from"] % len(values)] if "from" in edit else _scalar(edit["value"])
        values[edit["index"] % len(values)] = new
        entry.value = values


def _resize(document: Document, edit: Edit) -> None:
    """Another length; new elements repeat old ones, strings with a number so that they differ."""
    entry = document.entry(edit["key"])
    if entry and isinstance(entry.value, list):
        values = list(entry.value)[: edit["length"]]
        for i in range(len(values), edit["length"]):
            old = entry.value[i % len(entry.value)] if entry.value else 0
            values.append(old + b"+%d" % i if entry.element == STRING else old)  # type: ignore
        entry.value = values


def _tensor(document: Document, edit: Edit) -> None:
    """Name, shape, type or offset of a tensor; ``fit``: its bytes follow."""
    tensor = document.tensor(edit["name"])
    if not tensor:
        return
    tensor.name = edit["to"].encode("latin-1") if "to" in edit else tensor.name
    tensor.shape = edit.get("shape", tensor.shape)
    tensor.type = edit.get("type", tensor.type)
    tensor.offset = edit.get("offset", tensor.offset)
    if edit.get("fit"):
        tensor.data = tiled(tensor.data, max(0, min(tensor.nbytes, MOST_BYTES // 4)))


def _row(document: Document, edit: Edit) -> None:
    """A tensor goes, or is copied under another name."""
    tensor = document.tensor(edit["name"])
    if tensor and edit["op"] == "drop":
        document.tensors.remove(tensor)
    elif tensor:
        name = edit["to"].encode("latin-1")
        document.tensors.append(Tensor(name, tensor.shape, tensor.type, tensor.data))


def _swap(document: Document, edit: Edit) -> None:
    """Two rows of the table change places; their offsets follow their bytes, or stay."""
    a, b = (document.tensor(edit[key]) for key in ("name", "with"))
    if a and b:
        if edit.get("names"):
            a.name, b.name = b.name, a.name
        else:
            i, j = document.tensors.index(a), document.tensors.index(b)
            document.tensors[i], document.tensors[j] = b, a


_FILLS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf, "zero": 0.0}
_FILLS |= {"large": 6e4, "small": 6e-8}


def _weights(document: Document, edit: Edit) -> None:
    """Fill a tensor, or ``n`` of its numbers from ``at``, with one number, or with noise."""
    tensor = document.tensor(edit["name"])
    dtype = {0: "<f4", 1: "<f2"}.get(tensor.type) if tensor else None
    if tensor and edit["fill"] == "noise":
        tensor.data = np.random.default_rng(edit.get("seed", 0)).bytes(len(tensor.data))
    elif tensor and dtype:
        numbers = np.frombuffer(tensor.data, dtype).copy()
        at = int(edit.get("at", 0) * len(numbers))
        numbers[at : at + edit["n"] if "n" in edit else None] = _FILLS[edit["fill"]]
        tensor.data = numbers.tobytes()


def _conform(document: Document, edit: Edit) -> None:
    """Give every tensor the shape that follows from the metadata, so that faults lie deeper. Files
    of architectures whose tensors are not known here stay as they are."""
    shape = _shape(document)
    if not shape:
        return
    try:
        specs = model_tensors(shape)
    except (ArithmeticError, ValueError, MemoryError):
        return
    if sum(4 * math.prod(spec.shape) for spec in specs) > MOST_BYTES // 2:
        return
    wanted = {spec.name.encode(): list(spec.shape) for spec in specs}
    template = {t.name.split(b".", 2)[-1]: t for t in document.tensors}
    have = {t.name for t in document.tensors}
    for name in wanted:
        like = template.get(name.split(b".", 2)[-1])
        if name not in have and like:
            document.tensors.append(Tensor(name, like.shape, like.type, like.data))
    document.tensors = [t for t in document.tensors if t.name in wanted]
    for tensor in document.tensors:
        tensor.shape = wanted[tensor.name]
        tensor.data = tiled(tensor.data, tensor.nbytes)


def _shape(document: Document) -> ModelShape | None:
    """The dimensions in the metadata, or None where they are beyond what is tried."""
    arch = document.entry("general.architecture")
    prefix = arch.value.decode(errors="replace") if arch and isinstance(arch.value, bytes) else ""
    if not prefix.startswith("qwen35"):
        return None

    def number(key: str, default: int = 0) -> int:
        entry = document.entry(f"{prefix}.{key}")
        value = entry.value if entry else default
        return value if isinstance(value, int) and 0 <= value < 1 << 17 else default

    tokens = document.entry("tokenizer.ggml.tokens")
    n_vocab = len(tokens.value) if tokens and isinstance(tokens.value, list) else 0
    n_mtp, n_experts = number("nextn_predict_layers"), number("expert_count")
    n_layer = number("block_count") - n_mtp
    if not 0 <= n_layer <= 64 or n_mtp > 8 or n_experts > 64:
        return None
    usual = {"n_head": 1, "n_head_kv": number(KEYS["n_head"], 1), "full_attention_interval": 4}
    dimensions: Any = {name: number(key, usual.get(name, 0)) for name, key in KEYS.items()}
    dimensions["full_attention_interval"] = dimensions["full_attention_interval"] or 4
    return ModelShape(
        name="conforming",
        n_layer=n_layer,
        n_vocab=n_vocab,
        tied_embeddings=document.tensor("output.weight") is None,
        **dimensions,
    )


_PARTS: dict[str, Callable[[Document, Edit], None]] = {
    "set": _set,
    **dict.fromkeys(("delete", "rename", "duplicate"), _entry),
    "element": _element,
    "resize": _resize,
    "tensor": _tensor,
    **dict.fromkeys(("drop", "copy"), _row),
    "swap": _swap,
    "weights": _weights,
    "conform": _conform,
}
