"""How large the contexts of an engine are: what settings, model and memory allow."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from .errors import InsufficientMemoryError, UsageError
from .llama import native
from .llama.model import Model
from .models.memory import (
    available_memory,
    buffer_bytes,
    gigabytes,
    layer_bytes,
    padded,
    recurrent_bytes,
)
from .settings import Settings

log = logging.getLogger("pyllama_mtp")

#: Tokens of context where nobody says how many, unless prompt and answer need more.
USUAL_N_CTX = 8192
#: Such a length is not cut below this where memory is short.
LEAST_N_CTX = 1024
HOST = "host memory"
#: Shares of what is free that it may take: the host's memory is others' too.
HOST_SHARE, SHARE = 0.5, 0.9


def n_outputs(settings: Settings, n_sequences: int, n_batch: int) -> int:
    """Output rows that a decode of the target may have."""
    rows = n_sequences * (settings.depth_limit + 1)
    return n_batch if settings.prompt_rows == "all" else rows


def estimate(
    model: Model, settings: Settings, n_sequences: int, n_ctx: int
) -> tuple[int, int, int]:
    """Bytes where sequences have `n_ctx` tokens each: caches and states of the trunk, exact; the
    cache and carry of the MTP head, exact; an upper bound of everything else, weights included. Of
    a file that is `validated`. It takes no time; see :func:`simulate`."""
    s, info, mtp = settings, model.info, model.has_mtp and settings.depth_limit > 0
    n_cells, n_batch = n_sequences * padded(n_ctx), min(s.n_batch, n_sequences * n_ctx)
    layer = layer_bytes(info, n_cells, s.cache_type_k, s.cache_type_v)
    n_snapshots = s.depth_limit if s.rollback != "replay" else 0
    states = recurrent_bytes(info, n_sequences, n_snapshots)
    carry = 4 * info.n_embd * n_sequences * (1 + n_snapshots)
    rows = max(min(n_outputs(s, n_sequences, n_batch), n_batch), n_sequences)
    buffers = buffer_bytes(info, n_batch, min(s.n_ubatch, n_batch), rows, n_cells)
    # Backends that repack matrices, or hold them on a device, copy embeddings for the LM head.
    copied = next((t.nbytes for t in info.tensors if t.name == "token_embd.weight"), 0)
    return (
        len(info.attention_layers) * layer + states,
        info.n_mtp_layers * layer + carry if mtp else 0,
        info.weight_bytes
        + (copied if info.tied_embeddings else 0)
        + (2 if mtp else 1) * buffers
        + n_sequences * s.checkpoints * recurrent_bytes(info, 1, 0),
    )


@dataclass(frozen=True)
class DeviceMemory:
    """What an engine takes of one memory.

    Attributes:
        name: of the device, or HOST.
        parts: bytes by purpose: those of :meth:`.Engine.memory`, and on the host "outputs", rows of
            logits that are made when somebody samples from them; no "checkpoints" where their size
            is not known.
        free: bytes that can still be had there.
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


def simulate(twin: Model, settings: Settings, n_sequences: int, n_ctx: int) -> list[DeviceMemory]:
    """What an engine whose sequences have `n_ctx` tokens each would take, of the host and of each
    device: contexts are made that allocate nothing, and llama.cpp adds up what they would.

    Args:
        twin: a model without memory; see :meth:`.Model.without_memory`.
    """
    from .engine import Engine

    info, library = twin.info, native.load()
    with closing(Engine(twin, replace(settings, n_ctx=n_ctx), n_sequences)) as engine:
        taken = [engine.memory(device) for device in (library.ffi.NULL, *twin.used_devices)]
        rows = engine.target.options.n_outputs_max
    n_checkpoints = n_sequences * settings.checkpoints if twin.is_recurrent else 0
    if n_checkpoints and not info.validated:
        del taken[0]["checkpoints"]  # nobody says how large they will be
    else:
        taken[0]["checkpoints"] = n_checkpoints * recurrent_bytes(info, 1, 0)
    taken[0]["outputs"] = 4 * rows * info.n_vocab
    free = available_memory()
    found = [DeviceMemory(HOST, taken[0], free)]
    for device, parts in zip(twin.used_devices, taken[1:], strict=True):
        # As llama.cpp has it, a device that does not say has as much as the host.
        there, total = library.device_memory(device)
        found.append(DeviceMemory(library.device_name(device), parts, there if total else free))
    return found


def refuse_if_short(needed: Sequence[DeviceMemory], loaded: bool, what: str) -> None:
    """Raises InsufficientMemoryError, with the numbers, where one memory has not enough.

    Args:
        loaded: the weights are there already.
        what: is to be made, for the message.
    """
    for one in needed:
        free = one.free + (one.parts["weights"] if loaded else 0)
        if one.total > free:
            raise InsufficientMemoryError(
                f"{what} needs {one.describe()}, and {gigabytes(free)} are available; use a "
                "shorter context, a smaller cache type (q8_0, q4_0), fewer sequences, a smaller "
                "model"
                + ("" if one.name == HOST else ", or more of it on the CPU (--n-gpu-layers)")
            )


