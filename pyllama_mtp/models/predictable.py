"""A synthetic model whose MTP head drafts well, for measuring with real acceptance.

Of random weights alone no head can draft. Here the next token is nearly a function of the last one,
and the head knows that function, all at the cost of the shape's ordinary computation:

- Small norms and outputs make each part of the trunk add little to the residual stream: it stays
  the last token's embedding, with a trace of what came before. The one exception is the last
  block's feed-forward part, which is left as it is: its output decides the next token.
- Rows of rare tokens are shorter. Predicted are the first ids, the most frequent ones of a byte
  pair encoding, as in text; they are in the usual vocabulary of a draft head.
- The head's block has the weights of that feed-forward part. Its eh_proj passes the embedding on,
  as an identity, and adds noise from the hidden row: with more of it the head is wrong more often.

Peers that cannot be told to accept, unlike this package's `synthetic_acceptance`, are measured with
such a file as they are.
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

#: Norm of an embedding. Well below that of the feed-forward part's output, some sqrt(n_embd) / 2:
#: with tied embeddings a token would be its own successor otherwise.
EMBEDDING_NORM = 0.25
#: Of the residual stream, what all other parts of the trunk may add together.
TRACE = 0.05
#: Tokens that can be predicted, and the length of the other ones' rows.
COMMON, RARE = 24576, 0.5
#: On the final norm: the best logit leads by so much more, and probabilities are those of a model
#: that is sure of most tokens.
SHARPNESS = 16.0


@dataclass(frozen=True)
class Draw:
    """How a tensor's values are drawn.

    Attributes:
        name: the tensor that it is equal to.
        scale: factor on the usual values.
        rare: and on those of rare tokens' rows.
        passes: it is an eh_proj whose half for the embedding is the identity.
    """

    name: str
    scale: float = 1.0
    rare: float = 1.0
    passes: bool = False


def check(shape: ModelShape, noise: float) -> None:
    """Raise UsageError for what such a file cannot be made of."""
    if not (math.isfinite(noise) and noise >= 0):
        raise UsageError(
            f"head noise is {noise}; it is 0 (a head that is nearly always right) or more"
        )
    if shape.n_mtp < 1:
        raise UsageError(f"{shape.name} has no MTP head (n_mtp is {shape.n_mtp})")


def draw(spec: TensorSpec, shape: ModelShape, noise: float) -> Draw:
    """How `spec` is drawn for a head with so much noise, as a share of the embedding's norm."""
    n, n_parts = shape.n_embd, 2 * (shape.n_layer + 1)
    # What a part adds comes down by the square: at its norm and again at its output, so that
    # neither is too small for the scales of quantized blocks (F16).
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
            return Draw(spec.name, math.sqrt(less))  # what follows is a product of two
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
        first_row: which of the tensor's rows the chunk begins with.
    """
    kind = "<f2" if tensor_type == "f16" else "<f4"
    rows: npt.NDArray[np.floating] = np.frombuffer(chunk, kind).reshape(-1, 2 * n_embd).copy()
    rows[:, :n_embd] = np.eye(len(rows), n_embd, first_row)
    return rows.tobytes()
