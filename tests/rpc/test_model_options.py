"""Placing a model on two workers: by device name, experts and other tensors elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pyllama_mtp import Model, Session
from pyllama_mtp.errors import UsageError
from pyllama_mtp.models.surgery import drop_head, extract_head

from ..adapters import trunk, write_adapter
from ..regression.support import assert_same_tokens, greedy, rounding, settings, written
from .conftest import named

N_TOKENS = 24


def test_experts_stay_on_the_cpu(
    moe: Model, moe_file: Path, two_workers: tuple[str, str], text: list[int]
) -> None:
    prompt = [token % moe.n_vocab for token in text[:60]]
    expected = written(moe, prompt, N_TOKENS, 3).tokens
    for options in ({"cpu_moe": True}, {"n_cpu_moe": 2}):
        with Model(moe_file, rpc_servers=two_workers, **options) as model:
            got = written(model, prompt, N_TOKENS, 3).tokens
            assert_same_tokens(moe, prompt, got, expected, rounding(moe, prompt))


def test_an_adapter_is_where_its_matrices_are(
    demo: Model, demo_file: Path, two_workers: tuple[str, str], text: list[int], tmp_path: Path
) -> None:
    adapter = write_adapter(tmp_path / "a.gguf", demo.info, trunk(demo.info), strength=3)
    with Model(demo_file, lora=adapter) as model:
        expected = written(model, text[:60], N_TOKENS, 0).tokens
        gap = rounding(model, text[:97])
        with (
            Model(demo_file, lora=adapter, rpc_servers=two_workers) as remote,
            Session(remote, settings(3)) as session,
        ):
            got = greedy(session, text[:60], N_TOKENS).tokens
        assert_same_tokens(model, text[:60], got, expected, gap)


def test_a_head_in_a_file_of_its_own(
    demo: Model, demo_file: Path, two_workers: tuple[str, str], text: list[int], tmp_path: Path
) -> None:
    expected = written(demo, text[:60], N_TOKENS, 3)
    extract_head(demo_file, tmp_path / "mtp-m.gguf", "q8_0")
    trunk_file = drop_head(demo_file, tmp_path / "m.gguf")
    with (
        Model(trunk_file, rpc_servers=two_workers) as model,
        Session(model, settings(3)) as session,
    ):
        got = greedy(session, text[:60], N_TOKENS)
    assert_same_tokens(demo, text[:60], got.tokens, expected.tokens, rounding(demo, text[:97]))
    assert sum(got.telemetry.accepted) > 0.8 * sum(expected.telemetry.accepted)


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
