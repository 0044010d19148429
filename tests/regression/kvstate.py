"""Read what ``Context.save_state()`` holds: K and V of the attention layers, and the carry.

The format, as ``llama_kv_cache::state_write`` (upstream's src/llama-kv-cache.cpp) writes it for one
sequence (all little-endian)::

    u32 magic, i32 sequence                          llama_context::state_seq_get_data
    u32 n_stream                                     of these one has cells, the others are empty:
    u32 n_cells                                      nothing more follows when 0
    n_cells x { i32 position, u32 n_seq_id,          state_write_meta
                [i32 x, i32 y, i32 token]            with M-RoPE only (llama_kv_cell_ext)
                n_seq_id x i32 }
    u32 v_transposed, u32 n_layer                    state_write_data
    u32 n_rot_k, u32 n_rot_v                         rotations of a quantized cache, or 0
    n_layer x { i32 type, u64 row_bytes, n_cells rows }                             K
    n_layer x { i32 type, u64 row_bytes, n_cells rows }                             V
    n_layer x { i32 type, u32 element_bytes, u32 n_embd, n_embd x n_cells values }  V, transposed

Cells come in the order of the cache, not of positions. A trunk's state goes on with its recurrent
part, ``llama_memory_recurrent::state_write``::

    u32 n_cells                                      1
    i32 position, u32 n_seq_id                       0 ids
    u32 transposed, u32 n_layer                      0, all layers of the trunk
    n x { i32 type, u64 row_bytes, row }             convolution states of the recurrent ones
    u32 version, u32 tap, u64 row_bytes, row         the carry, behind the last of them, if any
    n x { i32 type, u64 row_bytes, row }             states of the delta nets
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

Floats = npt.NDArray[np.float32]
#: Of src/llama-memory-recurrent.cpp; a state begins with its type, a small number.
CARRY_VERSION = 0x4D545001


@dataclass(frozen=True)
class KVState:
    """Contents of a cache, sorted by position.

    Attributes:
        positions: [n] positions.
        tokens: [n] the token of each cell; with M-RoPE only, else 0.
        k, v: [n_layer, n, n_embd] float32; the MTP block's is the last one.
        recurrent: [n] the recurrent states, one after the other, as they are.
        carry: [n_embd] float32, empty where there is none.
    """

    positions: npt.NDArray[np.int32]
    tokens: npt.NDArray[np.int32]
    k: Floats
    v: Floats
    recurrent: bytes = b""
    carry: Floats = field(default_factory=lambda: np.zeros(0, dtype=np.float32))


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

    @property
    def ended(self) -> bool:
        return self.at == len(self.data)


def _rows(reader: _Reader, n_cells: int) -> Floats:
    kind, row_bytes = reader.take("iQ")
    raw = reader.block(n_cells * row_bytes).reshape(n_cells, row_bytes)
    return dequantize(raw, GGMLQuantizationType(kind)).astype(np.float32)


def _transposed_rows(reader: _Reader, n_cells: int) -> Floats:
    kind, element_bytes, n_embd = reader.take("iII")
    raw = reader.block(n_embd * n_cells * element_bytes).reshape(n_embd, n_cells * element_bytes)
    return dequantize(raw, GGMLQuantizationType(kind)).astype(np.float32).T


def _recurrent(reader: _Reader, n_past: int) -> tuple[bytes, Floats]:
    """The recurrent states and the carry of a sequence of `n_past` positions."""
    assert reader.take("IiI") == (1, n_past - 1, 0), "the two parts end at different positions"
    assert reader.take("II")[0] == 0
    states, carry = [], np.zeros(0, dtype=np.float32)
    while not reader.ended:
        (first,) = struct.unpack_from("<I", reader.data, reader.at)
        if first == CARRY_VERSION:
            assert not len(carry)
            _version, _tap, size = reader.take("IIQ")
            carry = reader.block(size).view(np.float32)
        else:
            states.append(reader.block(reader.take("iQ")[1]).tobytes())
    assert len(states) >= 2
    return b"".join(states), carry


def parse(data: bytes | bytearray, mrope: bool = True) -> KVState:
    """Parse the state of one sequence.

    Args:
        data: from ``Context.save_state()``.
        mrope: the model's positions have several sections.

    Raises:
        AssertionError: the bytes are not of this form, or some are left over.
    """
    reader = _Reader(bytes(data))
    _magic, seq, n_stream = reader.take("IiI")
    sizes = [size for _ in range(n_stream) for size in _attention(reader, seq, mrope)]
    if not sizes:
        assert n_stream > 1 or reader.ended
        nothing = np.zeros(0, dtype=np.int32)
        return KVState(nothing, nothing, np.zeros((1, 0, 0), "f4"), np.zeros((1, 0, 0), "f4"))
    (found,) = sizes
    if reader.ended:
        return found
    recurrent, carry = _recurrent(reader, int(found.positions.max()) + 1)
    return KVState(found.positions, found.tokens, found.k, found.v, recurrent, carry)


def _attention(reader: _Reader, seq: int, mrope: bool) -> list[KVState]:
    """The cells of one stream, or nothing."""
    (n_cells,) = reader.take("I")
    if n_cells == 0:
        return []
    cells = []
    for _ in range(n_cells):
        position, n_seq_id = reader.take("iI")
        _x, _y, token = reader.take("iii") if mrope else (0, 0, 0)
        assert reader.take("i" * n_seq_id) == (seq,)
        cells.append((position, token))
    transposed, n_layer, _n_rot_k, _n_rot_v = reader.take("IIII")
    assert transposed in (0, 1) and n_layer >= 1
    k = np.stack([_rows(reader, n_cells) for _ in range(n_layer)])
    read_v = _transposed_rows if transposed else _rows
    v = np.stack([read_v(reader, n_cells) for _ in range(n_layer)])
    order = np.argsort([position for position, _ in cells])
    positions, tokens = np.array(cells, dtype=np.int32)[order].T
    return [KVState(positions, tokens, k[:, order], v[:, order])]
