"""Drafts, and the LM head that they come from: the model's own rows for tokens of a draft
vocabulary, as they are in the file or in another type."""

from __future__ import annotations

import itertools
import logging
import os
import time
import weakref
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..errors import FatalDecodeError, InsufficientMemoryError, ModelFileError, UsageError
from ..models.draftvocab import DEFAULT_SIZE, Ids, choose
from ..models.ggufheader import TENSOR_TYPES, TensorEntry
from ..models.ggufinfo import trimmed_head_ids
from ..models.modelinfo import GGUFInfo
from ..settings import available_threads
from . import native
from .batch import Floats

if TYPE_CHECKING:
    from .context import Context

log = logging.getLogger("pyllama_mtp")


#: Values that are converted to another type at a time, by each thread: 8 MiB of F32.
_SLICE = 1 << 21
#: Seconds between two lines in the log while rows are converted.
_PERIOD_S = 2.0


@dataclass(frozen=True, eq=False)
class HeadRows:
    """Rows of tensor `name`: `data` [n, bytes per row] uint8, of a type numbered as in ggml.h."""

    type: int
    data: npt.NDArray[np.uint8]
    name: str


class HeadFile:
    """The LM head in a model file that the MTP head drafts with, and the type its rows are given.

    The head is the MTP block's own if the file has one over the whole vocabulary, else the model's,
    else the token embedding (as in `graph_mtp` of upstream's src/models/qwen35.cpp).

    Attributes:
        name: of the tensor.
        n_rows: tokens that it is over.
        type: number of the type of the rows that :meth:`rows` gives.
    """

    def __init__(
        self, info: GGUFInfo, kind: str = "file", tensor: TensorEntry | None = None
    ) -> None:
        """Open the file.

        Args:
            tensor: another matrix, instead of the head.
            kind: a type by its name in ggml, in small letters, or "file": as they are.

        Raises:
            ModelFileError: the file cannot be read, or has no head.
            UsageError: rows cannot be given this type.
        """
        head = tensor or head_tensor(info)
        self.name, self._path, self._n_embd = head.name, head.file, head.shape[0]
        self._stored = _number(head.type)
        self.type = self.number(kind)
        if self.converts:
            self._refuse(kind)
        row_bytes = self.row_bytes()
        self.n_rows = head.nbytes // row_bytes
        self._offset = head.offset
        try:
            self._descriptor = os.open(head.file, os.O_RDONLY)
        except OSError as error:
            raise ModelFileError(f"cannot read {head.file}: {error}", head.file) from error
        weakref.finalize(self, os.close, self._descriptor)

    def number(self, kind: str) -> int:
        """The number of a type in ggml.h."""
        return self._stored if kind == "file" else _number(kind.upper())

    def row_bytes(self, kind: str = "file") -> int:
        """Bytes of a row in this type; 0: a row is not a whole number of its blocks."""
        number = self.number(kind)
        fits = self._n_embd % TENSOR_TYPES[number][1] == 0
        return _row_bytes(number, self._n_embd) if fits else 0

    @property
    def converts(self) -> bool:
        """Whether rows are of another type than in the file."""
        return self.type != self._stored

    def _refuse(self, kind: str) -> None:
        """Raise UsageError if rows cannot be converted."""
        lib, block = native.load().lib, TENSOR_TYPES[self.type][1]
        if lib.ggml_quantize_requires_imatrix(self.type):
            raise UsageError(
                f"draft_head_type {kind!r} needs an importance matrix; use one that needs none, "
                "such as 'q4_0' or 'q2_k'"
            )
        if self._n_embd % block:
            raise UsageError(
                f"draft_head_type {kind!r} has blocks of {block} values, and a row of {self.name} "
                f"has {self._n_embd}; use a type with smaller blocks, such as 'q4_0' or 'q8_0'"
            )
        stored = TENSOR_TYPES[self._stored][0]
        if stored != "F32" and not lib.ggml_get_type_traits(self._stored).to_float:
            raise UsageError(f"draft_head_type {kind!r}: {stored} of {self.name} cannot be read")

    def rows(self, ids: Ids) -> HeadRows:
        """Copy rows, as they are in the file (a row is a whole number of blocks in every type) or
        converted by ggml's own functions.

        Args:
            ids: [n] rows, in the order wanted.

        Raises:
            ModelFileError: the head has not these rows.
        """
        if ids.size and not 0 <= ids.min() <= ids.max() < self.n_rows:
            message = f"{self.name} has {self.n_rows} rows, wanted are {ids.min()} to {ids.max()}"
            raise ModelFileError(f"{self._path}: {message}", self._path)
        data = self._converted(ids) if self.converts else self._read(ids)
        return HeadRows(self.type, data, self.name)

    def _read(self, ids: Ids) -> npt.NDArray[np.uint8]:
        """Rows as they are in the file; read, not mapped, so that they are in memory once."""
        out = np.empty((len(ids), self.row_bytes()), dtype=np.uint8)
        starts = np.flatnonzero(np.diff(ids, prepend=-2) != 1).tolist()
        for start, end in itertools.pairwise([*starts, len(ids)]):
            at = self._offset + int(ids[start]) * out.shape[1]
            left = out[start:end].data.cast("B")
            while left:
                try:
                    n = os.preadv(self._descriptor, [left], at)
                except OSError as error:
                    message = f"cannot read {self._path}: {error}"
                    raise ModelFileError(message, self._path) from error
                if not n:
                    message = f"{self._path} has become shorter; {self.name} is not whole"
                    raise ModelFileError(message, self._path)
                at, left = at + n, left[n:]
        return out

    def _converted(self, ids: Ids) -> npt.NDArray[np.uint8]:
        """The rows in another type: slice by slice, the slices on all cores."""
        n_slice = max(1, _SLICE // self._n_embd)
        out = np.empty((len(ids), _row_bytes(self.type, self._n_embd)), dtype=np.uint8)
        starts = range(0, len(ids), n_slice)

        def convert(start: int) -> None:
            part = np.s_[start : start + n_slice]
            self._convert(self._read(ids[part]), out[part])

        if len(starts) == 1:
            convert(0)
            return out
        said = time.monotonic()
        with ThreadPoolExecutor(available_threads()) as pool:
            for n_done, _ in enumerate(pool.map(convert, starts)):
                if time.monotonic() - said > _PERIOD_S:
                    said, share = time.monotonic(), n_done / len(starts)
                    log.info("the draft head becomes %s: %.0f %%", self.type_name, 100 * share)
        return out

    @property
    def type_name(self) -> str:
        """Name of `type` in ggml."""
        return TENSOR_TYPES[self.type][0]

    def _convert(self, rows: npt.NDArray[np.uint8], out: npt.NDArray[np.uint8]) -> None:
        """Rows of the file, [n, bytes per row], to `out`."""
        library = native.load()
        ffi, lib = library.ffi, library.lib
        values = rows.view(np.float32) if TENSOR_TYPES[self._stored][0] == "F32" else None
        if values is None:
            values = np.empty((len(rows), self._n_embd), dtype=np.float32)
            to_float = lib.ggml_get_type_traits(self._stored).to_float
            to_float(ffi.from_buffer(rows), ffi.from_buffer("float[]", values), values.size)
        buffers = ffi.from_buffer("float[]", values), ffi.from_buffer(out)
        lib.ggml_quantize_chunk(self.type, *buffers, 0, len(rows), self._n_embd, ffi.NULL)


def head_tensor(info: GGUFInfo) -> TensorEntry:
    """The LM head that drafts are made with; see :class:`HeadFile`. Raises ModelFileError: the file
    has none."""
    tensors = {tensor.name: tensor for tensor in info.tensors}
    own = None if info.trimmed_head else info.own_head
    head = own or tensors.get("output.weight") or tensors.get("token_embd.weight")
    if not head:
        raise ModelFileError(f"{info.path}: the file has no LM head", info.path)
    return head


def _number(name: str) -> int:
    return next(number for number, (known, _, _) in TENSOR_TYPES.items() if known.upper() == name)


def _row_bytes(number: int, n_embd: int) -> int:
    _, block, block_bytes = TENSOR_TYPES[number]
    return n_embd // block * block_bytes


@dataclass(frozen=True, eq=False)
class DraftHead:
    """An LM head over a part of the vocabulary.

    Attributes:
        ids: [n] its tokens, ascending; those of a trimmed head in the order of the file.
        file: where its rows are from, and further ones; None for the trimmed head of a model file,
            which stays where the model has it.
        ranked: [n] ids, most useful first; None: nobody has ranked them.
    """

    ids: Ids
    file: HeadFile | None = None
    ranked: Ids | None = None

    def rows(self) -> HeadRows | None:
        """Row i is of token ids[i]: read and converted each time. None for a trimmed head."""
        return self.file.rows(self.ids) if self.file else None


def draft_head(
    info: GGUFInfo,
    spec: str | int | tuple[int, ...] | os.PathLike[str],
    kind: str = "file",
) -> DraftHead | None:
    """The draft head that a user asks for; None: the model's own.

    Args:
        spec: as for :func:`choose`; or "auto": the file's trimmed head if it has one, else
            DEFAULT_SIZE tokens if that is less than half of the vocabulary and the tokenizer can be
            ranked.
        kind: the type of its rows; see :class:`HeadFile`.

    Raises:
        UsageError, DraftVocabError, ModelFileError: see :func:`choose` and :class:`HeadFile`;
            UsageError also for the whole vocabulary, or another type, where the file's head has a
            part of it, and for a part where MTP blocks have several LM heads.
    """
    if info.n_lm_heads > 1:
        if spec not in ("auto", "full") or kind != "file":
            raise UsageError(
                f"draft_vocab {spec!r}, draft_head_type {kind!r}: the MTP blocks of {info.path} "
                "have LM heads of their own, and rows are of one; use 'full' and 'file', or 'auto'"
            )
        return None
    trimmed = info.trimmed_head
    if spec == "auto" and trimmed:
        if kind != "file":
            raise UsageError(
                f"draft_head_type {kind!r}: the trimmed MTP head of {info.path} is used as it is; "
                "use 'file', or with a number as draft_vocab rows of the model's LM head"
            )
        return DraftHead(trimmed_head_ids(info))
    ranked = _by_size(info) if spec == "auto" else choose(info.path, spec)
    if trimmed and ranked is None:
        raise UsageError(
            f"draft_vocab {spec!r}: the MTP head of {info.path} has {trimmed.n_rows} of "
            f"{info.n_vocab} tokens; use 'auto', or fewer rows of the model's LM head"
        )
    if ranked is None and kind == "file":
        return None
    head = HeadFile(info, kind)
    if ranked is None and not head.converts:
        return None
    ids = np.arange(info.n_vocab, dtype=np.int32) if ranked is None else np.sort(ranked)
    return DraftHead(ids, head, ranked)


def _by_size(info: GGUFInfo) -> Ids | None:
    """The default draft vocabulary; None: the whole one."""
    if info.n_vocab <= 2 * DEFAULT_SIZE:
        return None
    try:
        return choose(info.path, DEFAULT_SIZE)
    except ModelFileError as error:
        log.info("drafting over the whole vocabulary: %s", error)
        return None


def set_draft_head(context: Context, rows: HeadRows | None, ids: Ids) -> None:
    """Give the MTP block an LM head over a part of the vocabulary, for :func:`compute_drafts`.

    Args:
        rows: [n] rows of the model's LM head, as they are in its file; None: the rows of the
            trimmed head that the file has.
        ids: [n] int32: their tokens, ascending; of a trimmed head, in the order of the file.

    Raises:
        UsageError: the library, or the model, has no use for one.
        InsufficientMemoryError: there is no room for the rows.
    """
    ids = np.array(ids, dtype=np.int32)
    if rows is None:
        _use_model_draft_head(context, ids)
        return
    ffi, lib = context.library.ffi, context.library.lib
    data = np.ascontiguousarray(rows.data)
    if not len(ids) or rows.type < 0:
        raise UsageError(f"a draft head of {len(ids)} rows of type {rows.type}")
    pointers = (ffi.from_buffer(data), ffi.from_buffer("int32_t[]", ids))
    arguments = rows.type, pointers[0], data.nbytes, pointers[1], len(ids)
    if not context.call(lib.pyllama_mtp_set_draft_head, *arguments):
        raise context.refusal("a draft head", "it needs the patched library")
    context.draft_ids = ids


def _use_model_draft_head(context: Context, ids: Ids) -> None:
    ffi, lib = context.library.ffi, context.library.lib
    out = ffi.new("int32_t *[1]")
    n = context.call(lib.pyllama_mtp_use_model_draft_head, out)
    if not n:
        raise context.refusal("a draft head", "it needs a trimmed head")
    context.model.refuse_lost_worker()
    native_ids = np.frombuffer(ffi.buffer(out[0], 4 * n), dtype=np.int32)
    if not np.array_equal(native_ids, ids):
        raise UsageError("the file's trimmed head has other tokens than these")
    context.draft_ids = ids


def use_own_head(context: Context) -> None:
    """Give the MTP block its own LM head again, over the whole vocabulary."""
    if context.draft_ids is not None:
        lib, null = context.library.lib, context.library.ffi.NULL
        context.call(lib.pyllama_mtp_set_draft_head, 0, null, 0, null, 0)
        context.draft_ids = None


def replace_draft_rows(context: Context, slots: Ids, ids: Ids, rows: HeadRows) -> None:
    """Write other rows over some of the draft head's rows, in place.

    Args:
        slots: [n] int32: which rows of the head, none twice.
        ids: [n] int32: their tokens from now on, none of which the head has already.
        rows: [n], of the type that the head has.

    Raises:
        UsageError: the head was not given rows, or these do not fit.
    """
    slots, ids = np.array(slots, dtype=np.int32), np.array(ids, dtype=np.int32)
    if len(slots) != len(ids):
        raise UsageError(f"{len(slots)} slots for {len(ids)} tokens")
    ffi, lib = context.library.ffi, context.library.lib
    data = np.ascontiguousarray(rows.data)
    pointers = [ffi.from_buffer("int32_t[]", array) for array in (slots, ids)]
    arguments = (len(ids), *pointers, ffi.from_buffer(data), data.nbytes)
    if not context.call(lib.pyllama_mtp_replace_draft_rows, *arguments):
        said = native.take_recent_errors()
        context.model.refuse_lost_worker()
        raise UsageError(f"no row is replaced: {said or 'it needs the patched library'}")
    assert context.draft_ids is not None
    context.draft_ids = context.draft_ids.copy()  # earlier distributions refer to the old array
    context.draft_ids[slots] = ids


# -- drafts ----------------------------------------------------------------------------------------


def compute_drafts(
    context: Context,
    tokens: Ids,
    seqs: Ids,
    n: int,
    n_candidates: int = 0,
    temperatures: Floats | None = None,
    noise: Floats | None = None,
) -> Ids:
    """The MTP block's drafts for what follows the newest token of each sequence, in one graph.

    Caches and the results of the last decode stay.

    Args:
        context: with_mtp.
        tokens: [n_seqs] int32: the newest tokens, not decoded yet.
        seqs: [n_seqs] int32: each has decoded something. More than one need a unified cache.
        n: drafts for each.
        n_candidates: keep the logits of so many best tokens of every draft; see
            :func:`draft_logits`.
        temperatures: [n_seqs] float32, above 0: drafts are drawn from softmax(logits /
            temperature) by `noise`; None: drafts are the best tokens.
        noise: [n, n_seqs, n_head] float32 from the standard Gumbel distribution: the largest of
            logits / temperature + noise is drawn; see :attr:`.Context.n_head`. Zeros give the best
            token.

    Returns:
        [n, n_seqs] int32.

    Raises:
        UsageError: no such context, or arrays of other shapes.
        NoKVSlotError: the cache has no room for the drafts.
        FatalDecodeError: the logits hold a NaN (on a GPU drafts do not tell).
        DecodeError: as :meth:`.Context.decode`.
    """
    _check_draft(context, tokens, seqs, n, n_candidates)
    ffi, lib = context.library.ffi, context.library.lib
    tokens, seqs = (np.ascontiguousarray(a, dtype=np.int32) for a in (tokens, seqs))
    drafts = np.empty((n, len(seqs)), dtype=np.int32)
    drawn: tuple[Any, ...] = ffi.NULL, ffi.NULL
    context.draft_shape = (n, len(seqs), n_candidates)
    if temperatures is not None or noise is not None:
        context.draft_shape = (n, len(seqs), context.n_head)
        drawn = _noise(context, temperatures, noise, n_candidates)
    ids = [ffi.from_buffer("int32_t[]", array) for array in (tokens, seqs, drafts)]
    arguments = *ids[:2], len(seqs), n, n_candidates, *drawn, ids[2]
    context.compute(len(seqs), ("draft", len(seqs), n), lib.pyllama_mtp_draft, *arguments)
    if drafts.min() < 0:
        raise FatalDecodeError(native.NAN)
    return drafts


def _noise(
    context: Context, temperatures: Floats | None, noise: Floats | None, n_candidates: int
) -> tuple[Any, ...]:
    """Noise and factors for the native call."""
    shapes = [None if array is None else array.shape for array in (noise, temperatures)]
    wanted = context.draft_shape
    if shapes != [wanted, wanted[1:2]] or n_candidates:
        raise UsageError(
            f"noise of shape {shapes[0]} and temperatures of shape {shapes[1]}, expected "
            f"{wanted} and {wanted[1:2]}, without candidates"
        )
    assert temperatures is not None and noise is not None
    pair = (noise, 1 / temperatures)
    arrays = [np.ascontiguousarray(array, dtype=np.float32) for array in pair]
    return tuple(context.library.ffi.from_buffer("float[]", array) for array in arrays)


def _check_draft(context: Context, tokens: Ids, seqs: Ids, n: int, n_candidates: int) -> None:
    """Refuse what would have the native call read beyond its arrays, or fail without a reason."""
    if not context.options.with_mtp:
        raise UsageError("drafts come from a context with_mtp")
    if context.options.n_seq_max > 1 and not context.options.unified:
        raise UsageError("drafts of a context for several sequences need a unified cache")
    if n < 1 or n_candidates < 0 or not 0 < len(seqs) == len(tokens):
        raise UsageError(
            f"{n} drafts with {n_candidates} candidates after {len(tokens)} tokens of "
            f"{len(seqs)} sequences: it takes one draft or more, and a token of each sequence"
        )


def draft_logits(context: Context) -> Floats:
    """[n, n_seqs, n_candidates] float32 of the last :func:`compute_drafts`: logits of the best
    tokens of each, in no order; of drawn drafts all logits, [n, n_seqs, n_head]. A view that the
    next draft overwrites. Raises UsageError when the last draft left none."""
    n = context.library.ffi.new("int32_t *")
    pointer = context.library.lib.llama_mtp_get_draft_logits(context.handle, n)
    if not n[0]:
        raise UsageError("the last draft left no logits: ask it for candidates")
    return context.view(pointer, int(n[0])).reshape(*context.draft_shape[:2], -1)


def reserve_rounds(context: Context, n_seqs: int, depths: Iterable[int]) -> None:
    """Allocate what rounds of `n_seqs` sequences need, for each of these numbers of drafts. Raises
    InsufficientMemoryError: there is no room for it."""
    for n in depths:
        if not context.call(context.library.lib.pyllama_mtp_reserve, n_seqs, n):
            context.model.refuse_lost_worker()
            said = native.take_recent_errors()
            raise InsufficientMemoryError(f"no memory for rounds of {n} drafts: {said}")
