"""Patch 9: the products of many columns, as prompts have them, are right for every type.

The reference are products of one column each, which tests/ffi/test_small_batch.py compares with
upstream's: columns are quantized alike, so only the order of float additions differs. Sizes lie
around the edges of tiles (32 or 16 rows, 1024 weights) and of groups of columns.
"""

from __future__ import annotations

import numpy as np
import pytest

from pyllama_mtp.llama import native

from .ggmlcalls import Floats
from .products import NAMES, TYPES, Products, block, normal, numbers

FLOATS_AND_REST = ("F32", "F16", "BF16", "NVFP4")  # which go another way
KINDS = [(n, t) for n, t in zip(NAMES, TYPES, strict=True) if n not in FLOATS_AND_REST]
EVERY_TYPE = pytest.mark.parametrize("kind", [t for _, t in KINDS], ids=[n for n, _ in KINDS])


def error(found: Floats, right: Floats, columns: Floats, rows: Floats) -> float:
    """The largest difference, in units of what a column times a row can sum up to: what rounding
    floats makes is below 1e-6."""
    size = np.linalg.norm(columns, axis=-1)[..., None] * np.linalg.norm(rows, axis=-1).max()
    return float((np.abs(found - right) / np.maximum(size, 1e-30)).max())


@pytest.mark.parametrize("m", [1, 15, 16, 17, 31, 33, 70])
@EVERY_TYPE
def test_columns_together_are_columns_alone(ggml: Products, kind: int, m: int) -> None:
    for k in sorted({block(kind), 3 * block(kind), 1280, 2048 + block(kind)}):
        rows, columns = normal(m, k), numbers(71, k)
        weights = ggml.quantize(rows, kind)
        right = ggml.alone(weights, m, columns, kind)
        for n in (17, 18, 19, 33, 34, 35, 36, 37, 38, 71):
            found = ggml.product(weights, m, columns[:n], 1, kind)
            assert error(found, right[:n], columns[:n], rows) < 1e-6, (n, k)


@EVERY_TYPE
def test_products_are_those_of_floats(ggml: Products, kind: int) -> None:
    """Weights and columns lose precision when they are quantized."""
    rows, columns = normal(37, 1024), normal(40, 1024)
    weights = ggml.quantize(rows, kind)
    exact = columns.astype(np.float64) @ rows.T.astype(np.float64)
    found = ggml.product(weights, 37, columns, 2, kind)
    assert np.corrcoef(found.ravel(), exact.ravel())[0, 1] > 0.9


@pytest.mark.parametrize("kind", [8, 12], ids=["Q8_0", "Q4_K"])
@pytest.mark.parametrize("m", [1, 64, 300, 5000])
@pytest.mark.parametrize("n_threads", [2, 3, 5])
def test_threads_share_the_tiles(ggml: Products, n_threads: int, m: int, kind: int) -> None:
    rows, columns = normal(m, 256), numbers(41, 256)
    weights = ggml.quantize(rows, kind)
    one = ggml.product(weights, m, columns, 1, kind)
    assert error(one, ggml.alone(weights, m, columns, kind), columns, rows) < 1e-6
    for _ in range(5):
        found = ggml.product(weights, m, columns, n_threads, kind)
        assert found.tobytes() == one.tobytes()


@EVERY_TYPE
@pytest.mark.parametrize("shared", [True, False], ids=["gate", "down"])
def test_experts_are_products_of_their_own(ggml: Products, kind: int, shared: bool) -> None:
    """Experts have no token, one, a few, or many."""
    n_experts, n_used, m, k = 5, 2, 38, 512
    rows = normal(n_experts, m, k)
    weights = ggml.quantize(rows, kind)
    rng = np.random.default_rng(kind)
    ids = np.stack([rng.permutation(3)[:n_used] for _ in range(40)]).astype(np.int32)
    ids[7, 1] = 3  # the fourth expert has one token, the fifth none
    columns = numbers(40, 1 if shared else n_used, k)
    found = ggml.experts(weights, (n_experts, m), columns, ids, 3, kind)
    right = ggml.experts_alone(weights, (n_experts, m), columns, ids, kind)
    assert error(found, right, columns, rows) < 1e-6


@pytest.mark.parametrize("kind", [8, 12], ids=["Q8_0", "Q4_K"])
def test_it_can_be_turned_off(ggml: Products, kind: int) -> None:
    """Sums in another order differ, somewhere, in their last bit."""
    weights, columns = ggml.quantize(normal(64, 1024), kind), normal(64, 1024)
    on = ggml.product(weights, 64, columns, 1, kind)
    assert native.load().set_large_batch(False)
    off = ggml.product(weights, 64, columns, 1, kind)
    assert on.tobytes() != off.tobytes()
    assert np.abs(on - off).max() < 1e-4 * np.abs(off).max()
