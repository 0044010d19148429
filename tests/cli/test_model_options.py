"""Every command has the options of loading a model and of RoPE scaling, and obeys them."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from pyllama_mtp import Model, RopeScaling
from pyllama_mtp.cli import build_parser, options
from pyllama_mtp.llama.modeloptions import ModelOptions

from ..adapters import trunk, write_adapter
from ..processes import Program

COMMANDS = {"generate": ["x"], "matrix": [], "accept": [], "tune": [], "serve": []}
GIVEN = shlex.split(
    "--head mtp-m.gguf --n-gpu-layers 3 --device A,B --split-mode none --main-gpu 1 "
    "--tensor-split 1,2 --n-cpu-moe 4 --cpu-moe --override-tensor 'a.*=CPU,b(?=c)=GPU0' "
    "--override-tensor d=CPU --no-mmap --mlock --lora x.gguf,y.gguf --lora-scaled z.gguf:0.5 "
    "--rpc 127.0.0.1:1 --rpc-timeout 9 --moe-cache-mib 5"
)
#: The matrix takes several values of these.
SWITCHES = {"prompt_rows": "last", "prompt_sync": "kv", "hidden": "post-norm",
            "draft_vocab": "full"}  # fmt: skip
ROPE = shlex.split(
    "--rope-scaling yarn --rope-scale 4 --rope-freq-base 1e6 --yarn-orig-ctx 4096 "
    "--yarn-ext-factor 0.5 --yarn-attn-factor 1.5 --yarn-beta-fast 16 --yarn-beta-slow 2"
)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_them(command: str) -> None:
    arguments = [command, *COMMANDS[command], *GIVEN, *ROPE]
    args = build_parser(command).parse_args(arguments)
    found = ModelOptions(**options.placement(args))
    assert found.given == {
        "n_gpu_layers": 3,
        "device": ("A", "B"),
        "split_mode": "none",
        "main_gpu": 1,
        "tensor_split": (1.0, 2.0),
        "n_cpu_moe": 4,
        "cpu_moe": True,
        "moe_cache_size": 5 << 20,
        "override_tensor": (("a.*", "CPU"), ("b(?=c)", "GPU0"), ("d", "CPU")),
        "use_mmap": False,
        "use_mlock": True,
        "lora": (("x.gguf", 1.0), ("y.gguf", 1.0), ("z.gguf", 0.5)),
        "rpc_servers": ("127.0.0.1:1",),
        "rpc_timeout": 9,
        "head": "mtp-m.gguf",
    }
    assert {*found.given} == {*vars(found)} - {"no_alloc"}  # that is all there are
    args.n_ctx = 256
    assert options.settings_from(args, 2, **SWITCHES).rope == RopeScaling(
        rope_scaling="yarn",
        rope_freq_base=1e6,
        rope_freq_scale=0.25,
        yarn_orig_ctx=4096,
        yarn_ext_factor=0.5,
        yarn_attn_factor=1.5,
        yarn_beta_fast=16,
        yarn_beta_slow=2,
    )
    nothing = build_parser(command).parse_args([command, *COMMANDS[command]])
    assert not ModelOptions(**options.placement(nothing)).given
    assert options.settings_from(nothing, 2, **SWITCHES).rope == RopeScaling()


def test_generate_obeys(in_process: Program, demo: Model, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "a.gguf", demo.info, trunk(demo.info), strength=3)

    def text(*given: Any) -> str:
        done = in_process(
            "generate", "--json", "-n", "12", "--threads", "1", *map(str, given), "def f"
        )
        return str(json.loads(done.stdout)["text"])

    plain = text()
    assert text("--no-mmap", "--mlock", "--device", "none", "--override-tensor", "ffn=CPU") == plain
    adapted = text("--lora", adapter)
    assert adapted != plain and text("--lora", adapter, "--draft-n-max", 0) == adapted
    assert text("--lora-scaled", f"{adapter}:0") == plain
