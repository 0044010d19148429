"""Trimmed MTP heads in model files: an LM head over a part of the vocabulary, and its tokens.

The MTP block has an LM head of its own there, [n_embd, n_rows] with fewer rows than the vocabulary
has tokens. The tensor ``d2t``, [n_rows] I64 or I32, holds the token id of each row. This is the
convention of upstream's src/models/eagle3.cpp and dflash.cpp, which llama.cpp's pull request 29143
brings to Qwen3.5. Checkpoints that vLLM reads have a tensor of the same name with id minus row
number; a converter has to add the row number.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from pyllama_mtp.errors import ModelFileError
from pyllama_mtp.models.ggufheader import NOT_WEIGHTS, TensorEntry
from pyllama_mtp.models.modelinfo import GGUFInfo

Ids = npt.NDArray[np.int32]

D2T = "d2t"
_DTYPES = {"I32": "<i4", "I64": "<i8"}


def own_head(info: GGUFInfo) -> TensorEntry | None:
    """The MTP block's own LM head, if it has one."""
    return info.tensor(f"blk.{info.n_layer}.nextn.shared_head_head.weight")


def n_lm_heads(info: GGUFInfo) -> int:
    """How many LM heads the MTP blocks have: those of their own, and the model's."""
    blocks = range(info.n_layer, info.n_layer + info.n_mtp_layers)
    names = [f"blk.{block}.nextn.shared_head_head.weight" for block in blocks]
    own = sum(info.tensor(name) is not None for name in names)
    return own + (own < len(names))


def trimmed_head(info: GGUFInfo) -> TensorEntry | None:
    """The MTP block's own LM head, if it is over the tokens of ``d2t``: shape (n_embd, n_rows)."""
    return own_head(info) if info.tensor(D2T) else None


def n_rows(head: TensorEntry) -> int:
    """The number of tokens that a head can draft."""
    return math.prod(head.shape[1:])


def trimmed_head_ids(info: GGUFInfo) -> Ids:
    """The token of each row of :func:`trimmed_head`: [n_rows] int32, in the order of the file.

    Raises:
        ModelFileError: there is no trimmed head, or it is malformed; the message says how.
    """
    d2t = info.tensor(D2T) if trimmed_head(info) else None
    problems = trimmed_head_problems(info) if d2t else ["no trimmed MTP head"]
    if not d2t or problems:
        raise ModelFileError(f"{info.path}: {'; '.join(problems)}", info.path)
    return _ids(d2t).astype(np.int32)


def trimmed_head_problems(info: GGUFInfo) -> list[str]:
    """What is wrong with the MTP block's own LM head and with ``d2t``; [] where neither exists."""
    head, d2t = own_head(info), info.tensor(D2T)
    if d2t and not head:
        return [
            f"there is a tensor {D2T}, which says what tokens the rows of an MTP block's LM head "
            f"belong to, but no such head (blk.{info.n_layer}.nextn.shared_head_head.weight)"
        ]
    if not head:
        return []
    rows = n_rows(head)
    flat = len(head.shape) > 1 and math.prod(head.shape[2:]) == 1
    if not flat or head.shape[0] != info.n_embd or rows > info.n_vocab:
        return [f"tensor {head.name} is {head.shape}, expected {(info.n_embd, info.n_vocab)}"]
    if head.type in NOT_WEIGHTS:
        return [f"tensor {head.name} has type {head.type}, which no kernel takes there"]
    if d2t:
        return _d2t_problems(d2t, head, rows) or _id_problems(_ids(d2t), info.n_vocab)
    if rows < info.n_vocab:
        return [
            f"tensor {head.name} has {rows} rows for a vocabulary of {info.n_vocab} tokens, and "
            f"there is no tensor {D2T} that says which ones they belong to"
        ]
    return []


def _d2t_problems(d2t: TensorEntry, head: TensorEntry, rows: int) -> list[str]:
    if d2t.type not in _DTYPES:
        return [f"tensor {D2T} has type {d2t.type}; token ids are I32 or I64"]
    if math.prod(d2t.shape) != d2t.shape[0]:
        return [f"tensor {D2T} is {d2t.shape}, expected one dimension"]
    if d2t.shape[0] != rows:
        return [f"tensor {D2T} has {d2t.shape[0]} entries for the {rows} rows of {head.name}"]
    return []


def _id_problems(ids: npt.NDArray[np.int64], n_vocab: int) -> list[str]:
    problem = _faulty_id(ids, n_vocab)
    if not problem:
        return []
    if not _faulty_id(ids + np.arange(len(ids)), n_vocab):
        problem += (
            "; it seems to hold offsets (id minus row number, as EAGLE-3 checkpoints do): convert "
            "the model again, to ids"
        )
    return [f"tensor {D2T}: {problem}"]


def _faulty_id(ids: npt.NDArray[np.int64], n_vocab: int) -> str:
    """What is wrong with the first faulty id; "" if every id is a token and none comes twice."""
    outside = np.flatnonzero((ids < 0) | (ids >= n_vocab))
    if outside.size:
        row = int(outside[0])
        return f"row {row} is token {ids[row]}, the vocabulary is 0 to {n_vocab - 1}"
    tokens, counts = np.unique(ids, return_counts=True)
    twice = np.flatnonzero(counts > 1)
    return f"token {tokens[twice[0]]} has {counts[twice[0]]} rows" if twice.size else ""


def _ids(d2t: TensorEntry) -> npt.NDArray[np.int64]:
    return np.frombuffer(d2t.read(), _DTYPES[d2t.type]).astype(np.int64)
