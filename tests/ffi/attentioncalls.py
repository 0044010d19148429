"""Attention called directly: one operator on random numbers, and the same in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .ggmlcalls import BF16, F16, F32, Q4_0, Q4_1, Q8_0, Floats
from .products import Products

TYPES = {"f32": F32, "f16": F16, "bf16": BF16, "q8_0": Q8_0, "q4_0": Q4_0, "q4_1": Q4_1}
HIDDEN = -np.inf


@dataclass(frozen=True)
class Case:
    """One operator, on random numbers."""

    q: Floats  # [streams, rows, heads, dk]
    k: Floats  # [streams, cells, kv heads, dk]
    v: Floats  # [streams, cells, kv heads, dv]
    mask: Floats | None  # [streams, rows, cells]: what is added to the scores
    type_k: int = F16
    type_v: int = F16
    max_bias: float = 0.0
    softcap: float = 0.0
    sinks: Floats | None = None  # [heads]

    @property
    def scale(self) -> float:
        return float(self.q.shape[-1]) ** -0.5

    def rows(self, *rows: int) -> Case:
        """The same with these rows only."""
        mask = None if self.mask is None else self.mask[:, list(rows)]
        return replace(self, q=self.q[:, list(rows)], mask=mask)

    def stream(self, stream: int) -> Case:
        one = slice(stream, stream + 1)
        mask = None if self.mask is None else self.mask[one]
        return replace(self, q=self.q[one], k=self.k[one], v=self.v[one], mask=mask)


def case(cells: int, rows: int = 8, heads: int = 8, kv: int = 2, d: int = 64, **rest: Any) -> Case:
    """Random numbers; each row sees one cell more than the one before it, the last one all."""
    streams, dv = rest.pop("streams", 1), rest.pop("dv", d)
    rng = np.random.default_rng(cells)

    def numbers(*shape: int) -> Floats:
        return rng.standard_normal(shape).astype(np.float32)

    seen = cells - rows + 1 + np.arange(rows)
    mask = np.where(np.arange(cells) < seen[:, None], 0.0, HIDDEN).astype(np.float32)
    return Case(
        numbers(streams, rows, heads, d) * 2,
        numbers(streams, cells, kv, d),
        numbers(streams, cells, kv, dv),
        np.broadcast_to(mask, (streams, rows, cells)).copy(),
        **rest,
    )


class Attention(Products):
    def cache(self, ctx: Any, numbers: Floats, kind: int) -> Any:
        """[d, cells, kv heads, streams]: a view as llama.cpp has it, cell by cell in memory."""
        streams, cells, heads, d = numbers.shape
        row = self.ggml_row_size(kind, d)
        whole = self.ggml_new_tensor_4d(ctx, kind, d, heads, cells, streams)
        self.fill(whole, self.quantize(numbers, kind))
        strides = (row * heads, row, row * heads * cells)
        return self.ggml_view_4d(ctx, whole, d, cells, heads, streams, *strides, 0)

    def operator(self, ctx: Any, one: Case) -> Any:
        """The tensor [dv, heads, rows, streams] that is computed."""
        streams, rows, heads, d = one.q.shape
        q = self.ggml_new_tensor_4d(ctx, F32, d, rows, heads, streams)
        self.fill(q, one.q.transpose(0, 2, 1, 3).tobytes())
        k, v = self.cache(ctx, one.k, one.type_k), self.cache(ctx, one.v, one.type_v)
        mask = self.ffi.NULL
        if one.mask is not None:
            mask = self.ggml_new_tensor_4d(ctx, F16, one.mask.shape[2], rows, 1, streams)
            self.fill(mask, one.mask.astype(np.float16).tobytes())
        numbers = (one.scale, one.max_bias, one.softcap)
        out = self.ggml_flash_attn_ext(ctx, q, k, v, mask, *numbers)
        if one.sinks is not None:
            sinks = self.ggml_new_tensor_2d(ctx, F32, heads, 1)
            self.fill(sinks, one.sinks.astype(np.float32).tobytes())
            self.ggml_flash_attn_ext_add_sinks(out, sinks)
        return out

    def run(self, one: Case, n_threads: int = 2) -> Floats:
        """[streams, rows, heads, dv]"""
        streams, rows, heads, _ = one.q.shape
        with self.context(2**27 + 3 * one.q.nbytes + 16 * (one.k.nbytes + one.v.nbytes)) as ctx:
            out = self.computed(ctx, self.operator(ctx, one), n_threads)
            return out.reshape(streams, rows, heads, -1)

    def stored(self, numbers: Floats, kind: int) -> Any:
        """What a cache of a type keeps of these numbers, in float64."""
        with self.context(2**20 + 16 * numbers.nbytes) as ctx:
            view = self.cache(ctx, numbers, kind)
            out = self.ggml_new_tensor_4d(ctx, F32, *numbers.transpose(3, 1, 2, 0).shape)
            streams, cells, heads, d = numbers.shape
            kept = self.computed(ctx, self.ggml_cpy(ctx, view, out), 1)
            kept = kept.reshape(streams, heads, cells, d)
            return kept.transpose(0, 2, 1, 3).astype(np.float64)

    def wanted(self, one: Case) -> Any:
        """The same in float64, from the numbers that are in the cache."""
        k, v = self.stored(one.k, one.type_k), self.stored(one.v, one.type_v)
        heads = one.q.shape[2]
        k, v = (np.repeat(part, heads // part.shape[2], axis=2) for part in (k, v))
        scores = (
            np.einsum("srhd,schd->srhc", one.q.astype(np.float64), k, optimize=True) * one.scale
        )
        if one.softcap:
            scores = one.softcap * np.tanh(scores / one.softcap)
        if one.mask is not None:
            scores = scores + slopes(heads, one.max_bias)[:, None] * one.mask[:, :, None]
        top = scores.max(-1, keepdims=True)
        if one.sinks is not None:
            top = np.maximum(top, one.sinks[:, None])
        weights = np.exp(scores - top)
        total = weights.sum(-1, keepdims=True)
        if one.sinks is not None:
            total = total + np.exp(one.sinks[:, None] - top)
        return np.einsum("srhc,schd->srhd", weights / total, v, optimize=True)


def slopes(heads: int, max_bias: float) -> Any:
    """ALiBi's slope of each head: https://arxiv.org/abs/2108.12409"""
    if max_bias == 0.0:
        return np.ones(heads)
    power = 2 ** int(np.floor(np.log2(heads)))
    first = [2.0 ** (-max_bias * (i + 1) / power) for i in range(power)]
    rest = [2.0 ** (-max_bias / 2 * (2 * i + 1) / power) for i in range(heads - power)]
    return np.array(first + rest)
