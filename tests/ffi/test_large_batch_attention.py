"""Patch 9: attention of 9 rows and more, against numpy in float64, and the same bits whatever the
number of threads.

Shapes are those around the edges of the kernel's tiles (64 cells), panels (48 or 16 queries, rows
and heads together) and blocks (240 queries).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pyllama_mtp.llama import native

from .attentioncalls import HIDDEN, TYPES, Attention, Case, case, variations
from .ggmlcalls import Q4_0, Q8_0

KINDS = ["f32", "f16", "q8_0", "q4_0"]
SHAPES = [(8, 2, 64), (8, 2, 256), (5, 1, 128), (3, 3, 64), (1, 1, 32), (16, 1, 64), (6, 2, 96)]


def assert_right(ggml: Attention, one: Case, n_threads: int = 2) -> None:
    """Rounded no worse than F16 rounds."""
    found, wanted = ggml.run(one, n_threads), ggml.wanted(one)
    assert np.abs(found - wanted).max() < 5e-4 * np.abs(wanted).max()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cells", [70, 128, 129, 700])
@pytest.mark.parametrize("rows", [9, 12, 17, 31, 48, 61, 70])
def test_it_is_right(ggml: Attention, rows: int, cells: int, kind: str) -> None:
    assert_right(ggml, case(cells, rows, type_k=TYPES[kind], type_v=TYPES[kind]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("heads", "kv", "d"), SHAPES)
@pytest.mark.parametrize("rows", [9, 33])
def test_shapes(ggml: Attention, rows: int, heads: int, kv: int, d: int, kind: str) -> None:
    one = case(200, rows, heads, kv, d, streams=2, type_k=TYPES[kind], type_v=TYPES[kind])
    assert_right(ggml, one)


def test_heads_of_other_sizes_for_values_than_for_keys(ggml: Attention) -> None:
    assert_right(ggml, case(200, 20, 6, 2, 96, dv=32))
    assert_right(ggml, case(200, 20, 4, 1, 64, dv=128, type_k=Q8_0, type_v=Q4_0))


def test_variations(ggml: Attention) -> None:
    for one in variations(40):
        assert_right(ggml, one)


def hide_tiles(one: Case) -> None:
    """Several sequences in one cache: rows see tiles that others do not."""
    assert one.mask is not None
    mask, rows = one.mask[0], np.arange(one.mask.shape[1])
    mask[:, 128:256] = HIDDEN  # of no row
    mask[rows % 2 == 0, 320:448] = HIDDEN
    mask[rows % 3 == 1, :300] = HIDDEN
    mask[5] = HIDDEN
    mask[5, 77] = 0.0  # one cell only
    mask[6] = HIDDEN  # nothing


@pytest.mark.parametrize("kind", KINDS)
def test_masks_that_hide_whole_tiles(ggml: Attention, kind: str) -> None:
    one = case(600, 50, type_k=TYPES[kind], type_v=TYPES[kind])
    hide_tiles(one)
    assert one.mask is not None
    seen = np.isfinite(one.mask[0]).any(axis=1)
    assert not ggml.run(one)[0, ~seen].any()
    one.mask[0, ~seen, 0] = 0.0
    assert_right(ggml, one)


@pytest.mark.parametrize("n_threads", [1, 3, 5])
@pytest.mark.parametrize("kind", ["f16", "q8_0"])
@pytest.mark.parametrize("rows", [9, 70, 200])
def test_the_number_of_threads(ggml: Attention, rows: int, kind: str, n_threads: int) -> None:
    one = case(500, rows, type_k=TYPES[kind], type_v=TYPES[kind])
    hide_tiles(one)
    assert ggml.run(one, n_threads).tobytes() == ggml.run(one, 2).tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_cells_that_no_row_sees(ggml: Attention, kind: str) -> None:
    """What lies there may be anything, and follows in any number."""
    one = case(130, 20, type_k=TYPES[kind], type_v=TYPES[kind])
    assert one.mask is not None
    one.mask[:, :, 40:50] = HIDDEN
    wanted = ggml.run(one).tobytes()
    value = 7.0 if kind.startswith("q") else np.nan
    width = [(0, 0), (0, 200), (0, 0), (0, 0)]
    k, v = (np.pad(part, width, constant_values=value) for part in (one.k, one.v))
    k[:, 40:50] = v[:, 40:50] = value
    mask = np.pad(one.mask, [(0, 0), (0, 0), (0, 200)], constant_values=HIDDEN)  # type: ignore[arg-type]
    assert ggml.run(replace(one, k=k, v=v, mask=mask)).tobytes() == wanted


@pytest.mark.parametrize("kind", ["f32", "f16"])
def test_numbers_of_all_sizes(ggml: Attention, kind: str) -> None:
    """Sums of shorts do not overflow, and small numbers beside large ones count."""
    one = case(200, 20, d=256, type_k=TYPES[kind], type_v=TYPES[kind])
    for factor in (1e-4, 1e3):
        assert_right(ggml, replace(one, v=one.v * np.float32(factor)))
        scaled = replace(one, q=one.q / np.float32(factor), k=one.k * np.float32(factor))
        assert_right(ggml, scaled)
    alike = replace(one, q=np.ones_like(one.q), k=np.ones_like(one.k), v=np.ones_like(one.v))
    assert_right(ggml, alike)
    assert_right(ggml, replace(alike, k=-alike.k, v=-alike.v))
    single = np.zeros_like(one.q)
    single[..., 3] = 50.0
    assert_right(ggml, replace(one, q=single))
    empty = np.zeros_like(one.q)
    assert_right(ggml, replace(one, q=empty))
    assert not ggml.run(replace(one, v=one.v * 0)).any()


def test_what_is_no_number_stays_so(ggml: Attention) -> None:
    one = case(200, 20)
    q = one.q.copy()
    q[0, 3, 1, 5] = np.nan
    found = ggml.run(replace(one, q=q))
    assert np.isnan(found[0, 3, 1]).all()
    assert np.isfinite(np.delete(found[0].reshape(160, 64), 3 * 8 + 1, axis=0)).all()


def test_it_can_be_switched_off_and_leaves_some_to_upstream(ggml: Attention) -> None:
    switch = native.load().set_large_batch
    on, off = ggml.on_and_off(switch, case(300, 20))
    assert on.tobytes() != off.tobytes() and np.abs(on - off).max() < 3e-2  # upstream sums in F16
    for other in (case(300, 8), case(300, 20, softcap=3.0), case(300, 20, d=36)):
        on, off = ggml.on_and_off(switch, other)
        assert on.tobytes() == off.tobytes()
