"""The CPU patches: products of a few columns, and of many as prompts have them.

A few columns: the bits are those of each column alone, which is compared with upstream's. Many: the
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

#: Types whose products of many columns go another way.
FLOATS_AND_REST = ("F32", "F16", "BF16", "NVFP4")
#: Types whose tables for quantizing take ggml seconds.
LONG = ("IQ2_S", "IQ2_XS", "IQ1_S", "IQ1_M")
KINDS = {
    name: pytest.param(kind, id=name, marks=[pytest.mark.long] if name in LONG else [])
    for name, kind in zip(NAMES, TYPES, strict=True)
}
EVERY_TYPE = pytest.mark.parametrize("kind", KINDS.values())
TYPES_FOR_MANY = pytest.mark.parametrize(
    "kind", [kind for name, kind in KINDS.items() if name not in FLOATS_AND_REST]
)
FLOATS = pytest.mark.parametrize("kind", [F32, F16, BF16], ids=["F32", "F16", "BF16"])
#: Columns beyond 8, by the size of a block: with super-blocks of 256 other kernels take over.
MORE = dict.fromkeys((32, 64), (9, 16, 17, 31, 32))


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


@pytest.mark.parametrize("m", usual(1, 5, 70, long=(3, 4, 48)))
@EVERY_TYPE
def test_few_columns_together_are_columns_alone(ggml: Products, kind: int, m: int) -> None:
    for k in (block(kind), 3 * block(kind), 1280, *([5120] if m == 5 else [])):
        weights, columns = ggml.quantize(normal(m, k), kind), numbers(35, k)
        alone = ggml.alone(weights, m, columns, kind)
        for n in (2, 3, 4, 5, 6, 7, 8, *MORE.get(block(kind), ())):
            found = ggml.product(weights, m, columns[:n], 1, kind)
            assert found.tobytes() == alone[:n].tobytes(), f"{n} columns of {k}"


@FLOATS
@pytest.mark.parametrize("m", [4, 40, 256])
def test_floats_round_alike_for_any_number_of_columns(ggml: Products, kind: int, m: int) -> None:
    for k in (32, 1280, 1288):
        weights, columns = ggml.quantize(normal(m, k), kind), normal(70, k)
        alone = ggml.alone(weights, m, columns, kind)
        for n in (2, 7, 13, 33, 70):
            found = ggml.product(weights, m, columns[:n], 1, kind)
            assert found.tobytes() == alone[:n].tobytes(), f"{n} columns of {k}"


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


@pytest.mark.parametrize("k", [32, 96, 1024, 3584, 32768])
@pytest.mark.parametrize("m", [1, 4, 5, 257])
def test_q8_0_is_upstream_bit_for_bit(ggml: Products, m: int, k: int) -> None:
    weights, columns = ggml.quantize(numbers(m, k), Q8_0), numbers(5, k)
    assert ggml.product(weights, m, columns, 1).tobytes() == (
        upstream(ggml, weights, m, columns).tobytes()
    )


@pytest.mark.parametrize("m", usual(1, 70, long=(15, 16, 17, 31, 33)))
@TYPES_FOR_MANY
def test_many_columns_together_are_columns_alone(ggml: Products, kind: int, m: int) -> None:
    for k in sorted({block(kind), 3 * block(kind), 1280, 2048 + block(kind)}):
        rows, columns = normal(m, k), numbers(71, k)
        weights = ggml.quantize(rows, kind)
        right = ggml.alone(weights, m, columns, kind)
        for n in (17, 18, 19, 33, 34, 35, 36, 37, 38, 71):
            found = ggml.product(weights, m, columns[:n], 1, kind)
            assert error(found, right[:n], columns[:n], rows) < 1e-6, (n, k)


@pytest.mark.parametrize("kind", [0, 1, 30, 8, 12], ids=["F32", "F16", "BF16", "Q8_0", "Q4_K"])
@pytest.mark.parametrize("m", [1, 7, 8, 300, 5000])
def test_threads_share_the_rows(ggml: Products, m: int, kind: int) -> None:
    """Chunks and tiles end anywhere, there are fewer of them than threads, or many more."""
    rows, columns = normal(m, 256), numbers(41, 256)
    weights = ggml.quantize(rows, kind)
    alone, many = ggml.alone(weights, m, columns, kind), ggml.product(weights, m, columns, 1, kind)
    assert error(many, alone, columns, rows) < 1e-6
    for n_threads in (2, 3, 5) * 3:
        for n, wanted in ((1, alone), (5, alone), (13, alone), (41, many)):
            found = ggml.product(weights, m, columns[:n], n_threads, kind)
            assert found.tobytes() == wanted[:n].tobytes(), (n, n_threads)


@EVERY_TYPE
@pytest.mark.parametrize("shared", [True, False], ids=["gate", "down"])
def test_experts_of_few_tokens_are_products_of_their_own(
    ggml: Products, kind: int, shared: bool
) -> None:
    """Tokens of an expert go through it together: of none, of a few, of more than eight."""
    n_experts, n_used, m, k = 5, 3, 38, 512
    weights = ggml.quantize(normal(n_experts, m, k), kind)
    rng = np.random.default_rng(kind)
    for t, n_threads in ((1, 1), (2, 3), (4, 2), (8, 2), *([(32, 3)] if block(kind) < 256 else [])):
        ids = np.stack([rng.permutation(n_experts - 1)[:n_used] for _ in range(t)]).astype(np.int32)
        columns = numbers(t, 1 if shared else n_used, k)
        found = ggml.experts(weights, (n_experts, m), columns, ids, n_threads, kind)
        alone = ggml.experts_alone(weights, (n_experts, m), columns, ids, kind)
        assert found.tobytes() == alone.tobytes(), t


@TYPES_FOR_MANY
@pytest.mark.parametrize("shared", [True, False], ids=["gate", "down"])
def test_experts_of_many_tokens_are_products_of_their_own(
    ggml: Products, kind: int, shared: bool
) -> None:
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


@pytest.mark.parametrize("kind", [1, 12, 23], ids=["F16", "Q4_K", "IQ4_XS"])
def test_more_tokens_than_the_kernels_take(ggml: Products, kind: int) -> None:
    """Many columns, and the experts of many tokens, go another way, and are right."""
    weights = ggml.quantize(normal(3, 38, 512), kind)
    columns, ids = normal(99, 1, 512), np.arange(198, dtype=np.int32).reshape(99, 2) % 3
    found = ggml.experts(weights, (3, 38), columns, ids, 2, kind)
    alone = ggml.experts_alone(weights, (3, 38), columns[:8], ids[:8], kind)
    assert np.abs(found[:8] - alone).max() < 0.05


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
    """Sums in another order differ, somewhere, in their last bit."""
    weights, columns = ggml.quantize(normal(64, 1024), kind), normal(64, 1024)
    on = ggml.product(weights, 64, columns, 1, kind)
    assert native.load().set_cpu_switch("large_batch", False)
    off = ggml.product(weights, 64, columns, 1, kind)
    assert on.tobytes() != off.tobytes()
    assert np.abs(on - off).max() < 1e-4 * np.abs(off).max()
