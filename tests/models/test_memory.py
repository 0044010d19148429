"""Cache sizes are those upstream allocates; what limits a process is known."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from pyllama_mtp.errors import UsageError
from pyllama_mtp.models import memory
from pyllama_mtp.models.ggufinfo import validate_model_file
from pyllama_mtp.models.memory import available_memory, memory_estimate


def test_cache_sizes_by_hand(tiny_dense: Path) -> None:
    info = validate_model_file(tiny_dense)
    estimate = memory_estimate(info, 1000, n_rs_seq=3)
    # 1 attention layer, 1000 cells padded to 1024, K and V rows of 64 f16 elements
    assert estimate.kv_target == 1 * 1024 * 2 * 64 * 2
    assert estimate.kv_draft == estimate.kv_target
    # 3 recurrent layers, 4 sets: conv (4 - 1) x (128 + 2 x 2 x 32), state 32 x 128; f32
    assert estimate.recurrent == 3 * 4 * (3 * 256 + 32 * 128) * 4
    assert estimate.weights == info.weight_bytes
    assert estimate.total > estimate.weights + estimate.kv_target


def test_mtp_off_costs_less(tiny_dense: Path) -> None:
    info = validate_model_file(tiny_dense)
    on, off = (memory_estimate(info, 4096, mtp=m) for m in (True, False))
    assert off.kv_draft == 0
    assert on.weights - off.weights == info.mtp_weight_bytes > 0
    assert off.total < on.total


def test_checkpoints_are_copies_of_the_recurrent_state(tiny_dense: Path) -> None:
    info = validate_model_file(tiny_dense)
    none, four = (memory_estimate(info, 4096, checkpoints=n) for n in (0, 4))
    assert four.checkpoints == 4 * none.recurrent == four.total - none.total


def test_quantized_cache_is_smaller(tiny_dense: Path) -> None:
    info = validate_model_file(tiny_dense)
    f16, q8, q4 = (memory_estimate(info, 2048, t, t).kv_target for t in ("f16", "q8_0", "q4_0"))
    assert (q8 * 32, q4 * 32) == (f16 * 17, f16 * 9)


def test_sequences_are_padded_apart(tiny_dense: Path) -> None:
    info = validate_model_file(tiny_dense)
    one, three = (memory_estimate(info, 768, n_seq=n).kv_target for n in (1, 3))
    assert one == three
    assert memory_estimate(info, 600, n_seq=3).kv_target == three


@pytest.mark.parametrize(
    "arguments",
    [
        {"n_ctx": 0},
        {"n_ctx": 8, "type_k": "q3_k"},
        {"n_ctx": 8, "n_rs_seq": -1},
        {"n_ctx": 8, "checkpoints": -1},
    ],
)
def test_bad_arguments(arguments: dict[str, object], tiny_dense: Path) -> None:
    with pytest.raises(UsageError):
        memory_estimate(validate_model_file(tiny_dense), **arguments)  # type: ignore[arg-type]


def test_address_space_limit_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    before = available_memory()
    mapped = memory._fields(Path("/proc/self/status"))["VmSize"] * 1024
    limits = (mapped + (10 << 20), resource.RLIM_INFINITY)
    monkeypatch.setattr(memory.resource, "getrlimit", lambda which: limits)
    assert 0 < available_memory() <= 10 << 20 < before


def test_control_group_limit_is_respected(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 100000\n")
    names = ("memory.max", "memory.current", "inactive_file")
    assert memory._headroom(tmp_path, *names) == 700000
    (tmp_path / "memory.max").write_text("max\n")
    assert memory._headroom(tmp_path, *names) is None
    assert memory._headroom(tmp_path / "absent", *names) is None
