"""Patch 5: attention of 1 to 8 rows, whose bits depend on nothing but what the row itself sees.

Not on the rows beside it, not on the number of threads, not on hidden cells: what is in them, how
many follow the last one, what other streams hold. Shapes are those around the edges of the kernel's
tiles (64 cells) and stretches (256 cells, from 4,096 on 512).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pyllama_mtp.llama import native

from .attentioncalls import HIDDEN, TYPES, Attention, Case, case, variations
from .ggmlcalls import BF16, F16, F32, Q4_0, Q8_0


def assert_right(ggml: Attention, one: Case) -> None:
    found, wanted = ggml.run(one), ggml.wanted(one)
    assert np.abs(found - wanted).max() < 4e-6 * np.abs(wanted).max()


def assert_rows_are_rows_alone(ggml: Attention, one: Case, counts: tuple[int, ...]) -> None:
    n = one.q.shape[1]
    alone = np.concatenate([ggml.run(one.rows(row)) for row in range(n)], axis=1)
    for count in counts:
        for first in (0, n - count):
            rows = range(first, first + count)
            found = ggml.run(one.rows(*rows))
            assert found.tobytes() == alone[:, list(rows)].tobytes(), f"{count} rows"


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("cells", [8, 65, 300, 4700])
def test_it_is_right(ggml: Attention, cells: int, kind: str) -> None:
    assert_right(ggml, case(cells, type_k=TYPES[kind], type_v=TYPES[kind]))


@pytest.mark.parametrize(
    ("heads", "kv", "d", "dv"),
    [(8, 2, 256, 256), (1, 1, 32, 32), (6, 2, 96, 32), (5, 1, 80, 112), (16, 1, 64, 128)],
)
def test_shapes(ggml: Attention, heads: int, kv: int, d: int, dv: int) -> None:
    for rows in (1, 3):
        assert_right(ggml, case(200, rows, heads, kv, d, dv=dv, streams=2))


def test_variations(ggml: Attention) -> None:
    softcap, types = case(300, softcap=3.0), case(300, type_k=Q8_0, type_v=Q4_0)
    for one in (*variations(8), softcap, types):
        assert_right(ggml, one)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("cells", [9, 64, 65, 257, 511, 513, 700, 4099, 5000])
def test_the_rows_beside_it(ggml: Attention, cells: int, kind: str) -> None:
    one = case(cells, type_k=TYPES[kind], type_v=TYPES[kind])
    assert_rows_are_rows_alone(ggml, one, (2, 3, 5, 8) if cells > 1000 else (2, 3, 4, 5, 6, 7, 8))


@pytest.mark.parametrize(("heads", "kv", "d"), [(8, 2, 256), (3, 1, 96), (5, 5, 32), (16, 1, 64)])
def test_the_rows_beside_it_in_other_shapes(ggml: Attention, heads: int, kv: int, d: int) -> None:
    assert_rows_are_rows_alone(ggml, case(400, 8, heads, kv, d), (2, 3, 4, 5, 6, 7, 8))
    biased = replace(case(400, 8, heads, kv, d), max_bias=8.0, softcap=20.0)
    assert_rows_are_rows_alone(ggml, biased, (2, 7))


def test_rows_that_see_other_cells(ggml: Attention) -> None:
    """Rows of several sequences in one cache see different cells; so do rows after a rollback."""
    one = case(1000)
    assert one.mask is not None
    rng = np.random.default_rng(0)
    mine = rng.integers(0, 3, 1000)
    for row in range(8):
        one.mask[0, row, mine != row % 3] = HIDDEN
    one.mask[0, 4, :] = HIDDEN
    one.mask[0, 4, 640] = 0.0  # of one cell in the middle of a stretch
    one.mask[0, 5, 128:900] = HIDDEN
    assert_right(ggml, one)
    assert_rows_are_rows_alone(ggml, one, (2, 3, 5, 8))


@pytest.mark.parametrize("n_threads", [1, 3, 5])
@pytest.mark.parametrize("kind", ["f16", "q8_0"])
@pytest.mark.parametrize("cells", [40, 700, 6000])
def test_the_number_of_threads(ggml: Attention, cells: int, kind: str, n_threads: int) -> None:
    one = case(cells, type_k=TYPES[kind], type_v=TYPES[kind])
    for rows in ((7,), (4, 5, 6, 7), tuple(range(8))):
        wanted = ggml.run(one.rows(*rows), 2).tobytes()
        assert ggml.run(one.rows(*rows), n_threads).tobytes() == wanted


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("cells", [10, 63, 256, 500, 4096, 4150])
def test_cells_that_follow_unseen(ggml: Attention, cells: int, kind: str) -> None:
    """The cache's view ends at a multiple of 256 cells, or later; what lies there may be NaN."""
    one = case(cells, rows=4, type_k=TYPES[kind], type_v=TYPES[kind])
    wanted = ggml.run(one).tobytes()
    for more in (1, 64, 246, 1000):
        width = [(0, 0), (0, more), (0, 0), (0, 0)]
        value = np.nan if TYPES[kind] in (F32, F16, BF16) else 7.0
        k, v = (np.pad(part, width, constant_values=value) for part in (one.k, one.v))
        mask = np.pad(one.mask, [(0, 0), (0, 0), (0, more)], constant_values=HIDDEN)  # type: ignore[arg-type]
        assert ggml.run(replace(one, k=k, v=v, mask=mask)).tobytes() == wanted, f"{more} more"


@pytest.mark.parametrize("row", range(8))
def test_cells_that_only_others_see(ggml: Attention, row: int) -> None:
    one = case(300)
    wanted = ggml.run(one)[0, row].tobytes()
    assert one.mask is not None
    hidden = one.mask[0, row] == HIDDEN
    k, v = one.k.copy(), one.v.copy()
    k[0, hidden], v[0, hidden] = np.nan, np.nan
    assert ggml.run(replace(one, k=k, v=v))[0, row].tobytes() == wanted


def test_streams_are_streams_alone(ggml: Attention) -> None:
    one = case(300, rows=3, streams=3)
    assert one.mask is not None
    one.mask[1, :, :200] = HIDDEN
    assert_right(ggml, one)
    found = ggml.run(one)
    for stream in range(3):
        assert found[stream].tobytes() == ggml.run(one.stream(stream))[0].tobytes()


def test_a_row_that_sees_nothing_is_zero(ggml: Attention) -> None:
    one = case(200, rows=3)
    assert one.mask is not None
    one.mask[0, 1] = HIDDEN
    found = ggml.run(one)[0]
    assert not found[1].any()
    assert np.isfinite(found).all() and found[0].any() and found[2].any()


def test_it_can_be_switched_off_and_ends_at_8_rows(ggml: Attention) -> None:
    switch = native.load().set_few_rows_attention
    on, off = ggml.on_and_off(switch, case(700, rows=8))
    assert on.tobytes() != off.tobytes() and np.abs(on - off).max() < 3e-2  # upstream sums in F16
    on, off = ggml.on_and_off(switch, case(700, rows=9))
    assert on.tobytes() == off.tobytes()
