"""How much memory a model needs at most, and how much this process may still use.

Cache sizes follow upstream's allocation exactly; compute buffers are an upper bound. What is exact
in everything, and needs the library, is :func:`pyllama_mtp.sizing.simulate`.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from pyllama_mtp.errors import UsageError
from pyllama_mtp.models.ggufinfo import GGUFInfo
from pyllama_mtp.settings import CACHE_TYPES

#: Types the KV cache can have here, as the command line spells them.
_CTX_PADDING = 256  # upstream src/llama-context.cpp: cparams.n_ctx = GGML_PAD(cparams.n_ctx, 256)
_F32 = 4


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes by purpose; ``total`` adds them up. Everything but ``compute`` is exact on CPU.

    weights: all tensors of the trunk, and of the MTP blocks when MTP is on.
    tied_output: a second copy of a tied token embedding, which backends that repack matrices
        (AMX, 4-bit kernels) or hold them on a device make for the LM head; an upper bound.
    kv_target: KV cache of the trunk's full-attention layers.
    recurrent: convolution and delta-rule states, (1 + n_rs_seq) sets per sequence.
    kv_draft: KV cache of the MTP blocks (draft context); 0 without MTP.
    outputs: host rows for logits and, with MTP, hidden states of both contexts.
    compute: graph buffers of both contexts, estimated.
    checkpoints: copies of the recurrent state of one sequence, on the host.
    """

    weights: int
    tied_output: int
    kv_target: int
    recurrent: int
    kv_draft: int
    outputs: int
    compute: int
    checkpoints: int

    @property
    def total(self) -> int:
        """The sum of all parts, in bytes."""
        caches = self.kv_target + self.recurrent + self.kv_draft
        buffers = self.outputs + self.compute + self.checkpoints
        return self.weights + self.tied_output + caches + buffers


