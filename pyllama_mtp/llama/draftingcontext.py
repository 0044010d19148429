"""The MTP block in the trunk's context: its drafts, and the LM head that they come from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import FatalDecodeError, InsufficientMemoryError, UsageError
from . import native
from .nativecontext import Floats, Ints, NativeContext

if TYPE_CHECKING:
    from .drafthead import HeadRows

NAN = "the model's logits are NaN: damaged weights, or a kernel bug"


class DraftingContext(NativeContext):
    """A context that drafts, if it was made with_mtp.

    Attributes:
        draft_ids: [n] int32: tokens that the draft head is over, by row; None: the whole
            vocabulary.
    """

    draft_ids: Ints | None = None
    _draft_shape: tuple[int, ...] = ()

    def draft(
        self,
        tokens: Ints,
        seqs: Ints,
        n: int,
        n_candidates: int = 0,
        temperatures: Floats | None = None,
        noise: Floats | None = None,
    ) -> Ints:
        """The MTP block's drafts for what follows the newest token of each sequence, in one graph.

        Caches and the results of the last decode stay. For a context with_mtp.

        Args:
            tokens: [n_seqs] int32: the newest tokens, not decoded yet.
            seqs: [n_seqs] int32: each has decoded something. More than one need a unified cache.
            n: drafts for each.
            n_candidates: keep the logits of so many best tokens of every draft; see
                :attr:`draft_logits`.
            temperatures: [n_seqs] float32, above 0: drafts are drawn from softmax(logits /
                temperature) by `noise`; None: drafts are the best tokens.
            noise: [n, n_seqs, n_head] float32 from the standard Gumbel distribution: the largest of
                logits / temperature + noise is drawn; see :attr:`n_head`. Zeros give the best
                token.

        Returns:
            [n, n_seqs] int32.

        Raises:
            UsageError: no such context, or arrays of other shapes.
            NoKVSlotError: the cache has no room for the drafts.
            FatalDecodeError: the logits hold a NaN (on a GPU drafts do not tell).
            DecodeError: as :meth:`decode`.
        """
        self._check_draft(tokens, seqs, n, n_candidates)
        view, null = self._ffi.from_buffer, self._ffi.NULL
        tokens, seqs = (np.ascontiguousarray(a, dtype=np.int32) for a in (tokens, seqs))
        drafts = np.empty((n, len(seqs)), dtype=np.int32)
        drawn = null, null
        self._draft_shape = (n, len(seqs), n_candidates)
        if temperatures is not None or noise is not None:
            self._draft_shape = (n, len(seqs), self.n_head)
            drawn = self._noise(temperatures, noise, n_candidates)
        given = view("int32_t[]", tokens), view("int32_t[]", seqs), len(seqs), n, n_candidates
        code = self._run(self._lib.pyllama_mtp_draft, *given, *drawn, view("int32_t[]", drafts))
        if code != 0:
            self._fail(code)
        self._raise_what_came()
        if drafts.min() < 0:
            raise FatalDecodeError(NAN)
        return drafts

    def _noise(
        self, temperatures: Floats | None, noise: Floats | None, n_candidates: int
    ) -> tuple[Any, Any]:
        """Noise and factors for the native call."""
        shapes = [None if given is None else given.shape for given in (noise, temperatures)]
        if shapes != [self._draft_shape, self._draft_shape[1:2]] or n_candidates:
            raise UsageError(
                f"noise of shape {shapes[0]} and temperatures of shape {shapes[1]}, expected "
                f"{self._draft_shape} and {self._draft_shape[1:2]}, without candidates"
            )
        assert temperatures is not None and noise is not None
        pair = (noise, 1 / temperatures)
        arrays = [np.ascontiguousarray(given, dtype=np.float32) for given in pair]
        return tuple(self._ffi.from_buffer("float[]", array) for array in arrays)

    def _check_draft(self, tokens: Ints, seqs: Ints, n: int, n_candidates: int) -> None:
        """Refuse what would have the native call read beyond its arrays, or fail without a
        reason."""
        options = self.options
        if not options.with_mtp:
            raise UsageError("drafts come from a context with_mtp")
        if options.n_seq_max > 1 and not options.unified:
            raise UsageError("drafts of a context for several sequences need a unified cache")
        if n < 1 or n_candidates < 0 or not 0 < len(seqs) == len(tokens):
            raise UsageError(
                f"{n} drafts with {n_candidates} candidates after {len(tokens)} tokens of "
                f"{len(seqs)} sequences: it takes one draft or more, and a token of each sequence"
            )

    @property
    def draft_logits(self) -> Floats:
        """[n, n_seqs, n_candidates] float32 of the last :meth:`draft`: logits of the best tokens of
        each, in no order; of drawn drafts all logits, [n, n_seqs, n_head]. A view that the next
        draft overwrites. Raises UsageError when the last draft left none."""
        n = self._ffi.new("int32_t *")
        pointer = self._lib.llama_mtp_get_draft_logits(self.handle, n)
        if not n[0]:
            raise UsageError("the last draft left no logits: ask it for candidates")
        return self._view(pointer, int(n[0])).reshape(*self._draft_shape[:2], -1)

    def reserve_rounds(self, n_seqs: int, depths: Iterable[int]) -> None:
        """Allocate what rounds of `n_seqs` sequences need, for each of these numbers of drafts.
        Raises InsufficientMemoryError: there is no room for it."""
        for n in depths:
            if not self._call(self._lib.pyllama_mtp_reserve, n_seqs, n):
                self.model.refuse_lost_worker()
                said = native.take_recent_errors()
                raise InsufficientMemoryError(f"no memory for rounds of {n} drafts: {said}")

    # -- LM head -------------------------------------------------------------------------------

    @property
    def n_head(self) -> int:
        """Rows of the LM head that drafts come from."""
        return self.model.n_vocab if self.draft_ids is None else len(self.draft_ids)

    def set_draft_head(self, rows: HeadRows | None, ids: Ints) -> None:
        """Give the MTP block an LM head over a part of the vocabulary, for :meth:`draft`.

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
            self._use_model_draft_head(ids)
            return
        data = np.ascontiguousarray(rows.data)
        if not len(ids) or rows.type < 0:
            raise UsageError(f"a draft head of {len(ids)} rows of type {rows.type}")
        pointers = (self._ffi.from_buffer(data), self._ffi.from_buffer("int32_t[]", ids))
        given = rows.type, pointers[0], data.nbytes, pointers[1], len(ids)
        if not self._call(self._lib.pyllama_mtp_set_draft_head, *given):
            raise self._refusal("a draft head", "it needs the patched library")
        self.draft_ids = ids

    def _use_model_draft_head(self, ids: Ints) -> None:
        out = self._ffi.new("int32_t *[1]")
        n = self._call(self._lib.pyllama_mtp_use_model_draft_head, out)
        if not n:
            raise self._refusal("a draft head", "it needs a trimmed head")
        self.model.refuse_lost_worker()
        native_ids = np.frombuffer(self._ffi.buffer(out[0], 4 * n), dtype=np.int32)
        if not np.array_equal(native_ids, ids):
            raise UsageError("the file's trimmed head has other tokens than these")
        self.draft_ids = ids

    def use_own_head(self) -> None:
        """Give the MTP block its own LM head again, over the whole vocabulary."""
        if self.draft_ids is not None:
            null = self._ffi.NULL
            self._call(self._lib.pyllama_mtp_set_draft_head, 0, null, 0, null, 0)
            self.draft_ids = None

    def replace_draft_rows(self, slots: Ints, ids: Ints, rows: HeadRows) -> None:
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
        data = np.ascontiguousarray(rows.data)
        pointers = [self._ffi.from_buffer("int32_t[]", array) for array in (slots, ids)]
        given = (len(ids), *pointers, self._ffi.from_buffer(data), data.nbytes)
        if not self._call(self._lib.pyllama_mtp_replace_draft_rows, *given):
            said = native.take_recent_errors()
            self.model.refuse_lost_worker()
            raise UsageError(f"no row is replaced: {said or 'it needs the patched library'}")
        assert self.draft_ids is not None
        self.draft_ids = self.draft_ids.copy()  # distributions drawn before refer to the old array
        self.draft_ids[slots] = ids
