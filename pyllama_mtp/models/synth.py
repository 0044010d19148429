"""Write a model of a published shape with random weights straight to GGUF: for measuring speed.

Nothing is downloaded and memory stays bounded: tensors are generated in chunks of a few MB and
appended to the file one after the other. Quantized tensors are not quantized from floats but made
of random valid blocks, which is faster by far and costs the same to compute with.

Values: norms are 1, matrices are zero-mean with standard deviation 1/sqrt(inputs), so activations
keep their size through any depth; decays and time-step biases of the recurrent layers are drawn
from the ranges of Mamba's initialisation, so that states neither vanish nor explode. The same
seed gives the same bytes.
"""

from __future__ import annotations

import errno
import math
import os
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGUF_DEFAULT_ALIGNMENT as ALIGNMENT
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType

from pyllama_mtp.errors import DiskFullError, UsageError
from pyllama_mtp.models import predictable
from pyllama_mtp.models.layout import TensorSpec, model_tensors
from pyllama_mtp.models.predictable import Draw
from pyllama_mtp.models.shapes import ModelShape, check_shape, get_shape
from pyllama_mtp.models.vocab import CHAT_TEMPLATE, synthetic_vocabulary

#: Called with (bytes written, bytes in all) after every chunk.
Progress = Callable[[int, int], None]

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
_FILE_TYPES = {
    "f32": LlamaFileType.ALL_F32,
    "f16": LlamaFileType.MOSTLY_F16,
    "q8_0": LlamaFileType.MOSTLY_Q8_0,
    "q4_0": LlamaFileType.MOSTLY_Q4_0,
    "iq4_nl": LlamaFileType.MOSTLY_IQ4_NL,
}
#: Tensor types the writer knows, as the command line spells them.
TENSOR_TYPES = tuple(_FILE_TYPES)
_BLOCK_BYTES = {"q8_0": 34, "q4_0": 18, "iq4_nl": 18}


def write_synthetic(
    path: str | os.PathLike[str],
    shape: str | ModelShape,
    tensor_type: str = "q8_0",
    seed: int = 0,
    *,
    progress: Progress | None = None,
    force: bool = False,
    head_noise: float | None = None,
    **overrides: object,
) -> Path:
    """Write a synthetic model and return its path.

    The file appears under its name only when it is complete; until then it is ``PATH.<pid>.part``
    beside it, which is removed on any failure, Ctrl-C included.

    Args:
        path: the file to write.
        shape: a name from :data:`pyllama_mtp.models.shapes.SHAPES`, or a shape of your own.
        tensor_type: f32, f16, q8_0, q4_0 or iq4_nl, for all matrices and embeddings.
        seed: any non-negative whole number.
        progress: called with (bytes done, bytes in all).
        force: overwrite an existing file.
        head_noise: make the head draft well: with 0 it is nearly always right, and the more noise,
            the less; see :mod:`pyllama_mtp.models.predictable`. None: random weights throughout,
            whose drafts are never accepted.
        overrides: dimensions that replace those of a named shape, e.g. ``n_layer=4``.

    Raises:
        UsageError: unknown type, shape or dimension, an existing file, an unusable folder.
        DiskFullError: not enough free space before or while writing.
    """
    target = Path(path)
    if isinstance(shape, str):
        shape = get_shape(shape, **overrides)
    elif overrides:
        raise UsageError("dimensions can be replaced only in a named shape")
    check_shape(shape)
    _check_arguments(target, tensor_type, seed, force)
    if head_noise is not None:
        predictable.check(shape, tensor_type, head_noise)
    specs = model_tensors(shape)
    _check_rows(specs, tensor_type)
    draws = [
        Draw(spec.name) if head_noise is None else predictable.draw(spec, shape, head_noise)
        for spec in specs
    ]
    data_bytes = sum(_padded(tensor_bytes(spec, tensor_type)) for spec in specs)
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        _check_space(target, data_bytes)
        _write_header(part, shape, specs, tensor_type, seed, head_noise)
        with part.open("ab") as file:
            _write_data(
                file.write, zip(specs, draws, strict=True), tensor_type, seed, data_bytes, progress
            )
        part.replace(target)
    except OSError as exc:
        raise _explain(exc, target, data_bytes) from exc
    finally:
        part.unlink(missing_ok=True)
    return target