def memory_estimate(
    info: GGUFInfo,
    n_ctx: int,
    type_k: str = "f16",
    type_v: str = "f16",
    n_seq: int = 1,
    n_rs_seq: int = 0,
    mtp: bool = True,
    n_batch: int = 2048,
    n_ubatch: int = 512,
    n_outputs: int = 16,
    checkpoints: int = 0,
) -> MemoryEstimate:
    """Estimate the memory for one target context and, with ``mtp``, one draft context.

    Args:
        info: the model.
        n_ctx: context length in tokens, over all sequences.
        type_k: type of the K cache, one of :data:`pyllama_mtp.settings.CACHE_TYPES`.
        type_v: type of the V cache.
        n_seq: sequences (``n_seq_max``).
        n_rs_seq: recurrent-state snapshots kept per sequence for rollback.
        mtp: whether a draft context exists and the MTP blocks are loaded.
        n_batch: tokens per decode call; hidden rows are kept for each.
        n_ubatch: tokens per graph.
        n_outputs: most output rows in one decode call (``n_outputs_max``).
        checkpoints: most checkpoints of the recurrent state that a session keeps.

    Raises:
        UsageError: a size below 1, a negative ``n_rs_seq`` or ``checkpoints``, an unknown cache
            type.
    """
    sizes = (("n_ctx", n_ctx), ("n_seq", n_seq), ("n_batch", n_batch), ("n_ubatch", n_ubatch))
    for key, value in (*sizes, ("n_outputs", n_outputs)):
        if value < 1:
            raise UsageError(f"{key} is {value}, it must be at least 1")
    for key, value in (("n_rs_seq", n_rs_seq), ("checkpoints", checkpoints)):
        if value < 0:
            raise UsageError(f"{key} is {value}, it must not be negative")
    mtp = mtp and info.n_mtp_layers > 0
    cells = n_seq * padded(-(-n_ctx // n_seq))
    per_layer = cells * (
        _row_bytes(type_k, "K", info.n_head_kv * info.head_dim_k)
        + _row_bytes(type_v, "V", info.n_head_kv * info.head_dim_v)
    )
    embedding = next((t.nbytes for t in info.tensors if t.name == "token_embd.weight"), 0)
    n_outputs = max(min(n_outputs, n_batch), n_seq)
    return MemoryEstimate(
        weights=info.weight_bytes - (0 if mtp else info.mtp_weight_bytes),
        tied_output=embedding if info.tied_embeddings else 0,
        kv_target=len(info.attention_layers) * per_layer,
        recurrent=recurrent_bytes(info, n_seq, n_rs_seq),
        kv_draft=info.n_mtp_layers * per_layer if mtp else 0,
        outputs=_output_bytes(info, n_batch, n_outputs, mtp),
        compute=_compute_bytes(info, min(n_ubatch, n_batch, cells), n_outputs, cells, mtp),
        checkpoints=checkpoints * recurrent_bytes(info, 1, 0),
    )


def padded(n_ctx: int) -> int:
    """The context length that llama.cpp makes of `n_ctx`."""
    return -(-n_ctx // _CTX_PADDING) * _CTX_PADDING


def available_memory() -> int:
    """Bytes this process may still allocate: the least of machine, control group and RLIMIT_AS.

    Reads /proc/meminfo (MemAvailable), the memory limits of the process's control group (version
    1 or 2) and all its parents, counting reclaimable file cache as free, and the address-space
    limit less what is mapped.
    """
    limits = [_machine_memory(), *_cgroup_headroom()]
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        limits.append(soft - _fields(Path("/proc/self/status")).get("VmSize", 0) * 1024)
    return max(0, min(limits))


# --- parts of the estimate ----------------------------------------------------------------------


def _row_bytes(cache_type: str, which: str, n: int) -> int:
    """Bytes of a cache row of ``n`` elements; a row per cell (upstream src/llama-kv-cache.cpp)."""
    if cache_type not in CACHE_TYPES:
        raise UsageError(f"{which} cache type {cache_type!r}; allowed: {', '.join(CACHE_TYPES)}")
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[cache_type.upper()]]
    if n % block:
        raise UsageError(f"{which} cache rows of {n} elements cannot be {cache_type}; use f16")
    return int(n // block * size)


def recurrent_bytes(info: GGUFInfo, n_seq: int, n_rs_seq: int) -> int:
    """F32 states: n_embd_r and n_embd_s of upstream src/llama-hparams.cpp, a row per snapshot."""
    channels = info.ssm_inner_size + 2 * info.ssm_k_heads * info.ssm_state_size
    n_embd_r = max(info.ssm_conv_kernel - 1, 0) * channels
    n_embd_s = info.ssm_state_size * info.ssm_inner_size
    rows = n_seq * (1 + n_rs_seq)
    return len(info.recurrent_layers) * rows * (n_embd_r + n_embd_s) * _F32


def _output_bytes(info: GGUFInfo, n_batch: int, n_outputs: int, mtp: bool) -> int:
    """Upstream src/llama-context.cpp output_reserve: F32 logits per output row, and with MTP a
    hidden row per batch token, in each context."""
    logits = n_outputs * info.n_vocab * _F32
    hidden = n_batch * info.n_embd * _F32
    return 2 * (logits + hidden) if mtp else logits


def _compute_bytes(info: GGUFInfo, n_ubatch: int, n_outputs: int, cells: int, mtp: bool) -> int:
    """An estimate: the widest intermediate rows of one layer for a whole ubatch, the attention
    mask, and the logits of the output rows. The allocator reuses buffers between layers.

    An upper bound: on a CPU, target contexts of the 0.8B shape and of a tiny MoE model with 64 to
    2048 tokens per ubatch and up to 65,536 cells used 0.63 to 0.98 of it."""
    experts = info.n_expert_used * info.n_ff_exp + info.n_ff_shexp
    channels = info.ssm_inner_size + 2 * info.ssm_k_heads * info.ssm_state_size
    attention = 3 * info.n_head * info.head_dim_k
    widest = max(info.n_ff, experts, channels + info.ssm_inner_size, attention)
    rows = n_ubatch * (4 * info.n_embd + 3 * widest) * _F32
    mask = n_ubatch * cells * 2
    logits = min(n_ubatch, n_outputs) * info.n_vocab * _F32
    return (2 if mtp else 1) * (rows + mask + logits)


def gigabytes(n: int) -> str:
    """Bytes, for messages."""
    return f"{n / 1e9:.2f} GB"


# --- what the machine has -----------------------------------------------------------------------


def _fields(path: Path) -> dict[str, int]:
    """``Name: number`` lines of a /proc file (in kB there) or ``name number`` of a cgroup file."""
    found: dict[str, int] = {}
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        words = line.replace(":", " ").split()
        if len(words) >= 2 and words[1].isdigit():
            found[words[0]] = int(words[1])
    return found


def _machine_memory() -> int:
    fields = _fields(Path("/proc/meminfo"))
    if "MemAvailable" in fields:
        return fields["MemAvailable"] * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_headroom() -> Iterator[int]:
    """Limit less use (file cache not counted) of the process's control groups and their parents."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            root, limit, usage, cache = "", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            root, limit, usage = "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cache = "total_inactive_file"
        else:
            continue
        base = Path("/sys/fs/cgroup") / root
        folder = base / group.lstrip("/")
        for place in (folder, *folder.parents):
            if (room := _headroom(place, limit, usage, cache)) is not None:
                yield room
            if place == base:
                break


def _headroom(folder: Path, limit: str, usage: str, cache: str) -> int | None:
    try:
        allowed = (folder / limit).read_text().strip()
        used = int((folder / usage).read_text())
    except (OSError, ValueError):
        return None
    if not allowed.isdigit():  # "max": no limit
        return None
    return int(allowed) - used + _fields(folder / "memory.stat").get(cache, 0)
