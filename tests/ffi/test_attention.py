"""The CPU patches: attention of 1 to 8 rows, and of more, against numpy in float64.

A row's bits depend on what the row itself sees, and on nothing else: not on the number of threads,
nor on hidden cells, whatever is in them and however many follow the last one, nor on the rows
beside it, however many. Shapes are those around the edges of the kernels' tiles
(64 cells), stretches (256 cells, from 4,096 on 512), panels (48 or 16 queries, rows and heads
together) and blocks (240 queries).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pyllama_mtp.llama import native

from ..marks import usual
from .attentioncalls import HIDDEN, TYPES, Attention, Case, case, variations
from .ggmlcalls import F16, F32, Q4_0, Q8_0

#: Types for more than 8 rows; TYPES are those for 1 to 8.
KINDS = ("f32", "f16", "q8_0", "q4_0")


def assert_right(ggml: Attention, one: Case) -> None:
    """Rounded no worse than F16 rounds."""
    found, wanted = ggml.run(one), ggml.wanted(one)
    assert np.abs(found - wanted).max() < 5e-4 * np.abs(wanted).max()


def assert_rows_are_rows_alone(ggml: Attention, one: Case, counts: tuple[int, ...]) -> None:
    n = one.q.shape[1]
    alone = np.concatenate([ggml.run(one.rows(row)) for row in range(n)], axis=1)
    for count in counts:
        for first in (0, n - count):
            rows = range(first, first + count)
            found = ggml.run(one.rows(*rows))
            assert found.tobytes() == alone[:, list(rows)].tobytes(), f"{count} rows"


# -- the values ------------------------------------------------------------------------------------

SIZES = [(kind, 8, cells) for kind in TYPES for cells in (8, 65, 300, 4700)]
MORE_ROWS = [(rows, cells) for rows in (9, 17, 48, 70) for cells in (70, 129, 700)]


@pytest.mark.parametrize(
    ("kind", "rows", "cells"), [*SIZES, *((kind, *size) for kind in KINDS for size in MORE_ROWS)]
)
def test_it_is_right(ggml: Attention, kind: str, rows: int, cells: int) -> None:
    assert_right(ggml, case(cells, rows, type_k=TYPES[kind], type_v=TYPES[kind]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("heads", "kv", "d", "dv"),
    [(8, 2, 64, 64), (8, 2, 256, 256), (5, 1, 128, 128), (3, 3, 64, 64), (1, 1, 32, 32),
     (16, 1, 64, 128), (6, 2, 96, 96), (6, 2, 96, 32)],
)  # fmt: skip
def test_shapes(ggml: Attention, heads: int, kv: int, d: int, dv: int, kind: str) -> None:
    types = {"type_k": TYPES[kind], "type_v": TYPES[kind]}
    for rows in (1, 3, 9, 33):
        assert_right(ggml, case(200, rows, heads, kv, d, dv=dv, streams=2, **types))


def test_more_rows_than_are_taken_together(ggml: Attention) -> None:
    """Queries and values of 85 rows take 32 MB here."""
    one = case(130, 100, heads=128, kv=1, d=512, streams=2)
    assert_right(ggml, replace(one, q=one.q / 4))


def test_variations(ggml: Attention) -> None:
    odd = [case(200, rows, 5, 1, 80, dv=112, streams=2) for rows in (1, 3, 20)]
    types = [case(300, rows, type_k=Q8_0, type_v=Q4_0) for rows in (8, 20)]
    for one in (*variations(8), *variations(40), case(300, softcap=3.0), *odd, *types):
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


@pytest.mark.parametrize("rows", [8, 50])
@pytest.mark.parametrize("kind", KINDS)
def test_masks_that_hide_whole_tiles(ggml: Attention, kind: str, rows: int) -> None:
    """A row that sees nothing is zero."""
    one = case(600, rows, type_k=TYPES[kind], type_v=TYPES[kind])
    hide_tiles(one)
    assert one.mask is not None
    seen = np.isfinite(one.mask[0]).any(axis=1)
    assert not ggml.run(one)[0, ~seen].any()
    one.mask[0, ~seen, 0] = 0.0
    assert_right(ggml, one)


@pytest.mark.parametrize("kind", ["f32", "f16", "q8_0"])
@pytest.mark.parametrize(("rows", "d"), [(3, 256), (3, 1024), (20, 256)])
def test_numbers_of_all_sizes(ggml: Attention, rows: int, d: int, kind: str) -> None:
    """Sums of shorts do not overflow, and small numbers beside large ones count."""
    one = case(200, rows, 4, d=d, type_k=TYPES[kind], type_v=TYPES[kind])
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
    assert_right(ggml, replace(one, q=0 * one.q))
    assert not ggml.run(replace(one, v=one.v * 0)).any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [4, 12, 70])
@pytest.mark.parametrize("queries", [1.0, 10.0])
def test_a_channel_of_k_a_hundred_times_the_others(
    ggml: Attention, rows: int, kind: str, queries: float
) -> None:
    """Models have such channels. Keys are rounded to 16 bits together: the others must keep theirs,
    as many as with upstream's attention in F16."""
    one = case(300, rows, d=128, type_k=TYPES[kind], type_v=TYPES[kind])
    one.k[..., 17] *= 100
    one.q[..., 17] *= queries
    wanted = ggml.wanted(one)

    def error() -> float:
        return float(np.sqrt(np.square(ggml.run(one) - wanted).mean() / np.square(wanted).mean()))

    found = error()
    assert found < 5e-4
    if rows < 64 and kind == "f16":  # upstream's, too, rounds to 16 bits
        ours = "few_rows_attention" if rows <= 8 else "large_batch"
        assert native.load().set_cpu_switch(ours, False)
        theirs = error()
        assert native.load().set_cpu_switch(ours, True)
        assert found < 1.2 * theirs