def synthetic_size(shape: ModelShape, tensor_type: str) -> int:
    """Bytes of tensor data the file will hold (its header, up to about 10 MB, comes on top)."""
    return sum(_padded(tensor_bytes(spec, tensor_type)) for spec in model_tensors(shape))


def tensor_bytes(spec: TensorSpec, tensor_type: str) -> int:
    """Bytes of one tensor when matrices are stored as ``tensor_type``."""
    count = math.prod(spec.shape)
    stored = _stored_type(spec, tensor_type)
    if stored in _BLOCK_BYTES:
        return count // BLOCK * _BLOCK_BYTES[stored]
    return count * (2 if stored == "f16" else 4)


def _stored_type(spec: TensorSpec, tensor_type: str) -> str:
    return tensor_type if spec.quantizable else "f32"


def _padded(n: int) -> int:
    return -(-n // ALIGNMENT) * ALIGNMENT


# --- checks -------------------------------------------------------------------------------------


def _check_arguments(target: Path, tensor_type: str, seed: int, force: bool) -> None:
    if tensor_type not in TENSOR_TYPES:
        raise UsageError(f"unknown type {tensor_type!r}; allowed: {', '.join(TENSOR_TYPES)}")
    if seed < 0:
        raise UsageError(f"seed is {seed}, it must not be negative")
    if target.is_dir():
        raise UsageError(f"{target} is a directory; give a file name")
    if not target.parent.is_dir():
        raise UsageError(f"folder {target.parent} does not exist; create it first")
    if target.exists() and not force:
        raise UsageError(f"{target} exists; choose another name or overwrite it with --force")


def _check_rows(specs: list[TensorSpec], tensor_type: str) -> None:
    if tensor_type not in _BLOCK_BYTES:
        return
    for spec in specs:
        if spec.quantizable and spec.shape[0] % BLOCK:
            raise UsageError(
                f"{spec.name} has rows of {spec.shape[0]} elements, {tensor_type} needs a "
                f"multiple of {BLOCK}; change the dimension or use f16"
            )


def _check_space(target: Path, needed: int) -> None:
    free = shutil.disk_usage(target.parent).free
    if needed > free:
        raise DiskFullError(
            f"{target} needs {needed / 1e9:.2f} GB, {free / 1e9:.2f} GB are free in "
            f"{target.parent}; free some space or choose another folder"
        )


def _explain(exc: OSError, target: Path, needed: int) -> Exception:
    if isinstance(exc, DiskFullError):
        return exc
    if exc.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return DiskFullError(
            f"writing {target} ({needed / 1e9:.2f} GB) failed: {exc.strerror}; the partial file "
            "was removed"
        )
    return UsageError(f"cannot write {target}: {exc.strerror or exc}")


# --- header -------------------------------------------------------------------------------------


def _write_header(
    part: Path,
    shape: ModelShape,
    specs: list[TensorSpec],
    tensor_type: str,
    seed: int,
    head_noise: float | None,
) -> None:
    """Metadata, vocabulary and tensor table, padded so that tensor data can be appended."""
    writer = GGUFWriter(part, shape.architecture)
    try:
        _add_general(writer, shape, tensor_type, seed)
        if head_noise is not None:
            writer.add_float32("pyllama_mtp.synthetic.head_noise", head_noise)
        _add_dimensions(writer, shape)
        _add_vocabulary(writer, shape.n_vocab)
        for spec in specs:
            stored = GGMLQuantizationType[_stored_type(spec, tensor_type).upper()]
            n_bytes = tensor_bytes(spec, tensor_type)
            # The gguf package counts dimensions from the slow end, as numpy does.
            dims = spec.shape[::-1]
            writer.add_tensor_info(spec.name, dims, np.dtype(np.float32), n_bytes, stored)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        assert writer.fout is not None
        writer.write_padding(writer.fout[0], writer.fout[0].tell())
    finally:
        writer.close()


def _add_general(writer: GGUFWriter, shape: ModelShape, tensor_type: str, seed: int) -> None:
    writer.add_type("model")
    writer.add_name(f"{shape.name} (synthetic, random weights)")
    writer.add_description("Random weights for speed measurements; its text is nonsense.")
    writer.add_file_type(_FILE_TYPES[tensor_type])
    writer.add_quantization_version(2)
    writer.add_bool("pyllama_mtp.synthetic", True)
    writer.add_string("pyllama_mtp.synthetic.shape", shape.name)
    writer.add_uint64("pyllama_mtp.synthetic.seed", seed)


def _add_dimensions(writer: GGUFWriter, shape: ModelShape) -> None:
    """Hyper-parameters under the keys upstream's load_hparams and load_arch_hparams read."""
    arch = shape.architecture
    counts = {
        "block_count": shape.n_layer + shape.n_mtp,
        "context_length": shape.n_ctx_train,
        "embedding_length": shape.n_embd,
        "attention.head_count": shape.n_head,
        "attention.head_count_kv": shape.n_head_kv,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "rope.dimension_count": shape.n_rot,
        "ssm.conv_kernel": shape.ssm_conv_kernel,
        "ssm.state_size": shape.ssm_head_dim,
        "ssm.group_count": shape.ssm_k_heads,
        "ssm.time_step_rank": shape.ssm_v_heads,
        "ssm.inner_size": shape.ssm_inner,
        "full_attention_interval": shape.full_attention_interval,
        "nextn_predict_layers": shape.n_mtp,
    }
    if shape.n_expert:
        counts["expert_count"] = shape.n_expert
        counts["expert_used_count"] = shape.n_expert_used
        counts["expert_feed_forward_length"] = shape.n_ff_exp
        counts["expert_shared_feed_forward_length"] = shape.n_ff_shexp
    else:
        counts["feed_forward_length"] = shape.n_ff
    for key, value in counts.items():
        writer.add_uint32(f"{arch}.{key}", value)
    writer.add_array(f"{arch}.rope.dimension_sections", list(shape.rope_sections))
    writer.add_float32(f"{arch}.rope.freq_base", shape.rope_freq_base)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", 1e-6)


def _add_vocabulary(writer: GGUFWriter, n_vocab: int) -> None:
    vocab = synthetic_vocabulary(n_vocab)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen35")
    writer.add_token_list(vocab.tokens)
    writer.add_token_types(vocab.types)
    writer.add_token_merges(vocab.merges)
    writer.add_eos_token_id(vocab.im_end)
    writer.add_pad_token_id(vocab.endoftext)
    writer.add_bos_token_id(vocab.endoftext)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


# --- weights ------------------------------------------------------------------------------------


def _write_data(
    write: Callable[[bytes], int],
    tensors: Iterable[tuple[TensorSpec, Draw]],
    tensor_type: str,
    seed: int,
    total: int,
    progress: Progress | None,
) -> None:
    done = 0
    for spec, draw in tensors:
        n_bytes = tensor_bytes(spec, tensor_type)
        for chunk in tensor_chunks(spec, tensor_type, seed, draw):
            write(chunk)
            done += len(chunk)
            if progress is not None:
                progress(done, total)
        padding = _padded(n_bytes) - n_bytes
        write(bytes(padding))
        done += padding
    if progress is not None:
        progress(total, total)


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
    deviation = draw.scale / math.sqrt(spec.shape[0])
    step = CHUNK_BLOCKS if tensor_type in _BLOCK_BYTES else CHUNK_BLOCKS * BLOCK
    row = spec.shape[0] // (BLOCK if tensor_type in _BLOCK_BYTES else 1)
    n_rows = count // spec.shape[0]
    if draw.passes:
        step = max(step // row, 1) * row
    common = n_rows if draw.rare == 1.0 else min(n_rows, predictable.COMMON)
    for first, last, scale in ((0, common, 1.0), (common, n_rows, draw.rare)):
        for start in range(first * row, last * row, step):
            units = min(step, last * row - start)
            chunk = _random_chunk(rng, units, tensor_type, scale * deviation)
            if draw.passes:
                chunk = predictable.pass_embedding(chunk, start // row, n_rows, tensor_type)
            yield chunk


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
    if tensor_type not in _BLOCK_BYTES:
        values = rng.standard_normal(units, dtype=np.float32) * np.float32(deviation)
        numbers: bytes = values.astype("<f2" if tensor_type == "f16" else "<f4").tobytes()
        return numbers
    n_quants = _BLOCK_BYTES[tensor_type] - 2
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
