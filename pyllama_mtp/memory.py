"""Settings as they hold for one model and the memory there is: which drafts it can make, what its
contexts need, and how long they may be."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from .errors import InsufficientMemoryError, UsageError
from .llama import native
from .llama.contextoptions import ContextOptions
from .llama.model import Model
from .models.memory import available_memory, gigabytes, layer_bytes, padded, recurrent_bytes
from .settings import HEAD_TYPES, Settings

log = logging.getLogger("pyllama_mtp")

#: Tokens of context for n_ctx 0, unless prompt and answer need more; and the least to which that
#: is cut where memory is short.
USUAL_N_CTX, LEAST_N_CTX = 8192, 1024
HOST = "host memory"
#: Bytes that are more than graphs, logits and checkpoints take at usual sizes of batches.
GENEROUS = 4 << 30
#: Shares of the free memory that such a context may take. Others use the host's memory too.
HOST_SHARE, SHARE = 0.5, 0.9


@dataclass(frozen=True)
class Resolved:
    """What an engine is made by; see :meth:`.Settings.resolve`.

    Attributes:
        settings: as they hold for the model: `n_ctx`, in tokens, is above 0.
        n_sequences: number of sequences, each of `n_ctx` tokens.
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
    def measured_counts(self) -> list[int]:
        """Numbers of sequences whose rounds are measured for "auto": a few, and all."""
        return [*(n for n in (1, 2, 4, 8) if n < self.n_sequences), self.n_sequences]

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


# -- memory ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DeviceMemory:
    """The bytes that an engine takes of one memory.

    Attributes:
        name: of the device, or HOST.
        parts: bytes by purpose, as in :meth:`.Engine.memory`; on the host also "outputs", the rows
            of logits. "checkpoints" is absent where their size is not known.
        free: bytes still free there.
    """

    name: str
    parts: dict[str, int]
    free: int

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return sum(self.parts.values())

    def describe(self) -> str:
        """The total and its parts, for messages."""
        shown = sorted(((n, name) for name, n in self.parts.items() if n), reverse=True)
        parts = ", ".join(f"{name.replace('_', ' ')} {gigabytes(n)}" for n, name in shown[:4])
        return f"{gigabytes(self.total)} of {self.name} ({parts})"


def simulate(twin: Model, resolved: Resolved) -> list[DeviceMemory]:
    """The bytes that an engine would take, of the host and of each device: llama.cpp adds them up
    for contexts that allocate nothing.

    Args:
        twin: a model without memory; see :meth:`.Model.without_memory`.
    """
    from .engine import Engine

    info, library = twin.info, native.load()
    with closing(Engine(twin, resolved)) as engine:
        taken = [engine.memory(device) for device in (library.ffi.NULL, *twin.used_devices)]
        rows = engine.target.options.n_outputs_max
    n_checkpoints = resolved.n_sequences * resolved.settings.checkpoints if twin.is_recurrent else 0
    if n_checkpoints and not info.validated:
        del taken[0]["checkpoints"]  # their size is not known
    else:
        taken[0]["checkpoints"] = n_checkpoints * recurrent_bytes(info, 1, 0)
    taken[0]["outputs"] = 4 * rows * info.n_vocab
    free = available_memory()
    memories = [DeviceMemory(HOST, taken[0], free)]
    for device, parts in zip(twin.used_devices, taken[1:], strict=True):
        # As in llama.cpp, a device that does not say has as much as the host.
        there, total = library.device_memory(device)
        memories.append(DeviceMemory(library.device_name(device), parts, there if total else free))
    return memories


def _refuse_if_short(needed: Sequence[DeviceMemory], what: str) -> None:
    """Raises InsufficientMemoryError, with the numbers, if one memory, which has the weights
    already, is too small."""
    for one in needed:
        free = one.free + one.parts["weights"]
        if one.total > free:
            raise InsufficientMemoryError(
                f"{what} needs {one.describe()}, and {gigabytes(free)} are available; use a "
                "shorter context, a smaller cache type (q8_0, q4_0), fewer sequences, a smaller "
                "model"
                + ("" if one.name == HOST else ", or more of it on the CPU (--n-gpu-layers)")
            )


