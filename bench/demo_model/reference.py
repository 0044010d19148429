"""The outside check: transformers' Qwen3.5 and a head written out here, on the file's weights.

The trunk is transformers' `Qwen3_5ForCausalLM`, its weights mapped back from the GGUF tensors.
The head is written below position by position with an explicit cache, sharing no code with
net.py. Their logits and hidden rows go into a small committed file, so that ordinary tests can
compare llama.cpp with them without PyTorch:

    tokens         int32   (S, T)        held-out token ids
    positions      int32   (P,)          the rows that are stored
    trunk_logits   float32 (S, P, V)     row p: about token p + 1, having read tokens 0..p
    head_logits    float32 (S, P, V)     draft step 1 at row p: embed(x_p), trunk row h_{p-1}
    second_logits  float32 (S, P, V)     draft step 2 at row p: embed(x_p), the head's own state of
                                         row p - 1; its cache holds rows 0..p-1 from the trunk
    hidden         float32 (S, P, E)     trunk rows after the final norm
    head_hidden    float32 (S, P, E)     head rows after the head norm, draft step 1
    sha256         str                   of the GGUF file all this was computed from

At row 0 the hidden input is a zero vector. Every row of head_logits assumes a cache filled from
the trunk for all earlier rows.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from .export import load, read_config, read_tensors
from .net import Config

POSITIONS = (0, 1, 2, 31, 63, 64, 65, 80, 94, 95)
N_TOKENS = 96
Weights = dict[str, Tensor]

ATTENTION = {"attn_q": "q_proj", "attn_k": "k_proj", "attn_v": "v_proj", "attn_output": "o_proj"}
DELTA = {
    "attn_qkv": "in_proj_qkv",
    "attn_gate": "in_proj_z",
    "ssm_beta": "in_proj_b",
    "ssm_alpha": "in_proj_a",
    "ssm_out": "out_proj",
}


def to_transformers(weights: Weights, config: Config) -> dict[str, Tensor]:
    """GGUF tensors as a state dict of Qwen3_5ForCausalLM (its norms store w - 1)."""
    state = {
        "model.embed_tokens.weight": weights["token_embd.weight"],
        "lm_head.weight": weights["token_embd.weight"],
        "model.norm.weight": weights["output_norm.weight"] - 1,
    }
    for i in range(config.n_layer):
        ours, theirs = f"blk.{i}.", f"model.layers.{i}."
        state[theirs + "input_layernorm.weight"] = weights[ours + "attn_norm.weight"] - 1
        post = weights[ours + "post_attention_norm.weight"]
        state[theirs + "post_attention_layernorm.weight"] = post - 1
        for part in ("gate", "up", "down"):
            state[f"{theirs}mlp.{part}_proj.weight"] = weights[f"{ours}ffn_{part}.weight"]
        if ours + "attn_q.weight" in weights:
            for a, b in ATTENTION.items():
                state[f"{theirs}self_attn.{b}.weight"] = weights[f"{ours}{a}.weight"]
            for a in ("q_norm", "k_norm"):
                norm = weights[f"{ours}attn_{a}.weight"]
                state[f"{theirs}self_attn.{a}.weight"] = norm - 1
            continue
        for a, b in DELTA.items():
            state[f"{theirs}linear_attn.{b}.weight"] = weights[f"{ours}{a}.weight"]
        state[theirs + "linear_attn.conv1d.weight"] = weights[ours + "ssm_conv1d.weight"][:, None]
        state[theirs + "linear_attn.dt_bias"] = weights[ours + "ssm_dt.bias"]
        state[theirs + "linear_attn.A_log"] = (-weights[ours + "ssm_a"]).log()
        state[theirs + "linear_attn.norm.weight"] = weights[ours + "ssm_norm.weight"]
    return state


def trunk(weights: Weights, c: Config) -> Qwen3_5ForCausalLM:
    """transformers' model with the file's weights, in float32."""
    config = Qwen3_5TextConfig(
        vocab_size=c.n_vocab,
        hidden_size=c.n_embd,
        intermediate_size=c.n_ff,
        num_hidden_layers=c.n_layer,
        num_attention_heads=c.n_head,
        num_key_value_heads=c.n_head_kv,
        head_dim=c.head_dim,
        linear_conv_kernel_dim=c.conv,
        linear_key_head_dim=c.gdn_dim,
        linear_value_head_dim=c.gdn_dim,
        linear_num_key_heads=c.gdn_heads,
        linear_num_value_heads=c.gdn_heads,
        layer_types=[
            "full_attention" if (i + 1) % c.interval == 0 else "linear_attention"
            for i in range(c.n_layer)
        ],
        rms_norm_eps=c.eps,
        tie_word_embeddings=True,
        max_position_embeddings=c.n_ctx,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": c.rope_base,
            "partial_rotary_factor": c.n_rot / c.head_dim,
            "mrope_section": [3, 3, 2],
        },
    )
    model = Qwen3_5ForCausalLM(config).float().eval()
    model.load_state_dict(to_transformers(weights, c), strict=True)
    return model


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last axis."""
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


