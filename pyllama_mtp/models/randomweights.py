"""The random values of a synthetic model's tensors, as bytes of the types they are stored in.

Norms are 1, matrices are zero-mean with standard deviation 1/sqrt(inputs), so activations
keep their size through any depth; decays and time-step biases of the recurrent layers are drawn
from the ranges of Mamba's initialisation, so that states neither vanish nor explode. The same
seed gives the same bytes.

Tensors in q8_0, q4_0 and iq4_nl are made of random valid blocks, which is much faster than
quantizing and costs the same to compute with. For other quantized types the library quantizes
random floats.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from pyllama_mtp.models import predictable
from pyllama_mtp.models.layout import TensorSpec
from pyllama_mtp.models.predictable import Draw
from pyllama_mtp.models.quantize import WEIGHT_TYPES, stored_bytes
from pyllama_mtp.settings import available_threads

BLOCK = 32  # elements per block of every quantized type below
CHUNK_BLOCKS = 1 << 17  # 4 million elements: at most 16 MB (F32) at a time

# The 16 levels of IQ4_NL, from upstream's ggml/src/ggml-common.h (kvalues_iq4nl).
_IQ4_NL_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def _rms(levels: npt.ArrayLike) -> float:
    return float(np.sqrt(np.mean(np.square(np.asarray(levels, dtype=np.float64)))))


# Per quantized type: the root mean square of its equally likely levels, i.e. deviation / scale.
_LEVEL_RMS = {
    "q8_0": _rms([0, *range(-127, 128)]),  # 256 byte patterns, -128 replaced by 0
    "q4_0": _rms(range(-8, 8)),
    "iq4_nl": _rms(_IQ4_NL_LEVELS),
}
BLOCK_BYTES = {"q8_0": 34, "q4_0": 18, "iq4_nl": 18}
#: Tensor types that are drawn as they are stored; of floats nothing but these two.
TENSOR_TYPES = ("f32", "f16", *BLOCK_BYTES)


def tensor_chunks(spec: TensorSpec, tensor_type: str, seed: int, draw: Draw) -> Iterator[bytes]:
    """The stored bytes of one tensor, a few MB at a time.

    Each tensor has a generator of its own, seeded with (seed, checksum of its name): its values
    do not depend on the other tensors, so shapes that differ in depth share their first layers.
    """
    rng = np.random.Generator(np.random.SFC64([seed, zlib.crc32(draw.name.encode())]))
    count = math.prod(spec.shape)
    if spec.kind not in ("embedding", "matrix"):
        yield (draw.scale * _small_tensor(spec, rng, count)).astype("<f4").tobytes()
        return
    if tensor_type not in TENSOR_TYPES or (draw.passes and tensor_type in BLOCK_BYTES):
        for chunk in tensor_chunks(spec, "f16", seed, draw):
            yield _quantized(chunk, tensor_type, spec.shape[0])
        return
    deviation = draw.scale / math.sqrt(spec.shape[0])
    step = CHUNK_BLOCKS if tensor_type in BLOCK_BYTES else CHUNK_BLOCKS * BLOCK
    row = spec.shape[0] // (BLOCK if tensor_type in BLOCK_BYTES else 1)
    n_rows = count // spec.shape[0]
    step = max(step // row, 1) * row
    common = n_rows if draw.rare == 1.0 else min(n_rows, predictable.COMMON)
    for first, last, scale in ((0, common, 1.0), (common, n_rows, draw.rare)):
        for start in range(first * row, last * row, step):
            units = min(step, last * row - start)
            chunk = _random_chunk(rng, units, tensor_type, scale * deviation)
            if draw.passes:
                chunk = predictable.pass_embedding(chunk, start // row, n_rows, tensor_type)
            yield chunk


def _quantized(chunk: bytes, tensor_type: str, n_per_row: int) -> bytes:
    """Rows of F16 as the library quantizes them, on all threads."""
    from pyllama_mtp.llama import native

    library = native.load()
    row_bytes = stored_bytes((n_per_row,), tensor_type.upper())

    def quantize(rows: npt.NDArray[np.float32]) -> bytes:
        into = library.ffi.new("char[]", len(rows) * row_bytes)
        source = library.ffi.from_buffer("float[]", rows)
        library.lib.ggml_quantize_chunk(
            WEIGHT_TYPES[tensor_type], source, into, 0, len(rows), n_per_row, library.ffi.NULL
        )
        return bytes(library.ffi.buffer(into))

    rows = np.frombuffer(chunk, "<f2").astype(np.float32).reshape(-1, n_per_row)
    n_threads = min(available_threads(), len(rows))
    with ThreadPoolExecutor(n_threads) as pool:
        return b"".join(pool.map(quantize, np.array_split(rows, n_threads)))


def _small_tensor(
    spec: TensorSpec, rng: np.random.Generator, count: int
) -> npt.NDArray[np.float64]:
    """The ``count`` values of a tensor that is no matrix, in file order."""
    if spec.kind == "norm":
        return np.ones(count)
    if spec.kind == "decay":  # -exp(A_log): the decay per time step is exp(this x softplus(dt))
        return -np.exp(rng.uniform(math.log(0.1), math.log(4.0), count))
    if spec.kind == "dt_bias":  # softplus of the bias lies between 0.001 and 0.1, as in Mamba
        step = np.exp(rng.uniform(math.log(1e-3), math.log(1e-1), count))
        return np.log(np.expm1(step))
    return rng.standard_normal(count) / math.sqrt(spec.shape[0])


def _random_chunk(
    rng: np.random.Generator, units: int, tensor_type: str, deviation: float
) -> bytes:
    """``units`` elements (f16, f32) or blocks of 32 (quantized) with the given deviation."""
    if tensor_type not in BLOCK_BYTES:
        values = rng.standard_normal(units, dtype=np.float32) * np.float32(deviation)
        numbers: bytes = values.astype("<f2" if tensor_type == "f16" else "<f4").tobytes()
        return numbers
    n_quants = BLOCK_BYTES[tensor_type] - 2
    blocks = np.empty(units, dtype=[("scale", "<f2"), ("quants", "u1", (n_quants,))])
    scale = np.float16(deviation / _LEVEL_RMS[tensor_type])
    quants = np.frombuffer(rng.bytes(units * n_quants), dtype=np.uint8).reshape(units, n_quants)
    blocks["quants"] = quants
    if tensor_type == "q8_0":
        # The reference quantizer never yields -128 (0x80), and some kernels rely on that.
        blocks["quants"][quants == 0x80] = 0
        blocks["scale"] = scale
    else:
        # Levels of the 4-bit types are not symmetric; a random sign per block makes the mean 0.
        sign = 1 - 2 * (rng.integers(0, 2, units, dtype=np.int8))
        blocks["scale"] = scale * sign.astype(np.float16)
    raw: bytes = blocks.tobytes()
    return raw
