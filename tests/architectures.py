"""Small models with an MTP head of every architecture that the pinned llama.cpp has a graph for.

Dimensions are those of upstream's tests/test-llama-archs.cpp, or near them. What tensors a model
has, and of what shape, says the library itself: its loader makes a model of the metadata alone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, GGUFValueType, GGUFWriter

from pyllama_mtp.llama import native
from pyllama_mtp.models.demo import demo_path

Array = npt.NDArray[np.float32]

N_LAYER = 2
#: Hyper-parameters that all have.
_COMMON: dict[str, Any] = {
    "context_length": 8192,
    "embedding_length": 128,
    "feed_forward_length": 192,
    "attention.head_count": 2,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "leading_dense_block_count": 1,
    "expert_feed_forward_length": 96,
    "expert_shared_feed_forward_length": 64,
    "expert_count": 4,
    "expert_used_count": 2,
    "expert_shared_count": 1,
    "expert_gating_func": 2,  # sigmoid
    "expert_weights_norm": True,
    "expert_weights_scale": 1.0,
}
#: Latent attention: one K/V head; keys are the latent and the rotated part.
_LATENT: dict[str, Any] = {
    "attention.head_count_kv": 1,
    "attention.key_length": 96,
    "attention.value_length": 64,
    "attention.key_length_mla": 64,
    "attention.value_length_mla": 32,
    "attention.q_lora_rank": 48,
    "attention.kv_lora_rank": 64,
    "rope.dimension_count": 32,
}
_INDEXER: dict[str, Any] = {
    "attention.indexer.head_count": 4,
    "attention.indexer.key_length": 64,
    "attention.indexer.top_k": 4096,
}
_WINDOW: dict[str, Any] = {"attention.sliding_window": 32}


def hyperparameters(arch: str, n_heads: int) -> dict[str, Any]:
    """Of the small model of an architecture with so many MTP blocks, without its name as prefix."""
    n = N_LAYER + n_heads
    own: dict[str, dict[str, Any]] = {
        "bailingmoe3": {
            **_LATENT,
            "attention.head_count_kv": [0, *[1] * (n - 1)],
            "ssm.conv_kernel": 4,
            "kda.head_dim": 64,
            "kda.gate_lower_bound": -5.0,
        },
        "cohere2moe": {
            **_WINDOW,
            "attention.sliding_window_pattern": [True, *[False] * (n - 1)],
            "attention.layer_norm_epsilon": 1e-5,
            "logit_scale": 1.0,
        },
        "deepseek2": _LATENT,
        "deepseek32": {**_LATENT, **_INDEXER},
        "deepseek4": {
            **_WINDOW,
            **_INDEXER,
            "attention.indexer.key_length": 128,  # equal to key_length it ends the process
            "embedding_length": 256,
            "feed_forward_length": 256,
            "attention.head_count": 4,
            "attention.head_count_kv": 1,
            "attention.key_length": 64,
            "attention.value_length": 64,
            "rope.dimension_count": 32,
            "attention.q_lora_rank": 64,
            "attention.output_group_count": 4,
            "attention.output_lora_rank": 32,
            "attention.compress_ratios": [4, 128, *[0] * n_heads],
            "attention.compress_rope_freq_base": 160000.0,
            "hyper_connection.count": 4,
            "hyper_connection.sinkhorn_iterations": 2,
            "hyper_connection.epsilon": 1e-6,
            "hash_layer_count": 0,
            "swiglu_clamp_exp": 10.0,
            "expert_gating_func": 4,
        },
        "glm-dsa": {**_LATENT, **_INDEXER},
        "glm4moe": {"attention.key_length": 64, "attention.value_length": 64},
        "mimo2": {
            **_WINDOW,
            "attention.sliding_window_pattern": [1, 0, *[1] * n_heads],
        },
        "nemotron_h_moe": {
            "attention.layer_norm_epsilon": 1e-5,
            "feed_forward_length": [0, 0, 192, *[0] * n_heads],
            "attention.head_count_kv": [0, 2, 0, *[2] * n_heads],
            "ssm.conv_kernel": 4,
            "ssm.inner_size": 256,
            "ssm.state_size": 64,
            "ssm.group_count": 2,
            "ssm.time_step_rank": 4,
        },
        "qwen3next": {
            "rope.dimension_sections": [4, 4, 4, 4],
            "full_attention_interval": 2,
            "ssm.conv_kernel": 4,
            "ssm.inner_size": 128,
            "ssm.state_size": 32,
            "ssm.group_count": 2,
            "ssm.time_step_rank": 4,
        },
        "step35": {
            **_WINDOW,
            "embedding_length": 160,
            "attention.sliding_window_pattern": [1, 0, *[1] * n_heads],
        },
    }
    chosen = {**_COMMON, **own.get(arch, {})}
    n_layer = 3 if arch == "nemotron_h_moe" else N_LAYER
    return {**chosen, "block_count": n_layer + n_heads, "nextn_predict_layers": n_heads}


# --- what the library makes of them -------------------------------------------------------------


class _Tensor(ctypes.Structure):
    """The first members of ``struct ggml_tensor``."""

    _fields_ = (("type", ctypes.c_int), ("buffer", ctypes.c_void_p), ("ne", ctypes.c_int64 * 4))


def tensor_shapes(header: Path) -> dict[str, tuple[int, ...]]:
    """Shapes in ggml order, by name, of the model whose metadata a file has."""
    library, found = native.load(), dict[str, tuple[int, ...]]()
    folder = native.locate()[0]
    llama = ctypes.CDLL(str(folder / "libllama.so.0"))
    base = ctypes.CDLL(str(folder.parent / "libggml-base.so.0"))
    base.ggml_get_name.restype = ctypes.c_char_p

    class Params(ctypes.Structure):
        _fields_ = (
            ("bytes", ctypes.c_uint64 * (library.ffi.sizeof("struct llama_model_params") // 8)),
        )

    class Init(ctypes.Structure):
        _fields_ = (("no_alloc", ctypes.c_bool), ("context", ctypes.c_void_p))

    @ctypes.CFUNCTYPE(None, ctypes.POINTER(_Tensor), ctypes.c_void_p)
    def seen(tensor: Any, _: Any) -> None:
        name = base.ggml_get_name(tensor).decode()
        found[name] = tuple(tensor.contents.ne)

    given = library.lib.llama_model_default_params()
    given.load_mtp = True
    params = Params.from_buffer_copy(library.ffi.buffer(library.ffi.addressof(given)))
    base.gguf_init_from_file.restype = ctypes.c_void_p
    base.gguf_init_from_file.argtypes = (ctypes.c_char_p, Init)
    llama.llama_model_init_from_user.restype = ctypes.c_void_p
    llama.llama_model_init_from_user.argtypes = (
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_void_p,
        Params,
    )
    metadata = base.gguf_init_from_file(str(header).encode(), Init(True, None))
    pointer = ctypes.cast(seen, ctypes.c_void_p)
    model = llama.llama_model_init_from_user(metadata, pointer, None, params)
    message = native.take_recent_errors()
    assert model, message
    library.lib.llama_model_free(library.ffi.cast("struct llama_model *", model))
    base.gguf_free.argtypes = (ctypes.c_void_p,)
    base.gguf_free(metadata)
    return found


# --- weights ------------------------------------------------------------------------------------

#: Optional tensors, which published models of most architectures do not have.
_LEFT_OUT = ("rope_freqs", "attn_sinks", "ffn_latent", "embed_tokens", "shared_head_head", "ssm_in")
_KEPT = {"deepseek4": "attn_sinks", "nemotron_h_moe": "ssm_in"}
_DENSE = ("ffn_gate.", "ffn_up.", "ffn_down.")
#: Parts that a well drafting model keeps small: what they add to the residual stream.
_OUTPUTS = ("attn_output", "ssm_out", "attn_output_b")
_SMALL = 0.0005
#: Norm of an embedding, as in pyllama_mtp/models/predictable.py.
_LENGTH = 0.25


def _wanted(name: str, names: Mapping[str, Any], arch: str, n_layer: int) -> bool:
    """Of blocks that may be dense or mixtures of experts the first is dense; mimo2's head too."""
    if any(part in name for part in _LEFT_OUT if part != _KEPT.get(arch)):
        return False
    if name.endswith(".scale") or name.endswith(".input_scale"):  # of quantized files
        return False
    if name.endswith(".bias") and "attn_" in name:
        return False
    if "ffn_" not in name or not name.startswith("blk."):
        return True
    block = name[: name.index(".", 4) + 1]
    both = block + "ffn_gate.weight" in names and block + "ffn_gate_inp.weight" in names
    if not both or name.endswith("ffn_norm.weight"):
        return True
    layer = int(block[4:-1])
    dense = layer == 0 or (arch == "mimo2" and layer >= n_layer - 1)
    return dense == any(part in name for part in _DENSE)


