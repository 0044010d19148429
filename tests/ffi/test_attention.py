"""The CPU patches: attention of 1 to 8 rows, and of more, against numpy in float64.

A row's bits depend on what the row itself sees, and on nothing else: not on the number of threads,
nor on hidden cells, whatever is in them and however many follow the last one, nor on the rows
beside it, however many. Cases are drawn. Shapes are those around the edges of the kernels' tiles
(64 cells), stretches (256 cells, from 4,096 on 512), panels (48 or 16 queries, rows and heads
together) and blocks (240 queries).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pyllama_mtp.llama import native

from ..marks import usual
from .attentioncalls import HIDDEN, TYPES, Attention, Case, case
from .ggmlcalls import F16, F32, Q4_0, Q8_0

#: Types that have a kernel for more than 8 rows; TYPES are those for 1 to 8.
KINDS = ("f32", "f16", "q8_0", "q4_0")
#: Heads, heads of K and V, and width of a head.
SHAPES = [(8, 2, 64), (8, 2, 256), (5, 1, 128), (3, 3, 64), (1, 1, 32), (6, 2, 96), (48, 2, 64)]
SHAPES += [(2, 1, 512), (71, 1, 64), (16, 1, 64), (5, 5, 32), (3, 1, 96)]
CELLS = (8, 9, 64, 65, 70, 129, 256, 257, 300, 511, 513, 572, 700)
LONG = (4099, 4700, 5000)
MASKS = ("causal", "none", "biased", "ALiBi", "sinks", "softcap", "tiles", "window", "sequences")


def assert_right(ggml: Attention, one: Case, most: float = 5e-4) -> None:
    """Rounded no worse than F16 rounds; a row that sees nothing is zero."""
    found = ggml.run(one)
    if one.mask is not None:
        blind = ~np.isfinite(one.mask).any(axis=-1)
        assert not found[blind].any()
        mask = one.mask.copy()
        mask[blind, 0] = 0.0
        one = replace(one, mask=mask)
        found[blind] = ggml.wanted(one)[blind]
    wanted = ggml.wanted(one)
    assert np.abs(found - wanted).max() < most * np.abs(wanted).max()


def masked(one: Case, how: str, rng: np.random.Generator) -> Case:
    """The case with another mask, and what goes with it."""
    assert one.mask is not None
    mask, heads = one.mask.copy(), one.q.shape[2]
    rows, cells = np.arange(mask.shape[1])[:, None], np.arange(mask.shape[2])
    if how == "none":
        return replace(one, mask=None)
    if how in ("biased", "ALiBi"):
        mask -= rng.integers(0, 8, mask.shape)
        return replace(one, mask=mask, max_bias=8.0 * (how == "ALiBi"))
    if how == "sinks":
        return replace(one, sinks=np.linspace(-2, 8, heads).astype(np.float32))
    if how == "softcap":
        return replace(one, softcap=float(rng.choice([3.0, 20.0])))
    if how == "tiles":  # several sequences in one cache: rows see tiles that others do not
        hidden = (cells >= 128) & (cells < 256) & (rows >= 0)
        hidden |= (cells >= 320) & (cells < 448) & (rows % 2 == 0)
        hidden |= (cells < 300) & (rows % 3 == 1)
        hidden |= ((rows == 5) & (cells != 77)) | (rows == 6)  # one cell only, and nothing
    elif how == "window":
        hidden = cells < rows + cells[-1] - 99 - len(rows)
    else:  # "sequences", each of which has another channel that is larger than the others
        mine = rng.integers(0, 3, len(cells))
        for sequence in range(3):
            one.k[:, mine == sequence, :, 10 * sequence] *= 30
        hidden = mine != rows % 3
    mask[:, hidden] = HIDDEN
    return replace(one, mask=mask)


def drawn(kind: str, rows: int, cells: tuple[int, ...], seed: int) -> Case:
    """A case: shape, cells, streams and mask are drawn."""
    rng = np.random.default_rng([seed, rows, list(TYPES).index(kind)])
    heads, kv, d = SHAPES[rng.integers(len(SHAPES))]
    n_cells = int(rng.choice([n for n in cells if n >= rows]))
    types = {"type_k": TYPES[kind], "type_v": TYPES[kind], "streams": int(rng.integers(1, 3))}
    one = case(n_cells, rows, heads, kv, d, **types)
    if rng.random() < 0.5:
        one.k[..., 5] *= 20  # models have such channels
    return masked(one, str(rng.choice(MASKS)), rng)


# -- the values and the bits -----------------------------------------------------------------------


@pytest.mark.parametrize("seed", usual(*range(2), long=range(2, 60)))
@pytest.mark.parametrize("rows", [8, 70])
@pytest.mark.parametrize("kind", TYPES)
def test_a_row_has_its_bits_whatever_is_beside_it(
    ggml: Attention, kind: str, rows: int, seed: int
) -> None:
    """A prompt, and its rows in parts, by both kernels and any number of threads; with more cells
    behind the last one, in which anything may be."""
    one = drawn(kind, rows, CELLS if seed < 40 else LONG, seed)
    rng, whole = np.random.default_rng(seed), ggml.run(one)
    most = 1.2e-3 if np.abs(one.k).max() > 20 else 6e-4  # of scores that are hundreds
    assert_right(ggml, one.rows(*rng.choice(rows, min(rows, 12), replace=False)), most)
    for count in (1, 1, *rng.integers(2, 9, 3), min(rows, 9), min(rows, 16), rows):
        first = int(rng.choice([0, rows - count, rng.integers(rows - count + 1)]))
        found = ggml.run(one.rows(*range(first, first + count)), int(rng.choice([1, 2, 5])))
        wanted = whole[:, first : first + count]
        assert found.tobytes() == wanted.tobytes(), f"{count} rows from {first} on"
    if one.mask is not None:
        more, hidden = int(rng.choice([1, 64, 246, 1000])), (one.mask == HIDDEN).all(axis=(0, 1))
        width = [(0, 0), (0, more), (0, 0), (0, 0)]
        k, v = np.pad(one.k, width), np.pad(one.v, width)
        unseen = np.append(hidden, np.ones(more, dtype=bool))
        k[:, unseen] = v[:, unseen] = 7.0 if kind.startswith("q") else np.nan
        mask = np.pad(one.mask, [(0, 0), (0, 0), (0, more)], constant_values=HIDDEN)
        assert ggml.run(replace(one, k=k, v=v, mask=mask)).tobytes() == whole.tobytes(), more


@pytest.mark.parametrize("rows", [1, 3, 20])
def test_keys_and_values_of_other_sizes_and_types(ggml: Attention, rows: int) -> None:
    for heads, kv, d, dv in ((16, 1, 64, 128), (6, 2, 96, 32), (5, 1, 80, 112)):
        assert_right(ggml, case(200, rows, heads, kv, d, dv=dv, streams=2))
    assert_right(ggml, case(300, rows, type_k=Q8_0, type_v=Q4_0))


@pytest.mark.long
def test_more_rows_than_are_taken_together(ggml: Attention) -> None:
    """Queries and values of 85 rows take 32 MB here."""
    one = case(130, 100, heads=128, kv=1, d=512, streams=2)
    assert_right(ggml, replace(one, q=one.q / 4))


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
