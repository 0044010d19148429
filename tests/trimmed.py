"""Model files of a few arrays and tensors; others made from whole ones: with other tensors, with an
MTP head over a part of the vocabulary; rows of an LM head."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter

from pyllama_mtp.drafting.head import DraftHead, HeadRows
from pyllama_mtp.models import synth
from pyllama_mtp.models.ggufinfo import read_gguf
from pyllama_mtp.models.modelinfo import GGUFInfo
from pyllama_mtp.models.shapes import ModelShape, TensorSpec, model_tensors
from pyllama_mtp.models.tokenizer import Ids

Tensors = dict[str, tuple[npt.NDArray[Any], GGMLQuantizationType | None]]
_SKIP = {"GGUF.version", "GGUF.tensor_count", "GGUF.kv_count", "general.architecture"}


@lru_cache(maxsize=4)
def _read(file: Path, *stamp: int) -> tuple[dict[str, Any], Tensors]:
    reader = GGUFReader(file)
    fields = {
        name: (field.contents(), field.types[0], field.types[-1])
        for name, field in reader.fields.items()
    }
    return fields, {t.name: (t.data, t.tensor_type) for t in reader.tensors}


def read(file: Path) -> tuple[dict[str, Any], Tensors]:
    """The metadata of a file (contents, type, type of entries) and its tensors, by name. It is read
    once, which takes a while, however often it is asked for."""
    return _read(file, file.stat().st_mtime_ns, file.stat().st_size)


def tensors_of(file: Path) -> Tensors:
    """Bytes and type of every tensor, by name."""
    return dict(read(file)[1])


def add_metadata(writer: GGUFWriter, source: Path, prefix: str = "") -> None:
    """Add the metadata of `source` whose names begin with `prefix`."""
    for name, (value, kind, entries) in read(source)[0].items():
        if name.startswith(prefix) and name not in _SKIP:
            sub = entries if kind == GGUFValueType.ARRAY else None
            writer.add_key_value(name, value, kind, sub_type=sub)


def add_values(writer: GGUFWriter, values: Mapping[str, Any]) -> None:
    """Add metadata, each by the type of its value, numpy arrays as 64-bit integers; None is left
    out."""
    numbers = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    adders: dict[type, Any] = {**numbers, str: writer.add_string, list: writer.add_array}
    for name, value in values.items():
        if isinstance(value, np.ndarray):
            array, long = GGUFValueType.ARRAY, GGUFValueType.UINT64
            writer.add_key_value(name, value.tolist(), array, sub_type=long)
        elif value is not None:
            adders[type(value)](name, value)


def finish(writer: GGUFWriter, tensors: Mapping[str, Any]) -> None:
    """Write a file of these tensors, each an array or (array, type), and what was added before."""
    for name, found in tensors.items():
        data, dtype = found if isinstance(found, tuple) else (found, None)
        writer.add_tensor(name, data, raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_bare(
    path: Path,
    tokens: list[str],
    types: Any,
    merges: list[str],
    tensors: Tensors | None = None,
) -> Path:
    """A file with these arrays and tensors, and no more than a description of it needs."""
    writer = GGUFWriter(path, "qwen35")
    writer.add_block_count(3)
    writer.add_uint32("qwen35.nextn_predict_layers", 1)
    if tokens:
        writer.add_token_list(tokens)
    if isinstance(types, list) and types:
        writer.add_token_types(types)
    elif types:
        writer.add_key_value("tokenizer.ggml.token_type", types, GGUFValueType.ARRAY)
    if merges:
        writer.add_token_merges(merges)
    finish(writer, tensors or {"output.weight": np.zeros((2, 32))})
    return path


def rewrite(
    source: Path,
    target: Path,
    tensors: Mapping[str, Any],
    change: Callable[[GGUFWriter], object] = lambda writer: None,
    **options: Any,
) -> Path:
    """Write the metadata of `source`, as `change` leaves them, and these tensors; returns `target`.
    `options`: of GGUFWriter."""
    writer = GGUFWriter(target, read(source)[0]["general.architecture"][0], **options)
    add_metadata(writer, source)
    change(writer)
    finish(writer, tensors)
    return target


def write_untied(target: Path, shape: str, kind: str, *names: str, **options: Any) -> Path:
    """Write a synthetic model whose MTP block has tables of its own, such as "embed_tokens" or
    "shared_head_head"; returns `target`."""

    def specs(made: ModelShape) -> list[TensorSpec]:
        block, size = f"blk.{made.n_layer}.nextn", (made.n_embd, made.n_vocab)
        own = [TensorSpec(f"{block}.{name}.weight", size, "matrix") for name in names]
        return [*model_tensors(made), *own]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(synth, "model_tensors", specs)
        return synth.write_synthetic(target, shape, kind, pure=True, **options)


def head_rows(model: Path | GGUFInfo, ids: Ids, kind: str = "file") -> HeadRows:
    """Rows of a model's LM head; see `DraftHead`."""
    return DraftHead(model if isinstance(model, GGUFInfo) else read_gguf(model), kind).rows(ids)


def write_trimmed(
    source: Path,
    target: Path,
    rows: npt.NDArray[np.integer] | None,
    d2t: npt.NDArray[np.generic] | None,
    *,
    sidecar: bool = False,
) -> Path:
    """Write `source` with an LM head for its MTP block; returns `target`.

    Args:
        rows: which rows of the model's LM head that one has, bytes as they are; None: it has none.
        d2t: the tensor of that name; None: there is none.
        sidecar: the trunk is left out, and the head is the file's only one (``output.weight``).
    """
    tensors = tensors_of(source)
    block = max(int(name.split(".")[1]) for name in tensors if name.startswith("blk."))
    head, dtype = tensors.get("output.weight") or tensors["token_embd.weight"]
    kept: Tensors = {}
    for name, tensor in tensors.items():
        trunk = name.startswith("blk.") and not name.startswith(f"blk.{block}.")
        if not (sidecar and (trunk or name == "output.weight")):
            kept[name] = tensor
    if rows is not None:
        name = "output" if sidecar else f"blk.{block}.nextn.shared_head_head"
        kept[f"{name}.weight"] = np.ascontiguousarray(head[rows]), dtype
    if d2t is not None:
        kept["d2t"] = d2t, None
    return rewrite(source, target, kept)
