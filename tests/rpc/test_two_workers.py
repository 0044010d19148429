"""A model spread over two workers writes what it writes locally, and its telemetry adds up."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pyllama_mtp import Model, Session
from pyllama_mtp.errors import UsageError

from ..marks import usual
from ..regression.support import assert_same_tokens, greedy, settings
from .conftest import named

N_TOKENS = 24
#: Output layer and MTP block on the second worker; the block on the first, the output layer on the
#: second, so that hidden rows have to travel.
TOGETHER, APART = {"tensor_split": (1.0, 1.0)}, {"tensor_split": (6.5, 1.5)}


@pytest.mark.parametrize(
    ("placed", "options"),
    usual(
        (TOGETHER, {}),
        (APART, {"prompt_sync": "full"}),
        ({"override_tensor": [("output_norm|nextn", "CPU"), (r"[0-3]\.", "RPC1")]}, {}),
        long=[
            (APART, {}),
            (TOGETHER, {"rollback": "replay"}),
            ({"device": ["RPC1", "RPC0"]}, {}),
            (TOGETHER, {"draft_n_max": 0}),
            (APART, {"rollback": "replay", "prompt_sync": "full", "draft_n_max": 2}),
            (TOGETHER, {"prompt_sync": "full"}),
            ({"device": "RPC1"}, {}),
            ({"split_mode": "none", "main_gpu": 1}, {}),
            ({"override_tensor": [("ffn_", "CPU")]}, {}),
            ({"override_tensor": [("ffn_", "RPC0")], "n_gpu_layers": 2}, {}),
        ],
    ),
    ids=str,
)
def test_same_text_as_local(
    demo: Model,
    demo_file: Path,
    two_workers: tuple[str, str],
    names: list[str],
    text: list[int],
    gap: float,
    placed: dict[str, Any],
    options: dict[str, object],
    caplog: pytest.LogCaptureFixture,
) -> None:
    options = dict(options)
    chosen = settings(options.pop("draft_n_max", 3), checkpoints=4, **options)
    prompts = [text[:100], [*text[:70], *text[200:210]], text[:120]]
    same = 0
    with (
        caplog.at_level(logging.WARNING, "pyllama_mtp"),
        Model(demo_file, rpc_servers=two_workers, **named(placed, names)) as model,
        Session(model, chosen) as remote,
        Session(demo, chosen) as local,
    ):
        for prompt in prompts:  # the second parts from the first, the third goes back
            got, expected = greedy(remote, prompt, N_TOKENS), greedy(local, prompt, N_TOKENS)
            telemetry = got.telemetry
            assert telemetry.n_cached == expected.telemetry.n_cached
            assert telemetry.prefill_tps > 0 and telemetry.decode_tps > 0
            assert telemetry.n_generated == len(got.tokens) == N_TOKENS
            if assert_same_tokens(demo, prompt, got.tokens, expected.tokens, gap):
                assert got.text == expected.text
                assert telemetry.drafted == expected.telemetry.drafted
                assert telemetry.accepted == expected.telemetry.accepted
                same += 1
            if not chosen.draft_n_max:
                continue
            assert sum(telemetry.accepted) > 0
    assert same >= 2, "rounding alone does not part that many"


def test_both_workers_hold_a_part(
    demo_file: Path, two_workers: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """By default layers go by free memory: two equal workers get about half each."""
    with (
        caplog.at_level(logging.DEBUG, "pyllama_mtp.llama.native"),
        Model(demo_file, rpc_servers=two_workers),
    ):
        pass
    assigned = [line for line in caplog.messages if "assigned to device RPC" in line]
    devices = Counter(line.split("assigned to device ")[1].split(",")[0] for line in assigned)
    assert sorted(devices.values()) == [4, 4], assigned


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "RPX"}, "device 'RPX' is not there; there is RPC0, RPC1, .*none"),
        ({"split_mode": "none", "main_gpu": 2}, "main_gpu is 2; there is 0 to 1: RPC0, RPC1"),
        ({"split_mode": "row"}, "split_mode 'row' is not possible here .*RPC0"),
        ({"override_tensor": {"ffn": "RPX"}}, "there is no device 'RPX'; there is CPU.*RPC0"),
    ],
)
def test_what_is_not_possible_is_said_with_what_is(
    demo_file: Path,
    two_workers: tuple[str, str],
    names: list[str],
    options: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(UsageError, match=named(message, names)):
        Model(demo_file, rpc_servers=two_workers, **options)
