"""Bytes of a model's caches and states, and the memory that is available."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from pyllama_mtp.errors import UsageError
from pyllama_mtp.models.modelinfo import GGUFInfo

_CTX_PADDING = 256  # upstream src/llama-context.cpp: cparams.n_ctx = GGML_PAD(cparams.n_ctx, 256)
_F32 = 4


def layer_bytes(info: GGUFInfo, n_cells: int, type_k: str, type_v: str) -> int:
    """Bytes of the KV cache of one attention layer; exact.

    Raises:
        UsageError: rows of such a type cannot have this model's length.
    """
    k = _row_bytes(type_k, "K", info.n_head_kv * info.head_dim_k)
    return n_cells * (k + _row_bytes(type_v, "V", info.n_head_kv * info.head_dim_v))


def padded(n_ctx: int) -> int:
    """The context length that llama.cpp makes of `n_ctx`."""
    return -(-n_ctx // _CTX_PADDING) * _CTX_PADDING


def available_memory() -> int:
    """Bytes that this process may still allocate.

    It is the least of: the machine's (MemAvailable of /proc/meminfo); the limits of the process's
    control group (version 1 or 2) and its parents, less what is used and no file cache; RLIMIT_AS
    less what is mapped.
    """
    limits = [_machine_memory(), *_cgroup_headroom()]
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        limits.append(soft - _fields(Path("/proc/self/status")).get("VmSize", 0) * 1024)
    return max(0, min(limits))


def _row_bytes(cache_type: str, which: str, n: int) -> int:
    """Bytes of a cache row of ``n`` elements; a row per cell (upstream src/llama-kv-cache.cpp)."""
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


def gigabytes(n: int) -> str:
    """Bytes, for messages."""
    return f"{n / 1e9:.2f} GB"


# --- what the machine has -----------------------------------------------------------------------


def _fields(path: Path) -> dict[str, int]:
    """``Name: number`` lines of a /proc file (in kB there) or ``name number`` of a cgroup file."""
    fields: dict[str, int] = {}
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return fields
    for line in lines:
        words = line.replace(":", " ").split()
        if len(words) >= 2 and words[1].isdigit():
            fields[words[0]] = int(words[1])
    return fields


def _machine_memory() -> int:
    fields = _fields(Path("/proc/meminfo"))
    if "MemAvailable" in fields:
        return fields["MemAvailable"] * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_headroom() -> Iterator[int]:
    """Bytes left of each limit of the process's control groups and their parents."""
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
