"""Drafts of the MTP block in the target's context: a chain for each sequence, in one graph."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import FatalDecodeError, InsufficientMemoryError, UsageError
from . import native
from .batch import Floats, Ints

if TYPE_CHECKING:
    from .context import Context


def compute_drafts(
    context: Context,
    tokens: Ints,
    seqs: Ints,
    n: int,
    n_candidates: int = 0,
    temperatures: Floats | None = None,
    noise: Floats | None = None,
) -> Ints:
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


def _check_draft(context: Context, tokens: Ints, seqs: Ints, n: int, n_candidates: int) -> None:
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
