"""Take the MTP head out of a model file, put one in, or leave it out, without loading the model.

Metadata are copied byte for byte except for the number of blocks; tensors are copied in pieces. The
file of a head is as upstream's ``convert_hf_to_gguf.py --mtp`` writes it: an embedding, a final
norm and an LM head beside the block, so that llama.cpp loads it as a draft model.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np

from pyllama_mtp.errors import NoMtpHeadError, UsageError
from pyllama_mtp.files import check_room, check_target, replacing
from pyllama_mtp.models.ggufheader import TENSOR_TYPES, TensorEntry, parse_file
from pyllama_mtp.models.ggufinfo import validate_model_file
from pyllama_mtp.models.modelinfo import D2T, GGUFInfo
from pyllama_mtp.models.quantize import (
    FILE_TYPES,
    WEIGHT_TYPES,
    Progress,
    padded_data,
    row_converter,
    stored_bytes,
)
from pyllama_mtp.models.sidecar import NO_HEAD, in_head, same

File = str | os.PathLike[str]

_PIECE = 8 << 20
#: Parts of the names of matrices that llama.cpp does not quantize; it only multiplies others.
_KEPT_AS_THEY_ARE = ("ffn_gate_inp", "norm.weight", "compressor_ape")
_U32_TYPE = struct.pack("<I", 4)
_NUMBERS = {name: number for number, (name, *_) in TENSOR_TYPES.items()}


def extract_head(
    source: File,
    target: File,
    kind: str | None = None,
    *,
    progress: Progress | None = None,
    force: bool = False,
) -> Path:
    """Write the MTP head of a model to a file of its own; returns its path.

    Args:
        source: a model with an MTP head; of one that is split, the first file.
        kind: the type of the new file's matrices, embedding and LM head, a key of
            :data:`.quantize.WEIGHT_TYPES`; matrices whose rows are no whole number of its blocks
            keep their type. None: every tensor keeps its type.
        force: overwrite an existing file.

    Raises:
        NoMtpHeadError: the model has no head.
        ModelFileError: the model cannot be read, or is damaged.
        UsageError: an unknown type, or one that needs an importance matrix; a target that exists or
            cannot be written.
        DiskFullError: no room for the new file.
    """
    if kind is not None and kind not in WEIGHT_TYPES:
        raise UsageError(f"unknown type {kind!r}; allowed: {', '.join(WEIGHT_TYPES)}")
    info = validate_model_file(source, head=NO_HEAD)
    mine = {tensor.name: tensor for tensor in info.tensors}
    nextn = f"blk.{info.n_layer}.nextn."
    tensors = [t for t in info.tensors if t.name == "output_norm.weight"]
    embedding = mine.get(f"{nextn}embed_tokens.weight", mine["token_embd.weight"])
    tensors.append(replace(embedding, name="token_embd.weight"))
    lm_head = info.own_head or mine.get("output.weight") or mine["token_embd.weight"]
    if not same(lm_head, embedding):
        tensors.append(replace(lm_head, name="output.weight"))
    moved = (f"{nextn}embed_tokens.weight", f"{nextn}shared_head_head.weight")
    tensors += [t for t in info.tensors if in_head(t.name, info.n_layer) and t.name not in moved]
    changes: dict[str, int | None] = {f"{info.architecture}.ple.layers": None}  # of the trunk
    if kind in FILE_TYPES:
        changes["general.file_type"] = FILE_TYPES[kind]
    return _write(target, info, changes, tensors, kind, progress, force)


def graft_head(
    trunk: File, head: File, target: File, *, progress: Progress | None = None, force: bool = False
) -> Path:
    """Write a model with the MTP head of another file inside; returns its path.

    Args:
        trunk: the model; its own head, if it has one, is left out.
        head: a file with the model's head.

    Raises:
        HeadMismatchError: the head is another model's.
        ModelFileError, UsageError, DiskFullError: see :func:`extract_head`.
    """
    info = validate_model_file(trunk, head=head)
    counts = _counts(info, info.n_mtp_layers)
    return _write(target, info, counts, info.tensors, None, progress, force)


def drop_head(
    source: File, target: File, *, progress: Progress | None = None, force: bool = False
) -> Path:
    """Write a model without its MTP head; returns its path.

    Raises:
        NoMtpHeadError: the model has no head.
        ModelFileError, UsageError, DiskFullError: see :func:`extract_head`.
    """
    info = validate_model_file(source, require_mtp=False)
    if not info.has_mtp:
        raise NoMtpHeadError(f"{source}: the model has no MTP head to be left out", source)
    tensors = [tensor for tensor in info.tensors if not in_head(tensor.name, info.n_layer)]
    return _write(target, info, _counts(info, 0), tensors, None, progress, force)


def _counts(info: GGUFInfo, n_mtp: int) -> dict[str, int | None]:
    """The metadata that count the blocks."""
    arch = info.architecture
    return {
        f"{arch}.block_count": info.n_layer + n_mtp,
        f"{arch}.nextn_predict_layers": n_mtp or None,
    }


# --- writing ------------------------------------------------------------------------------------


def _write(
    target: File,
    info: GGUFInfo,
    changes: Mapping[str, int | None],
    tensors: Sequence[TensorEntry],
    kind: str | None,
    progress: Progress | None,
    force: bool,
) -> Path:
    """Write a file with the metadata of `info` and these tensors; it appears when it is complete.

    Args:
        changes: new numbers by their keys in the metadata; None: the key is left out.
        kind: the new type of matrices; None: they keep their types.
    """
    path = Path(target)
    sources = {info.path, info.head, *(tensor.file for tensor in tensors)} - {""}
    check_target(path, force, *sources)
    stored = [_stored(tensor, kind) for tensor in tensors]
    alignment = info.metadata.get("general.alignment", 32)
    assert isinstance(alignment, int)  # the parser has looked
    sizes = [stored_bytes(t.shape, name) for t, name in zip(tensors, stored, strict=True)]
    padded = [-(-size // alignment) * alignment for size in sizes]
    start = _start(info, changes, tensors, stored, padded, alignment)
    check_room(path, len(start) + sum(padded))
    data = (_pieces(tensor, name) for tensor, name in zip(tensors, stored, strict=True))
    with replacing(path) as file:
        file.writelines(chain([start], padded_data(data, alignment, sum(padded), progress)))
    return path


def _stored(tensor: TensorEntry, kind: str | None) -> str:
    """The type that a tensor is written in: `kind` for matrices whose rows are whole blocks."""
    if kind is None or tensor.name == D2T or any(part in tensor.name for part in _KEPT_AS_THEY_ARE):
        return tensor.type
    if math.prod(tensor.shape[1:]) == 1 or tensor.shape[0] % TENSOR_TYPES[WEIGHT_TYPES[kind]][1]:
        return tensor.type
    return kind.upper()


def _pieces(tensor: TensorEntry, stored: str) -> Iterator[bytes]:
    """The bytes of a tensor, converted to the type that it is written in."""
    if stored != tensor.type:
        convert, row = row_converter(tensor, stored.lower()), tensor.nbytes // tensor.n_rows
        step = max(1, _PIECE // tensor.shape[0]) * row
        for start in range(0, tensor.nbytes, step):
            data = tensor.read((start, min(step, tensor.nbytes - start)))
            yield convert(np.frombuffer(data, np.uint8).reshape(-1, row)).tobytes()
        return
    for start in range(0, tensor.nbytes, _PIECE):
        yield tensor.read((start, min(_PIECE, tensor.nbytes - start)))


def _start(
    info: GGUFInfo,
    changes: Mapping[str, int | None],
    tensors: Sequence[TensorEntry],
    stored: Sequence[str],
    padded: Sequence[int],
    alignment: int,
) -> bytes:
    """All that stands before the tensor data: metadata and tensor table."""
    parser, header = parse_file(info.path)
    split = ("split.no", "split.count", "split.tensors.count")
    kept = {
        key: _U32_TYPE + struct.pack("<I", number)
        for key, number in changes.items()
        if number is not None
    }
    kept |= {key: parser.raw(key) for key in parser.spans if key not in (*changes, *split)}
    out = bytearray(b"GGUF" + struct.pack("<IQQ", header.version, len(tensors), len(kept)))
    for key, value in kept.items():
        out += _text(key) + value
    at = 0
    for tensor, name, room in zip(tensors, stored, padded, strict=True):
        out += _text(tensor.name) + struct.pack("<I", len(tensor.shape))
        out += struct.pack(f"<{len(tensor.shape)}QIQ", *tensor.shape, _NUMBERS[name], at)
        at += room
    return bytes(out + bytes(-len(out) % alignment))


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data
