"""MTP heads in files of their own, for a model whose file has none.

Such a file is what upstream's ``convert_hf_to_gguf.py --mtp`` writes: the model's metadata, the MTP
block, and an embedding, a final norm and an LM head, so that llama.cpp can load it as a draft
model. Here its tensors join the model's: those of the block under their names, its embedding and LM
head as ``nextn.embed_tokens`` and ``nextn.shared_head_head``, which the graph prefers to the
model's own. Tensors that equal the model's are left out, so that nothing is loaded twice; so are
those that blocks of the architecture cannot have.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path, PurePath

import numpy as np

from pyllama_mtp.errors import HeadMismatchError
from pyllama_mtp.models.architectures import elsewhere
from pyllama_mtp.models.ggufheader import TOKENS, ArraySummary, TensorEntry
from pyllama_mtp.models.modelinfo import D2T, GGUFInfo

#: In the place of a file name: no head, not even one beside the model.
NO_HEAD = "none"
#: Begins the name of a file that holds an MTP head only.
PREFIX = "mtp-"
#: Where publishers put heads, seen from the folder of the main file.
_FOLDERS = (".", "MTP")
#: A type at the end of a file's name, without the suffix.
TYPE_IN_NAME = re.compile(
    r"[-._](ud[-_])?(i?q\d|tq\d|bf16|f16|f32|mxfp4|nvfp4)[a-z0-9_]*$", re.IGNORECASE
)
_SAME = (
    *("architecture", "n_layer", "n_embd", "n_head", "n_head_kv", "head_dim_k", "head_dim_v"),
    *("n_rot", "n_ff", "n_expert", "n_expert_used", "n_ff_exp", "n_ff_shexp", "n_vocab"),
    *("recurrent_layers", "tokenizer_model"),
)
#: How far apart two final norms may be, as a share of their length: farther is another model, less
#: a fine-tune.
_FAR = 0.1
_SAMPLES, _SAMPLE = 256, 4096

log = logging.getLogger("pyllama_mtp")


def find_head(path: str | os.PathLike[str]) -> Path | None:
    """The MTP head that lies beside a model or in a folder ``MTP`` there; None: there is none.

    Which head fits is said in :func:`fitting_heads`; of heads that fit alike the smallest is taken.
    """
    folder = Path(path).parent
    try:
        heads = [head for name in _FOLDERS for head in (folder / name).glob("*.gguf")]
        sizes = sorted((head.stat().st_size, str(head)) for head in heads if head.is_file())
    except (OSError, ValueError):  # a folder that cannot be read; a null character
        return None
    return next(map(Path, fitting_heads(Path(path).name, [head for _, head in sizes])), None)


def is_named(stem: str, name: str) -> bool:
    """Whether a model's file, `stem`, has this name: it begins so, and the word ends there."""
    return stem.startswith(name) and not stem.removeprefix(name)[:1].isalnum()


def fitting_heads(model: str, heads: Iterable[str]) -> list[str]:
    """The files that hold an MTP head for a model, by their names, the most alike first.

    The publishers' rule: ``mtp-NAME*.gguf`` is for ``NAME-Q4_K_M.gguf``, whatever its own type.

    Args:
        model: the name of the model's file, without its folder.
        heads: paths of any files.
    """
    stem = model.lower().removesuffix(".gguf")

    def own_name(head: str) -> str:
        return PurePath(head).name.lower().removeprefix(PREFIX).removesuffix(".gguf")

    def fits(head: str) -> bool:
        file, name = PurePath(head).name.lower(), TYPE_IN_NAME.sub("", own_name(head))
        is_one = file.startswith(PREFIX) and file.endswith(".gguf")
        return bool(is_one and name) and is_named(stem, name)

    def alike(head: str) -> int:
        return len(os.path.commonprefix([own_name(head), stem]))  # noqa: RUF071 - of characters

    return sorted(filter(fits, heads), key=alike, reverse=True)


def is_head(info: GGUFInfo) -> bool:
    """Whether a file is an MTP head alone."""
    names = {tensor.name for tensor in info.tensors}
    return info.has_mtp and not any(name.startswith("blk.0.") for name in names)


def in_head(name: str, n_layer: int) -> bool:
    """Whether a tensor belongs to the MTP head of a model with so many layers in its trunk."""
    block = re.match(r"blk\.(\d+)\.", name)
    return name == D2T or bool(block and int(block[1]) >= n_layer)


