"""Write a model of a published shape with random weights straight to GGUF: for measuring speed.

Nothing is downloaded and memory stays bounded: tensors are generated in chunks of a few MB and
appended to the file one after the other. A file type such as q4_k_m is a mixture of tensor types,
which the library chooses (:mod:`.quantize`). The same seed gives the same bytes.

The vocabulary is a synthetic byte-level BPE of any size. Every text can be tokenized (all 256 bytes
are tokens) and common English and Python words take one token each, so that prompts have a
realistic length. The rest of the vocabulary is filled with nonsense words that no merge makes: only
a model with random weights says them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUF_DEFAULT_ALIGNMENT as ALIGNMENT
from gguf import GGUFWriter

from pyllama_mtp.errors import ModelFileError, UsageError
from pyllama_mtp.files import check_room, check_target, write_error
from pyllama_mtp.models.draftvocab import CONTROL, NORMAL, UNUSED, byte_alphabet
from pyllama_mtp.models.ggufinfo import read_gguf, validate_model_file
from pyllama_mtp.models.quantize import (
    FILE_TYPES,
    WEIGHT_TYPES,
    Progress,
    check_types,
    choose_types,
    padded_data,
    stored_bytes,
)
from pyllama_mtp.models.randomweights import (
    BLOCK,
    BLOCK_BYTES,
    TENSOR_TYPES,
    check_noise,
    how_to_draw,
    tensor_chunks,
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

#: File types with all matrices in one type.
_UNIFORM = ("f32", "f16", "q8_0")

#: The example model, of a size in common use: shape, file type and head noise. Its name changes
#: whenever its contents do.
EXAMPLE = ("qwen3.5-0.8b", "q4_k_m", 0.05)
EXAMPLE_NAME = "synthetic-qwen3.5-0.8b-q4_k_m-1.gguf"


def example_path() -> Path:
    """Where :func:`write_example` keeps its model: in XDG_CACHE_HOME, or ~/.cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    return Path(cache) / "pyllama-mtp" / EXAMPLE_NAME


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
    **overrides: object,
) -> Path:
    """Write a synthetic model and return its path.

    The file appears under its name only when it is complete; until then it is ``PATH.<pid>.part``
    beside it, which is removed on any failure, Ctrl-C included.

    Args:
        path: the file to write.
        shape: a name from :data:`.shapes.SHAPES`, or a shape of your own.
        tensor_type: a file type, a key of :data:`.quantize.FILE_TYPES`.
        seed: any non-negative whole number.
        progress: called with (bytes done, bytes in all).
        force: overwrite an existing file.
        head_noise: make the head draft well: drafts are nearly always right with 0, and less often
            with more noise; see :mod:`.randomweights`. None: random weights throughout, whose
            drafts are never accepted.
        head_type: the type of the MTP block's matrices, a key of :data:`.quantize.WEIGHT_TYPES`;
            None: as the mixture has them.
        pure: store all matrices and embeddings in `tensor_type`, one of `TENSOR_TYPES`, without the
            exceptions of a mixture.
        empty: leave a hole in the place of the weights. Such a file takes a few MB of disk, and
            ``pyllama-mtp inspect`` tells the memory that the model would need.
        overrides: dimensions that replace those of a named shape, e.g. ``n_layer=4``.

    Raises:
        UsageError: unknown type, shape or dimension, a type that needs an importance matrix, an
            existing file, an unusable folder.
        DiskFullError: not enough free space before or while writing.
    """
    target = Path(path)
    if isinstance(shape, str):
        shape = get_shape(shape, **overrides)
    elif overrides:
        raise UsageError("dimensions can be replaced only in a named shape")
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
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        types = _types(specs, tensor_type if uniform else "f16")
        if not uniform:
            _write_header(part, shape, specs, types, "f16", seed, head_noise)
            # The library reads the header only, but the file must have the right length.
            os.truncate(part, part.stat().st_size + _data_bytes(specs, types))
            chosen = choose_types(read_gguf(part), tensor_type, head_type)
            types = {name: kind.lower() for name, kind in chosen.items()}
        n_bytes = _data_bytes(specs, types)
        check_room(target, 0 if empty else n_bytes)
        _write_header(part, shape, specs, types, tensor_type, seed, head_noise)
        if empty:
            os.truncate(part, part.stat().st_size + n_bytes)
        else:
            drawn = ((spec, how_to_draw(spec, shape, head_noise)) for spec in specs)
            data = (tensor_chunks(spec, types[spec.name], seed, draw) for spec, draw in drawn)
            with part.open("ab") as file:
                file.writelines(padded_data(data, ALIGNMENT, n_bytes, progress))
        part.replace(target)
    except OSError as exc:
        raise write_error(exc, target) from exc
    finally:
        part.unlink(missing_ok=True)
    return target


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
) -> None:
    """Metadata, vocabulary and tensor table, padded so that tensor data can be appended."""
    writer = GGUFWriter(part, shape.architecture)
    try:
        _add_general(writer, shape, file_type, seed)
        if head_noise is not None:
            writer.add_float32("pyllama_mtp.synthetic.head_noise", head_noise)
        _add_dimensions(writer, shape)
        vocab = add_tokens(writer, shape.n_vocab)
        writer.add_pad_token_id(vocab.endoftext)
        writer.add_bos_token_id(vocab.endoftext)
        writer.add_add_bos_token(False)
        writer.add_chat_template(CHAT_TEMPLATE)
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


def _add_dimensions(writer: GGUFWriter, shape: ModelShape) -> None:
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
