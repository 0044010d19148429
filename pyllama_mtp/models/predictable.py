"""A synthetic model whose MTP head drafts well, for measuring with real acceptance.

No head can draft what a model of random weights says. Here the next token is nearly a function of
the last one, and the head knows that function; the computation costs as much as the shape's always
does:

- Small norms and outputs make each part of the trunk add little to the residual stream, which
  stays the last token's embedding with a trace of the tokens before. The exception is the last
  block's feed-forward part: it is left as it is, and its output decides the next token.
- Rows of rare tokens are shorter, so the first ids are predicted. As in text, these are the most
  frequent tokens of a byte pair encoding, and they are in the usual vocabulary of a draft head.
- The head's block has the weights of that feed-forward part. Its eh_proj passes the embedding on,
  as an identity, and adds noise from the hidden row: more noise makes the head wrong more often.

Such a file measures other programs too, on which no acceptance can be imposed as with this
package's `synthetic_acceptance`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pyllama_mtp.errors import UsageError
from pyllama_mtp.models.layout import TensorSpec
from pyllama_mtp.models.shapes import ModelShape

#: Norm of an embedding. It is well below that of the feed-forward part's output, some
#: sqrt(n_embd) / 2: otherwise, with tied embeddings, a token would be its own successor.
EMBEDDING_NORM = 0.25
#: What all other parts of the trunk may add together, as a share of the residual stream.
TRACE = 0.05
#: Number of tokens that can be predicted, and the length of the other tokens' rows.
COMMON, RARE = 24576, 0.5
#: Factor on the final norm, which makes the model as sure of most tokens as a trained one.
SHARPNESS = 16.0


@dataclass(frozen=True)
class Draw:
    """How a tensor's values are drawn.

    Attributes:
        name: the tensor whose values it has.
        scale: factor on the usual values.
        rare: one more factor on the rows of rare tokens.
        passes: whether it is an eh_proj whose half for the embedding is the identity.
    """

    name: str
    scale: float = 1.0
    rare: float = 1.0
    passes: bool = False


def check(shape: ModelShape, noise: float) -> None:
    """Raise UsageError for a shape without a head, or a noise that is no number from 0."""
    if not (math.isfinite(noise) and noise >= 0):
        raise UsageError(
            f"head noise is {noise}; it is 0 (a head that is nearly always right) or more"
        )
    if shape.n_mtp < 1:
        raise UsageError(f"{shape.name} has no MTP head (n_mtp is {shape.n_mtp})")


def draw(spec: TensorSpec, shape: ModelShape, noise: float | None) -> Draw:
    """How `spec` is drawn; `noise` is a share of the embedding's norm, None: as in any model."""
    if noise is None:
        return Draw(spec.name)
    n, n_parts = shape.n_embd, 2 * (shape.n_layer + 1)
    # Applied at a part's norm and again at its output, so that neither gets too small for the
    # scales of quantized blocks (F16).
    less = math.sqrt(TRACE * EMBEDDING_NORM / math.sqrt(n * n_parts))
    if spec.kind == "embedding":
        return Draw(spec.name, EMBEDDING_NORM, RARE)
    if spec.name == "output.weight":
        return Draw(spec.name, rare=RARE)
    if spec.name == "output_norm.weight":
        return Draw(spec.name, SHARPNESS)
    block = re.fullmatch(r"blk\.(\d+)\.(.+)\.(?:weight|bias)", spec.name)
    if not block:
        return Draw(spec.name)
    layer, name = int(block[1]), block[2]
    recurrent = layer in shape.recurrent_layers
    if name == ("ssm_norm" if recurrent else "attn_norm") or name in ("attn_output", "ssm_out"):
        return Draw(spec.name, less)
    if layer < shape.n_layer - 1:
        if name == "post_attention_norm":
            return Draw(spec.name, math.sqrt(less))  # a product of two follows
        if name.startswith("ffn_down"):
            return Draw(spec.name, less)
    if layer >= shape.n_layer:
        # Deviation of eh_proj: 1 / sqrt(2 n); of n inputs with the norm's weight: that x sqrt(1/2).
        scales = {
            "nextn.enorm": EMBEDDING_NORM / math.sqrt(n),
            "nextn.hnorm": noise * EMBEDDING_NORM * math.sqrt(2 / n),
            "nextn.shared_head_norm": SHARPNESS,
        }
        if name in scales:
            return Draw(spec.name, scales[name])
        if name.startswith("ffn_"):
            last = spec.name.replace(f"blk.{layer}.", f"blk.{shape.n_layer - 1}.", 1)
            return Draw(last)
    return Draw(spec.name, passes=name == "nextn.eh_proj")


def pass_embedding(chunk: bytes, first_row: int, n_embd: int, tensor_type: str) -> bytes:
    """Rows of eh_proj, [embedding; hidden] -> n_embd, with the identity as their first halves.

    Args:
        chunk: whole rows of 2 `n_embd` elements, in f16 or f32.
        first_row: the number of the chunk's first row in the tensor.
    """
    kind = "<f2" if tensor_type == "f16" else "<f4"
    rows: npt.NDArray[np.floating] = np.frombuffer(chunk, kind).reshape(-1, 2 * n_embd).copy()
    rows[:, :n_embd] = np.eye(len(rows), n_embd, first_row)
    return rows.tobytes()