def join_head(model: GGUFInfo, head: GGUFInfo) -> GGUFInfo:
    """The model with the MTP head of another file, in the place of its own, if it has one."""
    _check(model, head)
    arch = model.architecture
    taken = [*_taken(model, head)]
    gone = [tensor for tensor in model.tensors if in_head(tensor.name, model.n_layer)]
    counts = {
        f"{arch}.block_count": model.n_layer + head.n_mtp_layers,
        f"{arch}.nextn_predict_layers": head.n_mtp_layers,
    }
    return replace(
        model,
        size=model.size + head.size,
        n_mtp_layers=head.n_mtp_layers,
        tensors=(
            *(tensor for tensor in model.tensors if tensor not in gone),
            *(replace(tensor, name=name) for name, tensor in taken),
        ),
        metadata=model.metadata | counts,
        head=head.path,
        head_tensors=(
            *((tensor.name, None) for tensor in gone),
            *((name, tensor.name) for name, tensor in taken),
        ),
    )


def _taken(model: GGUFInfo, head: GGUFInfo) -> Iterator[tuple[str, TensorEntry]]:
    """The tensors that the model gets from the head's file: (name in the model, tensor)."""
    mine = {tensor.name: tensor for tensor in model.tensors}
    there = {tensor.name: tensor for tensor in head.tensors}
    nextn = f"blk.{model.n_layer}.nextn."
    for name, tensor in there.items():
        if in_head(name, model.n_layer):
            yield name, tensor
    lm_head = "output" if "output.weight" in there else "token_embd"
    my_head = "output" if "output.weight" in mine else "token_embd"
    for name, theirs, ours in (
        ("embed_tokens", "token_embd", "token_embd"),
        ("shared_head_head", lm_head, my_head),
        ("shared_head_norm", "output_norm", "output_norm"),
    ):
        if name not in model.abilities.own:
            continue
        shared, own = there.get(f"{theirs}.weight"), mine.get(f"{ours}.weight")
        if not shared or f"{nextn}{name}.weight" in there or (own and same(shared, own)):
            continue
        yield f"{nextn}{name}.weight", shared
        if name == "shared_head_head" and f"{theirs}.scale" in there:
            yield f"{nextn}{name}.scale", there[f"{theirs}.scale"]


def _check(model: GGUFInfo, head: GGUFInfo) -> None:
    """Raise HeadMismatchError if the head is certainly another model's: says what differs."""
    if head.architecture == "gemma4-assistant":
        raise HeadMismatchError(f"{head.path}: {elsewhere(head.architecture)}", head.path)
    if not is_head(head) and not head.mtp_complete:
        raise HeadMismatchError(f"{head.path} has no MTP head (tensors blk.*.nextn.*)", head.path)
    for name in _SAME:
        ours, theirs = getattr(model, name), getattr(head, name)
        if ours != theirs and theirs not in (0, ""):
            shown = ("differs",) if name == "recurrent_layers" else (f"is {theirs!r}", f"{ours!r}")
            raise _mismatch(model, head, f"its {name} {' and the model has '.join(shown)}")
    flags = model.metadata.get(f"{model.architecture}.attention.recurrent_layers")
    if isinstance(flags, tuple) and len(flags) != model.n_layer + head.n_mtp_layers:
        raise _mismatch(model, head, f"the model has recurrent_layers for {len(flags)} blocks")
    tokens = (info.metadata.get(TOKENS) for info in (model, head))
    if len({array.digest for array in tokens if isinstance(array, ArraySummary)}) > 1:
        raise _mismatch(model, head, "its vocabulary has other tokens")
    _check_norm(model, head)


def _check_norm(model: GGUFInfo, head: GGUFInfo) -> None:
    """Compare the final norms: a head's file has that of the model that the head was made for."""
    norms = [
        np.frombuffer(tensor.read(), "<f4").astype(float)
        for info in (model, head)
        for tensor in info.tensors
        if tensor.name == "output_norm.weight" and tensor.type == "F32"
    ]
    if len(norms) < 2 or norms[0].shape != norms[1].shape:
        return
    apart, length = np.linalg.norm(norms[0] - norms[1]), np.linalg.norm(norms[0])
    if apart > _FAR * length:
        raise _mismatch(model, head, "its final norm (output_norm) is another model's")
    if apart:
        log.warning(
            "the MTP head %s was made of another version of the model (its output_norm differs); "
            "fewer drafts may be accepted",
            head.path,
        )


def _mismatch(model: GGUFInfo, head: GGUFInfo, why: str) -> HeadMismatchError:
    return HeadMismatchError(
        f"the MTP head {head.path} does not belong to {model.path}: {why}; give the head of this "
        f"model, or {NO_HEAD!r}",
        head.path,
    )


def same(one: TensorEntry, other: TensorEntry) -> bool:
    """Whether two tensors are alike: type, shape, and bytes at many places."""
    if (one.type, one.shape) != (other.type, other.shape):
        return False
    step = max(_SAMPLE, one.nbytes // _SAMPLES)
    starts = [*range(0, one.nbytes, step), max(0, one.nbytes - _SAMPLE)]
    pieces = [(start, min(_SAMPLE, one.nbytes - start)) for start in starts]
    return one.read(*pieces) == other.read(*pieces)
