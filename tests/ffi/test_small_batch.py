"""Patch 12: the products of a few columns are, bit for bit, those of each column alone.

Every shape is tried: rows and columns left over by the kernel's groups, chunks of any size, several
threads. One column goes the same way where rows are computed side by side.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from pyllama_mtp import Model, native
from pyllama_mtp.context import Context, ContextOptions

from .ggmlcalls import F32, Q8_0, Floats, Ggml


class Products(Ggml):
    """A Q8_0 matrix times columns."""

    def quantize(self, rows: Floats) -> bytes:
        """[m, k] float32 as Q8_0."""
        m, k = rows.shape
        data = self.ffi.new("char[]", m * self.ggml_row_size(Q8_0, k))
        source = self.ffi.from_buffer("float[]", np.ascontiguousarray(rows))
        self.ggml_quantize_chunk(Q8_0, source, data, 0, m, k, self.ffi.NULL)
        return bytes(self.ffi.buffer(data))

    def product(self, weights: bytes, m: int, columns: Floats, n_threads: int) -> Floats:
        """[n, m] float32: a Q8_0 matrix of `m` rows times [n, k] float32."""
        n, k = columns.shape
        with self.context(4 * len(weights) + 8 * n * (m + k)) as ctx:
            a = self.ggml_new_tensor_2d(ctx, Q8_0, k, m)
            b = self.ggml_new_tensor_2d(ctx, F32, k, n)
            self.ffi.memmove(self.ggml_get_data(a), weights, len(weights))
            self.data(b)[:] = columns.ravel()
            out, graph = self.ggml_mul_mat(ctx, a, b), self.ggml_new_graph(ctx)
            self.ggml_build_forward_expand(graph, out)
            assert self.ggml_graph_compute_with_ctx(ctx, graph, n_threads) == 0
            return self.data(out).reshape(n, m).copy()


@pytest.fixture(scope="module")
def ggml() -> Products:
    return Products()


@pytest.fixture(autouse=True)
def switched_on() -> Iterator[None]:
    yield
    native.load().set_small_batch(True)


def numbers(*shape: int) -> Floats:
    """Blocks of very different magnitude, some of them zero or tiny."""
    rng = np.random.default_rng(list(shape))
    scale = rng.choice([0.0, 1e-30, 1e-3, 1.0, 1e3], size=(*shape[:-1], shape[-1] // 32, 1))
    blocks = rng.standard_normal((*shape[:-1], shape[-1] // 32, 32)) * scale
    return blocks.reshape(shape).astype(np.float32)


def one_by_one(ggml: Products, weights: bytes, m: int, columns: Floats) -> Floats:
    """[n, m]: each column multiplied alone, as upstream does it."""
    assert native.load().set_small_batch(False)
    found = [ggml.product(weights, m, columns[i : i + 1], 1)[0] for i in range(len(columns))]
    native.load().set_small_batch(True)
    return np.stack(found)


@pytest.mark.parametrize("k", [32, 96, 1024, 3584, 16384, 32768])
@pytest.mark.parametrize("m", [1, 3, 4, 5, 70, 257])
def test_columns_together_are_columns_alone(ggml: Products, m: int, k: int) -> None:
    weights, columns = ggml.quantize(numbers(m, k)), numbers(33, k)
    alone = one_by_one(ggml, weights, m, columns)
    for n in (1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 31, 32, 33):  # 33 columns go another way
        found = ggml.product(weights, m, columns[:n], 1)
        assert found.tobytes() == alone[:n].tobytes(), f"{n} columns"


@pytest.mark.parametrize("m", [1, 7, 64, 300, 5000])
@pytest.mark.parametrize("n_threads", [2, 3, 5])
def test_threads_share_the_rows(ggml: Products, n_threads: int, m: int) -> None:
    """Chunks end anywhere, there are fewer of them than threads, or many more."""
    weights, columns = ggml.quantize(numbers(m, 256)), numbers(5, 256)
    alone = one_by_one(ggml, weights, m, columns)
    for n in (1, 5) * 5:
        found = ggml.product(weights, m, columns[:n], n_threads)
        assert found.tobytes() == alone[:n].tobytes()


def test_the_products_are_right(ggml: Products) -> None:
    """Against the same numbers in float64, within what quantizing the columns loses."""
    rng = np.random.default_rng(1)
    rows, columns = rng.standard_normal((64, 512)), rng.standard_normal((4, 512))
    found = ggml.product(ggml.quantize(rows.astype(np.float32)), 64, columns.astype(np.float32), 2)
    assert np.abs(found - columns @ rows.T).max() < 0.04 * np.sqrt(512)


def test_a_model_computes_the_same_with_it_and_without(moe: Model, demo: Model) -> None:
    for model in (demo, moe):
        options = ContextOptions(n_ctx=64, n_batch=16, n_ubatch=16, n_threads=2, n_outputs_max=4)
        tokens, ones = np.arange(20, 24, dtype=np.int32), np.ones(4, dtype=np.int8)
        found = []
        for on in (True, False):
            assert native.load().set_small_batch(on)
            with Context(model, options) as context:
                context.decode(tokens, 0, ones)
                found.append([context.logits(row).tobytes() for row in range(4)])
        assert found[0] == found[1]
