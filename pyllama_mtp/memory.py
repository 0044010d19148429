"""Memory: what an engine takes of the host's and of each device's, and how long its contexts may
be."""

from __future__ import annotations

import logging
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

from .engine import Engine, Resolved
from .errors import InsufficientMemoryError
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
#: Tokens per graph for experts on a GPU: prompts 1.6 times as fast as with 512 on an H100.
LARGE_N_UBATCH = 2048
#: Bytes that are more than graphs, logits and checkpoints take at usual sizes of batches.
GENEROUS = 4 << 30
#: Shares of the free memory that such a context may take. Others use the host's memory too.
HOST_SHARE, SHARE = 0.5, 0.9


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


#: What was simulated, by model and way: llama.cpp takes up to a second for it.
_KNOWN: WeakKeyDictionary[Model, dict[Resolved, list[dict[str, int]]]] = WeakKeyDictionary()


def simulate(model: Model, resolved: Resolved) -> list[DeviceMemory]:
    """The bytes that an engine would take, of the host and of each device: llama.cpp adds them up
    for contexts that allocate nothing."""
    known = _KNOWN.setdefault(model, {})
    if resolved not in known:
        with nullcontext(model) if model.options.no_alloc else model.without_memory() as twin:
            known[resolved] = _add_up(twin, resolved)
    library, free = native.load(), available_memory()
    host, *devices = known[resolved]
    memories = [DeviceMemory(HOST, host, free)]
    for device, parts in zip(model.used_devices, devices, strict=True):
        # As in llama.cpp, a device that does not say has as much as the host.
        there, total = library.device_memory(device)
        memories.append(DeviceMemory(library.device_name(device), parts, there if total else free))
    return memories


def _add_up(twin: Model, resolved: Resolved) -> list[dict[str, int]]:
    """The parts of each memory, of the host first; see :class:`DeviceMemory`.

    Args:
        twin: a model without memory; see :meth:`.Model.without_memory`.
    """
    with closing(Engine(twin, resolved)) as engine:
        no_device = native.load().ffi.NULL
        taken = [engine.memory(device) for device in (no_device, *twin.used_devices)]
        rows = engine.target.options.n_outputs_max
    n_checkpoints = resolved.n_sequences * resolved.settings.checkpoints if twin.is_recurrent else 0
    if n_checkpoints and not twin.info.validated:
        del taken[0]["checkpoints"]  # their size is not known
    else:
        taken[0]["checkpoints"] = n_checkpoints * state_bytes(twin.info)
    taken[0]["outputs"] = 4 * rows * twin.info.n_vocab
    return taken


def state_bytes(info: GGUFInfo) -> int:
    """Bytes of a recurrent state, F32: n_embd_r and n_embd_s of upstream src/llama-hparams.cpp."""
    channels = info.ssm_inner_size + 2 * info.ssm_k_heads * info.ssm_state_size
    n_floats = max(info.ssm_conv_kernel - 1, 0) * channels
    n_floats += info.ssm_state_size * info.ssm_inner_size
    return 4 * len(info.recurrent_layers) * n_floats


def _plenty(model: Model, resolved: Resolved) -> bool:
    """Whether memory is so large that nothing need be simulated, which takes a second with a
    vocabulary of 248,000 tokens: the smallest has four times the room for all weights, and for
    caches and states in F32, and GENEROUS more."""
    info, n, library = model.info, resolved.n_sequences, native.load()
    if not info.validated:
        return False
    layers = len(info.attention_layers) + info.n_mtp_layers
    row = info.n_head_kv * (info.head_dim_k + info.head_dim_v)
    needed = 4 * layers * row * n * padded(resolved.settings.n_ctx) + info.weight_bytes
    needed += n * (1 + resolved.n_snapshots) * state_bytes(info)
    free = available_memory(), *(library.device_memory(one)[0] for one in model.used_devices)
    return 4 * needed + GENEROUS <= min(free)


