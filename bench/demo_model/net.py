"""A miniature Qwen3.5 in plain PyTorch: Gated DeltaNet, gated attention and the MTP head.

The arithmetic is that of llama.cpp's `qwen35` (src/models/qwen35.cpp) and of transformers'
`Qwen3_5ForCausalLM`. Norm weights are kept as the factor itself (GGUF's form, HF stores w - 1).
The gated delta rule is computed in chunks (Yang et al. 2024, "Gated Delta Networks").
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

KV = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Config:
    """Sizes of the model; rows of every matrix are multiples of 32, the blocks of Q8_0."""

    n_vocab: int = 2048
    n_embd: int = 192
    n_layer: int = 6
    interval: int = 3  # every third layer has full attention
    n_ff: int = 512
    n_head: int = 4
    n_head_kv: int = 2
    head_dim: int = 64
    n_rot: int = 16  # a quarter of head_dim
    rope_base: float = 10000.0
    gdn_heads: int = 3
    gdn_dim: int = 64
    conv: int = 4
    eps: float = 1e-6
    n_ctx: int = 4096


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis, in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


def linear(n_in: int, n_out: int, zero: bool = False) -> nn.Linear:
    """A projection without bias; `zero` for those that write to the residual stream."""
    layer = nn.Linear(n_in, n_out, bias=False)
    if zero:
        nn.init.zeros_(layer.weight)
    else:
        nn.init.normal_(layer.weight, std=n_in**-0.5)
    return layer


def rope_tables(config: Config, n_tokens: int) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotary angles, each (n_tokens, n_rot / 2).

    With text all three position axes of M-RoPE are the same, which leaves plain RoPE.
    """
    half = torch.arange(0, config.n_rot, 2, dtype=torch.float64) / config.n_rot
    angles = torch.arange(n_tokens, dtype=torch.float64)[:, None] * config.rope_base**-half
    return angles.cos().float(), angles.sin().float()