def _values(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    n = int(np.prod(shape))
    noise = rng.standard_normal(n).astype(np.float32)
    if "norm" in name:
        data = 1 + 0.1 * noise
    elif "ssm_a" in name:
        data = -0.5 - np.abs(noise)
    elif name.startswith("token_embd"):
        data = noise
    elif name.endswith(".bias") or len(shape) == 1:
        data = 0.1 * noise
    else:
        data = noise / np.sqrt(shape[0])
    return data.reshape(shape[::-1]).astype(np.float32)


def _drafting_well(tensors: dict[str, Array], n_layer: int, noise: float, seed: int) -> None:
    """Make the next token nearly a function of the last one that the head knows, too; see
    pyllama_mtp/models/predictable.py."""
    embedding = tensors["token_embd.weight"]
    n_embd = embedding.shape[1]
    embedding *= _LENGTH / np.linalg.norm(embedding, axis=1, keepdims=True)
    last = f"blk.{n_layer - 1}."
    for name, data in tensors.items():
        head = name.startswith("blk.") and int(name.split(".")[1]) >= n_layer
        early = ".ffn_down" in name and not name.startswith(last) and not head
        if early or any(f".{part}." in name for part in _OUTPUTS):
            data *= _SMALL
        elif name.endswith("nextn.eh_proj.weight"):
            data[:, :n_embd] = np.eye(n_embd, dtype=np.float32)
            data[:, n_embd:] = np.random.default_rng(seed).standard_normal((n_embd, n_embd))
        elif name.endswith("nextn.enorm.weight"):
            data[:] = _LENGTH / np.sqrt(n_embd)
        elif name.endswith("nextn.hnorm.weight"):
            data[:] = noise * _LENGTH / n_embd
        elif name.endswith("shared_head_norm.weight"):
            data[:] = tensors["output_norm.weight"]
        elif (
            head and (last + name.split(".", 2)[2]) in tensors and ("ffn" in name or "post" in name)
        ):
            data[:] = tensors[last + name.split(".", 2)[2]]


def write_model(
    arch: str,
    path: Path,
    n_heads: int = 1,
    *,
    noise: float | None = None,
    seed: int = 1,
    changes: Mapping[str, Any] | None = None,
) -> Path:
    """Write a small model of an architecture, in F32, with the demo model's tokenizer.

    Args:
        n_heads: MTP blocks.
        noise: of a head that drafts well otherwise; None: random weights.
        changes: hyper-parameters that are others in the file, and fit its tensors no longer.
    """
    given = hyperparameters(arch, n_heads)
    header = path.with_suffix(".header")
    _write(header, arch, given, {})
    shapes = tensor_shapes(header)
    header.unlink()
    n_layer = given["block_count"] - n_heads
    if arch == "deepseek4":  # the loader asks the file for a head, and there is none
        n = given["embedding_length"]
        for i in range(n_layer, n_layer + n_heads):
            shapes[f"blk.{i}.nextn.eh_proj.weight"] = (2 * n, n)
            for norm in ("enorm", "hnorm", "shared_head_norm"):
                shapes[f"blk.{i}.nextn.{norm}.weight"] = (n,)
    rng = np.random.default_rng(seed)
    tensors = {}
    for name in sorted(shapes):
        if _wanted(name, shapes, arch, n_layer):
            shape = shapes[name]
            while len(shape) > 1 and shape[-1] == 1:
                shape = shape[:-1]
            tensors[name] = _values(name, shape, rng)
    if arch == "mimo2":  # its head wants one matrix for all three
        for i in range(n_layer, n_layer + n_heads):
            parts = [tensors.pop(f"blk.{i}.attn_{part}.weight") for part in "qkv"]
            tensors[f"blk.{i}.attn_qkv.weight"] = np.concatenate(parts)
    if noise is not None:
        _drafting_well(tensors, n_layer, noise, seed)
    _write(path, arch, {**given, **(changes or {})}, tensors)
    return path


def _write(path: Path, arch: str, given: Mapping[str, Any], tensors: Mapping[str, Array]) -> None:
    writer = GGUFWriter(path, arch)
    writer.add_name(f"{arch}, random weights")
    for key, value in given.items():
        name = f"{arch}.{key}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, list):
            writer.add_array(name, value)
        else:
            writer.add_uint32(name, value)
    for key, field in GGUFReader(demo_path()).fields.items():
        if key.startswith("tokenizer."):
            kind = field.types[0]
            sub = field.types[-1] if kind == GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), kind, sub)
    for name, data in tensors.items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
