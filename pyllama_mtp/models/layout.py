"""Which tensors a Qwen3.5/3.6-style file holds: one table for writing files and for checking them.

Names and shapes are those that ``load_arch_tensors`` of upstream's src/models/qwen35.cpp and
src/models/qwen35moe.cpp ask for. Shapes are in ggml order: ``shape[0]`` is the fast dimension, so
a matrix is (inputs, outputs).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal

from pyllama_mtp.models.shapes import ModelShape

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
