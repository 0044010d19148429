"""Tiny models with random weights, in the place of those that llama-cpp-python's tests download.

Their vocabularies come from the vocabulary files in its source archive. Tests that want the text of
a particular model cannot pass with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFWriter

N_EMBD, N_FF, N_LAYER, N_HEAD, N_CTX = 128, 256, 2, 4, 512
#: Of the Mamba model.
D_INNER, D_STATE, D_CONV, DT_RANK = 256, 16, 4, 8
#: A tensor's shape as ggml counts it: row length first.
Shapes = dict[str, tuple[int, ...]]


def write(
    path: Path, vocabulary: Path, arch: str, parameters: Mapping[str, Any], shapes: Shapes
) -> Path:
    """Write a model with the tokenizer of a vocabulary file; `parameters` without the prefix."""
    writer = GGUFWriter(path, arch)
    for key, value in parameters.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
        add[type(value)](f"{arch}.{key}", value)
    for key, field in GGUFReader(vocabulary).fields.items():
        if key.startswith("tokenizer."):
            element = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(key, field.contents(), field.types[0], element)
    draw = np.random.default_rng(1)
    for name, shape in shapes.items():
        writer.add_tensor(name, _values(name, shape[::-1], draw))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _values(name: str, shape: tuple[int, ...], draw: np.random.Generator) -> np.ndarray[Any, Any]:
    values = draw.standard_normal(shape, dtype=np.float32)
    if name.endswith("norm.weight"):
        values = 1 + 0.1 * values
    elif name.endswith("ssm_a"):
        values = -np.abs(values) - 0.1  # a state decays
    else:
        values /= shape[-1] ** 0.5
    return values.astype(np.float32)


def n_tokens(vocabulary: Path) -> int:
    """Tokens in a vocabulary file."""
    return len(GGUFReader(vocabulary).fields["tokenizer.ggml.tokens"].data)


def transformer(path: Path, vocabulary: Path) -> Path:
    """A Llama."""
    head = N_EMBD // N_HEAD
    parameters = {
        "block_count": N_LAYER,
        "context_length": N_CTX,
        "embedding_length": N_EMBD,
        "feed_forward_length": N_FF,
        "attention.head_count": N_HEAD,
        "attention.head_count_kv": N_HEAD,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.dimension_count": head,
    }
    vectors = ("attn_norm", "ffn_norm")
    shapes = _ends(n_tokens(vocabulary))
    for i in range(N_LAYER):
        shapes |= {f"blk.{i}.{name}.weight": (N_EMBD,) for name in vectors}
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            shapes[f"blk.{i}.{name}.weight"] = (N_EMBD, N_EMBD)
        for name in ("ffn_gate", "ffn_up"):
            shapes[f"blk.{i}.{name}.weight"] = (N_EMBD, N_FF)
        shapes[f"blk.{i}.ffn_down.weight"] = (N_FF, N_EMBD)
    return write(path, vocabulary, "llama", parameters, shapes)


def recurrent(path: Path, vocabulary: Path) -> Path:
    """A Mamba."""
    parameters = {
        "block_count": N_LAYER,
        "context_length": N_CTX,
        "embedding_length": N_EMBD,
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "ssm.conv_kernel": D_CONV,
        "ssm.inner_size": D_INNER,
        "ssm.state_size": D_STATE,
        "ssm.time_step_rank": DT_RANK,
    }
    shapes = _ends(n_tokens(vocabulary))
    for i in range(N_LAYER):
        own: Shapes = {
            "attn_norm.weight": (N_EMBD,),
            "ssm_in.weight": (N_EMBD, 2 * D_INNER),
            "ssm_conv1d.weight": (D_CONV, D_INNER),
            "ssm_conv1d.bias": (D_INNER,),
            "ssm_x.weight": (D_INNER, DT_RANK + 2 * D_STATE),
            "ssm_dt.weight": (DT_RANK, D_INNER),
            "ssm_dt.bias": (D_INNER,),
            "ssm_a": (D_STATE, D_INNER),
            "ssm_d": (D_INNER,),
            "ssm_out.weight": (D_INNER, N_EMBD),
        }
        shapes |= {f"blk.{i}.{name}": shape for name, shape in own.items()}
    return write(path, vocabulary, "mamba", parameters, shapes)


def embedding(path: Path, vocabulary: Path) -> Path:
    """A BERT."""
    parameters = {
        "block_count": N_LAYER,
        "context_length": N_CTX,
        "embedding_length": N_EMBD,
        "feed_forward_length": N_FF,
        "attention.head_count": N_HEAD,
        "attention.layer_norm_epsilon": 1e-12,
        "attention.causal": False,
        "pooling_type": 2,  # the first token's
    }
    shapes: Shapes = {
        "token_embd.weight": (N_EMBD, n_tokens(vocabulary)),
        "token_types.weight": (N_EMBD, 2),
        "position_embd.weight": (N_EMBD, N_CTX),
    }
    pairs: Shapes = {"token_embd_norm": (N_EMBD,)}
    for i in range(N_LAYER):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            pairs[f"blk.{i}.{name}"] = (N_EMBD, N_EMBD)
        for name in ("attn_output_norm", "layer_output_norm"):
            pairs[f"blk.{i}.{name}"] = (N_EMBD,)
        pairs[f"blk.{i}.ffn_up"] = (N_EMBD, N_FF)
        pairs[f"blk.{i}.ffn_down"] = (N_FF, N_EMBD)
    for name, shape in pairs.items():
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = shape, shape[-1:]
    return write(path, vocabulary, "bert", parameters, shapes)


def _ends(n_vocab: int) -> Shapes:
    return {
        "token_embd.weight": (N_EMBD, n_vocab),
        "output_norm.weight": (N_EMBD,),
        "output.weight": (N_EMBD, n_vocab),
    }
