"""Paired ratios: which samples are paired, the estimate, its interval, intervals that hold
together."""

from __future__ import annotations

import math
import random
from statistics import mean, median
from typing import Any

import pytest

from pyllama_mtp.errors import UsageError
from pyllama_mtp.measure.figures import (
    Cell,
    Ratio,
    base_of,
    half_widths,
    paired_ratios,
    typical,
    typical_ratio,
)
from pyllama_mtp.measure.sample import Sample

from ..cells import made_cell
from ..marks import usual


def cell(depth: int, speeds: dict[int, float], **changes: Any) -> Cell:
    """A cell with these decode speeds, by repeat; prefill is ten times as fast."""
    samples = [
        Sample(9, 8, 1.0, 1.0, 60 / v if v else 1.0, 10 * v, v, [], [], 0, 1.0)
        for v in speeds.values()
    ]
    return made_cell(depth, samples, repeats=list(speeds), **changes)


def test_ratios_are_of_the_same_repeat() -> None:
    """The machine was half as fast in repeat 1; the ratio of medians would be 150 / 50."""
    plain = cell(0, {0: 100.0, 1: 50.0, 2: 50.0})
    mtp = cell(3, {2: 75.0, 0: 150.0, 3: 150.0})
    assert paired_ratios(mtp, plain, "decode_tps") == [1.5, 1.5]
    assert paired_ratios(mtp, plain, "prefill_tps") == [1.5, 1.5]
    assert paired_ratios(mtp, plain, "elapsed_s") == pytest.approx([1 / 1.5, 1 / 1.5])


def test_a_sample_without_a_rate_has_no_ratio() -> None:
    assert paired_ratios(cell(3, {0: 0.0, 1: 9.0}), cell(0, {0: 1.0, 1: 3.0}), "decode_tps") == [3]


def spending(made: Cell, prefill_s: float, decode_s: float) -> Cell:
    """The cell with this CPU time of its thread in every sample."""
    for sample in made.samples:
        sample.cpu_s = {"prefill": prefill_s, "decode": decode_s}
    return made


def test_one_thread_is_compared_by_its_cpu_time() -> None:
    """Both take a second for prefill and one for decode, in which one thread ran for a part."""
    plain = spending(cell(0, {0: 100.0}, settings={"n_threads": 1}), 0.5, 1.0)
    mtp = spending(cell(3, {0: 100.0}, settings={"n_threads": 1}), 1.0, 0.25)
    mtp.samples[0].elapsed_s = plain.samples[0].elapsed_s = 2.0
    assert paired_ratios(mtp, plain, "prefill_tps") == [0.5]
    assert paired_ratios(mtp, plain, "decode_tps") == [4.0]
    assert paired_ratios(mtp, plain, "elapsed_s") == [1.25 / 1.5]


def test_a_sample_without_decoding_has_no_ratio_by_cpu_time_either() -> None:
    plain = spending(cell(0, {0: 100.0}, settings={"n_threads": 1}), 0.5, 0.0)
    mtp = spending(cell(3, {0: 100.0}, settings={"n_threads": 1}), 1.0, 0.25)
    assert paired_ratios(mtp, plain, "decode_tps") == []


@pytest.mark.parametrize(
    "change", [{"settings": {"n_threads": 2}}, {"machine": {"cores": 2}}, {"backend": "CUDA"}, {}]
)
def test_cpu_time_that_says_little_is_left_out(change: dict[str, Any]) -> None:
    """CPU time of several threads, beside a device, or of one side only is not used."""
    changes: dict[str, Any] = {"settings": {"n_threads": 1}, **change}
    if "machine" in change:
        del changes["settings"]
    plain = spending(cell(0, {0: 100.0}, **changes), 0.5, 1.0)
    mtp = cell(3, {0: 150.0}, **changes)
    if change:
        spending(mtp, 1.0, 0.25)
    assert paired_ratios(mtp, plain, "prefill_tps") == [1.5]
    assert paired_ratios(mtp, plain, "decode_tps") == [1.5]


def test_the_estimate_takes_all_of_them_and_is_not_moved_by_a_stray_one() -> None:
    """Of three: the fourth of the six means of pairs is between sqrt(1 * 4) and 2."""
    assert typical_ratio([1.0, 2.0, 4.0]).value == 2.0
    assert typical_ratio([1.0, 1.0, 1.21, 1.21]).value == pytest.approx(1.1)
    assert typical_ratio([1.0] * 8 + [50.0]).value == 1.0


def test_one_pair_says_nothing_of_the_noise() -> None:
    assert typical_ratio([1.5]) == Ratio(1.5, None, None, 1) and typical_ratio([1.5]).holds_one
    ratio = typical_ratio([1.3, 1.1, 1.2, 1.0, 1.9])
    assert ratio.low and ratio.high and ratio.low < 1.0 and ratio.high > 1.4 and ratio.n == 5
    assert ratio.scatter == pytest.approx((ratio.high - ratio.value) / ratio.value)