def _refuse_if_short(model: Model, resolved: Resolved, trained: int) -> None:
    """Raises InsufficientMemoryError, with the numbers, if one memory, which has the weights
    already, is too small. Lengths beyond the training length are tried in steps: llama.cpp takes
    half a minute to add up 2 billion tokens."""
    wanted = resolved.settings.n_ctx
    n = min(wanted, trained)
    while True:
        for one in simulate(model, resolved.with_n_ctx(n)):
            free = one.free + one.parts["weights"]
            if one.total > free:
                raise InsufficientMemoryError(
                    f"a context of {n} tokens needs {one.describe()}, and {gigabytes(free)} are "
                    "available; use a shorter context, a smaller cache type (q8_0, q4_0), fewer "
                    "sequences, a smaller model"
                    + ("" if one.name == HOST else ", or more of it on the CPU (--n-gpu-layers)")
                )
        if n == wanted:
            return
        n = min(4 * n, wanted)


def resolve(settings: Settings, model: Model, n_sequences: int = 1, room: int = 0) -> Resolved:
    """Settings as they hold for a model, once: what an engine is made by.

    `n_ctx` stays as it is, if it is not 0. Else it is `room`, but at least 8192 and at most the
    training length. Where that takes more than 0.9 of a device's free memory, or half of the
    host's, it is halved, but not below `room` or 1024. Then `n_ubatch` "auto" is settled.

    Args:
        n_sequences: number of sequences, each of `n_ctx` tokens.
        room: tokens of prompt and answer; 0: not known.

    Raises:
        UsageError: settings that do not go together with this model.
        InsufficientMemoryError: the length asked for does not fit.
    """
    auto = settings.n_ubatch == "auto"
    settings = replace(settings, n_ubatch=settings.ubatch)
    resolved = _with_n_ctx(model, Resolved.of(model, settings, n_sequences), room)
    if auto and experts_on_gpus(model):
        large = replace(resolved, settings=replace(resolved.settings, n_ubatch=LARGE_N_UBATCH))
        if _fits(model, large):
            return large
    return resolved


def _with_n_ctx(model: Model, resolved: Resolved, room: int) -> Resolved:
    """Settle `n_ctx`; see :func:`resolve`."""
    settings = resolved.settings
    wanted, trained = settings.n_ctx, settings.rope.length(model.n_ctx_train)
    needed = padded(room + resolved.depth + 1 if room else 0)
    usual = min(max(USUAL_N_CTX, needed), trained)
    if model.options.no_alloc:
        return resolved.with_n_ctx(wanted or usual)
    if not wanted:
        return _shortened(model, resolved.with_n_ctx(usual), min(usual, max(LEAST_N_CTX, needed)))
    if not _plenty(model, resolved):
        _refuse_if_short(model, resolved, trained)
    if wanted > padded(trained):
        log.warning(
            "a context of %d tokens is longer than the %d that the model was trained for; text "
            "beyond them may be poor",
            *(wanted, trained),
        )
    return resolved


def experts_on_gpus(model: Model) -> bool:
    """Whether the model has experts, and all of them are on GPUs of this machine."""
    info, options = model.info, model.options
    all_layers = options.n_gpu_layers < 0 or options.n_gpu_layers >= info.n_layer
    elsewhere = options.cpu_moe or options.n_cpu_moe or options.override_tensor
    if options.rpc_servers or elsewhere or not all_layers:
        return False
    return bool(info.n_expert) and model.on_gpu


def why_ubatch(model: Model, n_ubatch: int) -> str:
    """Why `n_ubatch` "auto" has become this."""
    if not experts_on_gpus(model):
        return "as is usual"
    if n_ubatch == LARGE_N_UBATCH:
        return "the experts are on a GPU, and a prompt reads each of them fewer times"
    return f"there is no room for graphs of {LARGE_N_UBATCH}, which experts on a GPU gain from"


def _shortened(model: Model, resolved: Resolved, least: int) -> Resolved:
    """Halve `n_ctx`, but not below `least`, until it takes no more than its share of memory."""
    n_ctx = usual = resolved.settings.n_ctx
    while n_ctx > least and not _fits(model, resolved.with_n_ctx(n_ctx)):
        n_ctx = max(n_ctx // 2, least)
    if n_ctx < usual:
        log.info("context of %d tokens, not %d: memory is short", n_ctx, usual)
    return resolved.with_n_ctx(n_ctx)


def _fits(model: Model, resolved: Resolved) -> bool:
    """Whether the shares of free memory have room for everything but the loaded weights."""
    return _plenty(model, resolved) or all(
        one.total - (0 if model.options.no_alloc else one.parts["weights"])
        <= one.free * (HOST_SHARE if one.name == HOST else SHARE)
        for one in simulate(model, resolved)
    )
