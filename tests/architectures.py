"""Models with an MTP head of every architecture that the pinned llama.cpp has a graph for.

What tensors a model has, and of what shape, says the library itself: its loader makes a model of
the metadata alone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGUFWriter

from pyllama_mtp.llama import native
from pyllama_mtp.models.demo import demo_path
from pyllama_mtp.models.synth import CHAT_TEMPLATE, add_tokens

from .hyperparameters import N_LAYER_LARGE, N_VOCAB_LARGE, hyperparameters
from .trimmed import add_metadata, add_values, finish

Array = npt.NDArray[np.float32]
#: One of each kind: attention, a recurrent state, several MTP blocks, compressed keys and values.
USUAL = ("glm4moe", "qwen3next", "step35", "deepseek2")


def architectures(names: Iterable[str]) -> list[Any]:
    """Parameters of a test or fixture: all but the USUAL ones are among the long tests."""
    return [pytest.param(n, marks=[] if n in USUAL else pytest.mark.long) for n in names]


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
        shape = tuple(tensor.contents.ne)
        found[name] = shape[: max([i for i, n in enumerate(shape, 1) if n > 1], default=1)]

    given = library.lib.llama_model_default_params()
    given.load_mtp = True
    params = Params.from_buffer_copy(library.ffi.buffer(library.ffi.addressof(given)))
    base.gguf_init_from_file.restype = ctypes.c_void_p
    base.gguf_init_from_file.argtypes = (ctypes.c_char_p, Init)
    llama.llama_model_init_from_user.restype = ctypes.c_void_p
    llama.llama_model_init_from_user.argtypes = (*(ctypes.c_void_p,) * 3, Params)
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
_OUTPUTS = ("attn_output", "ssm_out", "attn_output_b", "ple_value", "ple_conv1d")
_SMALL = 0.0005
#: Norm of an embedding, as in pyllama_mtp/models/synth.py; in a large model, where there
#: are more and longer outputs.
_LENGTH, _LENGTH_LARGE = 0.25, 4.0


def _wanted(name: str, names: Mapping[str, Any], arch: str, n_layer: int) -> bool:
    """Whether the model gets a tensor. Where a block may be dense or a mixture of experts, only
    the first block and mimo2's head are dense."""
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
    pyllama_mtp/models/synth.py."""
    embedding = tensors["token_embd.weight"]
    n_embd = embedding.shape[1]
    large = n_layer >= N_LAYER_LARGE
    length = _LENGTH_LARGE if large else _LENGTH
    same = ("ffn", "post", "exp_probs") if large else ("ffn", "post")
    embedding *= length / np.linalg.norm(embedding, axis=1, keepdims=True)
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
            data[:] = length / np.sqrt(n_embd)
        elif name.endswith("nextn.hnorm.weight"):
            data[:] = noise * length / n_embd
        elif name.endswith("shared_head_norm.weight"):
            data[:] = tensors["output_norm.weight"]
        elif ".nextn.hc_head_" in name:  # of streams: how they become one
            data[:] = tensors["output_hc_" + name.split("hc_head_")[1]]
        elif head and any(part in name for part in same):
            data[:] = tensors.get(last + name.split(".", 2)[2], data)


def write_model(
    arch: str,
    path: Path,
    n_heads: int = 1,
    *,
    noise: float | None = None,
    seed: int = 1,
    large: bool = False,
    changes: Mapping[str, Any] | None = None,
) -> Path:
    """Write a model of an architecture, in F32.

    Args:
        n_heads: MTP blocks.
        noise: of a head that drafts well otherwise; None: random weights.
        large: a model to measure with, of one of LARGE; else it is small, and has the demo
            model's tokenizer.
        changes: hyper-parameters that are others in the file, and fit its tensors no longer.
    """
    given = hyperparameters(arch, n_heads, large)
    header = path.with_suffix(".header")
    _write(header, arch, given, {}, large)
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
            tensors[name] = _values(name, shapes[name], rng)
    if arch == "mimo2":  # its head wants one matrix for all three
        for i in range(n_layer, n_layer + n_heads):
            parts = [tensors.pop(f"blk.{i}.attn_{part}.weight") for part in "qkv"]
            tensors[f"blk.{i}.attn_qkv.weight"] = np.concatenate(parts)
    if noise is not None:
        _drafting_well(tensors, n_layer, noise, seed)
    _write(path, arch, {**given, **(changes or {})}, tensors, large)
    return path


def _write(
    path: Path, arch: str, given: Mapping[str, Any], tensors: Mapping[str, Array], large: bool
) -> None:
    writer = GGUFWriter(path, arch)
    writer.add_name(f"{arch}, random weights")
    add_values(writer, {f"{arch}.{key}": value for key, value in given.items()})
    if large:
        add_tokens(writer, N_VOCAB_LARGE, "qwen2")
        writer.add_chat_template(CHAT_TEMPLATE)
    else:
        add_metadata(writer, demo_path(), "tokenizer.")
    finish(writer, tensors)
