"""Memory: what an engine takes of the host's and of each device's, and how long its contexts may
be."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from .engine import Engine, Resolved
from .errors import InsufficientMemoryError, UsageError
from .llama import native
from .llama.contextoptions import padded
from .llama.model import Model
from .machine import available_memory
from .models.modelinfo import GGUFInfo
from .settings import Settings

log = logging.getLogger("pyllama_mtp")

#: Tokens of context for n_ctx 0, unless prompt and answer need more; and the least to which that
#: is cut where memory is short.
USUAL_N_CTX, LEAST_N_CTX = 8192, 1024
HOST = "host memory"
#: Bytes that are more than graphs, logits and checkpoints take at usual sizes of batches.
GENEROUS = 4 << 30
#: Shares of the free memory that such a context may take. Others use the host's memory too.
HOST_SHARE, SHARE = 0.5, 0.9
_F32 = 4


def gigabytes(n: int) -> str:
    """Bytes, for messages."""
    return f"{n / 1e9:.2f} GB"


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
    """Settings as they hold for a model, once: what an engine is made by.

    `n_ctx` stays as it is, if it is not 0. Else it is `room`, but at least 8192 and at most the
    training length. Where that takes more than 0.9 of a device's free memory, or half of the
    host's, it is halved, but not below `room` or 1024.

    Args:
        n_sequences: number of sequences, each of `n_ctx` tokens.
        room: tokens of prompt and answer; 0: not known.

    Raises:
        UsageError: settings that do not go together with this model.
        InsufficientMemoryError: the length asked for does not fit.
    """
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
    snapshots = not native.load().has_tap
    return caches + recurrent_bytes(info, n, resolved.n_snapshots, snapshots)


def _free_bytes(model: Model) -> list[int]:
    """Free bytes of the host and of each device in use."""
    library = native.load()
    return [available_memory(), *(library.device_memory(d)[0] for d in model.used_devices)]


# -- bytes of caches and states, by a description that is validated --------------------------------


def layer_bytes(info: GGUFInfo, n_cells: int, type_k: str, type_v: str) -> int:
    """Bytes of the KV cache of one attention layer; exact.

    Raises:
        UsageError: rows of such a type cannot have this model's length.
    """
    k = _cache_row_bytes(type_k, "K", info.n_head_kv * info.head_dim_k)
    return n_cells * (k + _cache_row_bytes(type_v, "V", info.n_head_kv * info.head_dim_v))


def _cache_row_bytes(cache_type: str, which: str, n: int) -> int:
    """Bytes of a cache row of ``n`` elements; a row per cell (upstream src/llama-kv-cache.cpp)."""
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[cache_type.upper()]]
    if n % block:
        raise UsageError(f"{which} cache rows of {n} elements cannot be {cache_type}; use f16")
    return int(n // block * size)


def recurrent_bytes(info: GGUFInfo, n_seq: int, n_rs_seq: int, snapshots: bool = False) -> int:
    """F32 states: n_embd_r and n_embd_s of upstream src/llama-hparams.cpp. Where tokens can be
    taken back, a convolution has the inputs of a state and one per such token, and one of zeros; a
    delta net has one state, and beside it k, v, gate and beta of the last tokens, and of one that
    does nothing (our src/llama-memory-recurrent.h).

    Args:
        snapshots: both have a state per token, as upstream.
    """
    keys = info.ssm_k_heads * info.ssm_state_size
    channels, n_state = info.ssm_inner_size + 2 * keys, max(info.ssm_conv_kernel - 1, 0)
    n_embd_r = n_state * channels
    n_embd_s = info.ssm_state_size * info.ssm_inner_size
    rows = n_seq * (1 + n_rs_seq)
    if snapshots or not n_rs_seq:
        n_floats = rows * (n_embd_r + n_embd_s)
    else:
        repeated = info.architecture == "qwen3next"
        token = (
            (info.ssm_inner_size if repeated else keys) + info.ssm_inner_size + 2 * info.ssm_v_heads
        )
        inputs = n_seq * (n_state + n_rs_seq) + 1
        n_floats = inputs * channels + n_seq * n_embd_s + (rows + 1) * token
    return len(info.recurrent_layers) * n_floats * _F32
