"""Model files with an MTP head over a part of the vocabulary, made from whole ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, GGUFValueType, GGUFWriter

_SKIP = {"GGUF.version", "GGUF.tensor_count", "GGUF.kv_count", "general.architecture"}


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
    reader = GGUFReader(source)
    architecture = str(reader.fields["general.architecture"].contents())
    writer = GGUFWriter(target, architecture)
    for name, field in reader.fields.items():
        if name not in _SKIP:
            kind = field.types[0]
            sub = field.types[-1] if kind == GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), kind, sub_type=sub)
    block = int(reader.fields[f"{architecture}.block_count"].contents()) - 1
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    head = tensors.get("output.weight") or tensors["token_embd.weight"]
    for name, tensor in tensors.items():
        trunk = name.startswith("blk.") and not name.startswith(f"blk.{block}.")
        if not (sidecar and (trunk or name == "output.weight")):
            writer.add_tensor(name, tensor.data, raw_dtype=tensor.tensor_type)
    if rows is not None:
        name = "output" if sidecar else f"blk.{block}.nextn.shared_head_head"
        data = np.ascontiguousarray(head.data[rows])
        writer.add_tensor(f"{name}.weight", data, raw_dtype=head.tensor_type)
    if d2t is not None:
        writer.add_tensor("d2t", d2t)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
