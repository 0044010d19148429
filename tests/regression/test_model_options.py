"""Where tensors go, how the file is read: options of a model, and what is said of bad ones."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pyllama_mtp import Model, Session, Settings
from pyllama_mtp.errors import UsageError
from pyllama_mtp.llama import native
from pyllama_mtp.llama.cachetypes import cache_costs
from pyllama_mtp.llama.context import Context, ContextOptions
from pyllama_mtp.models.synth import write_synthetic

from .support import greedy, settings, written

N_TOKENS = 24


def moved(model: Path, caplog: pytest.LogCaptureFixture, **options: Any) -> dict[str, str]:
    """Loads it with these options: tensors whose buffer type is overridden, and by which."""
    caplog.clear()
    with caplog.at_level(logging.DEBUG, "pyllama_mtp.llama.native"), Model(model, **options):
        pass
    found = re.findall(
        r"tensor (\S+) \(.* buffer type overridden to (\S+)", "\n".join(caplog.messages)
    )
    return dict(found)


@pytest.mark.parametrize(
    ("options", "layers"),
    [
        ({"n_cpu_moe": 2}, {0, 1}),
        ({"n_cpu_moe": 10**6}, None),
        ({"cpu_moe": True}, None),
        ({"override_tensor": {r"blk\.1\..*_exps": "CPU"}}, {1}),
        ({"override_tensor": [(r"blk\.1\..*_exps", "CPU")], "n_cpu_moe": 1}, {0, 1}),
    ],
)
def test_experts_go_where_they_are_sent(
    moe_file: Path,
    moe: Model,
    caplog: pytest.LogCaptureFixture,
    options: dict[str, Any],
    layers: set[int] | None,
) -> None:
    experts = [t.name for t in moe.info.tensors if "_exps." in t.name]
    wanted = {n for n in experts if layers is None or int(n.split(".")[1]) in layers}
    assert moved(moe_file, caplog, **options).keys() == wanted
    assert experts


def test_an_override_to_the_cpu_takes_its_repacked_buffers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_synthetic(tmp_path / "m.gguf", "tiny-moe", "q4_0")
    native.load().set_cpu_switch("small_batch", False)  # so that upstream's repacking is used
    try:
        found = moved(path, caplog, cpu_moe=True)
    finally:
        native.load().set_cpu_switch("small_batch", True)
    assert set(found.values()) == {"CPU_REPACK"}


@pytest.mark.parametrize(
    ("options", "mode"),
    [
        ({}, "mmap"),
        ({"use_mmap": False}, "none"),
        ({"use_mmap": True}, "mmap"),
        ({"use_mlock": True}, r"mmap\+mlock"),
        ({"use_mlock": True, "use_mmap": False}, "mlock"),
        ({"device": "none"}, "mmap"),
        ({"device": "none", "override_tensor": {"ffn_.*": "CPU"}}, "mmap"),
        ({"split_mode": "none", "main_gpu": 0, "device": "none"}, "mmap"),
    ],
)
def test_how_the_file_is_read_and_the_text_does_not_depend_on_it(
    demo: Model,
    demo_file: Path,
    text: list[int],
    caplog: pytest.LogCaptureFixture,
    options: dict[str, Any],
    mode: str,
) -> None:
    expected = written(demo, text[:60], N_TOKENS, 3).tokens
    with caplog.at_level(logging.DEBUG, "pyllama_mtp.llama.native"):
        model = Model(demo_file, **options)
    with model, Session(model, settings(3)) as session:
        assert re.search(rf"load_mode = {mode}\)", caplog.text)
        assert not (model.on_gpu and "device" in options)
        assert greedy(session, text[:60], N_TOKENS).tokens == expected


def test_a_cache_of_experts_is_made(moe_file: Path) -> None:
    """llama.cpp makes it on GPUs, and refuses it elsewhere; a head's own context has none."""
    with Model(moe_file, n_gpu_layers=0, device="none", moe_cache_size=1 << 20) as model:
        options = ContextOptions(256, 64, 64, 1)
        with pytest.raises(UsageError, match="MoE cache requires a GPU"):
            Context(model, options)
        Context(model, replace(options, mtp_head=True)).close()


def test_what_quantized_caches_cost_on_cuda_is_said(
    demo_file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with Model(demo_file, device="none") as model:
        Session(model, Settings(n_ctx=256, cache_type_k="q8_0", cache_type_v="q8_0")).close()
        assert "q8_0" not in caplog.text
        monkeypatch.setattr(model, "on_gpu", True)
        monkeypatch.setattr(model, "devices", native.load().handles("cpu"))
        monkeypatch.setattr(native.Library, "device_name", lambda self, device: "CUDA0")
        assert not cache_costs(model, "f16", "f16")
        (cost,) = cache_costs(model, "f16", "q4_0")
        assert cost.startswith("CUDA0 turns a whole f16 and q4_0 cache into F16")