@pytest.mark.parametrize("n", usual(3, long=[9]))
def test_the_interval_holds_the_true_ratio_as_often_as_it_says(n: int) -> None:
    draw = random.Random(7)
    trials = [[draw.lognormvariate(0.3, 0.2) for _ in range(n)] for _ in range(600)]
    found = [typical_ratio(trial) for trial in trials]
    true = 2.718281828459045**0.3
    held = sum((one.low or 9) <= true <= (one.high or 0) for one in found) / len(found)
    assert 0.93 <= held <= 0.985
    off = [abs(math.log(ratio.value / true)) for ratio in found]
    off_median = [abs(math.log(median(trial) / true)) for trial in trials]
    assert sum(off) < sum(off_median), "closer to the truth than their median"


@pytest.mark.parametrize(("ratios", "message"), [([], "no repeat"), ([1.0, 0.0], "above 0")])
def test_what_has_no_ratio_is_refused(ratios: list[float], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        typical_ratio(ratios)


def test_the_base_is_the_plain_cell_of_the_same_setting() -> None:
    plain = cell(0, {0: 1.0})
    others = [
        cell(0, {0: 1.0}, **change)
        for change in (
            {"n_prompt": 1024},
            {"variant": "upstream"},
            {"prompt_class": "code"},
            {"run": "b"},
            {"program": "llama-server"},
            {"max_tokens": 9},
        )
    ]
    mtp = cell(3, {0: 1.0})
    assert base_of(mtp, [*others, mtp, plain]) is plain
    assert base_of(plain, [*others, plain]) is plain
    assert base_of(mtp, [*others, mtp, cell(0, {})]) is None, "a cell without a sample is no base"


def test_of_several_bases_the_closest_is_taken() -> None:
    first, second = cell(0, {0: 1.0}), cell(0, {0: 2.0})
    mtp = cell(3, {0: 4.0})
    assert base_of(mtp, [first, cell(2, {0: 1.0}), second, mtp]) is second
    assert base_of(mtp, [first, mtp, cell(2, {0: 1.0}), second]) is first


# -- intervals that hold together ------------------------------------------------------------------


def rows(count: int, values: int, seed: int, width: float = 1.0) -> list[list[float]]:
    source = random.Random(seed)
    return [[source.gauss(0, width) for _ in range(values)] for _ in range(count)]


@pytest.mark.parametrize(
    ("count", "values"), usual((1, 9), (8, 3), long=[(1, 5), (20, 3), (20, 7)])
)
def test_all_intervals_hold_in_95_of_100_cases(count: int, values: int) -> None:
    groups = [*([row] for row in range(count)), range(count)]
    missed = 0
    for seed in range(200):
        drawn = rows(count, values, seed)
        widths = half_widths(drawn, ["p"] * count, groups)
        centers = [mean([float(typical(drawn[row])) for row in group]) for group in groups]
        missed += any(abs(center) > width for center, width in zip(centers, widths, strict=True))
    assert missed / 200 <= 0.08 and (missed / 200 >= 0.01 or count > 1)


def test_a_mean_of_rows_has_a_narrower_interval() -> None:
    values = [[1.0, 2.0, 9.0], [5.0, 6.0, 7.0]]
    one, _, both = half_widths(values, ["p", "p"], [[0], [1], [0, 1]])
    assert both < one


def test_a_noisier_row_has_a_wider_interval_and_pools_are_apart() -> None:
    quiet, loud = rows(6, 5, 1, 0.01), rows(6, 5, 2, 1.0)
    singles = [[row] for row in range(6)]
    apart = half_widths([*quiet[:3], *loud[:3]], ["a"] * 3 + ["b"] * 3, singles)
    assert 2 * max(apart[:3]) < 0.1 < 2 * min(apart[3:])


def test_equal_values_have_an_interval_without_width() -> None:
    assert half_widths([[0.5, 0.5, 0.5]])[0] < 1e-9


def test_a_single_value_takes_its_noise_from_the_pool() -> None:
    found = half_widths([*rows(3, 5, 1), [0.1]], ["p"] * 4, [[0], [3]])
    assert found[1] > found[0]
    with pytest.raises(UsageError, match="one sample only"):
        half_widths([[1.0], [2.0]], ["p", "p"], [[0], [1]])


def test_the_same_input_gives_the_same_intervals() -> None:
    values = rows(4, 5, 7)
    singles = [[row] for row in range(4)]
    assert half_widths(values, "aabb", singles) == half_widths(values, "aabb", singles)
