"""Which of two devices holds what: workers by name, experts and other tensors elsewhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from pyllama_mtp import Model, Session
from pyllama_mtp.errors import UsageError

from ..adapters import trunk, write_adapter
from ..regression.support import assert_same_tokens, greedy, rounding, settings

N_TOKENS = 24


@pytest.fixture(scope="module")
def names(demo_file: Path, two_workers: tuple[str, str]) -> list[str]:
    """What the devices of the two are called; ggml numbers those of a process on."""
    with Model(demo_file, rpc_servers=two_workers) as model:
        return [model._library.device_name(device) for device in model.devices]


def named(value: Any, names: list[str]) -> Any:
    """The value with their names for RPC0 and RPC1."""
    if isinstance(value, str):
        return re.sub(r"RPC([01])\b", lambda found: names[int(found[1])], value)
    if isinstance(value, dict):
        return {key: named(one, names) for key, one in value.items()}
    return (
        type(value)(named(one, names) for one in value)
        if isinstance(value, list | tuple)
        else value
    )


@pytest.mark.parametrize(
    "options",
    [
        {"device": ["RPC1", "RPC0"]},
        {"device": "RPC1"},
        {"split_mode": "none", "main_gpu": 1},
        {"override_tensor": [("ffn_", "CPU")]},
        {"override_tensor": [("ffn_", "RPC0")], "n_gpu_layers": 2},
        {"override_tensor": [("output_norm|nextn", "CPU"), (r"blk\.[0-3]\.", "RPC1")]},
    ],
)
def test_same_text_as_local(
    demo: Model,
    demo_file: Path,
    two_workers: tuple[str, str],
    text: list[int],
    gap: float,
    names: list[str],
    options: dict[str, Any],
) -> None:
    options = named(options, names)
    with Session(demo, settings(3)) as session:
        expected = greedy(session, text[:90], N_TOKENS).tokens
    with Model(demo_file, rpc_servers=two_workers, **options) as model:
        assert model.on_gpu
        with Session(model, settings(3)) as session:
            got = greedy(session, text[:90], N_TOKENS).tokens
    assert_same_tokens(demo, text[:90], got, expected, gap)


def test_experts_stay_on_the_cpu(
    moe: Model, moe_file: Path, two_workers: tuple[str, str], text: list[int]
) -> None:
    prompt = [token % moe.n_vocab for token in text[:60]]
    with Session(moe, settings(3)) as session:
        expected = greedy(session, prompt, N_TOKENS).tokens
    for options in ({"cpu_moe": True}, {"n_cpu_moe": 2}):
        with Model(moe_file, rpc_servers=two_workers, **options) as model:
            with Session(model, settings(3)) as session:
                got = greedy(session, prompt, N_TOKENS).tokens
            assert_same_tokens(moe, prompt, got, expected, rounding(moe, prompt))


def test_an_adapter_is_where_its_matrices_are(
    demo: Model, demo_file: Path, two_workers: tuple[str, str], text: list[int], tmp_path: Path
) -> None:
    adapter = write_adapter(tmp_path / "a.gguf", demo.info, trunk(demo.info), strength=3)
    with Model(demo_file, lora=adapter) as model:
        with Session(model, settings(0)) as session:
            expected = greedy(session, text[:60], N_TOKENS).tokens
        gap = rounding(model, text[:97])
        with (
            Model(demo_file, lora=adapter, rpc_servers=two_workers) as remote,
            Session(remote, settings(3)) as session,
        ):
            got = greedy(session, text[:60], N_TOKENS).tokens
        assert_same_tokens(model, text[:60], got, expected, gap)


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
