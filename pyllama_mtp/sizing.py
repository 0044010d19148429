"""How long an engine's contexts may be: what settings, model and memory allow."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from .engine import Engine
from .errors import InsufficientMemoryError
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
from .modelsettings import n_outputs, settings_for
from .settings import Settings

log = logging.getLogger("pyllama_mtp")

#: Tokens of context for n_ctx 0, unless prompt and answer need more; and the least to which that
#: is cut where memory is short.
USUAL_N_CTX, LEAST_N_CTX = 8192, 1024
HOST = "host memory"
#: Shares of the free memory that such a context may take. Others use the host's memory too.
HOST_SHARE, SHARE = 0.5, 0.9


def estimate(
    model: Model, settings: Settings, n_sequences: int, n_ctx: int
) -> tuple[int, int, int]:
    """Bytes that sequences of `n_ctx` tokens each take: caches and states of the trunk, exact; the
    cache and carry of the MTP head, exact; an upper bound of everything else, weights included.

    For a `validated` file. Takes no time; :func:`simulate` is exact."""
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


def simulate(twin: Model, settings: Settings, n_sequences: int, n_ctx: int) -> list[DeviceMemory]:
    """The bytes that an engine for sequences of `n_ctx` tokens would take, of the host and of each
    device: llama.cpp adds them up for contexts that allocate nothing.

    Args:
        twin: a model without memory; see :meth:`.Model.without_memory`.
    """
    info, library = twin.info, native.load()
    with closing(Engine(twin, replace(settings, n_ctx=n_ctx), n_sequences)) as engine:
        taken = [engine.memory(device) for device in (library.ffi.NULL, *twin.used_devices)]
        rows = engine.target.options.n_outputs_max
    n_checkpoints = n_sequences * settings.checkpoints if twin.is_recurrent else 0
    if n_checkpoints and not info.validated:
        del taken[0]["checkpoints"]  # their size is not known
    else:
        taken[0]["checkpoints"] = n_checkpoints * recurrent_bytes(info, 1, 0)
    taken[0]["outputs"] = 4 * rows * info.n_vocab
    free = available_memory()
    found = [DeviceMemory(HOST, taken[0], free)]
    for device, parts in zip(twin.used_devices, taken[1:], strict=True):
        # As in llama.cpp, a device that does not say has as much as the host.
        there, total = library.device_memory(device)
        found.append(DeviceMemory(library.device_name(device), parts, there if total else free))
    return found


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


def fitted(model: Model, settings: Settings, n_sequences: int, needed: int = 0) -> Settings:
    """The settings with the length of a sequence's context: `n_ctx` as it is, if it is not 0.

    Else the tokens `needed`, at least USUAL_N_CTX and at most the training length. Where that takes
    more than SHARE of a device's free memory, or HOST_SHARE of the host's, it is halved, but not
    below the tokens needed, or LEAST_N_CTX.

    Args:
        needed: tokens of prompt and answer; 0: not known.

    Raises:
        InsufficientMemoryError: the length asked for does not fit.
    """
    wanted, given = settings.n_ctx, (settings_for(model, settings), n_sequences)
    trained = settings.rope.length(model.n_ctx_train)
    usual = min(max(USUAL_N_CTX, padded(needed)), trained)
    if model.options.no_alloc:
        return replace(settings, n_ctx=wanted or usual)
    if wanted:
        what = f"a context of {wanted} tokens"
        _refuse_hopeless(model, *given, wanted, what)
        if not _plenty(model, *given, wanted):
            with model.without_memory() as twin:
                _refuse_if_short(simulate(twin, *given, wanted), what)
        if wanted > padded(trained):
            log.warning(
                "%s is longer than the %d that the model was trained for; text beyond them may be "
                "poor",
                *(what, trained),
            )
        return settings
    n_ctx, least = usual, min(usual, max(LEAST_N_CTX, padded(needed)))
    if not _plenty(model, *given, n_ctx):
        with model.without_memory() as twin:
            while n_ctx > least and not _fits(simulate(twin, *given, n_ctx)):
                n_ctx = max(n_ctx // 2, least)
    if n_ctx < usual:
        log.info("context of %d tokens, not %d: memory is short", n_ctx, usual)
    return replace(settings, n_ctx=n_ctx)


def room_for(model: Model, settings: Settings, n_prompt: int, max_tokens: int) -> Settings:
    """The settings with an `n_ctx` that has room for this prompt and answer, if it was 0."""
    return fitted(model, settings, 1, n_prompt + max_tokens + settings.depth_limit + 1)


def _fits(needed: Sequence[DeviceMemory]) -> bool:
    """Whether the shares of free memory have room for everything but the loaded weights."""
    return all(
        one.total - one.parts["weights"] <= one.free * (HOST_SHARE if one.name == HOST else SHARE)
        for one in needed
    )


def _plenty(model: Model, settings: Settings, n_sequences: int, n_ctx: int) -> bool:
    """Whether the smallest memory has twice the room needed, by an upper bound that takes no time.
    False for architectures without such a bound: :func:`simulate` them."""
    return model.info.validated and 2 * sum(estimate(model, settings, n_sequences, n_ctx)) <= min(
        _free(model)
    )


def _refuse_hopeless(
    model: Model, settings: Settings, n_sequences: int, n_ctx: int, what: str
) -> None:
    """Raises InsufficientMemoryError if all memories together are too small for the caches."""
    if not model.info.validated:
        return
    trunk, head, _ = estimate(model, settings, n_sequences, n_ctx)
    caches, free = trunk + head, sum(_free(model))
    if caches > free:
        raise InsufficientMemoryError(
            f"{what} needs {gigabytes(caches)} for caches, and "
            f"{gigabytes(free)} are available; use a shorter context, or a smaller cache type "
            "(q8_0, q4_0)"
        )


def _free(model: Model) -> list[int]:
    """Free bytes of the host's memory and of each of the model's devices."""
    library = native.load()
    return [available_memory(), *(library.device_memory(d)[0] for d in model.used_devices)]