def resolve(settings: Settings, model: Model, n_sequences: int = 1, room: int = 0) -> Resolved:
    """What :meth:`.Settings.resolve` gives, which see."""
    resolved = Resolved.of(model, settings, n_sequences)
    wanted, trained = settings.n_ctx, settings.rope.length(model.n_ctx_train)
    needed = padded(room + resolved.depth + 1 if room else 0)
    usual = min(max(USUAL_N_CTX, needed), trained)
    if model.options.no_alloc:
        return resolved.with_n_ctx(wanted or usual)
    if not wanted:
        return _shortened(model, resolved.with_n_ctx(usual), min(usual, max(LEAST_N_CTX, needed)))
    if not _plenty(model, resolved):
        _refuse_if_hopeless(model, resolved)
        with model.without_memory() as twin:
            _refuse_if_short(simulate(twin, resolved), f"a context of {wanted} tokens")
    if wanted > padded(trained):
        log.warning(
            "a context of %d tokens is longer than the %d that the model was trained for; text "
            "beyond them may be poor",
            *(wanted, trained),
        )
    return resolved


def _shortened(model: Model, resolved: Resolved, least: int) -> Resolved:
    """Halve `n_ctx`, but not below `least`, until it takes no more than its share of memory."""
    if _plenty(model, resolved):
        return resolved
    n_ctx = usual = resolved.settings.n_ctx
    with model.without_memory() as twin:
        while n_ctx > least and not _fits(simulate(twin, resolved.with_n_ctx(n_ctx))):
            n_ctx = max(n_ctx // 2, least)
    if n_ctx < usual:
        log.info("context of %d tokens, not %d: memory is short", n_ctx, usual)
    return resolved.with_n_ctx(n_ctx)


def _fits(needed: Sequence[DeviceMemory]) -> bool:
    """Whether the shares of free memory have room for everything but the loaded weights."""
    return all(
        one.total - one.parts["weights"] <= one.free * (HOST_SHARE if one.name == HOST else SHARE)
        for one in needed
    )


def _plenty(model: Model, resolved: Resolved) -> bool:
    """Whether memory is so large that nothing need be simulated, which takes most of a second with
    a vocabulary of 248,000 tokens: the smallest memory has four times the room for all weights and
    caches, and GENEROUS more.
    """
    if not model.info.validated:
        return False
    needed = model.info.weight_bytes + _cache_bytes(model, resolved)
    return 4 * needed + GENEROUS <= min(_free_bytes(model))


def _refuse_if_hopeless(model: Model, resolved: Resolved) -> None:
    """Raises InsufficientMemoryError if all memories together cannot hold the caches: llama.cpp
    takes half a minute to say so, of 2 billion tokens."""
    if not model.info.validated:
        return
    caches, free = _cache_bytes(model, resolved), sum(_free_bytes(model))
    if caches > free:
        raise InsufficientMemoryError(
            f"a context of {resolved.settings.n_ctx} tokens needs {gigabytes(caches)} for caches, "
            f"and {gigabytes(free)} are available; use a shorter context, or a smaller cache type "
            "(q8_0, q4_0)"
        )


def _cache_bytes(model: Model, resolved: Resolved) -> int:
    """Bytes of K and V and of recurrent states, by a description that is validated."""
    info, s, n = model.info, resolved.settings, resolved.n_sequences
    layers = len(info.attention_layers) + (info.n_mtp_layers if resolved.prompt_sync else 0)
    caches = layers * layer_bytes(info, n * padded(s.n_ctx), s.cache_type_k, s.cache_type_v)
    return caches + recurrent_bytes(info, n, resolved.n_snapshots)


def _free_bytes(model: Model) -> list[int]:
    """Free bytes of the host and of each device in use."""
    library = native.load()
    return [available_memory(), *(library.device_memory(d)[0] for d in model.used_devices)]
