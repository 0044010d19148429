"""The image encoder in plain PyTorch: the tower of Qwen3-VL, as upstream's graph computes it.

Weights have the names of the mmproj file (pyllama_mtp/models/mmproj.py). Source of the arithmetic:
tools/mtmd/models/qwen3vl.cpp.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from pyllama_mtp.models.mmproj import MERGE, Tower

from .export import read_tensors

Weights = dict[str, Tensor]
EPS = 1e-6


def draw_weights(tower: Tower, seed: int) -> Weights:
    """Weights to start from; norms are 1 and 0, biases 0."""
    torch.manual_seed(seed)
    weights = {}
    for name, shape in tower.tensors().items():
        if name.endswith("bias"):
            value = torch.zeros(shape)
        elif len(shape) == 1:
            value = torch.ones(shape)
        else:
            value = torch.randn(shape) / math.sqrt(math.prod(shape[1:]))
        weights[name] = value.requires_grad_()
    return weights


def load(path: Path) -> Weights:
    """The weights of an mmproj file, float32."""
    return {name: torch.from_numpy(array) for name, array in read_tensors(path).items()}


def _norm(x: Tensor, weights: Weights, name: str) -> Tensor:
    size = (x.shape[-1],)
    return F.layer_norm(x.float(), size, weights[f"{name}.weight"], weights[f"{name}.bias"], EPS)


def _linear(x: Tensor, weights: Weights, name: str) -> Tensor:
    return F.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])


def _merged(x: Tensor, side: int) -> Tensor:
    """Patches (batch, side * side, width), row by row, in the order in which they are merged."""
    half = side // MERGE
    x = x.view(len(x), half, MERGE, half, MERGE, -1).transpose(2, 3)
    return x.reshape(len(x), side * side, -1)


def _rope(tower: Tower, side: int) -> tuple[Tensor, Tensor]:
    """cos and sin (side * side, width of a head / 2): the first half turns with y, the other x."""
    quarter = tower.width // tower.n_heads // 4
    rate = 10000.0 ** -(torch.arange(quarter) / quarter)
    grid = torch.stack(torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij"), -1)
    places = _merged(grid.view(1, side * side, 2), side)[0]
    angles = (places[:, :, None] * rate).flatten(1)
    return angles.cos(), angles.sin()


def encode(tower: Tower, weights: Weights, pixels: Tensor) -> Tensor:
    """uint8 pixels (batch, n, n, 3), n = tower.image, to rows (batch, tokens, n_embd)."""
    side, n = tower.image // tower.patch, len(pixels)
    x = pixels.permute(0, 3, 1, 2).float() / 127.5 - 1
    kernel = weights["v.patch_embd.weight"] + weights["v.patch_embd.weight.1"]
    x = F.conv2d(x, kernel, weights["v.patch_embd.bias"], stride=tower.patch)
    x = x.flatten(2).transpose(1, 2) + weights["v.position_embd.weight"]
    x, (cos, sin) = _merged(x, side), _rope(tower, side)

    def turned(a: Tensor) -> Tensor:
        left, right = a.chunk(2, dim=-1)
        return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)

    for i in range(tower.n_blocks):
        block = f"v.blk.{i}"
        qkv = _linear(_norm(x, weights, f"{block}.ln1"), weights, f"{block}.attn_qkv").float()
        q, k, v = qkv.view(n, side * side, 3, tower.n_heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(turned(q), turned(k), v)
        mixed = mixed.transpose(1, 2).reshape(n, side * side, -1)
        x = x + _linear(mixed, weights, f"{block}.attn_out")
        up = _linear(_norm(x, weights, f"{block}.ln2"), weights, f"{block}.ffn_up")
        x = x + _linear(F.gelu(up, approximate="tanh"), weights, f"{block}.ffn_down")
    x = _norm(x, weights, "v.post_ln").reshape(n, -1, MERGE * MERGE * tower.width)
    x = F.gelu(_linear(x, weights, "mm.0"), approximate="tanh")
    return _linear(x, weights, "mm.2").float()
