"""Cache sizes are those upstream allocates; what limits a process is known."""

from __future__ import annotations

import resource
from dataclasses import replace
from pathlib import Path

import pytest

from pyllama_mtp import machine
from pyllama_mtp.errors import UsageError
from pyllama_mtp.llama.contextoptions import padded
from pyllama_mtp.machine import available_memory
from pyllama_mtp.memory import layer_bytes, recurrent_bytes
from pyllama_mtp.models.ggufinfo import validate_model_file


def test_cache_sizes_by_hand(tiny_dense: Path) -> None:
    info = validate_model_file(tiny_dense)
    # K and V rows of 64 f16 elements
    f16, q8, q4 = (layer_bytes(info, padded(1000), t, t) for t in ("f16", "q8_0", "q4_0"))
    assert f16 == 1024 * 2 * 64 * 2
    assert (q8 * 32, q4 * 32) == (f16 * 17, f16 * 9)
    # 3 recurrent layers; conv (4 - 1) x (128 + 2 x 2 x 32), state 32 x 128; f32
    conv, state = 3 * 256, 32 * 128
    assert recurrent_bytes(info, 2, 0) == 3 * 2 * (conv + state) * 4
    assert recurrent_bytes(info, 1, 3, snapshots=True) == 3 * 4 * (conv + state) * 4
    assert recurrent_bytes(info, 2, 1, snapshots=True) == 3 * 4 * (conv + state) * 4
    # the inputs of a convolution before 4 tokens, of these but the last, and one of zeros; k, v,
    # gate and beta of 4 tokens, and of one that does nothing
    inputs, token = (3 + 3 + 1) * 256, 2 * 32 + 128 + 4 + 4
    assert recurrent_bytes(info, 1, 3) == 3 * (inputs + state + 5 * token) * 4


def test_rows_that_a_cache_type_cannot_have(tiny_dense: Path) -> None:
    info = replace(validate_model_file(tiny_dense), head_dim_v=40)
    with pytest.raises(UsageError, match="V cache rows of 40 elements cannot be q8_0"):
        layer_bytes(info, 256, "f16", "q8_0")


def test_address_space_limit_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    before = available_memory()
    mapped = machine._fields(Path("/proc/self/status"))["VmSize"] * 1024
    limits = (mapped + (10 << 20), resource.RLIM_INFINITY)
    monkeypatch.setattr(machine.resource, "getrlimit", lambda which: limits)
    assert 0 < available_memory() <= 10 << 20 < before


def test_control_group_limit_is_respected(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 100000\n")
    names = ("memory.max", "memory.current", "inactive_file")
    assert machine._headroom(tmp_path, *names) == 700000
    (tmp_path / "memory.max").write_text("max\n")
    assert machine._headroom(tmp_path, *names) is None
    assert machine._headroom(tmp_path / "absent", *names) is None
