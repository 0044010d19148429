"""The parameters of one llama.cpp context."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..settings import RopeScaling

_CTX_PADDING = 256  # upstream src/llama-context.cpp: cparams.n_ctx = GGML_PAD(cparams.n_ctx, 256)


def padded(n_ctx: int) -> int:
    """The context length that llama.cpp makes of `n_ctx`."""
    return -(-n_ctx // _CTX_PADDING) * _CTX_PADDING


@dataclass(frozen=True)
class ContextOptions:
    """Parameters of one context, in llama.cpp's terms.

    Attributes:
        n_threads: CPU threads, of prompts and rounds.
        auto_threads: fewer while other programs keep the cores busy; see :class:`.Threads`. On the
            CPU, with the patched library.
        mtp_head: False: the trunk (target); True: the MTP block alone, as in upstream.
        with_mtp: a target with the MTP block, which drafts itself; see :func:`.compute_drafts`.
            Needs the patched library.
        need_embd_pre_norm: keep hidden rows of every token in a tap, on the device that computes
            them; see :meth:`.Context.hidden_rows`. Needs the patched library.
        hidden: the hidden state for the tap and the MTP block: "post-norm" (after the final norm)
            or "pre-norm".
        tap: hidden rows in upstream's way, through the host: "off"; "all" tokens; "outputs" only.
        n_outputs_max: most output rows per decode call.
        n_rs_seq: tokens by which a recurrent state can go back, within the last batch of its
            sequence, if that had no more than one token more.
        n_seq_max: sequences that may be in the caches at once.
        unified: sequences share the attention cache, and any of them may be in one graph; drafts
            of several need it. False: each has a part of n_ctx, and graphs have neighbours only.
        slice: run the last layer and the final norm for output rows only. (A context that drafts
            computes every row.)
        rope: how positions become angles; the same for target and draft.
    """

    n_ctx: int
    n_batch: int
    n_ubatch: int
    n_threads: int
    auto_threads: bool = False
    type_k: str = "f16"
    type_v: str = "f16"
    flash_attn: str = "auto"
    mtp_head: bool = False
    with_mtp: bool = False
    need_embd_pre_norm: bool = False
    hidden: str = "post-norm"
    tap: str = "off"
    n_outputs_max: int = 1
    n_rs_seq: int = 0
    n_seq_max: int = 1
    unified: bool = False
    slice: bool = True
    rope: RopeScaling = field(default_factory=RopeScaling)

    def fill(self, lib: Any, params: Any) -> None:
        """Write these values into a ``struct llama_context_params``."""
        p = params
        p.n_ctx, p.n_batch, p.n_ubatch = self.n_ctx, self.n_batch, self.n_ubatch
        p.n_seq_max, p.n_rs_seq = self.n_seq_max, self.n_rs_seq
        p.kv_unified = self.unified
        p.n_outputs_max = max(self.n_outputs_max, self.n_seq_max)  # llama.cpp asserts it
        p.n_outputs_max_per_seq = self.n_outputs_max
        p.n_threads = p.n_threads_batch = self.n_threads
        p.type_k = getattr(lib, f"GGML_TYPE_{self.type_k.upper()}")
        p.type_v = getattr(lib, f"GGML_TYPE_{self.type_v.upper()}")
        p.flash_attn_type = {
            "auto": lib.LLAMA_FLASH_ATTN_TYPE_AUTO,
            "on": lib.LLAMA_FLASH_ATTN_TYPE_ENABLED,
            "off": lib.LLAMA_FLASH_ATTN_TYPE_DISABLED,
        }[self.flash_attn]
        rope = self.rope.given
        if scaling := rope.pop("rope_scaling", None):
            p.rope_scaling_type = getattr(lib, f"LLAMA_ROPE_SCALING_TYPE_{scaling.upper()}")
        for name, value in rope.items():
            setattr(p, name, value)
        if self.mtp_head:
            p.ctx_type = lib.LLAMA_CONTEXT_TYPE_MTP
        elif self.with_mtp:
            p.ctx_type = lib.LLAMA_CONTEXT_TYPE_WITH_MTP
