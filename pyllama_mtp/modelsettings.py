"""Settings as they hold for one model: which drafts it can make, and how its context is made."""

from __future__ import annotations

from dataclasses import replace

from .errors import UsageError
from .llama import native
from .llama.contextoptions import ContextOptions
from .llama.model import Model
from .models.memory import padded
from .settings import HEAD_TYPES, Settings


def settings_for(model: Model, settings: Settings) -> Settings:
    """The settings that hold for a model.

    Without an MTP head, "auto" drafts from the text itself, or not at all without `ngram`. Heads
    that draft a token each make no more drafts than there are heads, as in llama-server. Raises
    UsageError: a number of drafts is asked for, and there is no head.
    """
    if model.has_mtp or not settings.depth_limit:
        most = model.info.most_drafts
        return settings.at_most(most) if most else settings
    if settings.draft_n_max == "auto":
        settings = replace(settings, synthetic_acceptance=None, draft_sampling=False)
        return settings if settings.ngram else replace(settings, draft_n_max=0)
    raise UsageError(f"{model.path} was loaded without an MTP head; use draft_n_max=0 or 'auto'")


def prompt_sync(model: Model, settings: Settings) -> str:
    """How the MTP head is kept in step: "kv", or "full" if asked for or if library or architecture
    leave no choice; "" where the head drafts nothing. Raises UsageError: a setting that drafting in
    upstream's way, "full", does not support."""
    if not (settings.depth_limit and model.has_mtp):
        return ""
    s, has_patches = settings, native.load().has_tap
    possible = has_patches and model.info.in_trunk
    if possible and s.prompt_sync != "full":
        return "kv"
    if not has_patches:
        where, other = "in upstream's library", "the patched variant"
    elif not possible:
        where, other = f"there for models of architecture {model.architecture!r}", "another model"
    else:
        where, other = "with prompt_sync 'full'", "prompt_sync 'kv'"
    part = has_patches and not possible
    for name, value, usable in (
        ("prompt_sync", s.prompt_sync, ("auto", "full")),
        ("hidden", s.hidden, ("post-norm",)),
        ("draft_vocab", s.draft_vocab, (s.draft_vocab,) if part else ("auto", "full")),
        ("draft_head_type", s.draft_head_type, HEAD_TYPES if part else ("auto", "file")),
    ):
        if value not in usable:
            raise UsageError(
                f"{name} {value!r} is not {where}; use {other}, or {name} {usable[-1]!r}"
            )
    return "full"


def n_outputs(settings: Settings, n_sequences: int, n_batch: int) -> int:
    """Most output rows of a decode of the target."""
    rows = n_sequences * (settings.depth_limit + 1)
    return n_batch if settings.prompt_rows == "all" else rows


def target_options(settings: Settings, n_sequences: int, sync: str) -> ContextOptions:
    """The options of the target's context.

    Args:
        settings: from :func:`settings_for`, with an `n_ctx` above 0.
        sync: from :func:`prompt_sync`.

    Raises:
        UsageError: batches that cannot hold a round.
    """
    assert settings.n_ctx > 0
    depth = settings.depth_limit
    # llama.cpp keeps a sequence's last depth + 1 tokens in one graph, and asserts room for one.
    least = max(depth + 2 if depth else 1, n_sequences * (depth + 1))
    if min(settings.n_batch, settings.n_ubatch) < least:
        of = f" of {n_sequences} sequences" if n_sequences > 1 else ""
        raise UsageError(
            f"n_batch is {settings.n_batch} and n_ubatch {settings.n_ubatch}; "
            f"verifying {depth} drafts{of} in one graph needs at least {least} of both"
        )
    n_ctx = max(settings.n_ctx, least)  # llama.cpp cuts n_batch down to n_ctx
    if n_sequences > 1:
        n_ctx = n_sequences * padded(n_ctx)
    n_batch = min(settings.n_batch, n_ctx)
    return ContextOptions(
        n_ctx=n_ctx,
        n_batch=n_batch,
        n_ubatch=min(settings.n_ubatch, n_batch),
        n_threads=settings.threads,
        type_k=settings.cache_type_k,
        type_v=settings.cache_type_v,
        flash_attn=settings.flash_attn,
        rope=settings.rope,
        with_mtp=sync == "kv",
        hidden=settings.hidden,
        tap="all" if sync == "full" else "off",
        n_outputs_max=n_outputs(settings, n_sequences, n_batch),
        n_rs_seq=depth if settings.rollback != "replay" else 0,
        n_seq_max=n_sequences,
        unified=n_sequences > 1,
    )
