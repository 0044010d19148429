"""How large the contexts of an engine are: what settings, model and memory allow."""

from __future__ import annotations

import logging
from dataclasses import replace

from .errors import UsageError
from .model import Model
from .models.memory import MemoryEstimate, available_memory, check_memory, memory_estimate, padded
from .settings import Settings

log = logging.getLogger("pyllama_mtp")

#: A length that nobody asked for is not cut below this.
LEAST_N_CTX = 4096


def n_outputs(settings: Settings, n_sequences: int, n_batch: int) -> int:
    """Output rows that a decode of the target may have."""
    rows = n_sequences * (settings.depth_limit + 1)
    return n_batch if settings.prompt_rows == "all" else rows


def estimate(model: Model, settings: Settings, n_sequences: int, n_ctx: int) -> MemoryEstimate:
    """Memory of an engine whose sequences have `n_ctx` tokens each."""
    s, n_ctx = settings, n_sequences * n_ctx
    n_batch = min(s.n_batch, n_ctx)
    return memory_estimate(
        model.info,
        n_ctx,
        s.cache_type_k,
        s.cache_type_v,
        n_seq=n_sequences,
        n_rs_seq=s.depth_limit if s.rollback != "replay" else 0,
        mtp=s.depth_limit > 0,
        n_batch=n_batch,
        n_ubatch=min(s.n_ubatch, n_batch),
        n_outputs=n_outputs(s, n_sequences, n_batch),
        checkpoints=s.checkpoints,
    )


def choose_n_ctx(model: Model, settings: Settings, n_sequences: int) -> int:
    """The length asked for; for 0 the training length, halved until the caches fit memory.

    Raises:
        InsufficientMemoryError: the length asked for does not fit.
    """
    wanted, loaded = settings.n_ctx, model.info.weight_bytes
    trained = settings.rope.length(model.n_ctx_train)
    if wanted:
        # The weights are in memory already; on a GPU none of this is known here.
        if not model.on_gpu:
            needed = estimate(model, settings, n_sequences, wanted)
            check_memory(needed, available_memory() + loaded)
        if wanted > padded(trained):
            log.warning(
                "a context of %d tokens is longer than the %d that the model was trained for; "
                "what it writes beyond them may be poor",
                *(wanted, trained),
            )
        return wanted
    n_ctx = trained
    while n_ctx > LEAST_N_CTX:
        if estimate(model, settings, n_sequences, n_ctx).total <= available_memory() / 2 + loaded:
            break
        n_ctx //= 2
    if n_ctx < trained:
        log.info("context of %d tokens (of %d): it fits memory", n_ctx, trained)
    return n_ctx


def refuse_without_tap(settings: Settings) -> None:
    """Raises UsageError for what upstream's library, which has no tap, cannot do."""
    s = settings
    for name, value, possible in (
        ("prompt_sync", s.prompt_sync, ("auto", "full")),
        ("hidden", s.hidden, ("post-norm",)),
        ("handoff", s.handoff, ("auto", "host")),
        ("drafting", s.drafting, ("auto", "stepwise")),
        ("draft_vocab", s.draft_vocab, ("auto", "full")),
        ("draft_head_type", s.draft_head_type, ("auto", "file")),
    ):
        if value not in possible:
            raise UsageError(
                f"{name} {value!r} is not in upstream's library; use the patched variant, or "
                f"{name} {possible[-1]!r}"
            )


def settings_for(model: Model, settings: Settings) -> Settings:
    """The settings that hold for a model: "auto" is no drafts where it has no MTP head.

    Raises:
        UsageError: so many drafts are asked for, and there is no head.
    """
    if model.has_mtp or not settings.depth_limit:
        return settings
    if settings.draft_n_max == "auto":
        return replace(settings, draft_n_max=0, synthetic_acceptance=None)
    raise UsageError(f"{model.path} was loaded without an MTP head (mtp=False); use draft_n_max=0")
