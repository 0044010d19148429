"""The CPU patches: products of a few columns, and of many as prompts have them.

A column's bits are those that it has alone, whatever is computed beside it: integer sums are exact,
and what an output takes in of them is rounded alike by all kernels. Against upstream's results: the
same but for rounding, since columns are quantized alike and only the order of float additions
differs. Every type is tried with rows and columns left over by the kernels' groups and tiles (32 or
16 rows, 1024 weights), chunks of any size, several threads, experts with any number of tokens.
"""

from __future__ import annotations

import numpy as np
import pytest

from pyllama_mtp.llama import native
from pyllama_mtp.models.ggufheader import TENSOR_TYPES

from ..marks import usual
from .ggmlcalls import BF16, F16, F32, Q8_0, Floats
from .products import KINDS as ALL_KINDS
from .products import NAMES, TYPES, Products, block, normal, numbers

#: Types whose tables for quantizing take ggml seconds.
LONG = ("IQ2_S", "IQ2_XS", "IQ1_S", "IQ1_M")
KINDS = {
    name: pytest.param(kind, id=name, marks=[pytest.mark.long] if name in LONG else [])
    for name, kind in zip(NAMES, TYPES, strict=True)
}
EVERY_TYPE = pytest.mark.parametrize("kind", KINDS.values())
FLOATS = pytest.mark.parametrize("kind", [F32, F16, BF16], ids=["F32", "F16", "BF16"])


def upstream(ggml: Products, weights: bytes, m: int, columns: Floats, kind: int = Q8_0) -> Floats:
    """[n, m]: each column multiplied alone, as upstream does it."""
    assert native.load().set_cpu_switch("small_batch", False)
    found = ggml.alone(weights, m, columns, kind)
    native.load().set_cpu_switch("small_batch", True)
    return found


def error(found: Floats, right: Floats, columns: Floats, rows: Floats) -> float:
    """The largest difference, in units of what a column times a row can sum up to: what rounding
    floats makes is below 1e-6."""
    size = np.linalg.norm(columns, axis=-1)[..., None] * np.linalg.norm(rows, axis=-1).max()
    return float((np.abs(found - right) / np.maximum(size, 1e-30)).max())


@pytest.mark.parametrize("m", usual(70, long=(1, 3, 5, 15, 16, 17, 33, 48)))
@EVERY_TYPE
def test_a_column_has_the_bits_that_it_has_alone(ggml: Products, kind: int, m: int) -> None:
    for k in sorted({block(kind), 3 * block(kind), 1280, 2048 + block(kind)}):
        weights, columns = ggml.quantize(normal(m, k), kind), numbers(70, k)
        alone = ggml.alone(weights, m, columns, kind)
        for n in (2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 18, 31, 32, 33, 34, 35, 36, 37, 70):
            found = ggml.product(weights, m, columns[:n], 1 + n % 2, kind)
            assert found.tobytes() == alone[:n].tobytes(), f"{n} columns of {k}"


