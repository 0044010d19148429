"""LoRA adapters with random matrices, for the tests."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter

from pyllama_mtp.models.modelinfo import GGUFInfo

from .trimmed import add_values, finish

RANK = 4


def write_adapter(
    path: Path,
    info: GGUFInfo,
    names: Iterable[str],
    *,
    rank: int = RANK,
    strength: float = 0.3,
    change: dict[str, Any] | None = None,
    tensors: dict[str, Any] | None = None,
) -> Path:
    """Write an adapter that changes these matrices of a model; returns `path`.

    Args:
        rank: of each.
        strength: of the change, about what its factor to a matrix of the same size is.
        change: metadata that replaces the right one; None leaves a key out.
        tensors: arrays that replace, or are added to, those of the matrices.
    """
    rng = np.random.default_rng(1)
    metadata = {
        "general.type": "adapter",
        "adapter.type": "lora",
        "adapter.lora.alpha": float(rank),
        **(change or {}),
    }
    writer = GGUFWriter(path, metadata.pop("general.architecture", info.architecture))
    add_values(writer, metadata)
    found: dict[str, Any] = {}
    shapes = {tensor.name: tensor.shape for tensor in info.tensors}
    for name in names:
        n, m, *more = shapes[name]
        a, b = (*more, rank, n), (*more, m, rank)  # numpy's order: the slowest dimension first
        if name == "token_embd.weight":
            a, b = (m, rank), (n, rank)
        for suffix, shape in ((".lora_a", a), (".lora_b", b)):
            scale = np.sqrt(strength / np.sqrt(n * rank))
            found[name + suffix] = (scale * rng.standard_normal(shape)).astype(np.float32)
    every = {**found, **(tensors or {})}
    finish(writer, {name: data for name, data in every.items() if data is not None})
    return path


def trunk(info: GGUFInfo) -> list[str]:
    """Matrices of the trunk that adapters change, of both kinds of layers."""
    ends = ("attn_q.weight", "attn_v.weight", "attn_qkv.weight", "ssm_out.weight", "_exps.weight",
            "ffn_down.weight")  # fmt: skip
    block = f"blk.{info.n_layer}."
    names = (tensor.name for tensor in info.tensors)
    return [name for name in names if name.endswith(ends) and not name.startswith(block)]
