"""The dimensions of the models this package can drive, and of the published models.

A :class:`ModelShape` is everything that decides tensor names, tensor shapes and cache sizes of a
Qwen3.5/3.6-style model: a hybrid of Gated DeltaNet (recurrent) and gated full-attention layers,
with dense or mixture-of-experts feed-forward blocks and an MTP head of ``n_mtp`` decoder blocks.

:func:`model_tensors` is one table for writing files and for checking them. Its names and shapes are
those that ``load_arch_tensors`` of upstream's src/models/qwen35.cpp and src/models/qwen35moe.cpp
ask for. Shapes are in ggml order: ``shape[0]`` is the fast dimension, so a matrix is (inputs,
outputs).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields, replace
from typing import Literal

from pyllama_mtp.errors import UsageError

# Native limits that end the process when exceeded (upstream src/llama-hparams.h).
MAX_LAYERS = 512
MAX_EXPERTS = 1024


@dataclass(frozen=True)
class ModelShape:
    """Dimensions of one model; all counts are integers, none is derived from a file.

    ``n_layer`` counts the trunk only (the file's ``block_count`` is ``n_layer + n_mtp``). Every
    ``full_attention_interval``-th trunk layer is full attention, the others are recurrent. Heads
    of the recurrent layers have ``ssm_head_dim`` columns for keys and values alike. A dense shape
    has ``n_expert == 0`` and uses ``n_ff``; a MoE shape uses the four expert dimensions instead.
    """

    name: str
    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_vocab: int
    ssm_k_heads: int
    ssm_v_heads: int
    n_ff: int = 0
    n_expert: int = 0
    n_expert_used: int = 0
    n_ff_exp: int = 0
    n_ff_shexp: int = 0
    ssm_head_dim: int = 128
    ssm_conv_kernel: int = 4
    full_attention_interval: int = 4
    n_mtp: int = 1
    n_ctx_train: int = 262144
    tied_embeddings: bool = False
    rope_freq_base: float = 1e7
    source: str = ""

    @property
    def architecture(self) -> str:
        """``general.architecture`` of the file: qwen35 (dense) or qwen35moe."""
        return "qwen35moe" if self.n_expert else "qwen35"

    @property
    def n_rot(self) -> int:
        """Rotated columns per head: a quarter (``partial_rotary_factor`` 0.25)."""
        return self.head_dim // 4

    @property
    def rope_sections(self) -> tuple[int, int, int, int]:
        """M-RoPE sections in pairs; 32 pairs give the published 11, 11, 10, 0."""
        pairs = self.n_rot // 2
        first = -(-pairs // 3)
        second = -(-(pairs - first) // 2)
        return first, second, pairs - first - second, 0

    @property
    def ssm_inner(self) -> int:
        """Columns of all value heads of a recurrent layer (``ssm.inner_size``)."""
        return self.ssm_v_heads * self.ssm_head_dim

    @property
    def ssm_conv_dim(self) -> int:
        """Channels of the causal convolution: queries, keys and values side by side."""
        return 2 * self.ssm_k_heads * self.ssm_head_dim + self.ssm_inner

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        """Indices of the recurrent trunk layers (upstream src/models/qwen35.cpp)."""
        step = self.full_attention_interval
        return tuple(i for i in range(self.n_layer) if (i + 1) % step)


#: Dimensions that a file has as they are: the key, after the architecture's name and a dot. In the
#: order in which files are written.
KEYS = {
    "n_ctx_train": "context_length",
    "n_embd": "embedding_length",
    "n_head": "attention.head_count",
    "n_head_kv": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "ssm_conv_kernel": "ssm.conv_kernel",
    "ssm_head_dim": "ssm.state_size",
    "ssm_k_heads": "ssm.group_count",
    "ssm_v_heads": "ssm.time_step_rank",
    "full_attention_interval": "full_attention_interval",
    "n_mtp": "nextn_predict_layers",
    "n_expert": "expert_count",
    "n_expert_used": "expert_used_count",
    "n_ff_exp": "expert_feed_forward_length",
    "n_ff_shexp": "expert_shared_feed_forward_length",
    "n_ff": "feed_forward_length",
}

# Two sources agree for every figure unless a comment says otherwise:
#  [card]   the model card on the Hugging Face hub ("Model Overview")
#  [hf]     defaults of transformers' configuration_qwen3_5.py / configuration_qwen3_5_moe.py
#  [config] config.json of the published model, as other projects copy or check it
#  [gguf]   metadata and number of weights that llama.cpp prints when it loads a published file
#           (pull requests 13194 and 22673, logs of llama-bench)
# fmt: off
_QWEN35_08B = ModelShape(
    name="qwen3.5-0.8b", n_layer=24, n_embd=1024, n_head=8, n_head_kv=2, head_dim=256,
    n_vocab=248320, ssm_k_heads=16, ssm_v_heads=16, n_ff=3584, tied_embeddings=True,
    source="[card] Qwen/Qwen3.5-0.8B; tied embeddings inferred from its parameter count",
)
_QWEN35_2B = replace(
    _QWEN35_08B, name="qwen3.5-2b", n_embd=2048, n_ff=6144,
    source="[config] Qwen/Qwen3.5-2B; [gguf] 1.88 B parameters",
)
_QWEN35_4B = replace(
    _QWEN35_08B, name="qwen3.5-4b", n_layer=32, n_embd=2560, n_head=16, n_head_kv=4,
    ssm_v_heads=32, n_ff=9216,
    source="[config] Qwen/Qwen3.5-4B; [gguf] 4.21 B parameters",
)
_QWEN35_9B = replace(
    _QWEN35_4B, name="qwen3.5-9b", n_embd=4096, n_ff=12288, tied_embeddings=False,
    source="[config] Qwen/Qwen3.5-9B; [gguf] 8.95 B parameters",
)
_QWEN36_27B = replace(
    _QWEN35_9B, name="qwen3.6-27b", n_layer=64, n_embd=5120, n_head=24, ssm_v_heads=48, n_ff=17408,
    source="[card] Qwen/Qwen3.6-27B; [gguf] ssm.inner_size 6144, time_step_rank 48",
)
_QWEN38_27B = replace(
    _QWEN36_27B, name="qwen3.8-27b",
    source="[config] Qwen/Qwen3.8-27B: as Qwen3.6-27B; published Q8_0 files have 29.05 GB",
)
_QWEN36_35B_A3B = replace(
    _QWEN35_9B, name="qwen3.6-35b-a3b", n_layer=40, n_embd=2048, n_head_kv=2,
    n_ff=0, n_expert=256, n_expert_used=8, n_ff_exp=512, n_ff_shexp=512,
    source="[card] Qwen/Qwen3.6-35B-A3B; [hf] Qwen3_5MoeTextConfig",
)
_QWEN35_397B_A17B = replace(
    _QWEN36_35B_A3B, name="qwen3.5-397b-a17b", n_layer=60, n_embd=4096, n_head=32, ssm_v_heads=64,
    n_expert=512, n_expert_used=10, n_ff_exp=1024, n_ff_shexp=1024,
    source="[config] Qwen/Qwen3.5-397B-A17B; [gguf] ssm.inner_size 8192, 396.35 B parameters",
)
_QWEN36_MOE_SMALL = replace(
    _QWEN36_35B_A3B, name="qwen3.6-moe-small", n_layer=24, n_embd=1024, n_head=8,
    ssm_k_heads=8, ssm_v_heads=16, n_expert=32, n_ff_exp=256, n_ff_shexp=256,
    source="not published: qwen3.6-35b-a3b cut down to 1.4 GB in q8_0, for speed on small machines",
)
_TINY = ModelShape(
    name="tiny", n_layer=4, n_embd=128, n_head=2, n_head_kv=1, head_dim=64, n_vocab=2048,
    ssm_k_heads=2, ssm_v_heads=4, n_ff=256, ssm_head_dim=32, n_ctx_train=32768,
    tied_embeddings=True,
    source="not published: the smallest model with every kind of tensor, for tests",
)
_TINY_MOE = replace(
    _TINY, name="tiny-moe", n_ff=0, n_expert=8, n_expert_used=2, n_ff_exp=64, n_ff_shexp=64,
    tied_embeddings=False,
)
# fmt: on

#: Shapes by the name the command line takes.
SHAPES: dict[str, ModelShape] = {
    s.name: s
    for s in (
        *(_QWEN35_08B, _QWEN35_2B, _QWEN35_4B, _QWEN35_9B, _QWEN35_397B_A17B),
        *(_QWEN36_27B, _QWEN36_35B_A3B, _QWEN38_27B, _QWEN36_MOE_SMALL, _TINY, _TINY_MOE),
    )
}

_POSITIVE_FIELDS = (
    *("n_layer", "n_embd", "n_head", "n_head_kv", "head_dim", "n_vocab", "n_ctx_train"),
    *("ssm_k_heads", "ssm_v_heads", "ssm_head_dim", "full_attention_interval"),
)
MOE_FIELDS = ("n_expert_used", "n_ff_exp", "n_ff_shexp")
_FREE_FIELDS = {f.name: f.type for f in fields(ModelShape) if f.name not in ("name", "source")}


def get_shape(name: str, **overrides: object) -> ModelShape:
    """Look up a shape and change some of its dimensions.

    Args:
        name: a key of :data:`SHAPES`.
        overrides: field names of :class:`ModelShape` with numbers, or strings holding numbers
            (``"4"``, ``"true"``), as the command line passes them.

    Raises:
        UsageError: unknown shape or dimension, a value that is no number, or dimensions that do
            not fit together (see :func:`check_shape`).
    """
    if name not in SHAPES:
        raise UsageError(f"unknown shape {name!r}; known shapes: {', '.join(SHAPES)}")
    values: dict[str, object] = {}
    for key, value in overrides.items():
        if key not in _FREE_FIELDS:
            raise UsageError(f"unknown dimension {key!r}; allowed: {', '.join(_FREE_FIELDS)}")
        values[key] = _convert(key, value)
    shape = replace(SHAPES[name], **values)  # type: ignore[arg-type]
    check_shape(shape)
    return shape


def _convert(key: str, value: object) -> object:
    """``value`` as the type of the field ``key``: bool, float or int."""
    text = str(value).strip().lower()
    try:
        if _FREE_FIELDS[key] == "bool":
            return {"true": True, "1": True, "false": False, "0": False}[text]
        if _FREE_FIELDS[key] == "float":
            return float(text)
        return int(text)
    except (KeyError, ValueError):
        kind = {"bool": "true or false", "float": "a number"}.get(str(_FREE_FIELDS[key]))
        raise UsageError(f"{key}={value!r}: expected {kind or 'a whole number'}") from None


def shape_problems(shape: ModelShape) -> list[str]:
    """Dimensions with which the native code would abort; [] if there are none."""
    s = shape
    ffn = MOE_FIELDS if s.n_expert else ("n_ff",)
    problems = [
        f"{key} is {getattr(s, key)}, it must be at least 1"
        for key in (*_POSITIVE_FIELDS, *ffn)
        if getattr(s, key) < 1
    ]
    if problems:
        return problems
    rules = (
        (s.n_expert >= 0, f"n_expert is {s.n_expert}, it must not be negative"),
        (s.ssm_conv_kernel >= 2, f"ssm_conv_kernel is {s.ssm_conv_kernel}, at least 2 is needed"),
        (0 <= s.n_mtp <= 1, f"n_mtp is {s.n_mtp}; the MTP graphs take exactly one block"),
        (s.n_layer + s.n_mtp <= MAX_LAYERS, f"{s.n_layer + s.n_mtp} layers > {MAX_LAYERS}"),
        (s.n_expert <= MAX_EXPERTS, f"n_expert is {s.n_expert}, at most {MAX_EXPERTS}"),
        (s.n_expert_used <= max(s.n_expert, 0), f"n_expert_used {s.n_expert_used} > n_expert"),
        (s.n_head % s.n_head_kv == 0, f"n_head {s.n_head} is no multiple of {s.n_head_kv} kv"),
        (s.ssm_v_heads % s.ssm_k_heads == 0, "ssm_v_heads is no multiple of ssm_k_heads"),
        (s.rope_freq_base > 0, f"rope_freq_base is {s.rope_freq_base}, it must be positive"),
    )
    return [text for good, text in rules if not good]


def check_shape(shape: ModelShape) -> None:
    """Refuse dimensions the native code could not run.

    Raises:
        UsageError: lists every problem.
    """
    problems = shape_problems(shape)
    if not problems and (shape.head_dim % 8 or shape.n_rot < 2):
        problems.append(f"head_dim is {shape.head_dim}, it must be a multiple of 8")
    if problems:
        raise UsageError(f"shape {shape.name!r} does not work: " + "; ".join(problems))


# -- tensors of a shape ----------------------------------------------------------------------------

#: What a tensor is for; decides its random values and whether it may be quantized.
Kind = Literal["embedding", "matrix", "router", "norm", "conv", "decay", "dt_bias", "gate_vector"]


@dataclass(frozen=True)
class TensorSpec:
    """One tensor: name, shape in ggml order, purpose, and whether the loader insists on it."""

    name: str
    shape: tuple[int, ...]
    kind: Kind
    required: bool = True

    @property
    def quantizable(self) -> bool:
        """True for matrices; vectors, the convolution and the expert router stay F32.

        The router is small and its rounding flips expert choices (upstream src/llama-quant.cpp
        leaves ``ffn_gate_inp.weight`` alone for that reason).
        """
        return self.kind in ("embedding", "matrix")


def model_tensors(
    shape: ModelShape, recurrent_layers: Collection[int] | None = None
) -> list[TensorSpec]:
    """All tensors of a model in file order: embeddings, trunk blocks, MTP blocks, final norm.

    Args:
        shape: the dimensions.
        recurrent_layers: trunk layers that are recurrent; default: by the shape's interval.
    """
    recurrent = shape.recurrent_layers if recurrent_layers is None else recurrent_layers
    specs = [TensorSpec("token_embd.weight", (shape.n_embd, shape.n_vocab), "embedding")]
    for i in range(shape.n_layer):
        specs += _block(shape, i, recurrent=i in recurrent)
    for i in range(shape.n_layer, shape.n_layer + shape.n_mtp):
        specs += _block(shape, i, recurrent=False)
        specs += _mtp_head(shape, i)
    specs.append(TensorSpec("output_norm.weight", (shape.n_embd,), "norm"))
    if not shape.tied_embeddings:
        specs.append(TensorSpec("output.weight", (shape.n_embd, shape.n_vocab), "matrix"))
    return specs


def _mtp_head(shape: ModelShape, layer: int) -> list[TensorSpec]:
    """What makes block ``layer`` an MTP block: eh_proj over [embedding; hidden], and its norms."""
    prefix = f"blk.{layer}.nextn."
    n = shape.n_embd
    return [
        TensorSpec(prefix + "eh_proj.weight", (2 * n, n), "matrix"),
        TensorSpec(prefix + "enorm.weight", (n,), "norm"),
        TensorSpec(prefix + "hnorm.weight", (n,), "norm"),
        # Without it the graph falls back to output_norm, which a trained head does not share.
        TensorSpec(prefix + "shared_head_norm.weight", (n,), "norm", required=False),
    ]


def _block(shape: ModelShape, layer: int, *, recurrent: bool) -> Iterator[TensorSpec]:
    prefix = f"blk.{layer}."
    n = shape.n_embd
    yield TensorSpec(prefix + "attn_norm.weight", (n,), "norm")
    yield TensorSpec(prefix + "post_attention_norm.weight", (n,), "norm")
    yield from (_recurrent if recurrent else _attention)(shape, prefix)
    yield from (_experts if shape.n_expert else _dense_ffn)(shape, prefix)


def _attention(shape: ModelShape, prefix: str) -> Iterator[TensorSpec]:
    n, head, heads = shape.n_embd, shape.head_dim, shape.n_head
    # attn_q yields query and output gate, interleaved per head: twice the usual width.
    yield TensorSpec(prefix + "attn_q.weight", (n, 2 * head * heads), "matrix")
    yield TensorSpec(prefix + "attn_k.weight", (n, head * shape.n_head_kv), "matrix")
    yield TensorSpec(prefix + "attn_v.weight", (n, head * shape.n_head_kv), "matrix")
    yield TensorSpec(prefix + "attn_output.weight", (head * heads, n), "matrix")
    yield TensorSpec(prefix + "attn_q_norm.weight", (head,), "norm")
    yield TensorSpec(prefix + "attn_k_norm.weight", (head,), "norm")


def _recurrent(shape: ModelShape, prefix: str) -> Iterator[TensorSpec]:
    n, inner, heads = shape.n_embd, shape.ssm_inner, shape.ssm_v_heads
    yield TensorSpec(prefix + "attn_qkv.weight", (n, shape.ssm_conv_dim), "matrix")
    yield TensorSpec(prefix + "attn_gate.weight", (n, inner), "matrix")
    kernel = (shape.ssm_conv_kernel, shape.ssm_conv_dim)
    yield TensorSpec(prefix + "ssm_conv1d.weight", kernel, "conv")
    yield TensorSpec(prefix + "ssm_dt.bias", (heads,), "dt_bias")
    yield TensorSpec(prefix + "ssm_a", (heads,), "decay")
    yield TensorSpec(prefix + "ssm_beta.weight", (n, heads), "matrix")
    yield TensorSpec(prefix + "ssm_alpha.weight", (n, heads), "matrix")
    yield TensorSpec(prefix + "ssm_norm.weight", (shape.ssm_head_dim,), "norm")
    yield TensorSpec(prefix + "ssm_out.weight", (inner, n), "matrix")


def _dense_ffn(shape: ModelShape, prefix: str) -> Iterator[TensorSpec]:
    n, ff = shape.n_embd, shape.n_ff
    yield TensorSpec(prefix + "ffn_gate.weight", (n, ff), "matrix")
    yield TensorSpec(prefix + "ffn_up.weight", (n, ff), "matrix")
    yield TensorSpec(prefix + "ffn_down.weight", (ff, n), "matrix")


def _experts(shape: ModelShape, prefix: str) -> Iterator[TensorSpec]:
    n, ff, experts, shared = shape.n_embd, shape.n_ff_exp, shape.n_expert, shape.n_ff_shexp
    yield TensorSpec(prefix + "ffn_gate_inp.weight", (n, experts), "router")
    yield TensorSpec(prefix + "ffn_gate_exps.weight", (n, ff, experts), "matrix")
    yield TensorSpec(prefix + "ffn_up_exps.weight", (n, ff, experts), "matrix")
    yield TensorSpec(prefix + "ffn_down_exps.weight", (ff, n, experts), "matrix")
    yield TensorSpec(prefix + "ffn_gate_inp_shexp.weight", (n,), "gate_vector")
    yield TensorSpec(prefix + "ffn_gate_shexp.weight", (n, shared), "matrix")
    yield TensorSpec(prefix + "ffn_up_shexp.weight", (n, shared), "matrix")
    yield TensorSpec(prefix + "ffn_down_shexp.weight", (shared, n), "matrix")


def has_fused(name: str, names: Collection[str]) -> bool:
    """Whether ``names`` has a fused tensor that the loader takes in the place of ``name``."""
    for part, fused in (
        *((f"attn_{x}.weight", "attn_qkv.weight") for x in "qkv"),
        *((f"ffn_{x}_exps.weight", "ffn_gate_up_exps.weight") for x in ("gate", "up")),
    ):
        if name.endswith("." + part):
            return name[: -len(part)] + fused in names
    return False