class PlainHead:
    """The MTP head, one position at a time, with a cache that is a list of (k, v)."""

    def __init__(self, weights: Weights, c: Config) -> None:
        prefix = f"blk.{c.n_layer}."
        self.w = {k[len(prefix) :]: v for k, v in weights.items() if k.startswith(prefix)}
        self.embed, self.c = weights["token_embd.weight"], c
        self.cache: list[tuple[Tensor, Tensor]] = []

    def rope(self, x: Tensor, position: int) -> Tensor:
        """Rotate the first n_rot of head_dim for each head of x (heads, head_dim)."""
        half = self.c.n_rot // 2
        out = x.clone()
        for i in range(half):
            angle = torch.tensor(position * self.c.rope_base ** (-2 * i / self.c.n_rot))
            a, b = x[:, i], x[:, i + half]
            out[:, i] = a * angle.cos() - b * angle.sin()
            out[:, i + half] = a * angle.sin() + b * angle.cos()
        return out

    def step(self, token: int, hidden: Tensor, position: int, keep: bool) -> Tensor:
        """State after the head norm, (n_embd,); `keep` leaves this position in the cache."""
        w, c = self.w, self.c
        e = norm(self.embed[token], w["nextn.enorm.weight"], c.eps)
        h = norm(hidden, w["nextn.hnorm.weight"], c.eps)
        x = w["nextn.eh_proj.weight"] @ torch.cat([e, h])
        y = norm(x, w["attn_norm.weight"], c.eps)
        joint = (w["attn_q.weight"] @ y).view(c.n_head, 2, c.head_dim)
        q = norm(joint[:, 0], w["attn_q_norm.weight"], c.eps)
        k = norm(
            (w["attn_k.weight"] @ y).view(c.n_head_kv, c.head_dim), w["attn_k_norm.weight"], c.eps
        )
        v = (w["attn_v.weight"] @ y).view(c.n_head_kv, c.head_dim)
        q, k = self.rope(q, position), self.rope(k, position)
        rows = [*self.cache, (k, v)]
        if keep:
            self.cache.append((k, v))
        mixed = []
        for head in range(c.n_head):
            kv = head * c.n_head_kv // c.n_head
            keys = torch.stack([row[0][kv] for row in rows])
            values = torch.stack([row[1][kv] for row in rows])
            share = torch.softmax(keys @ q[head] / c.head_dim**0.5, dim=0)
            mixed.append(share @ values * torch.sigmoid(joint[head, 1]))
        x = x + w["attn_output.weight"] @ torch.cat(mixed)
        y = norm(x, w["post_attention_norm.weight"], c.eps)
        gate = w["ffn_gate.weight"] @ y
        x = x + w["ffn_down.weight"] @ (gate * torch.sigmoid(gate) * (w["ffn_up.weight"] @ y))
        return norm(x, w["nextn.shared_head_norm.weight"], c.eps)

    def run(self, tokens: list[int], hidden: Tensor) -> tuple[Tensor, Tensor]:
        """States of draft steps 1 and 2 at every row, each (T, n_embd)."""
        first, second = [], []
        zero = torch.zeros(self.c.n_embd)
        self.cache = []
        for p, token in enumerate(tokens):
            second.append(self.step(token, first[-1] if p else zero, p, keep=False))
            first.append(self.step(token, hidden[p - 1] if p else zero, p, keep=True))
        return torch.stack(first), torch.stack(second)


@torch.no_grad()
def reference(gguf_file: Path, sequences: np.ndarray) -> tuple[dict[str, Any], dict[str, float]]:
    """Arrays of the reference file for token ids (S, T), and net.py's largest differences."""
    config = read_config(gguf_file)
    weights = {name: torch.from_numpy(array) for name, array in read_tensors(gguf_file).items()}
    tokens = torch.from_numpy(sequences.astype(np.int64))
    outside = trunk(weights, config)
    hidden = outside.model(tokens, use_cache=False).last_hidden_state
    head = PlainHead(weights, config)
    states = [head.run(row.tolist(), h) for row, h in zip(tokens, hidden, strict=True)]
    first = torch.stack([s[0] for s in states])
    second = torch.stack([s[1] for s in states])
    embed = weights["token_embd.weight"]
    rows = {"hidden": hidden, "head_hidden": first}
    logits = {"trunk": hidden @ embed.T, "head": first @ embed.T, "second": second @ embed.T}
    model = load(gguf_file)
    own_hidden, (own_first, own_second) = model(tokens)
    own = {"trunk": own_hidden, "head": own_first, "second": own_second}
    largest = {k: float((model.logits(own[k]) - logits[k]).abs().max()) for k in logits}
    keep = list(POSITIONS)
    arrays: dict[str, Any] = {f"{k}_logits": v[:, keep].numpy() for k, v in logits.items()}
    arrays |= {k: v[:, keep].numpy() for k, v in rows.items()}
    arrays["tokens"] = sequences.astype(np.int32)
    arrays["positions"] = np.array(keep, dtype=np.int32)
    arrays["sha256"] = np.array(hashlib.sha256(gguf_file.read_bytes()).hexdigest())
    return arrays, largest


def write(gguf_file: Path, heldout: np.ndarray, path: Path) -> dict[str, float]:
    """Write the reference file; raises if net.py differs from it by more than 1e-3."""
    starts = [len(heldout) * i // 7 for i in (1, 3, 5)]
    sequences = np.stack([heldout[s : s + N_TOKENS] for s in starts])
    arrays, largest = reference(gguf_file, sequences)
    if max(largest.values()) > 1e-3:
        raise RuntimeError(f"net.py differs from the outside implementation: {largest}")
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, **arrays)
    return largest
