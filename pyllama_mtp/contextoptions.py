"""The parameters of one llama.cpp context."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ContextOptions:
    """Parameters of one context, in llama.cpp's terms.

    Attributes:
        mtp_head: False: the trunk (target); True: the MTP block (draft).
        need_embd_pre_norm: keep hidden rows in a tap, on the device: of every token, in a draft
            context of output tokens. Needs the patched library.
        hidden: where the tap reads: "post-norm" (after the final norm) or "pre-norm".
        tap: hidden rows by upstream's way, through the host: "off"; "all" tokens; "outputs" only.
        n_outputs_max: most output rows per decode call.
        n_rs_seq: recurrent-state snapshots kept for rollback.
        n_seq_max: sequences that may be in the caches at once.
        unified: they share the attention cache, and any of them may be in one graph; a chain of
            several needs it. False: a part of n_ctx for each, and graphs of neighbours only.
        full_block: a draft context runs its whole block for every token, as upstream does.
        trace: record the graph nodes of every decode; see :meth:`Context.nodes`.
    """

    n_ctx: int
    n_batch: int
    n_ubatch: int
    n_threads: int
    type_k: str = "f16"
    type_v: str = "f16"
    flash_attn: str = "auto"
    mtp_head: bool = False
    need_embd_pre_norm: bool = False
    hidden: str = "post-norm"
    tap: str = "off"
    n_outputs_max: int = 1
    n_rs_seq: int = 0
    n_seq_max: int = 1
    unified: bool = False
    full_block: bool = False
    trace: bool = False

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
        if self.mtp_head:
            p.ctx_type = lib.LLAMA_CONTEXT_TYPE_MTP
