"""Hyper-parameters of the models that :mod:`.architectures` writes.

Dimensions of small ones are those of upstream's tests/test-llama-archs.cpp, or near them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

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
#: Of a model to measure with: some 230 million weights, 100 million of them used for a token.
N_LAYER_LARGE, N_VOCAB_LARGE = 12, 8192
_COMMON_LARGE: dict[str, Any] = {
    "embedding_length": 1024,
    "feed_forward_length": 3072,
    "attention.head_count": 16,
    "attention.head_count_kv": 4,
    "expert_feed_forward_length": 512,
    "expert_shared_feed_forward_length": 512,
    "expert_count": 8,
}
#: By architecture: those that there are such models of.
LARGE: dict[str, dict[str, Any]] = {
    "deepseek2": {
        "attention.head_count_kv": 1,
        "attention.key_length": 320,
        "attention.value_length": 256,
        "attention.key_length_mla": 128,
        "attention.value_length_mla": 64,
        "attention.q_lora_rank": 384,
        "attention.kv_lora_rank": 256,
        "rope.dimension_count": 64,
    },
    "glm4moe": {},
    "qwen3next": {
        "full_attention_interval": 4,
        "ssm.inner_size": 1024,
        "ssm.state_size": 64,
        "ssm.group_count": 8,
        "ssm.time_step_rank": 16,
    },
    "step35": {"attention.sliding_window": 128},
}
_INDEXER: dict[str, Any] = {
    "attention.indexer.head_count": 4,
    "attention.indexer.key_length": 64,
    "attention.indexer.top_k": 4096,
}
_WINDOW: dict[str, Any] = {"attention.sliding_window": 32}
#: Residual streams side by side.
_STREAMS: dict[str, Any] = {
    "hyper_connection.count": 4,
    "hyper_connection.sinkhorn_iterations": 2,
    "hyper_connection.epsilon": 1e-6,
}
_DELTA_NET: dict[str, Any] = {
    "full_attention_interval": 2,
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 128,
    "ssm.state_size": 32,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 4,
}
#: Of qwen4exp, rows of a table of embeddings of n-grams; the numbers of rows by head.
_NGRAM_ROWS = [61, 67, 71, 73]
_NGRAM_EMBEDDINGS: dict[str, Any] = {
    "ple.layers": [0],
    "ple.ngram_size": 3,
    "ple.heads_per_ngram": 2,
    "ple.conv_kernel": 4,
    "ple.eos_token_id": 0,
    "embedding_length_per_layer_input": 32,
    "ple.layer_multipliers": np.array([1, 31, 1009], np.uint64),
    "ple.head_offsets": np.array([0, *np.cumsum(_NGRAM_ROWS)[:-1]], np.uint64),
    "ple.head_vocab_sizes": np.array(_NGRAM_ROWS, np.uint64),
}


def hyperparameters(arch: str, n_heads: int, large: bool = False) -> dict[str, Any]:
    """Hyper-parameters of a model with `n_heads` MTP blocks; names without the prefix."""
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
            **_STREAMS,
            "hash_layer_count": 0,
            "swiglu_clamp_exp": 10.0,
            "expert_gating_func": 4,
        },
        "glm-dsa": {**_LATENT, **_INDEXER},
        "glm5-next": {
            **_LATENT,
            **_INDEXER,
            **_STREAMS,
            "attention.head_count_kv": [0, *[1] * (n - 1)],
            "attention.key_length": 64,  # the latent alone: nothing is rotated
            "rope.dimension_count": 0,
            "attention.indexer.top_k": 16,  # fewer than there are
            "attention.indexer.kpool": 4,
            "attention.indexer.kpool_select_tail": True,
            "swiglu_clamp_exp": 10.0,
            "ssm.conv_kernel": 4,
            "kda.head_dim": 64,
            "kda.gate_lower_bound": -5.0,
        },
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
        "qwen3next": {**_DELTA_NET, "rope.dimension_count": 16},
        "qwen4exp": {
            **_DELTA_NET,
            **_INDEXER,
            **_STREAMS,
            **_NGRAM_EMBEDDINGS,
            "rope.dimension_sections": [8, 8, 8, 8],
            "attention.indexer.top_k": 16,  # fewer than there are
            "hyper_connection.low_rank": 8,
            "attention.compress_ratios": [4] * n,
        },
        "step35": {
            **_WINDOW,
            "embedding_length": 160,
            "attention.sliding_window_pattern": [1, 0, *[1] * n_heads],
        },
    }
    chosen = {**_COMMON, **own.get(arch, {})}
    n_layer = 3 if arch == "nemotron_h_moe" else N_LAYER
    if large:
        n_layer = N_LAYER_LARGE
        chosen |= {**_COMMON_LARGE, **LARGE[arch]}
        if "attention.sliding_window_pattern" in chosen:
            pattern = [i % 4 > 0 for i in range(n_layer)] + [True] * n_heads
            chosen["attention.sliding_window_pattern"] = pattern
    return {**chosen, "block_count": n_layer + n_heads, "nextn_predict_layers": n_heads}
