"""Write a model of a published shape with random weights straight to GGUF: for measuring speed.

Nothing is downloaded and memory stays bounded: tensors are generated in chunks of a few MB and
appended to the file one after the other. A file type such as q4_k_m is a mixture of tensor types,
which the library chooses (:mod:`.quantize`). The same seed gives the same bytes.

The vocabulary is a synthetic byte-level BPE of any size. Every text can be tokenized (all 256 bytes
are tokens) and common English and Python words take one token each, so that prompts have a
realistic length. The rest of the vocabulary is filled with nonsense words that no merge makes: only
a model with random weights says them.

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
import os
import re
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUF_DEFAULT_ALIGNMENT as ALIGNMENT
from gguf import GGUFReader, GGUFValueType, GGUFWriter

from pyllama_mtp.errors import ModelFileError, UsageError
from pyllama_mtp.files import cache_folder, check_room, check_target, complete
from pyllama_mtp.models.ggufheader import TensorEntry
from pyllama_mtp.models.ggufinfo import read_gguf, validate_model_file
from pyllama_mtp.models.quantize import (
    FILE_TYPES,
    WEIGHT_TYPES,
    Progress,
    check_types,
    choose_types,
    padded_data,
    row_converter,
    stored_bytes,
)
from pyllama_mtp.models.shapes import (
    KEYS,
    MOE_FIELDS,
    ModelShape,
    TensorSpec,
    check_shape,
    get_shape,
    model_tensors,
)
from pyllama_mtp.models.tokenizer import (
    CONTROL,
    NORMAL,
    UNUSED,
    byte_alphabet,
    read_tokenizer,
)
from pyllama_mtp.settings import available_threads

#: File types with all matrices in one type.
_UNIFORM = ("f32", "f16", "q8_0")

#: Bytes of tensors that are drawn before it is their turn.
AHEAD = 1 << 29

#: The example model, of a size in common use: shape, file type and head noise. Its name changes
#: whenever its contents do.
EXAMPLE = ("qwen3.5-0.8b", "q4_k_m", 0.05)
EXAMPLE_NAME = "synthetic-qwen3.5-0.8b-q4_k_m-1.gguf"


def example_path() -> Path:
    """Where :func:`write_example` keeps its model: in XDG_CACHE_HOME, or ~/.cache."""
    return cache_folder() / EXAMPLE_NAME


def example_is_there() -> bool:
    """Whether the example model is there, and whole."""
    try:
        validate_model_file(example_path())
    except ModelFileError:
        return False
    return True


def write_example(progress: Progress | None = None) -> Path:
    """Write the example model into the cache folder: half a gigabyte, 20 s on two cores.

    Raises:
        DiskFullError: no room for it.
        UsageError: the folder cannot be made or written.
    """
    target, (shape, file_type, noise) = example_path(), EXAMPLE
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make {target.parent}: {error.strerror}") from None
    return write_synthetic(
        target, shape, file_type, head_noise=noise, progress=progress, force=True
    )


def write_synthetic(
    path: str | os.PathLike[str],
    shape: str | ModelShape,
    tensor_type: str = "q8_0",
    seed: int = 0,
    *,
    progress: Progress | None = None,
    force: bool = False,
    head_noise: float | None = None,
    head_type: str | None = None,
    pure: bool = False,
    empty: bool = False,
    vocab: str | os.PathLike[str] | None = None,
    **overrides: object,
) -> Path:
    """Write a synthetic model and return its path.

    The file appears under its name only when it is complete; until then it has another name beside
    it, and is removed on any failure, Ctrl-C included.

    Args:
        path: the file to write.
        shape: a name from :data:`.shapes.SHAPES`, or a shape of your own.
        tensor_type: a file type, a key of :data:`.quantize.FILE_TYPES`.
        seed: any non-negative whole number.
        progress: called with (bytes done, bytes in all).
        force: overwrite an existing file.
        head_noise: make the head draft well: drafts are nearly always right with 0, and less often
            with more noise; see above. None: random weights throughout, whose
            drafts are never accepted.
        head_type: the type of the MTP block's matrices, a key of :data:`.quantize.WEIGHT_TYPES`;
            None: as the mixture has them.
        pure: store all matrices and embeddings in `tensor_type`, one of `TENSOR_TYPES`, without the
            exceptions of a mixture.
        empty: leave a hole in the place of the weights. Such a file takes a few MB of disk, and
            ``pyllama-mtp inspect`` tells the memory that the model would need.
        vocab: a GGUF file whose tokens, merges and chat template the model takes, weights or none.
            None: the synthetic vocabulary, of `n_vocab` tokens.
        overrides: dimensions that replace those of a named shape, e.g. ``n_layer=4``.

    Raises:
        UsageError: unknown type, shape or dimension, a type that needs an importance matrix, an
            existing file, an unusable folder.
        ModelFileError: `vocab` is damaged, or has no tokens.
        DiskFullError: not enough free space before or while writing.
    """
    target = Path(path)
    if isinstance(shape, str):
        shape = get_shape(shape, **overrides)
    elif overrides:
        raise UsageError("dimensions can be replaced only in a named shape")
    if vocab is not None:
        shape = replace(shape, n_vocab=read_tokenizer(vocab).n_vocab)
    check_shape(shape)
    check_types(tensor_type, head_type)
    uniform = pure or (tensor_type in _UNIFORM and head_type is None)
    _check_arguments(shape, tensor_type if pure else None, head_type, seed)
    check_target(target, force)
    if head_noise is not None:
        check_noise(shape, head_noise)
    specs = model_tensors(shape)
    if uniform:
        _check_rows(specs, tensor_type)
    with complete(target) as part:
        types = _types(specs, tensor_type if uniform else "f16")
        if not uniform:
            _write_header(part, shape, specs, types, "f16", seed, head_noise, vocab)
            # The library reads the header only, but the file must have the right length.
            os.truncate(part, part.stat().st_size + _data_bytes(specs, types))
            chosen = choose_types(read_gguf(part), tensor_type, head_type)
            types = {name: kind.lower() for name, kind in chosen.items()}
        n_bytes = _data_bytes(specs, types)
        check_room(target, 0 if empty else n_bytes)
        _write_header(part, shape, specs, types, tensor_type, seed, head_noise, vocab)
        if empty:
            os.truncate(part, part.stat().st_size + n_bytes)
        else:
            drawn = ((spec, how_to_draw(spec, shape, head_noise)) for spec in specs)
            data = _ahead(
                (_size(spec, types), partial(tensor_chunks, spec, types[spec.name], seed, draw))
                for spec, draw in drawn
            )
            with part.open("ab") as file:
                file.writelines(padded_data(data, ALIGNMENT, n_bytes, progress))
    return target


def _ahead(jobs: Iterable[tuple[int, Callable[[], Iterable[bytes]]]]) -> Iterator[list[bytes]]:
    """What the jobs give, in their order, computed on all threads.

    Args:
        jobs: bytes of a result, and what computes its parts. No more are begun than AHEAD bytes,
            but one.
    """
    n_ahead, begun = 0, deque[tuple[int, Future[list[bytes]]]]()
    with ThreadPoolExecutor(available_threads()) as pool:
        try:
            for size, parts in jobs:
                while begun and n_ahead + size > AHEAD:
                    done, future = begun.popleft()
                    n_ahead -= done
                    yield future.result()
                begun.append((size, pool.submit(lambda parts: [*parts()], parts)))
                n_ahead += size
            while begun:
                yield begun.popleft()[1].result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def synthetic_size(shape: ModelShape, tensor_type: str) -> int:
    """Bytes of tensor data of a file with its matrices in ``tensor_type``, one of
    :data:`pyllama_mtp.models.quantize.WEIGHT_TYPES` (its header, up to about 10 MB, comes on top).
    """
    specs = model_tensors(shape)
    return _data_bytes(specs, _types(specs, tensor_type))


def _types(specs: Iterable[TensorSpec], tensor_type: str) -> dict[str, str]:
    """The type of each tensor where all matrices have one."""
    return {spec.name: tensor_type if spec.quantizable else "f32" for spec in specs}


def _size(spec: TensorSpec, types: Mapping[str, str]) -> int:
    return stored_bytes(spec.shape, types[spec.name].upper())


def _data_bytes(specs: Iterable[TensorSpec], types: Mapping[str, str]) -> int:
    """Bytes of tensor data, padding included."""
    return sum(-(-_size(spec, types) // ALIGNMENT) * ALIGNMENT for spec in specs)


# --- checks -------------------------------------------------------------------------------------


def _check_arguments(
    shape: ModelShape, pure_type: str | None, head_type: str | None, seed: int
) -> None:
    if seed < 0:
        raise UsageError(f"seed is {seed}, it must not be negative")
    if pure_type is not None and (head_type is not None or pure_type not in TENSOR_TYPES):
        raise UsageError(
            f"a pure file has all its tensors in one type of {', '.join(TENSOR_TYPES)}; leave pure "
            "out for others, and for a head type"
        )
    if head_type is not None and shape.n_mtp < 1:
        raise UsageError(f"{shape.name} has no MTP head (n_mtp is {shape.n_mtp}) for {head_type}")


def _check_rows(specs: list[TensorSpec], tensor_type: str) -> None:
    if tensor_type not in BLOCK_BYTES:
        return
    for spec in specs:
        if spec.quantizable and spec.shape[0] % BLOCK:
            raise UsageError(
                f"{spec.name} has rows of {spec.shape[0]} elements, {tensor_type} needs a "
                f"multiple of {BLOCK}; change the dimension or use f16"
            )


# --- header -------------------------------------------------------------------------------------


def _write_header(
    part: Path,
    shape: ModelShape,
    specs: list[TensorSpec],
    types: Mapping[str, str],
    file_type: str,
    seed: int,
    head_noise: float | None,
    vocab_file: str | os.PathLike[str] | None,
) -> None:
    """Metadata, vocabulary and tensor table, padded so that tensor data can be appended."""
    writer = GGUFWriter(part, shape.architecture)
    try:
        _add_general(writer, shape, file_type, seed)
        if head_noise is not None:
            writer.add_float32("pyllama_mtp.synthetic.head_noise", head_noise)
        add_dimensions(writer, shape)
        if vocab_file is None:
            vocab = add_tokens(writer, shape.n_vocab)
            writer.add_pad_token_id(vocab.endoftext)
            writer.add_bos_token_id(vocab.endoftext)
            writer.add_add_bos_token(False)
            writer.add_chat_template(CHAT_TEMPLATE)
        else:
            _copy_vocabulary(writer, vocab_file)
        for spec in specs:
            # The gguf package counts dimensions from the slow end, as numpy does.
            dims, n_bytes = spec.shape[::-1], _size(spec, types)
            # A number: not every release of the package has a name for every type of the pin.
            stored: Any = WEIGHT_TYPES[types[spec.name]]
            writer.add_tensor_info(spec.name, dims, np.dtype(np.float32), n_bytes, stored)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        assert writer.fout is not None
        writer.write_padding(writer.fout[0], writer.fout[0].tell())
    finally:
        writer.close()


def _add_general(writer: GGUFWriter, shape: ModelShape, file_type: str, seed: int) -> None:
    writer.add_type("model")
    writer.add_name(f"{shape.name} (synthetic, random weights)")
    writer.add_description("Random weights for speed measurements; its text is nonsense.")
    writer.add_file_type(FILE_TYPES[file_type])
    writer.add_quantization_version(2)
    writer.add_bool("pyllama_mtp.synthetic", True)
    writer.add_string("pyllama_mtp.synthetic.shape", shape.name)
    writer.add_uint64("pyllama_mtp.synthetic.seed", seed)


def add_dimensions(writer: GGUFWriter, shape: ModelShape) -> None:
    """Hyper-parameters under the keys upstream's load_hparams and load_arch_hparams read."""
    arch = shape.architecture
    unused = ("n_ff",) if shape.n_expert else ("n_expert", *MOE_FIELDS)
    derived = {  # by the dimension that they follow
        "head_dim": {"attention.value_length": shape.head_dim, "rope.dimension_count": shape.n_rot},
        "ssm_v_heads": {"ssm.inner_size": shape.ssm_inner},
    }
    counts = {"block_count": shape.n_layer + shape.n_mtp}
    for name, key in KEYS.items():
        if name not in unused:
            counts |= {key: getattr(shape, name), **derived.get(name, {})}
    for key, value in counts.items():
        writer.add_uint32(f"{arch}.{key}", value)
    writer.add_array(f"{arch}.rope.dimension_sections", list(shape.rope_sections))
    writer.add_float32(f"{arch}.rope.freq_base", shape.rope_freq_base)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", 1e-6)


