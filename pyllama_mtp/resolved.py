"""Settings as they hold for one model: which drafts it can make, and what its contexts need."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .errors import UsageError
from .llama import native
from .llama.contextoptions import ContextOptions
from .llama.model import Model
from .models.memory import padded
from .settings import HEAD_TYPES, Settings


@dataclass(frozen=True)
class Resolved:
    """What an engine is made by; see :meth:`.Settings.resolve`.

    Attributes:
        settings: as they hold for the model: `n_ctx`, in tokens, is above 0.
        n_sequences: places for so many sequences, each of `n_ctx` tokens.
        depth: most drafts per round.
        prompt_sync: "kv": the MTP head is in the target's context; "full": upstream's way; "": no
            head drafts.
    """

    settings: Settings
    n_sequences: int
    depth: int
    prompt_sync: str

    @classmethod
    def of(cls, model: Model, settings: Settings, n_sequences: int = 1) -> Resolved:
        """Settle everything but `n_ctx`, which may still be 0.

        Without an MTP head, "auto" drafts from the text itself, or not at all without `ngram`.
        Heads that draft a token each make no more drafts than there are heads, as in llama-server.

        Raises:
            UsageError: a number of drafts is asked for, and there is no head; or a setting that
                drafting in upstream's way does not support.
        """
        most = model.info.most_drafts if model.has_mtp else None
        if not model.has_mtp and settings.depth_limit:
            if settings.draft_n_max != "auto":
                raise UsageError(
                    f"{model.path} was loaded without an MTP head; use draft_n_max=0 or 'auto'"
                )
            settings = replace(settings, synthetic_acceptance=None, draft_sampling=False)
            if not settings.ngram:
                settings = replace(settings, draft_n_max=0)
        depth = min(most or settings.depth_limit, settings.depth_limit)
        sync = _prompt_sync(model, settings) if depth and model.has_mtp else ""
        return cls(settings, n_sequences, depth, sync)

    def with_n_ctx(self, n_ctx: int) -> Resolved:
        """The same with sequences of so many tokens."""
        return replace(self, settings=replace(self.settings, n_ctx=n_ctx))

    @property
    def n_snapshots(self) -> int:
        """Snapshots of the recurrent state that each sequence keeps."""
        return self.depth if self.settings.rollback != "replay" else 0

    @property
    def target(self) -> ContextOptions:
        """The options of the target's context. Raises UsageError: batches cannot hold a round."""
        s, depth, n_sequences = self.settings, self.depth, self.n_sequences
        assert s.n_ctx > 0
        # llama.cpp keeps a sequence's last depth + 1 tokens in one graph, and asserts room for one.
        least = max(depth + 2 if depth else 1, n_sequences * (depth + 1))
        if min(s.n_batch, s.n_ubatch) < least:
            of = f" of {n_sequences} sequences" if n_sequences > 1 else ""
            raise UsageError(
                f"n_batch is {s.n_batch} and n_ubatch {s.n_ubatch}; "
                f"verifying {depth} drafts{of} in one graph needs at least {least} of both"
            )
        n_ctx = max(s.n_ctx, least)  # llama.cpp cuts n_batch down to n_ctx
        if n_sequences > 1:
            n_ctx = n_sequences * padded(n_ctx)
        n_batch = min(s.n_batch, n_ctx)
        return ContextOptions(
            n_ctx=n_ctx,
            n_batch=n_batch,
            n_ubatch=min(s.n_ubatch, n_batch),
            n_threads=s.threads,
            type_k=s.cache_type_k,
            type_v=s.cache_type_v,
            flash_attn=s.flash_attn,
            rope=s.rope,
            with_mtp=self.prompt_sync == "kv",
            hidden=s.hidden,
            tap="all" if self.prompt_sync == "full" else "off",
            n_outputs_max=n_batch if s.prompt_rows == "all" else n_sequences * (depth + 1),
            n_rs_seq=self.n_snapshots,
            n_seq_max=n_sequences,
            unified=n_sequences > 1,
        )


def _prompt_sync(model: Model, settings: Settings) -> str:
    """How the MTP head is kept in step: "kv", or "full" if asked for or if library or architecture
    leave no choice. Raises UsageError: a setting that drafting in upstream's way, "full", does not
    support."""
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
