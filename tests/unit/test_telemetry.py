"""Arithmetic of the figures that everything else reports."""

from __future__ import annotations

import json

import pytest

from pyllama_mtp import Telemetry
from pyllama_mtp.telemetry import timed


def test_rounds_are_counted_per_position() -> None:
    telemetry = Telemetry()
    for drafted, accepted in ((1, 0), (3, 3), (3, 0), (2, 1), (0, 0), (3, 2)):
        telemetry.count_round(drafted, accepted)
    assert telemetry.rounds == 6
    assert telemetry.drafted == [5, 4, 3]
    assert telemetry.accepted == [3, 2, 1]
    assert telemetry.acceptance_per_position == pytest.approx([3 / 5, 2 / 4, 1 / 3])
    assert telemetry.mean_accepted_length == pytest.approx(6 / 6)
    assert telemetry.tokens_per_round == pytest.approx(12 / 6)


def test_rates() -> None:
    telemetry = Telemetry(n_prompt=120, n_cached=20, n_generated=11, prefill_s=0.5, decode_s=2.0)
    assert telemetry.prefill_tps == 200, "cached tokens were not processed"
    assert telemetry.decode_tps == 5, "the first token belongs to the prefill"
    assert telemetry.elapsed_s == 2.5


def test_nothing_done_yet() -> None:
    telemetry = Telemetry()
    assert telemetry.prefill_tps == telemetry.decode_tps == telemetry.elapsed_s == 0
    assert telemetry.mean_accepted_length == telemetry.tokens_per_round == 0
    assert telemetry.acceptance_per_position == []


def test_phases_add_up_and_survive_an_exception() -> None:
    times = {"draft": 0.0, "verify": 0.0}
    with timed("draft", times):
        pass
    first = times["draft"]
    with pytest.raises(RuntimeError), timed("draft", times):
        raise RuntimeError
    assert times["draft"] > first > 0 == times["verify"]


def test_to_dict_is_json_and_has_derived_figures() -> None:
    telemetry = Telemetry(synthetic_acceptance=(0.5,), pairs=[])
    telemetry.count_round(1, 1)
    found = json.loads(json.dumps(telemetry.to_dict()))
    assert found["acceptance_per_position"] == [1.0]
    assert found["tokens_per_round"] == 2.0
    assert found["synthetic_acceptance"] == [0.5]
    assert {"prefill_tps", "decode_tps", "elapsed_s", "drafted", "time_s", "pairs"} <= {*found}