def add_tokens(writer: GGUFWriter, n_vocab: int, pre: str = "qwen35") -> SyntheticVocabulary:
    """The tokens of :func:`.synthetic_vocabulary`, as byte-level BPE that splits text as `pre`."""
    vocab = synthetic_vocabulary(n_vocab)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(vocab.tokens)
    writer.add_token_types(vocab.types)
    writer.add_token_merges(vocab.merges)
    writer.add_eos_token_id(vocab.im_end)
    return vocab


def _copy_vocabulary(writer: GGUFWriter, path: str | os.PathLike[str]) -> None:
    """All that a GGUF file says of its tokens."""
    for key, field in GGUFReader(path).fields.items():
        if key.startswith("tokenizer."):
            kind, *inner = field.types
            sub_type = inner[0] if kind == GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), kind, sub_type)


# -- the vocabulary --------------------------------------------------------------------------------

ENDOFTEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

#: ChatML as Qwen models use it.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_WORDS = """
the of and to in is that for it as was with be by on not he his are this at from or have an they
which one had but you were her all she there would their we him been has when who will no more if
out so said what up its about into than them can only other time new some could these two may first
then do any like my now over such our man me even most made after also well many must before where
how because good each those people state world year years life work used use number part very
system data model value values number list string file function class method object type name code
line test error return import def self None True False else elif while for print range len int str
float dict set tuple lambda yield with open raise except try assert pass break continue global async
await input output index key keys items result args kwargs path line lines text word words token
tokens write read call called example question answer because between through under while another
should without against during something nothing water light small large long short high low great
little old young right left day days night morning house city country government company market
money history science language speed memory machine computer program network learning training
""".split()  # noqa: SIM905 - a list literal would be 250 lines
_CHUNKS = ("    ", "  ", "\n\n", "\n    ", "==", "!=", "->", "()", "):", "ing", "ed", "er", "tion")
_CONSONANTS, _VOWELS = "bdfghjklmnprtvz", "aeiou"
_SYLLABLES = tuple(c + v for c in _CONSONANTS for v in _VOWELS)
#: Fewer tokens would not hold the bytes, the special tokens and a word or two.
MIN_VOCAB = 512


@dataclass(frozen=True)
class SyntheticVocabulary:
    """``tokens`` and ``types`` have n_vocab entries; ``merges`` are "left right", best first."""

    tokens: list[str]
    types: list[int]
    merges: list[str]
    endoftext: int
    im_end: int


def synthetic_vocabulary(n_vocab: int) -> SyntheticVocabulary:
    """Build a vocabulary of exactly ``n_vocab`` tokens; deterministic.

    The special tokens stand at the end, followed by unused padding, as in the published
    vocabulary (248,320 entries of which the last 276 are special or unused).

    Raises:
        UsageError: ``n_vocab`` is below :data:`MIN_VOCAB` or above what the fillers can name.
    """
    n_reserved = min(276, n_vocab // 64)
    limit = 256 + len(_SYLLABLES) ** 3
    if not MIN_VOCAB <= n_vocab <= limit:
        raise UsageError(f"n_vocab is {n_vocab}, allowed: {MIN_VOCAB} to {limit}")
    letters = byte_alphabet()
    tokens = dict.fromkeys(letters)  # ordered and unique: the native loader insists on unique
    merges = _merges(letters, tokens, n_vocab - n_reserved)
    filler = 0
    while len(tokens) < n_vocab - n_reserved:
        tokens[letters[32] + _nonsense(filler)] = None
        filler += 1
    first = len(tokens)
    names = [*tokens, ENDOFTEXT, IM_START, IM_END]
    names += [f"[PAD{i}]" for i in range(len(names), n_vocab)]
    types = [NORMAL] * first + [CONTROL] * 3 + [UNUSED] * (n_vocab - first - 3)
    return SyntheticVocabulary(names, types, merges, first, first + 2)


def _merges(letters: list[str], tokens: dict[str, None], limit: int) -> list[str]:
    """Add tokens (up to ``limit`` in all) and return the merges that build words letter by letter.

    Each word appears bare and with a leading space; a prefix common to two words is built once.
    """
    merges: list[str] = []
    for word in (*_CHUNKS, *(w for pair in ((" " + w, w) for w in _WORDS) for w in pair)):
        spelled = [letters[b] for b in word.encode()]
        for end in range(1, len(spelled)):
            left, right = "".join(spelled[:end]), spelled[end]
            if left + right in tokens:
                continue
            if len(tokens) >= limit:
                return merges
            tokens[left + right] = None
            merges.append(f"{left} {right}")
    return merges


def _nonsense(index: int) -> str:
    """The ``index``-th three-syllable word: bababa, badaba, ..."""
    base = len(_SYLLABLES)
    a, b, c = index // base % base, index % base, index // (base * base)
    return _SYLLABLES[c] + _SYLLABLES[a] + _SYLLABLES[b]


# -- random values, as bytes of the types they are stored in ---------------------------------------


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
        convert = row_converter(TensorEntry(spec.name, spec.shape, "F16", 0, 0), tensor_type)
        for chunk in tensor_chunks(spec, "f16", seed, draw):
            rows = np.frombuffer(chunk, np.uint8).reshape(-1, 2 * spec.shape[0])
            yield convert(rows).tobytes()
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