@EVERY_TYPE
def test_so_it_has_in_products_of_several_matrices(ggml: Products, kind: int) -> None:
    """As heads of keys with queries, two of these to one of those."""
    m, k = 20, 512
    weights, columns = ggml.quantize(normal(2, m, k), kind), normal(4, 40, k)
    for n in (1, 5, 40):
        with ggml.context(2**22) as ctx:
            a = ggml.ggml_new_tensor_4d(ctx, kind, k, m, 2, 1)
            b = ggml.ggml_new_tensor_4d(ctx, F32, k, n, 4, 1)
            ggml.fill(a, weights)
            ggml.data(b)[:] = columns[:, :n].ravel()
            found = ggml.computed(ctx, ggml.ggml_mul_mat(ctx, a, b), 2).reshape(4, n, m)
        half = len(weights) // 2
        for head in range(4):
            own = weights[half * (head // 2) :][:half]
            alone = ggml.alone(own, m, columns[head, :n], kind)
            assert found[head].tobytes() == alone.tobytes(), (n, head)


@FLOATS
def test_columns_may_lie_apart(ggml: Products, kind: int) -> None:
    """As queries without flash attention do; those of one token count as contiguous."""
    m, k = 32, 64
    weights, columns = ggml.quantize(normal(m, k), kind), normal(8, 2 * k)
    alone = ggml.alone(weights, m, columns[:, :k], kind)
    with ggml.context(2**20) as ctx:
        a = ggml.ggml_new_tensor_2d(ctx, kind, k, m)
        b = ggml.ggml_new_tensor_2d(ctx, F32, 2 * k, 8)
        ggml.fill(a, weights)
        ggml.data(b)[:] = columns.ravel()
        view = ggml.ggml_view_2d(ctx, b, k, 8, 8 * k, 0)
        found = ggml.computed(ctx, ggml.ggml_mul_mat(ctx, a, view), 2)
    assert found.tobytes() == alone.tobytes()


@EVERY_TYPE
def test_products_are_those_of_upstream_but_for_rounding(ggml: Products, kind: int) -> None:
    """Upstream quantizes the columns alike, but has floats as F16 and BF16 for F16 and BF16."""
    for k in (block(kind), 1280, 5120):
        rows, columns = normal(37, k), normal(8, k)
        weights = ggml.quantize(rows, kind)
        found = ggml.product(weights, 37, columns, 2, kind)
        error = np.abs(found - upstream(ggml, weights, 37, columns, kind)).max()
        bound = {"F16": 2e-3, "BF16": 2e-2}.get(TENSOR_TYPES[kind][0], 2e-6)
        assert error < bound * np.sqrt(k) * np.abs(rows).max(), k
        exact = columns.astype(np.float64) @ rows.T.astype(np.float64)
        if kind in (0, 1, 30):
            assert np.abs(found - exact).max() < {0: 1e-5, 1: 2e-3, 30: 2e-2}[kind] * np.sqrt(k)


@EVERY_TYPE
def test_sums_have_room_for_the_largest_quants(ggml: Products, kind: int) -> None:
    """All quants of a column are the largest one, and nearly all of a row: sums of 16 bits fill."""
    rows = np.ones((9, 512), dtype=np.float32)
    rows[:, ::16] = -1
    weights, columns = ggml.quantize(rows, kind), np.ones((8, 512), dtype=np.float32)
    columns[1::2] = -1
    right = upstream(ggml, weights, 9, columns, kind)
    for n in (1, 2, 8):
        found = ggml.product(weights, 9, columns[:n], 1, kind)
        assert error(found, right[:n], columns[:n], rows) < 2e-6


@pytest.mark.parametrize("kind", [0, 1, 30, 8, 12], ids=["F32", "F16", "BF16", "Q8_0", "Q4_K"])
@pytest.mark.parametrize("m", [1, 7, 8, 300, 5000])
def test_threads_share_the_rows(ggml: Products, m: int, kind: int) -> None:
    """Chunks and tiles end anywhere, there are fewer of them than threads, or many more."""
    weights, columns = ggml.quantize(normal(m, 256), kind), numbers(41, 256)
    alone = ggml.alone(weights, m, columns, kind)
    for n_threads in (2, 3, 5) * 3:
        for n in (1, 5, 13, 41):
            found = ggml.product(weights, m, columns[:n], n_threads, kind)
            assert found.tobytes() == alone[:n].tobytes(), (n, n_threads)


@EVERY_TYPE
@pytest.mark.parametrize("shared", [True, False], ids=["gate", "down"])
def test_experts_are_products_of_their_own(ggml: Products, kind: int, shared: bool) -> None:
    """Tokens of an expert go through it together: experts have no token, one, a few, or many."""
    n_experts, n_used, m, k = 5, 2, 38, 512
    weights = ggml.quantize(normal(n_experts, m, k), kind)
    rng = np.random.default_rng(kind)
    for t, n_threads in ((1, 1), (2, 3), (4, 2), (8, 1), (12, 2), (32, 3), (70, 2)):
        ids = np.stack([rng.permutation(3)[:n_used] for _ in range(t)]).astype(np.int32)
        ids[t // 2, 1] = 3  # the fourth expert has one token, the fifth none
        columns = numbers(t, 1 if shared else n_used, k)
        found = ggml.experts(weights, (n_experts, m), columns, ids, n_threads, kind)
        alone = ggml.experts_alone(weights, (n_experts, m), columns, ids, kind)
        assert found.tobytes() == alone.tobytes(), t


@pytest.mark.parametrize("name", ["Q1_0", "Q2_0", "TQ1_0", "TQ2_0"])
def test_types_without_kernels_are_left_to_upstream(ggml: Products, name: str) -> None:
    kind = ALL_KINDS[name]
    weights, columns = ggml.quantize(normal(37, 512), kind), normal(40, 512)
    assert not ggml.ggml_cpu_small_batch_type(kind) and ggml.ggml_cpu_small_batch_type(Q8_0)
    for n in (1, 4, 40):
        found = ggml.product(weights, 37, columns[:n], 1, kind)
        assert found.tobytes() == upstream(ggml, weights, 37, columns[:n], kind).tobytes()


@pytest.mark.parametrize("kind", [8, 12], ids=["Q8_0", "Q4_K"])
def test_it_can_be_turned_off(ggml: Products, kind: int) -> None:
    """Upstream's sums, in another order, differ somewhere in their last bit; those of the kernels
    of few columns do not."""
    weights, columns = ggml.quantize(normal(64, 1024), kind), normal(64, 1024)
    on = ggml.product(weights, 64, columns, 1, kind)
    assert native.load().set_cpu_switch("large_batch", False)
    assert ggml.product(weights, 64, columns, 1, kind).tobytes() == on.tobytes()
    off = upstream(ggml, weights, 64, columns, kind)
    assert on.tobytes() != off.tobytes()
    assert np.abs(on - off).max() < 1e-4 * np.abs(off).max()