def choose_n_ctx(model: Model, settings: Settings, n_sequences: int, needed: int = 0) -> int:
    """The length asked for; for 0 what is `needed`, at least USUAL_N_CTX, at most the training
    length. Where that takes more than SHARE of the free memory of a device that holds the model, or
    HOST_SHARE of the host's, it is halved, but not below what is needed, or LEAST_N_CTX.

    Args:
        needed: tokens of prompt and answer, where they are known.

    Raises:
        InsufficientMemoryError: the length asked for does not fit.
    """
    wanted = settings.n_ctx
    trained = settings.rope.length(model.n_ctx_train)
    usual = min(max(USUAL_N_CTX, padded(needed)), trained)
    if model.options.no_alloc:
        return wanted or usual
    given = settings, n_sequences
    if wanted:
        _refuse_hopeless(model, *given, wanted)
        if not _plenty(model, *given, wanted):
            with model.without_memory() as twin:
                parts = simulate(twin, *given, wanted)
            refuse_if_short(parts, True, f"a context of {wanted} tokens")
        if wanted > padded(trained):
            log.warning(
                "a context of %d tokens is longer than the %d that the model was trained for; "
                "what it writes beyond them may be poor",
                *(wanted, trained),
            )
        return wanted
    n_ctx, least = usual, min(usual, max(LEAST_N_CTX, padded(needed)))
    if not _plenty(model, *given, n_ctx):
        with model.without_memory() as twin:
            while n_ctx > least and not _fits(simulate(twin, *given, n_ctx)):
                n_ctx = max(n_ctx // 2, least)
    if n_ctx < usual:
        log.info("context of %d tokens, not %d: memory is short", n_ctx, usual)
    return n_ctx


def room_for(model: Model, settings: Settings, n_prompt: int, max_tokens: int) -> Settings:
    """The settings, with a context that has room for this prompt and answer where `n_ctx` is 0."""
    needed = n_prompt + max_tokens + settings.depth_limit + 1
    n_ctx = choose_n_ctx(model, settings_for(model, settings), 1, needed)
    return replace(settings, n_ctx=n_ctx)


def _fits(needed: Sequence[DeviceMemory]) -> bool:
    """Whether beside the loaded weights there is room, and more than that."""
    return all(
        one.total - one.parts["weights"] <= one.free * (HOST_SHARE if one.name == HOST else SHARE)
        for one in needed
    )


def _plenty(model: Model, settings: Settings, n_sequences: int, n_ctx: int) -> bool:
    """Whether twice of all that is needed has room in the smallest memory, by an upper bound that
    takes no time. False where there is none: of other architectures llama.cpp is asked."""
    return model.info.validated and 2 * sum(estimate(model, settings, n_sequences, n_ctx)) <= min(
        _free(model)
    )


def _refuse_hopeless(model: Model, settings: Settings, n_sequences: int, n_ctx: int) -> None:
    """Raises InsufficientMemoryError where the caches alone do not fit all memories together."""
    if not model.info.validated:
        return
    trunk, head, _ = estimate(model, settings, n_sequences, n_ctx)
    caches, free = trunk + head, sum(_free(model))
    if caches > free:
        raise InsufficientMemoryError(
            f"a context of {n_ctx} tokens needs {gigabytes(caches)} for caches, and "
            f"{gigabytes(free)} are available; use a shorter context, or a smaller cache type "
            "(q8_0, q4_0)"
        )


def _free(model: Model) -> list[int]:
    """Bytes that are free in the host's memory and in those of the model's devices."""
    library = native.load()
    return [available_memory(), *(library.device_memory(d)[0] for d in model.used_devices)]


def prompt_sync(model: Model, settings: Settings) -> str:
    """How the MTP head is kept in step: "kv", or "full" where it was asked for, or where library or
    architecture leave no choice.

    Raises:
        UsageError: what drafting in upstream's way, "full", cannot do.
    """
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
    for name, value, usable in (
        ("prompt_sync", s.prompt_sync, ("auto", "full")),
        ("hidden", s.hidden, ("post-norm",)),
        ("draft_vocab", s.draft_vocab, ("auto", "full")),
        ("draft_head_type", s.draft_head_type, ("auto", "file")),
    ):
        if value not in usable:
            raise UsageError(
                f"{name} {value!r} is not {where}; use {other}, or {name} {usable[-1]!r}"
            )
    return "full"


def settings_for(model: Model, settings: Settings) -> Settings:
    """The settings that hold for a model: where it has no MTP head, "auto" is drafts from the text
    itself, or none without `ngram`; heads that draft a token each make no more drafts than there
    are heads, as in llama-server.

    Raises:
        UsageError: so many drafts are asked for, and there is no head.
    """
    if model.has_mtp or not settings.depth_limit:
        most = model.info.most_drafts
        return settings.at_most(most) if most else settings
    if settings.draft_n_max == "auto":
        settings = replace(settings, synthetic_acceptance=None, draft_sampling=False)
        return settings if settings.ngram else replace(settings, draft_n_max=0)
    raise UsageError(f"{model.path} was loaded without an MTP head; use draft_n_max=0 or 'auto'")
