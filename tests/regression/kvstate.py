"""Read the K and V rows out of ``Context.save_state()`` of a context with one attention cache.

The format, as ``llama_kv_cache::state_write`` (upstream's src/llama-kv-cache.cpp) writes it for one
sequence (all little-endian)::

    u32 magic, i32 sequence                          llama_context::state_seq_get_data
    u32 n_stream                                     1 here
    u32 n_cells                                      nothing more follows when 0
    n_cells x { i32 position, u32 n_seq_id,          state_write_meta
                [i32 x, i32 y, i32 token]            with M-RoPE only (llama_kv_cell_ext)
                n_seq_id x i32 }
    u32 v_transposed, u32 n_layer                    state_write_data
    n_layer x { i32 type, u64 row_bytes, n_cells rows }                             K
    n_layer x { i32 type, u64 row_bytes, n_cells rows }                             V
    n_layer x { i32 type, u32 element_bytes, u32 n_embd, n_embd x n_cells values }  V, transposed

Cells come in the order of the cache, not of positions.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class KVState:
    """Contents of a cache, sorted by position.

    Attributes:
        positions: [n] positions.
        tokens: [n] the token of each cell.
        k, v: [n_layer, n, n_embd] float32.
    """

    positions: npt.NDArray[np.int32]
    tokens: npt.NDArray[np.int32]
    k: Floats
    v: Floats


class _Reader:
    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, form: str) -> tuple[int, ...]:
        values = struct.unpack_from("<" + form, self.data, self.at)
        self.at += struct.calcsize("<" + form)
        return values

    def block(self, n_bytes: int) -> npt.NDArray[np.uint8]:
        found = np.frombuffer(self.data, dtype=np.uint8, count=n_bytes, offset=self.at)
        self.at += n_bytes
        return found


def _rows(reader: _Reader, n_cells: int) -> Floats:
    kind, row_bytes = reader.take("iQ")
    raw = reader.block(n_cells * row_bytes).reshape(n_cells, row_bytes)
    return dequantize(raw, GGMLQuantizationType(kind)).astype(np.float32)


def _transposed_rows(reader: _Reader, n_cells: int) -> Floats:
    kind, element_bytes, n_embd = reader.take("iII")
    raw = reader.block(n_embd * n_cells * element_bytes).reshape(n_embd, n_cells * element_bytes)
    return dequantize(raw, GGMLQuantizationType(kind)).astype(np.float32).T


def parse(data: bytes) -> KVState:
    """Parse the state of one sequence; a model with M-RoPE.

    Args:
        data: from ``Context.save_state()``.

    Raises:
        AssertionError: the bytes are not of this form, or some are left over.
    """
    reader = _Reader(data)
    _magic, _seq, n_stream, n_cells = reader.take("IiII")
    assert n_stream == 1
    if n_cells == 0:
        assert reader.at == len(data)
        nothing = np.zeros(0, dtype=np.int32)
        return KVState(nothing, nothing, np.zeros((1, 0, 0), "f4"), np.zeros((1, 0, 0), "f4"))
    cells = []
    for _ in range(n_cells):
        position, n_seq_id, _x, _y, token = reader.take("iIiii")
        assert reader.take("i" * n_seq_id) == (0,)
        cells.append((position, token))
    transposed, n_layer = reader.take("II")
    assert transposed in (0, 1) and n_layer >= 1
    k = np.stack([_rows(reader, n_cells) for _ in range(n_layer)])
    read_v = _transposed_rows if transposed else _rows
    v = np.stack([read_v(reader, n_cells) for _ in range(n_layer)])
    assert reader.at == len(data), f"{len(data) - reader.at} bytes of the state are left over"
    order = np.argsort([position for position, _ in cells])
    positions, tokens = np.array(cells, dtype=np.int32)[order].T
    return KVState(positions, tokens, k[:, order], v[:, order])
