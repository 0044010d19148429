"""Patch 5: the products of a few columns are, bit for bit, those of each column alone.

Every type is tried with rows and columns left over by the kernel's groups, columns longer than its
tiles, chunks of any size, several threads, experts with any number of tokens. That the products are
right is seen beside upstream's own, one column at a time.
"""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from pyllama_mtp import Model
from pyllama_mtp.llama import native
from pyllama_mtp.llama.context import Context, ContextOptions

from .ggmlcalls import Q8_0, Floats
from .products import NAMES, TYPES, Products, block, normal, numbers


def upstream(ggml: Products, weights: bytes, m: int, columns: Floats, kind: int = Q8_0) -> Floats:
    """[n, m]: each column multiplied alone, as upstream does it."""
    assert native.load().set_small_batch(False)
    found = ggml.alone(weights, m, columns, kind)
    native.load().set_small_batch(True)
    return found


#: Columns beyond 8, by the size of a block: with super-blocks of 256 other kernels take over.
MORE = {32: (9, 16, 17, 31, 32)}


@pytest.mark.parametrize("m", [1, 3, 4, 5, 70])
@pytest.mark.parametrize("kind", TYPES, ids=NAMES)
def test_columns_together_are_columns_alone(ggml: Products, kind: int, m: int) -> None:
    for k in (block(kind), 3 * block(kind), 1280, 5120 if m < 70 else 2560):
        weights, columns = ggml.quantize(normal(m, k), kind), numbers(35, k)
        alone = ggml.alone(weights, m, columns, kind)
        for n in (2, 3, 4, 5, 6, 7, 8, *MORE.get(block(kind), ())):
            found = ggml.product(weights, m, columns[:n], 1, kind)
            assert found.tobytes() == alone[:n].tobytes(), f"{n} columns of {k}"


@pytest.mark.parametrize("kind", TYPES, ids=NAMES)
def test_products_are_those_of_upstream_but_for_rounding(ggml: Products, kind: int) -> None:
    """Upstream quantizes the columns alike, but has floats as F16 and BF16 for F16 and BF16."""
    for k in (block(kind), 1280, 5120):
        rows, columns = normal(37, k), normal(8, k)
        weights = ggml.quantize(rows, kind)
        found = ggml.product(weights, 37, columns, 2, kind)
        error = np.abs(found - upstream(ggml, weights, 37, columns, kind)).max()
        bound = {"F16": 2e-3, "BF16": 2e-2}.get(GGMLQuantizationType(kind).name, 2e-6)
        assert error < bound * np.sqrt(k) * np.abs(rows).max(), k
        exact = columns.astype(np.float64) @ rows.T.astype(np.float64)
        if kind in (0, 1, 30):
            assert np.abs(found - exact).max() < {0: 1e-5, 1: 1e-3, 30: 1e-2}[kind] * np.sqrt(k)


@pytest.mark.parametrize("k", [32, 96, 1024, 3584, 32768])
@pytest.mark.parametrize("m", [1, 4, 5, 257])
def test_q8_0_is_upstream_bit_for_bit(ggml: Products, m: int, k: int) -> None:
    weights, columns = ggml.quantize(numbers(m, k), Q8_0), numbers(5, k)
    assert ggml.product(weights, m, columns, 1).tobytes() == (
        upstream(ggml, weights, m, columns).tobytes()
    )


@pytest.mark.parametrize("kind", [0, 8, 12], ids=["F32", "Q8_0", "Q4_K"])
@pytest.mark.parametrize("m", [1, 7, 64, 300, 5000])
@pytest.mark.parametrize("n_threads", [2, 3, 5])
def test_threads_share_the_rows(ggml: Products, n_threads: int, m: int, kind: int) -> None:
    """Chunks end anywhere, there are fewer of them than threads, or many more."""
    weights, columns = ggml.quantize(normal(m, 256), kind), numbers(13, 256)
    alone = ggml.alone(weights, m, columns, kind)
    for n in (1, 5, 13) * 5:
        found = ggml.product(weights, m, columns[:n], n_threads, kind)
        assert found.tobytes() == alone[:n].tobytes()


@pytest.mark.parametrize("kind", TYPES, ids=NAMES)
@pytest.mark.parametrize("shared", [True, False], ids=["gate", "down"])
def test_experts_are_products_of_their_own(ggml: Products, kind: int, shared: bool) -> None:
    """Tokens of an expert go through it together: of none, of a few, of more than eight."""
    n_experts, n_used, m, k = 5, 3, 38, 512
    weights = ggml.quantize(normal(n_experts, m, k), kind)
    rng = np.random.default_rng(kind)
    for t, n_threads in ((1, 1), (2, 3), (4, 2), (8, 2), *([(32, 3)] if block(kind) == 32 else [])):
        ids = np.stack([rng.permutation(n_experts - 1)[:n_used] for _ in range(t)]).astype(np.int32)
        columns = numbers(t, 1 if shared else n_used, k)
        found = ggml.experts(weights, (n_experts, m), columns, ids, n_threads, kind)
        alone = ggml.experts_alone(weights, (n_experts, m), columns, ids, kind)
        assert found.tobytes() == alone.tobytes(), t


@pytest.mark.parametrize("kind", [1, 12, 23], ids=["F16", "Q4_K", "IQ4_XS"])
def test_more_tokens_than_the_kernels_take(ggml: Products, kind: int) -> None:
    """Many columns, and the experts of many tokens, go another way, and are right."""
    weights = ggml.quantize(normal(3, 38, 512), kind)
    columns, ids = normal(99, 1, 512), np.arange(198, dtype=np.int32).reshape(99, 2) % 3
    found = ggml.experts(weights, (3, 38), columns, ids, 2, kind)
    alone = ggml.experts_alone(weights, (3, 38), columns[:8], ids[:8], kind)
    assert np.abs(found[:8] - alone).max() < 0.05


def test_a_model_computes_the_same_with_it_and_without(demo: Model) -> None:
    """Only the delta net's small float products round differently."""
    options = ContextOptions(n_ctx=64, n_batch=16, n_ubatch=16, n_threads=2, n_outputs_max=4)
    tokens, ones = np.arange(20, 24, dtype=np.int32), np.ones(4, dtype=np.int8)
    found = []
    for on in (True, False):
        assert native.load().set_small_batch(on)
        with Context(demo, options) as context:
            context.decode(tokens, 0, ones)
            found.append(np.stack([context.logits(row).copy() for row in range(4)]))
    assert np.abs(found[0] - found[1]).max() < 1e-3 * np.abs(found[0]).max()
