"""Hyper-parameters that the native code cannot compute with, where it would end the process.

Each rule stands for an assertion, a division or an allocation of upstream's load_hparams
(src/llama-model.cpp), of the files src/models/qwen35.cpp and qwen35moe.cpp, or of an operation in
their graphs; two are about text that would be wrong (causal attention, 31 bits of positions). What
the loader itself answers with an error is left to it: a key of another type, an unknown
pre-tokenizer.
"""

from __future__ import annotations

import math

from pyllama_mtp.models.ggufheader import ArraySummary, Value
from pyllama_mtp.models.modelinfo import GGUFInfo
from pyllama_mtp.models.shapes import MAX_EXPERTS, shape_problems

_NEEDED = (
    *("block_count", "context_length", "embedding_length", "attention.head_count"),
    *("attention.layer_norm_rms_epsilon", "rope.dimension_sections", "ssm.conv_kernel"),
    *("ssm.inner_size", "ssm.state_size", "ssm.group_count", "ssm.time_step_rank"),
)
#: Read per layer, while graphs and tensor shapes take one number for all layers.
_UNIFORM = (
    *("attention.head_count", "attention.head_count_kv", "feed_forward_length"),
    *("expert_feed_forward_length", "expert_used_count"),
)
_ROPE_SCALING = ("none", "linear", "yarn", "longrope")
_MOST_POOLING = 4  # enum llama_pooling_type; unspecified is -1
_UNSPECIFIED = (1 << 32) - 1


def hyperparameter_problems(info: GGUFInfo) -> list[str]:
    """What is wrong with the hyper-parameters; [] where nothing is, or where only the native code
    knows what they must be."""
    arch = info.architecture
    if not info.validated:
        return _general_problems(info) + _switch_problems(info)
    missing = [f"{arch}.{key}" for key in _NEEDED if f"{arch}.{key}" not in info.metadata]
    if missing:
        return ["missing hyper-parameters: " + ", ".join(missing)]
    return (
        shape_problems(info.to_shape())
        + _dimension_problems(info)
        + _layer_problems(info)
        + _expert_problems(info)
        + _rope_problems(info)
        + _switch_problems(info)
    )


def _general_problems(info: GGUFInfo) -> list[str]:
    """Of any architecture; the loader asserts these (llama_model_base::load_hparams)."""
    rules = (
        (info.n_layer > 0, f"no layers of architecture {info.architecture!r} (block_count)"),
        (info.n_embd > 0, "embedding_length is missing"),
        (info.context_length < 1 << 31, f"context_length is {info.context_length}"),
        (info.n_expert <= MAX_EXPERTS, f"n_expert is {info.n_expert}, at most {MAX_EXPERTS}"),
        (
            info.n_expert_used <= info.n_expert,
            f"{info.n_expert_used} of {info.n_expert} experts are used",
        ),
    )
    return [text for good, text in rules if not good]


def _get(info: GGUFInfo, key: str) -> Value | None:
    return info.metadata.get(f"{info.architecture}.{key}")


def _dimension_problems(info: GGUFInfo) -> list[str]:
    inner = info.ssm_state_size * info.ssm_v_heads
    epsilon = _get(info, "attention.layer_norm_rms_epsilon")
    width = _get(info, "embedding_length_out")
    rules = (
        (
            info.context_length < 1 << 31,
            f"context_length is {info.context_length}; positions have 31 bits",
        ),
        (info.head_dim_k == info.head_dim_v, "key and value heads differ in size"),
        (
            info.ssm_inner_size == inner,
            f"ssm.inner_size {info.ssm_inner_size} is not state_size x time_step_rank",
        ),
        (
            isinstance(epsilon, float) and 0 <= epsilon < math.inf,
            f"attention.layer_norm_rms_epsilon is {epsilon!r}, it must be a number from 0",
        ),
        (
            width in (None, info.n_embd),
            f"embedding_length_out is {width!r}, these models have embedding_length {info.n_embd}",
        ),
    )
    return [text for good, text in rules if not good]


def _layer_problems(info: GGUFInfo) -> list[str]:
    """Per-layer values; a kind of layer that is missing leaves a cache without a buffer."""
    problems = []
    for key in _UNIFORM:
        value = _get(info, key)
        if isinstance(value, ArraySummary) or (isinstance(value, tuple) and len({*value}) != 1):
            problems.append(f"{key} differs from layer to layer, which these models cannot have")
    flags = _get(info, "attention.recurrent_layers")
    if flags is not None and not isinstance(flags, tuple):
        problems.append("attention.recurrent_layers is no list of flags, one per block")
    if not info.attention_layers or not info.recurrent_layers:
        kind = "recurrent" if info.attention_layers else "full-attention"
        problems.append(f"of {info.n_layer} layers none is a {kind} layer; at least one must be")
    return problems


def _expert_problems(info: GGUFInfo) -> list[str]:
    moe = info.architecture == "qwen35moe"
    if moe != (info.n_expert > 0):
        return [f"{info.architecture} with {info.n_expert} experts"]
    groups = _whole(info, "expert_group_count")
    used = _whole(info, "expert_group_used_count")
    if not moe:
        extra = info.n_expert_used or groups
        return ["expert_used_count or expert_group_count without experts"] if extra else []
    if groups <= 1:
        return []
    per_group = info.n_expert // groups
    # A group is chosen by its two best experts (build_moe_ffn of upstream's src/llama-graph.cpp).
    fits = info.n_expert % groups == 0 and per_group >= 2 and 0 < used < groups
    if fits and info.n_expert_used <= per_group * used:
        return []
    return [
        f"{info.n_expert_used} of {info.n_expert} experts in {used} of {groups} groups: "
        "expert_count must be a multiple of expert_group_count, and the groups in use must hold "
        "enough experts"
    ]


def _whole(info: GGUFInfo, key: str) -> int:
    """A whole number, or 0 where there is none: the loader refuses another type."""
    value = _get(info, key)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _rope_problems(info: GGUFInfo) -> list[str]:
    problems = []
    if not 0 < info.n_rot <= info.head_dim_k or info.n_rot % 2:
        problems.append(f"n_rot is {info.n_rot}, it must be even, 2 to {info.head_dim_k}")
    sections = _get(info, "rope.dimension_sections")
    # The operation divides by their sum, and asserts that it fits a head.
    whole = isinstance(sections, tuple) and all(type(n) is int and n >= 0 for n in sections)
    if not (isinstance(sections, tuple) and whole and len(sections) == 4):
        problems.append(f"rope.dimension_sections is {sections!r}, it must be four whole numbers")
    elif not 0 < sum(sections[:3]) <= sum(sections) <= info.head_dim_k:
        problems.append(f"rope.dimension_sections {sections} do not fit heads of {info.head_dim_k}")
    scaling = _get(info, "rope.scaling.type")
    if isinstance(scaling, str) and scaling not in _ROPE_SCALING:
        known = ", ".join(_ROPE_SCALING)
        problems.append(f"rope.scaling.type is {scaling[:40]!r}; known are {known}")
    base = _get(info, "rope.freq_base")
    if isinstance(base, float) and not 0 < base < math.inf:
        problems.append(f"rope.freq_base is {base!r}, it must be a positive number")
    return problems


def _switch_problems(info: GGUFInfo) -> list[str]:
    problems = []
    if _get(info, "attention.causal") is False:
        problems.append("attention.causal is false; text is generated with causal attention only")
    pooling = _get(info, "pooling_type")
    if type(pooling) is int and pooling > _MOST_POOLING and pooling != _UNSPECIFIED:
        problems.append(f"pooling_type is {pooling}, there is no such one")
    return problems
