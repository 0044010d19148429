"""The LM head that drafts come from: the model's own rows for the tokens of a draft vocabulary."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .draftvocab import DEFAULT_SIZE, Ids, choose
from .errors import ModelFileError, UsageError
from .models.ggufheader import TENSOR_TYPES
from .models.ggufinfo import GGUFInfo, read_gguf
from .models.trimmedhead import n_rows, own_head, trimmed_head, trimmed_head_ids

log = logging.getLogger("pyllama_mtp")


@dataclass(frozen=True, eq=False)
class HeadRows:
    """Rows of tensor `name`: `data` [n, bytes per row] uint8, of a type numbered as in ggml.h."""

    type: int
    data: npt.NDArray[np.uint8]
    name: str


def head_rows(model: str | os.PathLike[str] | GGUFInfo, ids: Ids) -> HeadRows:
    """Copy the rows of the LM head that the MTP head drafts with, whatever their type.

    A row is a whole number of blocks in every type, so quantized rows are copied, not quantized
    again. The head is the MTP block's own if the file has one over the whole vocabulary, else the
    model's, else the token embedding (as in `graph_mtp` of upstream's src/models/qwen35.cpp).

    Args:
        model: a model file, or its description, which saves reading it again.
        ids: [n] rows, in the order wanted.

    Raises:
        ModelFileError: the file cannot be read, has no head, or not these rows of it.
    """
    info = model if isinstance(model, GGUFInfo) else read_gguf(model)
    tensors = {tensor.name: tensor for tensor in info.tensors}
    own = None if trimmed_head(info) else own_head(info)
    head = own or tensors.get("output.weight") or tensors.get("token_embd.weight")
    if not head:
        raise ModelFileError(f"{info.path}: the file has no LM head", info.path)
    number = next(n for n, (name, _, _) in TENSOR_TYPES.items() if name == head.type)
    _, block, block_bytes = TENSOR_TYPES[number]
    row_bytes = head.shape[0] // block * block_bytes
    shape = (head.nbytes // row_bytes, row_bytes)
    if ids.size and not 0 <= ids.min() <= ids.max() < shape[0]:
        message = f"{head.name} has {shape[0]} rows, wanted are {ids.min()} to {ids.max()}"
        raise ModelFileError(f"{info.path}: {message}", info.path)
    try:
        rows = np.memmap(head.file, np.uint8, "r", offset=head.offset, shape=shape)
    except (OSError, ValueError) as error:
        raise ModelFileError(f"cannot read {info.path}: {error}", info.path) from error
    return HeadRows(number, np.asarray(rows)[ids], head.name)


@dataclass(frozen=True, eq=False)
class DraftHead:
    """An LM head over a part of the vocabulary: rows[i] belongs to token ids[i], ascending.

    rows is None for the trimmed head of a model file, which stays where the model has it; its ids
    are in the order of the file.
    """

    ids: Ids
    rows: HeadRows | None


def draft_head(info: GGUFInfo, spec: str | int | os.PathLike[str]) -> DraftHead | None:
    """The draft head that a user asks for; None: the model's own.

    Args:
        spec: as for :func:`choose`; or "auto": the file's trimmed head if it has one, else
            DEFAULT_SIZE tokens if that is less than half of the vocabulary and the tokenizer can be
            ranked.

    Raises:
        UsageError, DraftVocabError, ModelFileError: see :func:`choose`; UsageError also for the
            whole vocabulary where the file's head has a part of it.
    """
    trimmed = trimmed_head(info)
    if spec == "auto" and trimmed:
        return DraftHead(trimmed_head_ids(info), None)
    if spec == "auto":
        if info.n_vocab <= 2 * DEFAULT_SIZE:
            return None
        try:
            vocab = choose(info.path, DEFAULT_SIZE)
        except ModelFileError as error:
            log.info("drafting over the whole vocabulary: %s", error)
            return None
    else:
        vocab = choose(info.path, spec)
    if trimmed and not vocab:
        raise UsageError(
            f"draft_vocab {spec!r}: the MTP head of {info.path} has {n_rows(trimmed)} of "
            f"{info.n_vocab} tokens; use 'auto', or fewer rows of the model's LM head"
        )
    return DraftHead(vocab.ids, head_rows(info, vocab.ids)) if vocab else None
