"""The LM head that drafts come from: its rows in a file, in a context, following the text.

A draft head has the model's own rows for the tokens of a draft vocabulary, see :mod:`.vocabulary`,
as they are in the file or in another type.

No ranking knows the present text: tokens of names, of another language or of code may be missing,
and are then never drafted. So tokens of the text that the vocabulary lacks take the rows of its
least likely tokens, in place (:class:`Following`). The text does not change: the model verifies
over its whole vocabulary. The clock algorithm, as for pages of memory (Corbato 1969), decides which
rows are replaced: a hand goes round over the rows of the ranking's lower half, the least likely
first, and takes the next row whose token has not occurred since the hand last passed.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..errors import ModelFileError, UsageError
from ..llama import native
from ..llama.context import Context
from ..models.modelinfo import GGUFInfo
from ..models.quantize import WEIGHT_TYPES, Rows, row_converter, stored_bytes
from ..models.tokenizer import Ids
from ..settings import Settings
from ..telemetry import Telemetry
from .vocabulary import DEFAULT_SIZE, choose

log = logging.getLogger("pyllama_mtp")

#: Values that are converted to another type at a time: 32 MiB of F32.
_SLICE = 1 << 23
#: Seconds between two lines in the log while rows are converted.
_PERIOD_S = 2.0
#: Most rows that are replaced for a prompt, and after a round. On the 0.8B shape a row takes 2 us
#: as it is in the file, 10 us in q4_0 and 70 us in q4_k.
MOST_PER_PROMPT, MOST_PER_ROUND = 1024, 16

# -- rows in a model file --------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class HeadRows:
    """Rows of an LM head: `data` [n, bytes per row] uint8, of a type numbered as in ggml.h."""

    type: int
    data: npt.NDArray[np.uint8]


class DraftHead:
    """An LM head over a part of the vocabulary, whose rows are those of a model file.

    They are those of the MTP block's own head if the file has one over the whole vocabulary, else
    of the model's, else of the token embedding (as in `graph_mtp` of upstream's
    src/models/qwen35.cpp).

    Attributes:
        ranked: [n] its tokens, most useful first; None: the whole vocabulary.
        ids: [n] the same, ascending.
        type: name of the type of its rows, as in GGUF.
        converts: whether that is another type than in the file.
    """

    def __init__(self, info: GGUFInfo, kind: str = "file", ranked: Ids | None = None) -> None:
        """Open the file.

        Args:
            kind: a type by its name in ggml, in small letters, or "file": as they are.

        Raises:
            ModelFileError: the file cannot be read, or has no head.
            UsageError: rows cannot be given this type.
        """
        tensors = {tensor.name: tensor for tensor in info.tensors}
        own = None if info.trimmed_head else info.own_head
        tensor = own or tensors.get("output.weight") or tensors.get("token_embd.weight")
        if not tensor:
            raise ModelFileError(f"{info.path}: the file has no LM head", info.path)
        self._tensor, self.ranked = tensor, ranked
        self.ids = np.arange(tensor.n_rows, dtype=np.int32) if ranked is None else np.sort(ranked)
        self.type = tensor.type if kind == "file" else kind.upper()
        self.converts = self.type != tensor.type
        self._convert = row_converter(tensor, kind) if self.converts else None
        try:
            self._descriptor = os.open(tensor.file, os.O_RDONLY)
        except OSError as error:
            raise ModelFileError(f"cannot read {tensor.file}: {error}", tensor.file) from error
        weakref.finalize(self, os.close, self._descriptor)

    def rows(self, ids: Ids | None = None) -> HeadRows:
        """Copy rows, as they are in the file (a row is a whole number of blocks in every type) or
        converted by ggml's own functions.

        Args:
            ids: [n] rows, in the order wanted; None: those of its tokens.

        Raises:
            ModelFileError: the head has not these rows.
        """
        ids = self.ids if ids is None else ids
        path, n = self._tensor.file, self._tensor.n_rows
        if ids.size and not 0 <= ids.min() <= ids.max() < n:
            wanted = f"{n} rows, wanted are {ids.min()} to {ids.max()}"
            raise ModelFileError(f"{path}: {self._tensor.name} has {wanted}", path)
        data = self._converted(ids, self._convert) if self._convert else self._read(ids)
        return HeadRows(WEIGHT_TYPES[self.type.lower()], data)

    def _read(self, ids: Ids) -> Rows:
        """Rows as they are in the file; read, not mapped, so that they are in memory once."""
        tensor = self._tensor
        out = np.empty((len(ids), tensor.nbytes // tensor.n_rows), dtype=np.uint8)
        starts = np.flatnonzero(np.diff(ids, prepend=-2) != 1).tolist()
        for start, end in itertools.pairwise([*starts, len(ids)]):
            at = tensor.offset + int(ids[start]) * out.shape[1]
            left = out[start:end].data.cast("B")
            try:
                while left:
                    n = os.preadv(self._descriptor, [left], at)
                    if not n:
                        raise OSError(f"it has become shorter; {tensor.name} is not whole")
                    at, left = at + n, left[n:]
            except OSError as error:
                raise ModelFileError(f"cannot read {tensor.file}: {error}", tensor.file) from error
        return out

    def _converted(self, ids: Ids, convert: Callable[[Rows], Rows]) -> Rows:
        """The rows in another type, a slice at a time: as values they take much memory."""
        n_embd, said = self._tensor.shape[0], time.monotonic()
        out = np.empty((len(ids), stored_bytes((n_embd,), self.type)), dtype=np.uint8)
        step = max(1, _SLICE // n_embd)
        for start in range(0, len(ids), step):
            part = np.s_[start : start + step]
            out[part] = convert(self._read(ids[part]))
            if time.monotonic() - said > _PERIOD_S:
                said, share = time.monotonic(), 100 * start / len(ids)
                log.info("the draft head becomes %s: %.0f %%", self.type, share)
        return out


def draft_head(
    info: GGUFInfo,
    spec: str | int | tuple[int, ...] | os.PathLike[str],
    kind: str = "file",
) -> DraftHead | None:
    """The draft head that a user asks for; None: the model's own, which may be a trimmed one.

    Args:
        spec: as for :func:`choose`; or "auto": the file's trimmed head if it has one, else
            DEFAULT_SIZE tokens if that is less than half of the vocabulary and the tokenizer can be
            ranked.
        kind: the type of its rows; see :class:`DraftHead`.

    Raises:
        UsageError, DraftVocabError, ModelFileError: see :func:`choose` and :class:`DraftHead`;
            UsageError also for the whole vocabulary, or another type, where the file's head has a
            part of it, and for a part where MTP blocks have several LM heads.
    """
    trimmed, asked = info.trimmed_head, f"draft_vocab {spec!r}, draft_head_type {kind!r}"
    if info.n_lm_heads > 1 and (spec not in ("auto", "full") or kind != "file"):
        raise UsageError(
            f"{asked}: the MTP blocks of {info.path} have LM heads of their own, and rows are of "
            "one; use 'full' and 'file', or 'auto'"
        )
    if info.n_lm_heads > 1 or (trimmed and spec == "auto" and kind == "file"):
        return None
    if spec == "auto":
        ranked = None if trimmed else _by_size(info)
    else:
        ranked = choose(info.path, spec)
    if trimmed and ranked is None:
        raise UsageError(
            f"{asked}: the MTP head of {info.path} has {trimmed.n_rows} of {info.n_vocab} tokens "
            "and is used as it is; use 'auto' and 'file', or fewer rows of the model's LM head"
        )
    if ranked is None and kind == "file":  # the model's own, whose file may be gone
        return None
    head = DraftHead(info, kind, ranked)
    return head if ranked is not None or head.converts else None


def _by_size(info: GGUFInfo) -> Ids | None:
    """The default draft vocabulary; None: the whole one."""
    if info.n_vocab <= 2 * DEFAULT_SIZE:
        return None
    try:
        return choose(info.path, DEFAULT_SIZE)
    except ModelFileError as error:
        log.info("drafting over the whole vocabulary: %s", error)
        return None


# -- rows in a context -----------------------------------------------------------------------------


def set_draft_head(context: Context, rows: HeadRows, ids: Ids) -> None:
    """Give the MTP block an LM head over a part of the vocabulary, for :func:`compute_drafts`.

    Args:
        rows: [n] rows of the model's LM head.
        ids: [n] int32: their tokens, ascending.

    Raises:
        UsageError: the library, or the model, has no use for one.
        InsufficientMemoryError: there is no room for the rows.
    """
    ids = np.array(ids, dtype=np.int32)
    ffi, lib = context.library.ffi, context.library.lib
    data = np.ascontiguousarray(rows.data)
    if not len(ids) or rows.type < 0:
        raise UsageError(f"a draft head of {len(ids)} rows of type {rows.type}")
    pointers = (ffi.from_buffer(data), ffi.from_buffer("int32_t[]", ids))
    arguments = rows.type, pointers[0], data.nbytes, pointers[1], len(ids)
    if not context.call(lib.pyllama_mtp_set_draft_head, *arguments):
        raise context.refusal("a draft head", "it needs the patched library")
    context.draft_ids = ids


def use_trimmed_head(context: Context) -> None:
    """Draft with the trimmed MTP head that the model file has, which stays where the model has it.

    Raises:
        UsageError: there is none.
    """
    ffi, lib = context.library.ffi, context.library.lib
    out = ffi.new("int32_t *[1]")
    n = context.call(lib.pyllama_mtp_use_model_draft_head, out)
    if not n:
        raise context.refusal("a draft head", "it needs a trimmed head")
    context.model.refuse_lost_worker()
    context.draft_ids = np.frombuffer(ffi.buffer(out[0], 4 * n), dtype=np.int32).copy()


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


# -- rows that follow the text ---------------------------------------------------------------------


def give_head(context: Context, settings: Settings) -> Following | None:
    """Give a context that drafts the head that the settings ask for; what has it follow the text.

    Raises:
        UsageError, DraftVocabError, ModelFileError, InsufficientMemoryError: see
            :func:`draft_head` and :func:`set_draft_head`.
    """
    model, info = context.model, context.model.info
    head = draft_head(info, settings.draft_vocab, settings.draft_head_type)
    if head:
        set_draft_head(context, head.rows(), head.ids)
        return Following(context, head) if follows(settings, head) else None
    if info.trimmed_head and info.n_lm_heads == 1 and not model.options.no_alloc:  # else not read
        use_trimmed_head(context)
    return None


def follows(settings: Settings, head: DraftHead) -> bool:
    """Whether a draft head follows the text."""
    # Text at imposed acceptance means nothing. Draws from a head depend on its rows, and so on the
    # past, on which the text of a seed must not depend.
    means_nothing = settings.synthetic_acceptance is not None or settings.draft_sampling
    return settings.draft_follow and head.ranked is not None and not means_nothing


class Following:
    """Has the draft head of a context follow the text of all its sequences together."""

    def __init__(self, context: Context, head: DraftHead) -> None:
        """Args:
        head: the present head of `context`; with `ranked`.
        """
        assert head.ranked is not None
        self._context, self._head, n = context, head, len(head.ids)
        self._slots = np.full(context.model.n_vocab, -1, dtype=np.int32)
        self._slots[head.ids] = np.arange(n)
        self._loose: list[int] = self._slots[head.ranked[: n // 2 - 1 : -1]].tolist()
        self._hand = 0
        self._used = np.zeros(n, dtype=bool)  # by slot: its token has occurred since the hand

    def see(self, tokens: Sequence[int], telemetries: Sequence[Telemetry], prompt: bool) -> None:
        """Continue the text.

        Args:
            telemetries: count the tokens.
            prompt: the tokens are a prompt's, not the target's choice in a round.
        """
        began = time.perf_counter()
        ids = np.asarray(tokens, dtype=np.int32)
        slots = self._slots[ids]
        outside = ids[slots < 0]
        self._used[slots[slots >= 0]] = True
        most = min(MOST_PER_PROMPT if prompt else MOST_PER_ROUND, len(self._loose))
        wanted = _most_frequent(outside, most) if len(outside) else outside
        if len(wanted):
            self._replace(wanted)
        seconds = time.perf_counter() - began
        for telemetry in telemetries:
            count = telemetry.draft_vocab
            if not prompt:
                count["tokens"] += len(ids)
                count["outside"] += len(outside)
            count["replaced"] += len(wanted)
            count["seconds"] += seconds

    def _replace(self, ids: Ids) -> None:
        """Give these tokens, which have no rows, the rows of other tokens."""
        slots = np.array([self._next_slot() for _ in ids], dtype=np.int32)
        assert self._context.draft_ids is not None
        dropped = self._context.draft_ids[slots]
        replace_draft_rows(self._context, slots, ids, self._head.rows(ids))
        self._slots[dropped] = -1
        self._slots[ids] = slots

    def _next_slot(self) -> int:
        """The next row to replace; it counts as used."""
        while True:
            slot = self._loose[self._hand]
            self._hand = (self._hand + 1) % len(self._loose)
            if not self._used[slot]:
                self._used[slot] = True
                return slot
            self._used[slot] = False


def _most_frequent(ids: Ids, most: int) -> Ids:
    """Up to `most` different ids: the most frequent; of equals, the ids that occurred last."""
    found, last, counts = np.unique(ids[::-1], return_index=True, return_counts=True)
    return found[np.lexsort((last, -counts))][:most]