def image_rope_tables(config: Config, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin, each (batch, 1, tokens, n_rot / 2); positions (batch, tokens, 3) are (t, y, x).

    Frequency i turns with axis i mod 3, as the sections of the file deal them out.
    """
    half = torch.arange(0, config.n_rot, 2, dtype=torch.float64) / config.n_rot
    axis = torch.arange(len(half)) % 3
    angles = positions[..., axis].double() * config.rope_base**-half
    return angles.cos().float()[:, None], angles.sin().float()[:, None]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first n_rot dimensions of x (batch, heads, tokens, head_dim), halves paired."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)


class Attention(nn.Module):
    """Grouped attention with a joint query and gate projection and per-head q/k norms."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c = c
        self.wq = linear(c.n_embd, c.n_head * c.head_dim * 2)
        self.wk = linear(c.n_embd, c.n_head_kv * c.head_dim)
        self.wv = linear(c.n_embd, c.n_head_kv * c.head_dim)
        self.wo = linear(c.n_head * c.head_dim, c.n_embd, zero=True)
        self.q_norm = RMSNorm(c.head_dim, c.eps)
        self.k_norm = RMSNorm(c.head_dim, c.eps)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        """q, k, v as (batch, heads, tokens, head_dim) and the gate (batch, tokens, n)."""
        c, (b, t, _) = self.c, x.shape
        q, gate = self.wq(x).view(b, t, c.n_head, 2 * c.head_dim).chunk(2, dim=-1)
        k = self.wk(x).view(b, t, c.n_head_kv, c.head_dim)
        v = self.wv(x).view(b, t, c.n_head_kv, c.head_dim).transpose(1, 2).float()
        q = rotate(self.q_norm(q).transpose(1, 2), cos, sin)
        k = rotate(self.k_norm(k).transpose(1, 2), cos, sin)
        return q, k, v, gate.reshape(b, t, -1)

    def finish(self, mixed: Tensor, gate: Tensor) -> Tensor:
        """Gate the mixed values (batch, heads, tokens, head_dim) and project them out."""
        b, _, t, _ = mixed.shape
        mixed = mixed.transpose(1, 2).reshape(b, t, -1)
        return self.wo(mixed * torch.sigmoid(gate.float()))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v, gate = self.project(x, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.finish(mixed, gate)

    def later(self, x: Tensor, caches: list[KV], cos: Tensor, sin: Tensor) -> tuple[Tensor, KV]:
        """Attention of draft step n >= 2 at every row p, over what the draft cache then holds.

        `caches[i]` are the (k, v) of draft step i + 1. Row p sees its own k, v at p, those of
        step n - j at p - j for the drafted tokens (1 <= j <= n - 2), and those of step 1, made
        from the trunk's hidden rows, everywhere before. Returns the output and its own (k, v).
        """
        c = self.c
        group = c.n_head // c.n_head_kv
        q, k, v, gate = self.project(x, cos, sin)
        first, *drafted = [*caches, (k, v)]
        k1, v1 = (a.repeat_interleave(group, dim=1) for a in first)
        t = x.shape[1]
        distance = torch.arange(t)[:, None] - torch.arange(t)[None, :]
        scores = q @ k1.transpose(-1, -2)
        values = []
        for back, (kd, vd) in enumerate(reversed(drafted)):
            kd, vd = (a.repeat_interleave(group, dim=1) for a in (kd, vd))
            kd, vd = (F.pad(a, (0, 0, back, 0))[:, :, :t] for a in (kd, vd))
            scores = torch.where(distance == back, (q * kd).sum(-1, keepdim=True), scores)
            values.append(vd)
        weights = (scores * c.head_dim**-0.5).masked_fill(distance < 0, -math.inf).softmax(-1)
        mixed = weights.masked_fill(distance < len(values), 0.0) @ v1
        for back, vd in enumerate(values):
            share = weights.masked_fill(distance != back, 0.0).sum(-1, keepdim=True)
            mixed = mixed + share * vd
        return self.finish(mixed, gate), (k, v)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunk: int) -> Tensor:
    """The gated delta rule in chunks: q, k, v (batch, heads, tokens, d), g and beta (b, h, t).

    S_t = exp(g_t) S_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T and o_t = S_t q_t, with
    normalized q and k; tokens must be a multiple of `chunk`. All float32.
    """
    b, h, t, d = q.shape
    n = t // chunk
    q, k, v = (x.reshape(b, h, n, chunk, d) for x in (q * d**-0.5, k, v))
    beta = beta.reshape(b, h, n, chunk, 1)
    total = g.reshape(b, h, n, chunk).cumsum(-1)
    decay = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
    grown = total.exp()[..., None]
    kb = k * beta
    mixing = (kb @ k.transpose(-1, -2) * decay).tril(-1)
    eye = torch.eye(chunk)
    both = torch.cat((v * beta, kb * grown), dim=-1)
    both = torch.linalg.solve_triangular(mixing + eye, both, upper=False, unitriangular=True)
    u, w = both.chunk(2, dim=-1)
    scores = q @ k.transpose(-1, -2) * decay
    q_grown = q * grown
    left = (total[..., -1:] - total).exp()[..., None]
    k_left = (k * left).transpose(-1, -2)
    last = total[..., -1].exp()[..., None, None]
    state = q.new_zeros(b, h, d, d)
    out = []
    for i in range(n):
        fresh = u[:, :, i] - w[:, :, i] @ state
        out.append(q_grown[:, :, i] @ state + scores[:, :, i] @ fresh)
        state = state * last[:, :, i] + k_left[:, :, i] @ fresh
    return torch.stack(out, dim=2).reshape(b, h, t, d)


class DeltaNet(nn.Module):
    """Gated DeltaNet: short convolution, normalized q and k, decay and beta per token and head."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c = c
        inner = c.gdn_heads * c.gdn_dim
        self.qkv = linear(c.n_embd, 3 * inner)
        self.z = linear(c.n_embd, inner)
        self.beta = linear(c.n_embd, c.gdn_heads)
        self.alpha = linear(c.n_embd, c.gdn_heads)
        self.conv = nn.Parameter(torch.randn(3 * inner, c.conv) * 0.3)
        step = torch.exp(torch.empty(c.gdn_heads).uniform_(math.log(1e-3), math.log(1e-1)))
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))
        self.a_log = nn.Parameter(torch.empty(c.gdn_heads).uniform_(1, 8).log())
        self.norm = RMSNorm(c.gdn_dim, c.eps)
        self.out = linear(inner, c.n_embd, zero=True)

    def forward(self, x: Tensor) -> Tensor:
        c, (b, t, _) = self.c, x.shape
        mixed = self.qkv(x).float()
        padded = F.pad(mixed, (0, 0, c.conv - 1, 0))
        mixed = sum(padded[:, i : i + t] * self.conv[:, i] for i in range(c.conv))
        mixed = F.silu(mixed).view(b, t, 3, c.gdn_heads, c.gdn_dim).permute(2, 0, 3, 1, 4)
        q, k, v = mixed.unbind(0)
        q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + c.eps)
        k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + c.eps)
        beta = torch.sigmoid(self.beta(x).float()).transpose(1, 2)
        g = -self.a_log.exp() * F.softplus(self.alpha(x).float() + self.dt_bias)
        out = self._rule(q, k, v, g.transpose(1, 2), beta)
        z = self.z(x).float().view(b, t, c.gdn_heads, c.gdn_dim)
        out = self.norm(out.transpose(1, 2)) * F.silu(z)
        return self.out(out.reshape(b, t, -1))

    @staticmethod
    def _rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        """delta_rule for any number of tokens, always in float32."""
        t = q.shape[2]
        chunk = 64 if t >= 64 else t
        pad = -t % chunk
        with torch.autocast("cpu", enabled=False):
            if pad:
                q, k, v = (F.pad(x, (0, 0, 0, pad)) for x in (q, k, v))
                g, beta = F.pad(g, (0, pad)), F.pad(beta, (0, pad))
            return delta_rule(q, k, v, g, beta, chunk)[:, :, :t]


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.gate = linear(c.n_embd, c.n_ff)
        self.up = linear(c.n_embd, c.n_ff)
        self.down = linear(c.n_ff, c.n_embd, zero=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One decoder layer: mixer and feed-forward, each after a norm, each added to the stream."""

    def __init__(self, c: Config, attention: bool) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(c.n_embd, c.eps)
        self.mixer = Attention(c) if attention else DeltaNet(c)
        self.post_norm = RMSNorm(c.n_embd, c.eps)
        self.ffn = FeedForward(c)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = self.attn_norm(x)
        x = x + (self.mixer(y, cos, sin) if isinstance(self.mixer, Attention) else self.mixer(y))
        return x + self.ffn(self.post_norm(x))


class Head(nn.Module):
    """The MTP head: row p takes embed(x_p) and a hidden row of position p - 1, predicts x_{p+1}."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.e_norm = RMSNorm(c.n_embd, c.eps)
        self.h_norm = RMSNorm(c.n_embd, c.eps)
        self.eh_proj = linear(2 * c.n_embd, c.n_embd)
        self.block = Block(c, attention=True)
        self.norm = RMSNorm(c.n_embd, c.eps)

    def join(self, embedded: Tensor, previous: Tensor) -> Tensor:
        """eh_proj of [norm(embedding), norm(hidden)], both (batch, tokens, n_embd)."""
        return self.eh_proj(torch.cat((self.e_norm(embedded), self.h_norm(previous)), dim=-1))

    def forward(self, embedded: Tensor, previous: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """First draft step: hidden rows come from the trunk. Returns the state after the norm."""
        return self.norm(self.block(self.join(embedded, previous), cos, sin))

    def cache(self, embedded: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor) -> KV:
        """The keys and values that prompt sync writes: rows from the trunk, already shifted."""
        x = self.block.attn_norm(self.join(embedded, hidden))
        return self.block.mixer.project(x, cos, sin)[1:3]

    def later(
        self, embedded: Tensor, own: Tensor, caches: list[KV], cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, KV]:
        """Draft step n >= 2 at every position: row p takes the head's own state of p - 1 after
        step n - 1 (`own`, already shifted). Returns the state after the norm and its (k, v)."""
        block = self.block
        x = self.join(embedded, own)
        mixed, kv = block.mixer.later(block.attn_norm(x), caches, cos, sin)
        x = x + mixed
        return self.norm(x + block.ffn(block.post_norm(x))), kv


def shifted(rows: Tensor) -> Tensor:
    """Rows moved one position later, zeros at position 0: (batch, tokens, n_embd)."""
    return F.pad(rows, (0, 0, 1, 0))[:, :-1]


class Model(nn.Module):
    """Trunk, head and the embedding that both use for input and output."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c = c
        self.embed = nn.Parameter(torch.randn(c.n_vocab, c.n_embd) * 0.05)
        self.blocks = nn.ModuleList(
            Block(c, attention=(i + 1) % c.interval == 0) for i in range(c.n_layer)
        )
        self.norm = RMSNorm(c.n_embd, c.eps)
        self.head = Head(c)

    def trunk(self, embedded: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Embeddings to hidden rows after the final norm, both (batch, tokens, n_embd)."""
        x = embedded
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.norm(x)

    def logits(self, rows: Tensor) -> Tensor:
        """(..., n_embd) -> (..., n_vocab), float32."""
        return F.linear(rows, self.embed).float()

    def forward(self, tokens: Tensor, steps: int = 2) -> tuple[Tensor, list[Tensor]]:
        """`run` on text: token ids (batch, tokens)."""
        cos, sin = rope_tables(self.c, tokens.shape[1])
        return self.run(F.embedding(tokens, self.embed), cos, sin, steps)

    def run(
        self, embedded: Tensor, cos: Tensor, sin: Tensor, steps: int
    ) -> tuple[Tensor, list[Tensor]]:
        """Teacher-forced pass over embeddings, of tokens or of an image's rows: the trunk's hidden
        rows, and the states of draft steps 1 to `steps`, all (batch, tokens, n_embd); `logits` of
        row p are about token p + 1. Step n of row p knows the trunk's rows up to p - n."""
        hidden = self.trunk(embedded, cos, sin)
        before = shifted(hidden)
        states = [self.head(embedded, before, cos, sin)]
        caches = [self.head.cache(embedded, before, cos, sin)] if steps > 1 else []
        for _ in range(steps - 1):
            state, kv = self.head.later(embedded, shifted(states[-1]), caches, cos, sin)
            states.append(state)
            caches.append(kv)
        return hidden, states
