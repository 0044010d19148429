"""Tiny models without an MTP head, of architectures that this package has no graphs of its own for:
random weights, and vocabularies in which every text can be written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from pyllama_mtp.models.synth import CHAT_TEMPLATE, add_tokens

from .architectures import tensor_shapes
from .trimmed import add_values, finish

#: Attention only; with a sliding window; with tokenizers of both kinds; a recurrent state without
#: snapshots; experts, of values too.
ARCHITECTURES = ("llama", "gemma3", "qwen3", "mamba", "k2-horizon")
N_EMBD, N_HEAD, N_KV, HEAD, N_FF, N_VOCAB, N_CTX = 64, 4, 2, 16, 128, 640, 1024
WINDOW = 32
_N_EXPERT, _N_FF_EXPERT, _N_VALUE_EXPERT = 4, 64, 3
_INNER, _STATE, _RANK, _KERNEL = 128, 16, 32, 4

_ATTENTION = {
    "feed_forward_length": N_FF,
    "attention.head_count": N_HEAD,
    "attention.head_count_kv": N_KV,
    "attention.key_length": HEAD,
    "attention.value_length": HEAD,
    "rope.dimension_count": HEAD,
    "rope.freq_base": 10000.0,
}
_WIDE = ("feed_forward_length", "attention.key_length", "attention.value_length")
_WIDE += ("rope.dimension_count",)
_K2_HORIZON = {
    "leading_dense_block_count": 1,
    "expert_count": _N_EXPERT,
    "expert_used_count": 2,
    "expert_feed_forward_length": _N_FF_EXPERT,
    "expert_weights_norm": True,
    "attention.value_expert_count": _N_VALUE_EXPERT,
    "attention.value_expert_used_count": 2,
    "attention.group_norm_groups": 2,
}
_MAMBA = {
    "ssm.conv_kernel": _KERNEL,
    "ssm.inner_size": _INNER,
    "ssm.state_size": _STATE,
    "ssm.time_step_rank": _RANK,
}


def write_model(path: Path, arch: str, n_layer: int = 6, width: int = 1, **metadata: Any) -> Path:
    """Write a model of one of ARCHITECTURES; `metadata` replaces numbers of it, but no shapes. An
    architecture that nobody knows has Llama's tensors.

    Args:
        width: factor of the matrices of attention and of dense blocks; with 4, they have room for
            blocks of 256 weights.
    """
    known = arch if arch in ARCHITECTURES else "llama"
    sizes = {name: width * _ATTENTION[name] for name in _WIDE}
    numbers = {
        "block_count": n_layer,
        "context_length": N_CTX,
        "embedding_length": width * N_EMBD,
        "attention.layer_norm_rms_epsilon": 1e-5,
        **(_MAMBA if arch == "mamba" else _ATTENTION | sizes),
        **({"attention.sliding_window": WINDOW} if arch == "gemma3" else {}),
        **(_K2_HORIZON if arch == "k2-horizon" else {}),
    }
    header = path.with_suffix(".header")
    _write(header, known, numbers, {})
    shapes = {name: s for name, s in tensor_shapes(header).items() if _wanted(name, known)}
    header.unlink()
    rng = np.random.default_rng(7)
    tensors = {name: _values(name, shape, known, rng) for name, shape in shapes.items()}
    return _write(path, arch, numbers | metadata, tensors)


def _wanted(name: str, arch: str) -> bool:
    """Whether the model gets a tensor: none of quantized files, nor optional ones."""
    if not name.startswith("blk."):
        tied = arch in ("gemma3", "mamba")
        return name in ("token_embd.weight", "output_norm.weight", *["output.weight"] * (not tied))
    return not name.endswith("scale") and (not name.endswith("bias") or "ssm_" in name)


def _values(name: str, shape: tuple[int, ...], arch: str, rng: np.random.Generator) -> Any:
    if len(shape) == 1 or "norm" in name:
        return np.full(shape[::-1], -1 if "dt.bias" in name else 1, np.float32)
    # Gemma's LM head is the embedding; a large one, and each token is followed by itself.
    embedding = 0.05 if arch == "gemma3" else 1.0
    scale = embedding if name.startswith("token_embd") else shape[0] ** -0.5
    data = rng.normal(0, scale, shape[::-1]).astype(np.float32)
    return -abs(data) - 0.5 if name.endswith("ssm_a") else data


def _write(path: Path, arch: str, numbers: dict[str, Any], tensors: dict[str, Any]) -> Path:
    writer = gguf.GGUFWriter(path, arch)
    add_values(writer, {f"{arch}.{key}": value for key, value in numbers.items()})
    writer.add_name(f"random {arch}")
    writer.add_chat_template(CHAT_TEMPLATE)
    (_spm if arch in ("llama", "gemma3") else _bpe)(writer)
    finish(writer, tensors)
    return path


def _bpe(writer: gguf.GGUFWriter) -> None:
    vocab = add_tokens(writer, N_VOCAB, "qwen2")
    writer.add_bos_token_id(vocab.endoftext)
    writer.add_add_bos_token(False)


def _spm(writer: gguf.GGUFWriter) -> None:
    """SentencePiece: control tokens, 256 bytes, and words."""
    control = ["<unk>", "<s>", "</s>"]
    vocab = [f"<0x{byte:02X}>" for byte in range(256)]
    letters = [chr(code) for code in range(33, 127)]
    words = ["▁", *letters, *(f"▁{letter}" for letter in letters)]
    words += [f"▁w{i}" for i in range(N_VOCAB - len(control) - len(vocab) - len(words))]
    tokens = [*control, *vocab, *words]
    types = [2, 3, 3, *[6] * len(vocab), *[1] * len(words)]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    scores = [0.0] * (len(control) + len(vocab)) + [-1.0 * i for i in range(len(words))]
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)
