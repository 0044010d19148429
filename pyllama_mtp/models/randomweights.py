"""The random values of a synthetic model's tensors, as bytes of the types they are stored in.

Norms are 1, matrices are zero-mean with standard deviation 1/sqrt(inputs), so activations
keep their size through any depth; decays and time-step biases of the recurrent layers are drawn
from the ranges of Mamba's initialisation, so that states neither vanish nor explode. The same
seed gives the same bytes.

Tensors in q8_0, q4_0 and iq4_nl are made of random valid blocks, which is much faster than
quantizing and costs the same to compute with. For other quantized types the library quantizes
random floats.

A model whose MTP head drafts well serves measurements with real acceptance: no head can draft what
a model of random weights says. There the next token is nearly a function of the last one, and the
head knows that function; the computation costs as much as the shape's always does:

- Small norms and outputs make each part of the trunk add little to the residual stream, which
  stays the last token's embedding with a trace of the tokens before. The exception is the last
  block's feed-forward part: it is left as it is, and its output decides the next token.
- Rows of rare tokens are shorter, so the first ids are predicted. As in text, these are the most
  frequent tokens of a byte pair encoding, and they are in the usual vocabulary of a draft head.
- The head's block has the weights of that feed-forward part. Its eh_proj passes the embedding on,
  as an identity, and adds noise from the hidden row: more noise makes the head wrong more often.

Such a file measures other programs too, on which no acceptance can be imposed as with this
package's `synthetic_acceptance`.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pyllama_mtp.errors import UsageError
from pyllama_mtp.models.quantize import WEIGHT_TYPES, stored_bytes
from pyllama_mtp.models.shapes import ModelShape, TensorSpec
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
    common = n_rows if draw.rare == 1.0 else min(n_rows, COMMON)
    for first, last, scale in ((0, common, 1.0), (common, n_rows, draw.rare)):
        for start in range(first * row, last * row, step):
            units = min(step, last * row - start)
            chunk = _random_chunk(rng, units, tensor_type, scale * deviation)
            if draw.passes:
                chunk = pass_embedding(chunk, start // row, n_rows, tensor_type)
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


# -- models whose head drafts well -----------------------------------------------------------------

#: Norm of an embedding. It is well below that of the feed-forward part's output, some
#: sqrt(n_embd) / 2: otherwise, with tied embeddings, a token would be its own successor.
EMBEDDING_NORM = 0.25
#: What all other parts of the trunk may add together, as a share of the residual stream.
TRACE = 0.05
#: Number of tokens that can be predicted, and the length of the other tokens' rows.
COMMON, RARE = 24576, 0.5
#: Factor on the final norm, which makes the model as sure of most tokens as a trained one.
SHARPNESS = 16.0


@dataclass(frozen=True)
class Draw:
    """How a tensor's values are drawn.

    Attributes:
        name: the tensor whose values it has.
        scale: factor on the usual values.
        rare: one more factor on the rows of rare tokens.
        passes: whether it is an eh_proj whose half for the embedding is the identity.
    """

    name: str
    scale: float = 1.0
    rare: float = 1.0
    passes: bool = False


def check_noise(shape: ModelShape, noise: float) -> None:
    """Raise UsageError for a shape without a head, or a noise that is no number from 0."""
    if not (math.isfinite(noise) and noise >= 0):
        raise UsageError(
            f"head noise is {noise}; it is 0 (a head that is nearly always right) or more"
        )
    if shape.n_mtp < 1:
        raise UsageError(f"{shape.name} has no MTP head (n_mtp is {shape.n_mtp})")


def how_to_draw(spec: TensorSpec, shape: ModelShape, noise: float | None) -> Draw:
    """How `spec` is drawn; `noise` is a share of the embedding's norm, None: as in any model."""
    if noise is None:
        return Draw(spec.name)
    n, n_parts = shape.n_embd, 2 * (shape.n_layer + 1)
    # Applied at a part's norm and again at its output, so that neither gets too small for the
    # scales of quantized blocks (F16).
    less = math.sqrt(TRACE * EMBEDDING_NORM / math.sqrt(n * n_parts))
    if spec.kind == "embedding":
        return Draw(spec.name, EMBEDDING_NORM, RARE)
    if spec.name == "output.weight":
        return Draw(spec.name, rare=RARE)
    if spec.name == "output_norm.weight":
        return Draw(spec.name, SHARPNESS)
    block = re.fullmatch(r"blk\.(\d+)\.(.+)\.(?:weight|bias)", spec.name)
    if not block:
        return Draw(spec.name)
    layer, name = int(block[1]), block[2]
    recurrent = layer in shape.recurrent_layers
    if name == ("ssm_norm" if recurrent else "attn_norm") or name in ("attn_output", "ssm_out"):
        return Draw(spec.name, less)
    if layer < shape.n_layer - 1:
        if name == "post_attention_norm":
            return Draw(spec.name, math.sqrt(less))  # a product of two follows
        if name.startswith("ffn_down"):
            return Draw(spec.name, less)
    if layer >= shape.n_layer:
        # Deviation of eh_proj: 1 / sqrt(2 n); of n inputs with the norm's weight: that x sqrt(1/2).
        scales = {
            "nextn.enorm": EMBEDDING_NORM / math.sqrt(n),
            "nextn.hnorm": noise * EMBEDDING_NORM * math.sqrt(2 / n),
            "nextn.shared_head_norm": SHARPNESS,
        }
        if name in scales:
            return Draw(spec.name, scales[name])
        if name.startswith("ffn_"):
            last = spec.name.replace(f"blk.{layer}.", f"blk.{shape.n_layer - 1}.", 1)
            return Draw(last)
    return Draw(spec.name, passes=name == "nextn.eh_proj")


def pass_embedding(chunk: bytes, first_row: int, n_embd: int, tensor_type: str) -> bytes:
    """Rows of eh_proj, [embedding; hidden] -> n_embd, with the identity as their first halves.

    Args:
        chunk: whole rows of 2 `n_embd` elements, in f16 or f32.
        first_row: the number of the chunk's first row in the tensor.
    """
    kind = "<f2" if tensor_type == "f16" else "<f4"
    rows: npt.NDArray[np.floating] = np.frombuffer(chunk, kind).reshape(-1, 2 * n_embd).copy()
    rows[:, :n_embd] = np.eye(len(rows), n_embd, first_row)
    return rows.tobytes()