@pytest.mark.parametrize("rows", [6, 20])
def test_what_is_no_number_stays_so(ggml: Attention, rows: int) -> None:
    one = case(200, rows)
    q = one.q.copy()
    q[0, 3, 1, 5] = np.nan
    found = ggml.run(replace(one, q=q))
    assert np.isnan(found[0, 3, 1]).all()
    assert np.isfinite(np.delete(found[0].reshape(rows * 8, 64), 3 * 8 + 1, axis=0)).all()


@pytest.mark.parametrize("kind", ["f32", "f16", "q8_0"])
@pytest.mark.parametrize("what", ["k", "v"])
def test_a_cell_with_what_is_no_number(ggml: Attention, what: str, kind: str) -> None:
    """Rows that see it have none either; rows that do not are as they were."""
    one = case(200, rows=6, type_k=TYPES[kind], type_v=TYPES[kind])
    assert one.mask is not None
    one.mask[0, :3, 70] = HIDDEN
    numbers = getattr(one, what).copy()
    numbers[0, 70, 1, 5] = np.inf
    found, before = ggml.run(replace(one, **{what: numbers})), ggml.run(one)
    assert np.isnan(found[0, 3:, 4:]).all()
    assert found[0, :3].tobytes() == before[0, :3].tobytes()
    assert found[0, :, :4].tobytes() == before[0, :, :4].tobytes()


# -- the bits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("cells", usual(9, 65, 513, long=(64, 257, 511, 700, 4099, 5000)))
def test_the_rows_beside_it(ggml: Attention, cells: int, kind: str) -> None:
    one = case(cells, type_k=TYPES[kind], type_v=TYPES[kind])
    assert_rows_are_rows_alone(ggml, one, (2, 3, 5, 8) if cells > 1000 else (2, 3, 4, 5, 6, 7, 8))


@pytest.mark.parametrize(("heads", "kv", "d"), [(8, 2, 256), (3, 1, 96), (5, 5, 32), (16, 1, 64)])
def test_the_rows_beside_it_in_other_shapes(ggml: Attention, heads: int, kv: int, d: int) -> None:
    assert_rows_are_rows_alone(ggml, case(400, 8, heads, kv, d), (2, 3, 4, 5, 6, 7, 8))
    biased = replace(case(400, 8, heads, kv, d), max_bias=8.0, softcap=20.0)
    assert_rows_are_rows_alone(ggml, biased, (2, 7))


