"""Model files made from whole ones: with other tensors, with an MTP head over a part of the
vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter

Tensors = dict[str, tuple[npt.NDArray[Any], GGMLQuantizationType | None]]
_SKIP = {"GGUF.version", "GGUF.tensor_count", "GGUF.kv_count", "general.architecture"}


def tensors_of(file: Path) -> Tensors:
    """Bytes and type of every tensor, by name."""
    return {t.name: (t.data, t.tensor_type) for t in GGUFReader(file).tensors}


def rewrite(source: Path, target: Path, tensors: Mapping[str, tuple[Any, Any]]) -> Path:
    """Write the metadata of `source` with these tensors; returns `target`."""
    reader = GGUFReader(source)
    writer = GGUFWriter(target, str(reader.fields["general.architecture"].contents()))
    for name, field in reader.fields.items():
        if name not in _SKIP:
            kind = field.types[0]
            sub = field.types[-1] if kind == GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), kind, sub_type=sub)
    for name, (data, dtype) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


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
