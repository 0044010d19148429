"""Tiny models without an MTP head, of architectures that this package has no graphs of its own for:
random weights, and vocabularies in which every text can be written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from pyllama_mtp.models.synth import CHAT_TEMPLATE, add_tokens

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

Shapes = Iterator[tuple[str, tuple[int, ...]]]


def write_model(path: Path, arch: str, n_layer: int = 6, **metadata: Any) -> Path:
    """Write a model of one of ARCHITECTURES; `metadata` replaces numbers of it."""
    writer = gguf.GGUFWriter(path, arch)
    numbers = {
        "block_count": n_layer,
        "context_length": N_CTX,
        "embedding_length": N_EMBD,
        "attention.layer_norm_rms_epsilon": 1e-5,
        **(_MAMBA if arch == "mamba" else _ATTENTION),
        **({"attention.sliding_window": WINDOW} if arch == "gemma3" else {}),
        **(_K2_HORIZON if arch == "k2-horizon" else {}),
        **metadata,
    }
    add_values(writer, {f"{arch}.{key}": value for key, value in numbers.items()})
    writer.add_name(f"random {arch}")
    writer.add_chat_template(CHAT_TEMPLATE)
    (_spm if arch in ("llama", "gemma3") else _bpe)(writer)
    rng = np.random.default_rng(7)
    shapes = _mamba(n_layer) if arch == "mamba" else _attention(arch, n_layer)
    tensors = {}
    for name, shape in shapes:
        if len(shape) == 1:
            data = -np.ones(shape, np.float32) if "dt.bias" in name else np.ones(shape, np.float32)
        else:
            # Gemma's LM head is the embedding; a large one, and each token is followed by itself.
            embedding = 0.05 if arch == "gemma3" else 1.0
            scale = embedding if name.startswith("token_embd") else shape[-1] ** -0.5
            data = rng.normal(0, scale, shape).astype(np.float32)
            if name.endswith("ssm_a"):
                data = -abs(data) - 0.5
        tensors[name] = data
    finish(writer, tensors)
    return path


def _attention(arch: str, n_layer: int) -> Shapes:
    """Names, and shapes as numpy has them: rows first."""
    gemma, k2 = arch == "gemma3", arch == "k2-horizon"
    yield "token_embd.weight", (N_VOCAB, N_EMBD)
    yield "output_norm.weight", (N_EMBD,)
    if not gemma:
        yield "output.weight", (N_VOCAB, N_EMBD)
    for i in range(n_layer):
        block = f"blk.{i}."
        norms = ["attn_norm", "ffn_norm"]
        norms += ["post_attention_norm", "post_ffw_norm"] if gemma else []
        for norm in norms:
            yield f"{block}{norm}.weight", (N_EMBD,)
        if arch != "llama":
            yield f"{block}attn_q_norm.weight", (HEAD * N_HEAD if k2 else HEAD,)
            yield f"{block}attn_k_norm.weight", (HEAD * N_KV if k2 else HEAD,)
        yield f"{block}attn_q.weight", (N_HEAD * HEAD, N_EMBD)
        yield f"{block}attn_k.weight", (N_KV * HEAD, N_EMBD)
        yield f"{block}attn_output.weight", (N_EMBD, N_HEAD * HEAD)
        if k2:
            yield f"{block}attn_gate.weight", (N_HEAD * HEAD, N_EMBD)
        if k2 and i:
            yield f"{block}attn_v_gate.weight", (_N_VALUE_EXPERT, N_EMBD)
            yield f"{block}attn_v_exps.weight", (_N_VALUE_EXPERT, N_KV * HEAD, N_EMBD)
            yield f"{block}ffn_gate_inp.weight", (_N_EXPERT, N_EMBD)
            yield f"{block}ffn_gate_exps.weight", (_N_EXPERT, _N_FF_EXPERT, N_EMBD)
            yield f"{block}ffn_up_exps.weight", (_N_EXPERT, _N_FF_EXPERT, N_EMBD)
            yield f"{block}ffn_down_exps.weight", (_N_EXPERT, N_EMBD, _N_FF_EXPERT)
            continue
        yield f"{block}attn_v.weight", (N_KV * HEAD, N_EMBD)
        yield f"{block}ffn_gate.weight", (N_FF, N_EMBD)
        yield f"{block}ffn_up.weight", (N_FF, N_EMBD)
        yield f"{block}ffn_down.weight", (N_EMBD, N_FF)


def _mamba(n_layer: int) -> Shapes:
    yield "token_embd.weight", (N_VOCAB, N_EMBD)
    yield "output_norm.weight", (N_EMBD,)
    for i in range(n_layer):
        block = f"blk.{i}."
        yield f"{block}attn_norm.weight", (N_EMBD,)
        yield f"{block}ssm_in.weight", (2 * _INNER, N_EMBD)
        yield f"{block}ssm_conv1d.weight", (_INNER, _KERNEL)
        yield f"{block}ssm_conv1d.bias", (_INNER,)
        yield f"{block}ssm_x.weight", (_RANK + 2 * _STATE, _INNER)
        yield f"{block}ssm_dt.weight", (_INNER, _RANK)
        yield f"{block}ssm_dt.bias", (_INNER,)
        yield f"{block}ssm_a", (_INNER, _STATE)
        yield f"{block}ssm_d", (_INNER,)
        yield f"{block}ssm_out.weight", (N_EMBD, _INNER)


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
