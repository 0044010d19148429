"""Products of matrices of any type, called directly, and numbers to multiply."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pyllama_mtp.models.ggufheader import TENSOR_TYPES

from .ggmlcalls import F32, I32, Q8_0, Floats, Ggml

#: Types with kernels of their own, as in ggml.h.
NAMES = ["F32", "F16", "BF16", "Q8_0", "Q5_0", "Q4_0", "IQ4_NL", "MXFP4", "NVFP4"]
NAMES += ["Q6_K", "Q5_K", "Q4_K", "Q3_K", "Q2_K"]
NAMES += ["IQ4_XS", "IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS"]
NAMES += ["Q4_1", "Q5_1", "IQ1_S", "IQ1_M"]
KINDS = {name: kind for kind, (name, *_) in TENSOR_TYPES.items()}
TYPES = [KINDS[name] for name in NAMES]


class Products(Ggml):
    """Matrices of any type times columns."""

    def quantize(self, rows: Floats, kind: int) -> bytes:
        """[..., k] float32 as rows of a type."""
        n, k = rows.size // rows.shape[-1], rows.shape[-1]
        data = self.ffi.new("char[]", n * self.ggml_row_size(kind, k))
        source = self.ffi.from_buffer("float[]", np.ascontiguousarray(rows))
        weights = self.ffi.new("float[]", [1.0] * k)
        self.ggml_quantize_chunk(kind, source, data, 0, n, k, weights)
        return bytes(self.ffi.buffer(data))

    def product(
        self, weights: bytes, m: int, columns: Floats, n_threads: int, kind: int = Q8_0
    ) -> Floats:
        """[n, m] float32: a matrix of `m` rows times [n, k] float32."""
        n, k = columns.shape
        with self.context(4 * len(weights) + 8 * n * (m + k)) as ctx:
            a = self.ggml_new_tensor_2d(ctx, kind, k, m)
            b = self.ggml_new_tensor_2d(ctx, F32, k, n)
            self.fill(a, weights)
            self.data(b)[:] = columns.ravel()
            return self.computed(ctx, self.ggml_mul_mat(ctx, a, b), n_threads).reshape(n, m)

    def alone(self, weights: bytes, m: int, columns: Floats, kind: int = Q8_0) -> Floats:
        """[n, m] float32: the same, each column multiplied by itself."""
        return np.stack([self.product(weights, m, c[None], 1, kind)[0] for c in columns])

    def experts(
        self,
        weights: bytes,
        shape: tuple[int, int],
        columns: Floats,
        ids: npt.NDArray[np.int32],
        n_threads: int,
        kind: int,
    ) -> Floats:
        """[t, u, m] float32: matrices of [experts, m] rows times [t, 1 or u, k] float32, of those
        experts that `ids` [t, u] names."""
        (n_experts, m), (t, u, k) = shape, columns.shape
        with self.context(4 * len(weights) + 64 * columns.size + 64 * ids.size * m) as ctx:
            a = self.ggml_new_tensor_4d(ctx, kind, k, m, n_experts, 1)
            b = self.ggml_new_tensor_4d(ctx, F32, k, u, t, 1)
            c = self.ggml_new_tensor_2d(ctx, I32, ids.shape[1], t)
            self.fill(a, weights)
            self.data(b)[:] = columns.ravel()
            self.data(c).view(np.int32)[:] = ids.ravel()
            out = self.computed(ctx, self.ggml_mul_mat_id(ctx, a, b, c), n_threads)
            return out.reshape(*ids.shape, m)

    def experts_alone(
        self,
        weights: bytes,
        shape: tuple[int, int],
        columns: Floats,
        ids: npt.NDArray[np.int32],
        kind: int,
    ) -> Floats:
        """The same, each token's product with each of its experts by itself."""
        (n_experts, m), shared = shape, columns.shape[1] == 1
        size, found = len(weights) // n_experts, np.empty((*ids.shape, m), np.float32)
        for (token, place), expert in np.ndenumerate(ids):
            own = weights[expert * size : (expert + 1) * size]
            column = columns[token, 0 if shared else place][None]
            found[token, place] = self.product(own, m, column, 1, kind)[0]
        return found


def numbers(*shape: int) -> Floats:
    """Blocks of very different magnitude, some of them zero or tiny."""
    rng = np.random.default_rng(list(shape))
    scale = rng.choice([0.0, 1e-30, 1e-3, 1.0, 1e3], size=(*shape[:-1], shape[-1] // 32, 1))
    blocks = rng.standard_normal((*shape[:-1], shape[-1] // 32, 32)) * scale
    return blocks.reshape(shape).astype(np.float32)


def normal(*shape: int) -> Floats:
    return np.random.default_rng(list(shape)).standard_normal(shape).astype(np.float32)


def block(kind: int) -> int:
    """Weights of a block."""
    return max(32, TENSOR_TYPES[kind][1])