def assert_rows_are_those_of_prompts(ggml: Attention, one: Case) -> None:
    """Rows of any number of rows, by both kernels."""
    n = one.q.shape[1]
    whole = ggml.run(one)
    for count, firsts in {1: (0, 14, 15, n - 1), 8: (11,), 9: (11,), 16: (0, n - 16)}.items():
        for first in firsts:
            found = ggml.run(one.rows(*range(first, first + count)), 1 + count % 2)
            wanted = whole[:, first : first + count]
            assert found.tobytes() == wanted.tobytes(), f"{count} rows from {first} on"


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("cells", usual(70, 572, long=(300, 4500)))
@pytest.mark.parametrize(("heads", "kv", "d"), [(8, 2, 64), (3, 3, 128), (4, 1, 256)])
def test_few_rows_and_many(
    ggml: Attention, heads: int, kv: int, d: int, cells: int, kind: str
) -> None:
    """A prompt, and its rows in parts. With 70 cells, they are a prompt's first: they have no key
    to say how channels are balanced."""
    one = case(cells, 70, heads, kv, d, type_k=TYPES[kind], type_v=TYPES[kind])
    one.k[..., 5] *= 20
    assert_rows_are_those_of_prompts(ggml, one)


@pytest.mark.parametrize("kind", ["f16", "q8_0", "q4_0"])
@pytest.mark.parametrize(
    "shape",
    [(48, 2, 64), (6, 2, 96), (5, 1, 80), (2, 1, 512), (71, 1, 64)],
    ids=lambda shape: "-".join(map(str, shape)),
)
def test_few_rows_and_many_in_other_shapes(
    ggml: Attention, shape: tuple[int, int, int], kind: str
) -> None:
    types = {"type_k": TYPES[kind], "type_v": TYPES[kind]} if shape[2] % 32 == 0 else {}
    one = case(300, 70, *shape, **types)
    assert one.mask is not None
    one.k[..., 5] *= 20
    assert_rows_are_those_of_prompts(ggml, one)
    less = np.random.default_rng(0).integers(0, 8, one.mask.shape)
    biased = replace(one, mask=(one.mask - less).astype(np.float32), max_bias=8.0)
    sinks = np.linspace(-2, 8, shape[0]).astype(np.float32)
    assert_rows_are_those_of_prompts(ggml, replace(biased, softcap=20.0, sinks=sinks))


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_few_rows_and_many_that_see_other_cells(ggml: Attention, kind: str) -> None:
    """A window; rows that see little or nothing; the rows of two sequences in one cache."""
    one = case(600, 70, type_k=TYPES[kind], type_v=TYPES[kind])
    assert one.mask is not None
    window, sequences = replace(one, mask=one.mask.copy()), replace(one, mask=one.mask.copy())
    assert window.mask is not None and sequences.mask is not None
    for row in range(70):
        window.mask[0, row, : 430 + row] = HIDDEN
        sequences.mask[0, row, row // 35 :: 2] = HIDDEN
    hide_tiles(one)
    for other in (one, window, sequences):
        other.k[..., 5] *= 20
        assert_rows_are_those_of_prompts(ggml, other)


@pytest.mark.parametrize("kind", ["f32", "f16", "q8_0"])
def test_rows_that_see_other_cells(ggml: Attention, kind: str) -> None:
    """Rows of several sequences in one cache see different cells; so do rows after a rollback.
    Each sequence has another channel that is larger than the others."""
    one = case(1000, type_k=TYPES[kind], type_v=TYPES[kind])
    assert one.mask is not None
    rng = np.random.default_rng(0)
    mine = rng.integers(0, 3, 1000)
    for sequence in range(3):
        one.k[0, mine == sequence, :, 20 * sequence] *= 30
    for row in range(8):
        one.mask[0, row, mine != row % 3] = HIDDEN
    one.mask[0, 4, :] = HIDDEN
    one.mask[0, 4, 640] = 0.0  # of one cell in the middle of a stretch
    one.mask[0, 5, 128:900] = HIDDEN
    assert_right(ggml, one)
    assert_rows_are_rows_alone(ggml, one, (2, 3, 5, 8))


@pytest.mark.parametrize("n_threads", [1, 5])
@pytest.mark.parametrize("kind", ["f16", "q8_0"])
@pytest.mark.parametrize(
    ("rows", "cells"),
    [*((rows, cells) for rows in (1, 4, 8) for cells in (40, 700, 6000)), (9, 500), (70, 500),
     (200, 500)],
)  # fmt: skip
def test_the_number_of_threads(
    ggml: Attention, rows: int, cells: int, kind: str, n_threads: int
) -> None:
    one = case(cells, rows, type_k=TYPES[kind], type_v=TYPES[kind])
    if rows > 8:
        hide_tiles(one)
    assert ggml.run(one, n_threads).tobytes() == ggml.run(one, 2).tobytes()


def test_windows_of_a_long_context(ggml: Attention) -> None:
    """Results of stretches are merged window by window, in the same order for any number of
    threads and rows."""
    one = case(40_000, 4, heads=4, d=32)
    assert_right(ggml, one)
    wanted = ggml.run(one)
    for n_threads in (1, 3, 20):
        assert ggml.run(one, n_threads).tobytes() == wanted.tobytes()
    assert ggml.run(one.rows(2)).tobytes() == wanted[:, 2].tobytes()


@pytest.mark.parametrize(("n_threads", "limit"), [(1, 15), (16, 18), (64, 64)])
def test_its_memory_does_not_grow_with_the_context(
    ggml: Attention, n_threads: int, limit: int
) -> None:
    """8 rows of a 27B: 82 MiB at 196,608 cells, if the results of all stretches were kept."""
    sizes = []
    for cells in (32_768, 196_608):
        with ggml.context(0, no_alloc=True) as ctx:
            q = ggml.ggml_new_tensor_4d(ctx, F32, 256, 8, 24, 1)
            k = ggml.ggml_new_tensor_4d(ctx, F16, 256, cells, 4, 1)
            out = ggml.ggml_flash_attn_ext(ctx, q, k, k, ggml.ffi.NULL, 1.0, 0.0, 0.0)
            sizes.append(ggml.work_size(out, n_threads))
    assert sizes[0] <= sizes[1] < limit << 20


UNSEEN = [(kind, 4, cells) for kind in TYPES for cells in (10, 256, 500, 4150)]


@pytest.mark.parametrize(("kind", "rows", "cells"), [*UNSEEN, *((k, 20, 130) for k in KINDS)])
def test_cells_that_no_row_sees(ggml: Attention, kind: str, rows: int, cells: int) -> None:
    """What lies there may be NaN; the cache's view ends at a multiple of 256 cells, or later."""
    one = case(cells, rows, type_k=TYPES[kind], type_v=TYPES[kind])
    assert one.mask is not None
    hidden = slice(cells // 3, cells // 2)
    one.mask[:, :, hidden] = HIDDEN
    wanted = ggml.run(one).tobytes()
    value = 7.0 if kind.startswith("q") else np.nan
    for more in (1, 64, 246, 1000):
        width = [(0, 0), (0, more), (0, 0), (0, 0)]
        k, v = (np.pad(part, width, constant_values=value) for part in (one.k, one.v))
        k[:, hidden] = v[:, hidden] = value
        mask = np.pad(one.mask, [(0, 0), (0, 0), (0, more)], constant_values=HIDDEN)
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


# -- switches --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "own", "others"),
    [
        ("few_rows_attention", case(700, rows=8), [case(700, rows=9)]),
        ("large_batch", case(300, 20), [case(300, 8), case(300, 20, d=36)]),
    ],
    ids=["1 to 8 rows", "more"],
)
def test_each_can_be_switched_off_and_leaves_some_to_others(
    ggml: Attention, name: str, own: Case, others: list[Case]
) -> None:
    found = {}
    for value in (True, False):
        assert native.load().set_cpu_switch(name, value)
        found[value] = [ggml.run(one) for one in (own, *others)]
    (on, *same), (off, *as_before) = found[True], found[False]
    assert on.tobytes() != off.tobytes() and np.abs(on - off).max() < 3e-2  # upstream sums in F16
    assert [one.tobytes() for one in same] == [one.tobytes() for one in as_before]
