"""A miniature Qwen3.5 with its MTP head, of transformers' parts.

The trunk is a `Qwen3_5TextModel`; the head is one of a single layer with full attention, whose rows
are made from an embedding and a hidden row. Names and values of weights are transformers', whose
norms store w - 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from transformers import Qwen3_5TextConfig, Qwen3_5TextModel
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm

from pyllama_mtp.models.shapes import ModelShape

#: Rows of every matrix are multiples of 32, the blocks of Q8_0.
SHAPE = ModelShape(
    "demo", n_layer=6, n_embd=192, n_head=4, n_head_kv=2, head_dim=64, n_vocab=2048, ssm_k_heads=3,
    ssm_v_heads=3, ssm_head_dim=64, n_ff=512, full_attention_interval=3, n_ctx_train=4096,
    tied_embeddings=True, rope_freq_base=1e4,
)  # fmt: skip
EPS = 1e-6


def text_model(c: ModelShape, recurrent: Sequence[bool]) -> Qwen3_5TextModel:
    """transformers' model of such layers, recurrent or of full attention, in float32."""
    config = Qwen3_5TextConfig(
        vocab_size=c.n_vocab,
        hidden_size=c.n_embd,
        intermediate_size=c.n_ff,
        num_hidden_layers=len(recurrent),
        num_attention_heads=c.n_head,
        num_key_value_heads=c.n_head_kv,
        head_dim=c.head_dim,
        linear_conv_kernel_dim=c.ssm_conv_kernel,
        linear_key_head_dim=c.ssm_head_dim,
        linear_value_head_dim=c.ssm_head_dim,
        linear_num_key_heads=c.ssm_k_heads,
        linear_num_value_heads=c.ssm_v_heads,
        layer_types=["linear_attention" if one else "full_attention" for one in recurrent],
        rms_norm_eps=EPS,
        max_position_embeddings=c.n_ctx_train,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": c.rope_freq_base,
            "partial_rotary_factor": c.n_rot / c.head_dim,
            "mrope_section": c.rope_sections[:3],
        },
    )
    return Qwen3_5TextModel(config).float()


def draft_mask(n: int, t: int) -> Tensor:
    """What the rows of draft steps 1 to n see of each other: bool (1, 1, n * t, n * t).

    Row p of step i sees its own, those of an earlier step j at p - (i - j), which are the drafted
    tokens, and those of step 1, made from the trunk's hidden rows, everywhere before: that is what
    the draft cache then holds.
    """
    step, place = torch.arange(n).repeat_interleave(t), torch.arange(t).repeat(n)
    i, j = step[:, None], step[None, :]
    distance = place[:, None] - place[None, :]
    drafted = (j > 0) & (j <= i) & (distance == i - j)
    return (((j == 0) & (distance >= i)) | drafted)[None, None]


class Model(nn.Module):
    """Trunk and head, and the embedding that both use for input and output.

    Row p of the head takes embed(x_p) and a hidden row of position p - 1, and predicts x_{p+1}.
    """

    def __init__(self, c: ModelShape = SHAPE) -> None:
        super().__init__()
        self.c = c
        self.trunk = text_model(c, [i in c.recurrent_layers for i in range(c.n_layer)])
        self.head = text_model(c, [False])
        del self.head.embed_tokens
        self.e_norm = Qwen3_5RMSNorm(c.n_embd, EPS)
        self.h_norm = Qwen3_5RMSNorm(c.n_embd, EPS)
        self.eh_proj = nn.Linear(2 * c.n_embd, c.n_embd, bias=False)
        self._draw()

    @torch.no_grad()
    def _draw(self) -> None:
        """Weights to start from; what writes to the residual stream is 0."""
        for name, value in self.named_parameters():
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
                value.zero_()
            elif name.endswith("embed_tokens.weight"):
                value.normal_(std=0.05)
            elif name.endswith("conv1d.weight"):
                value.normal_(std=0.3)
            elif name.endswith("A_log"):
                value.uniform_(1, 8).log_()
            elif name.endswith("dt_bias"):
                step = torch.exp(torch.empty_like(value).uniform_(math.log(1e-3), math.log(1e-1)))
                value.copy_(step + torch.log(-torch.expm1(-step)))
            elif value.ndim == 2:
                value.normal_(std=value.shape[1] ** -0.5)

    def logits(self, rows: Tensor) -> Tensor:
        """(..., n_embd) -> (..., n_vocab), float32."""
        return F.linear(rows, self.trunk.embed_tokens.weight).float()

    def forward(self, tokens: Tensor, steps: int = 2) -> tuple[Tensor, list[Tensor]]:
        """`run` on text: token ids (batch, tokens)."""
        positions = torch.arange(tokens.shape[1]).expand(3, *tokens.shape)
        return self.run(self.trunk.embed_tokens(tokens), positions, steps)

    def run(self, embedded: Tensor, positions: Tensor, steps: int) -> tuple[Tensor, list[Tensor]]:
        """Teacher-forced pass over embeddings, of tokens or of an image's rows, at positions
        (t, y, x) of shape (3, batch, tokens): the trunk's hidden rows, and the states of draft
        steps 1 to `steps`, all (batch, tokens, n_embd); `logits` of row p are about token p + 1.
        Step n of row p knows the trunk's rows up to p - n, and then the head's own states."""
        passed = {"inputs_embeds": embedded, "position_ids": positions, "use_cache": False}
        hidden = previous = self.trunk(**passed).last_hidden_state
        rows, states, t = [], [], embedded.shape[1]
        for n in range(1, steps + 1):
            shifted = F.pad(previous, (0, 0, 1, 0))[:, :-1]
            both = torch.cat((self.e_norm(embedded), self.h_norm(shifted)), dim=-1)
            rows.append(self.eh_proj(both).float())
            passed["inputs_embeds"] = torch.cat(rows, dim=1)
            passed["position_ids"] = positions.repeat(1, 1, n)
            mask = {"full_attention": draft_mask(n, t)}
            previous = self.head(attention_mask=mask, **passed).last_hidden_state[:, -t:]
            states.append(previous)
        return hidden, states
