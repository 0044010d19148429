"""Validation accepts what the native code can run and refuses the rest with the right error."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from pyllama_mtp.errors import (
    HeadMismatchError,
    ModelFileError,
    NoMtpHeadError,
    UnsupportedArchitectureError,
)
from pyllama_mtp.models.ggufinfo import read_gguf, validate_model_file
from pyllama_mtp.models.synth import write_synthetic

from .. import architectures
from ..plain import write_model
from ..trimmed import rewrite, tensors_of


def test_tiny_models_are_valid(tiny_dense: Path, moe_file: Path) -> None:
    dense, moe = validate_model_file(tiny_dense), validate_model_file(moe_file)
    assert (dense.architecture, moe.architecture) == ("qwen35", "qwen35moe")
    for info in (dense, moe):
        assert (info.n_layer, info.n_mtp_layers, info.n_embd, info.n_vocab) == (4, 1, 128, 2048)
        assert info.recurrent_layers == (0, 1, 2)
        assert info.attention_layers == (3,)
        assert info.mtp_complete
        assert info.synthetic
        assert info.has_chat_template
    assert (moe.n_expert, moe.n_expert_used) == (8, 2)
    assert set(dense.tensor_types) == {"Q8_0", "F32"}


def test_description_agrees_with_the_gguf_package(moe_file: Path) -> None:
    info, reader = read_gguf(moe_file), gguf.GGUFReader(moe_file)
    theirs = {
        t.name: (tuple(int(d) for d in t.shape), t.tensor_type.name, t.data_offset, t.n_bytes)
        for t in reader.tensors
    }
    ours = {t.name: (t.shape, t.type, t.offset, t.nbytes) for t in info.tensors}
    assert ours == theirs
    assert info.n_params == sum(int(t.n_elements) for t in reader.tensors)


def test_model_without_head(tmp_path: Path) -> None:
    path = write_synthetic(tmp_path / "plain.gguf", "tiny", "f16", n_mtp=0)
    with pytest.raises(NoMtpHeadError, match="no MTP head"):
        validate_model_file(path)
    info = validate_model_file(path, require_mtp=False)
    assert not info.has_mtp and "give one in a file of its own" in info.why_no_mtp


@pytest.mark.parametrize(
    "name",
    [
        *(f"blk.4.{part}.weight" for part in ("nextn.eh_proj", "nextn.enorm", "nextn.hnorm")),
        *("blk.4.attn_k.weight", "blk.4.ffn_up.weight"),
        *("blk.0.attn_qkv.weight", "blk.1.ssm_a", "blk.3.attn_q.weight"),
    ],
)
def test_a_file_that_lacks_a_tensor(name: str, tiny_dense: Path, tmp_path: Path) -> None:
    """Of the head (block 4), which can be left out, or of the trunk."""
    tensors = {key: tensor for key, tensor in tensors_of(tiny_dense).items() if key != name}
    path = rewrite(tiny_dense, tmp_path / "m.gguf", tensors)
    if "blk.4." not in name:
        with pytest.raises(ModelFileError, match=f"{name} is missing"):
            validate_model_file(path)
        return
    with pytest.raises(NoMtpHeadError, match=f"incomplete.*{name}"):
        validate_model_file(path)
    assert read_gguf(path).mtp_missing == (name,)
    validate_model_file(path, require_mtp=False)


#: Whole numbers in place of a model's own, most of which would end the process natively.
NUMBERS = {
    ("full_attention_interval", 0): "full_attention_interval is 0",
    ("ssm.time_step_rank", 0): "ssm_v_heads is 0",
    ("ssm.inner_size", 96): "ssm.inner_size 96",
    ("ssm.group_count", 4): r"attn_qkv.weight is \(128, 256\), expected",
    ("attention.head_count_kv", 0): "n_head_kv is 0",
    ("attention.value_length", 32): "differ in size",
    ("rope.dimension_count", 128): "n_rot is 128",
    ("block_count", 4000): "4000 blocks",
    ("nextn_predict_layers", 6): "6 MTP blocks",
    ("expert_count", 8): "n_expert_used is 0",
}
#: Other metadata.
CHANGES: list[tuple[Callable[[gguf.GGUFWriter], object], str]] = [
    *(
        (lambda w, key=key, value=value: w.add_uint32(f"qwen35.{key}", value), message)  # type: ignore[misc]
        for (key, value), message in NUMBERS.items()
    ),
    (lambda w: w.kv_data[0].pop("qwen35.ssm.state_size"), "missing hyper-parameters: .*state_size"),
    (lambda w: w.add_string("qwen35.block_count", "5"), "expected a whole number"),
    (lambda w: w.add_uint16("split.count", 3), "one of 3 parts"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_a_file_that_says_something_else(
    change: Callable[[gguf.GGUFWriter], object], message: str, tiny_dense: Path, tmp_path: Path
) -> None:
    path = rewrite(tiny_dense, tmp_path / "m.gguf", tensors_of(tiny_dense), change)
    with pytest.raises(ModelFileError, match=message):
        validate_model_file(path)


@pytest.mark.parametrize(
    ("architecture", "advice"),
    [
        ("exaone-moe", "no graph for its MTP head"),
        ("llama", "no MTP head of it is known"),
    ],
)
def test_a_head_that_is_not_driven(architecture: str, advice: str, tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", architecture, nextn_predict_layers=1)
    message = rf"MTP head of architecture '{architecture}' is not driven here: .*{advice}"
    with pytest.raises(UnsupportedArchitectureError, match=message):
        validate_model_file(path)
    for require_mtp in (None, False):
        info = validate_model_file(path, require_mtp)
        assert (info.supported, info.has_mtp, info.mtp_complete) == (False, True, False)
    assert re.search(f"not driven here .*{advice}", info.why_no_mtp)


def test_an_architecture_without_a_head(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", "llama")
    with pytest.raises(NoMtpHeadError, match="no MTP head; load it without"):
        validate_model_file(path)
    info = validate_model_file(path, None)
    assert not info.supported and not info.has_mtp
    assert info.why_no_mtp == "the model has no MTP head"


@pytest.mark.parametrize("require_mtp", [True, None, False])
@pytest.mark.parametrize(
    ("architecture", "what"),
    [
        ("gemma4-assistant", "an MTP head for a Gemma 4 model.*without it.*-md FILE"),
        ("bert", "an embedding model"),
        ("clip", "the vision or audio part of a model"),
        ("llada", "a diffusion model"),
        ("t5", "a model with an encoder"),
    ],
)
def test_what_does_not_continue_text(
    architecture: str, what: str, require_mtp: bool | None, tmp_path: Path
) -> None:
    path = write_model(tmp_path / "m.gguf", architecture)
    with pytest.raises(UnsupportedArchitectureError, match=f"'{architecture}' is {what}"):
        validate_model_file(path, require_mtp)


def test_an_assistant_given_as_a_head(tmp_path: Path) -> None:
    model, head = (write_model(tmp_path / a, a) for a in ("gemma4", "gemma4-assistant"))
    with pytest.raises(HeadMismatchError, match="of a Gemma 4 model, and that is not driven here"):
        validate_model_file(model, None, head)


@pytest.mark.parametrize(
    ("n_heads", "changes", "message"),
    [
        (0, {"expert_count": 1025}, "n_expert is 1025"),
        (0, {"expert_used_count": 1}, "1 of 0 experts"),
        (0, {"context_length": 1 << 31}, "context_length is"),
        (0, {"attention.causal": False}, "attention.causal is false"),
        (0, {"block_count": 0}, "no layers of architecture 'llama'"),
        (1, {"nextn_predict_layers": 0}, "incomplete, 1 missing: metadata key"),
        (1, {"block_count": 5, "nextn_predict_layers": 3}, "incomplete, "),
        (1, {"expert_used_count": 9}, "9 of 4 experts"),
        (2, {}, "2 MTP blocks; glm4moe has one"),
    ],
)
def test_numbers_of_other_architectures(
    n_heads: int, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """That none can have, or none with a head."""
    path = tmp_path / "m.gguf"
    if n_heads:
        architectures.write_model("glm4moe", path, n_heads, changes=changes)
    else:
        write_model(path, "llama", **changes)
    with pytest.raises(ModelFileError, match=message):
        validate_model_file(path, True if n_heads else None)


def test_fused_projections_are_accepted(tiny_dense: Path, tmp_path: Path) -> None:
    """The loader takes attn_qkv in place of attn_q, attn_k and attn_v (create_tensor_qkv)."""
    tensors = tensors_of(tiny_dense)
    for part in "qkv":
        del tensors[f"blk.3.attn_{part}.weight"]
    tensors["blk.3.attn_qkv.weight"] = np.zeros((384, 128), np.float16), None
    validate_model_file(rewrite(tiny_dense, tmp_path / "m.gguf", tensors))


def test_what_a_decode_step_reads(tmp_path: Path) -> None:
    """Matrices of the trunk: of experts those that are used, of the embedding nothing, unless it is
    the LM head as well."""
    for shape in ("tiny", "tiny-moe"):
        path = write_synthetic(tmp_path / f"{shape}.gguf", shape, "q4_0", head_type="bf16")
        info = read_gguf(path)
        size = {tensor.name: tensor.nbytes for tensor in info.tensors}
        kinds = {tensor.name: tensor.type for tensor in info.tensors}
        wanted: dict[str, int] = {}
        for name, n in size.items():
            layer = int(name.split(".")[1]) if name.startswith("blk.") else -1
            vector = "norm" in name or name.endswith(".ssm_a") or "bias" in name or "conv1d" in name
            if layer == info.n_layer or vector or name.endswith("ffn_gate_inp_shexp.weight"):
                continue
            if name == "token_embd.weight" and shape == "tiny-moe":
                continue
            wanted[kinds[name]] = wanted.get(kinds[name], 0) + (n // 4 if "_exps" in name else n)
        assert info.step_types == wanted and "BF16" not in wanted
        assert list(info.step_types.values()) == sorted(wanted.values(), reverse=True)
