"""Cells: medians, and rates that are totals over totals."""

from __future__ import annotations

from typing import Any

import pytest

from pyllama_mtp.measure.figures import Cell, Sample

from ..cells import made_cell
from .records import FIGURES


def sample(**changes: Any) -> Sample:
    return Sample(**{**FIGURES, **changes})


def cell(*samples: Sample, **changes: Any) -> Cell:
    return made_cell(2, samples, **changes)


def test_times_are_medians_not_means() -> None:
    made = cell(
        sample(prefill_tps=1.0, decode_tps=9.0, elapsed_s=5.0),
        sample(prefill_tps=2.0, decode_tps=8.0, elapsed_s=6.0),
        sample(prefill_tps=99.0, decode_tps=1.0, elapsed_s=70.0),
    )
    assert (made.prefill_tps, made.decode_tps, made.elapsed_s) == (2.0, 8.0, 6.0)


def test_acceptance_is_total_over_total() -> None:
    """The mean of the samples' rates would be (1/2 + 90/100) / 2 = 0.7."""
    made = cell(
        sample(drafted=[2, 2], accepted=[1, 0], rounds=2, mean_acceptance_length=1.5),
        sample(drafted=[100, 50], accepted=[90, 25], rounds=100, mean_acceptance_length=2.15),
    )
    assert made.drafted == [102, 52]
    assert made.accepted == [91, 25]
    assert made.acceptance_per_position == [91 / 102, 25 / 52]
    assert made.rounds == 102
    assert made.mean_acceptance_length == pytest.approx(1 + 116 / 102)


def test_a_position_that_was_never_drafted_has_no_rate() -> None:
    made = cell(sample(drafted=[4], accepted=[2]), sample(drafted=[4, 0], accepted=[1, 0]))
    assert made.drafted == [8, 0]
    assert made.acceptance_per_position == [3 / 8, None]


def test_the_share_of_the_prompt_sync_is_total_over_total() -> None:
    """The mean of the samples' shares would be (0.5 + 0.1) / 2 = 0.3."""
    made = cell(
        sample(prefill_s=1.0, time_s={"prompt_sync": 0.5}),
        sample(prefill_s=9.0, time_s={"prompt_sync": 0.9}),
    )
    assert made.prompt_sync_share == pytest.approx(0.14)
    assert cell(sample(time_s={"prompt_sync": 0.0}), n_max=0).prompt_sync_share is None
