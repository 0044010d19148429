"""Write a GGUF file's F16 tensors as F32: same model, no rounding left in the arithmetic.

Comparisons with an outside implementation use such a file, because the library may then compute
in float32 throughout.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType

_SKIP = {"GGUF.version", "GGUF.tensor_count", "GGUF.kv_count", "general.architecture"}


def _copy_metadata(reader: GGUFReader, writer: GGUFWriter) -> None:
    """Every key of the source, in its order; only the file type changes."""
    for name, field in reader.fields.items():
        if name in _SKIP:
            continue
        value = field.contents()
        if name == "general.file_type":
            value = int(LlamaFileType.ALL_F32)
        kind = field.types[0]
        sub = field.types[-1] if kind == GGUFValueType.ARRAY else None
        writer.add_key_value(name, value, kind, sub_type=sub)


def upcast_gguf(src: str | Path, dst: str | Path) -> Path:
    """Write `src` to `dst` with every F16 tensor as F32, all else unchanged; returns `dst`.

    One tensor at a time is held in memory. The file appears under its name only when complete.
    """
    src, dst = Path(src), Path(dst)
    reader = GGUFReader(src)
    architecture = str(reader.fields["general.architecture"].contents())
    partial = dst.with_name(dst.name + ".part")
    writer = GGUFWriter(partial, architecture)
    _copy_metadata(reader, writer)
    half = GGMLQuantizationType.F16
    for tensor in reader.tensors:
        shape = [int(n) for n in tensor.shape[::-1]]
        if tensor.tensor_type in (half, GGMLQuantizationType.F32):
            n_bytes = 4 * int(tensor.n_elements)
            writer.add_tensor_info(tensor.name, shape, np.dtype(np.float32), n_bytes)
        else:
            writer.add_tensor_info(
                tensor.name,
                list(tensor.data.shape),
                tensor.data.dtype,
                int(tensor.n_bytes),
                tensor.tensor_type,
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in reader.tensors:
        data = tensor.data
        writer.write_tensor_data(data.astype(np.float32) if tensor.tensor_type == half else data)
    writer.close()
    partial.replace(dst)
    return dst
