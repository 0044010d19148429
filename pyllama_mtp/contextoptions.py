"""The parameters of one llama.cpp context, RoPE's among them."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any

from .arguments import Kind, between, keep_checked, option, wholes, words

if TYPE_CHECKING:
    from .llama.trace import NodeTimes


def _to(most: float, least: float = 1e-6) -> Kind:
    allowed = f"from {least:g} to {most:g}, or None (as the file says)"
    return between(least, most, allowed).or_this(None)


_rope = partial(option, part="rope")


@dataclass(frozen=True)
class RopeScaling:
    """How positions become angles (RoPE), for texts longer than the model was trained for.

    None: as the model file says. Raises UsageError for a value out of range.

    Attributes:
        rope_scaling: how positions are scaled.
        rope_freq_scale: factor of the positions, above 0, at most 1: 0.25 for four times the text.
        rope_freq_base: base of the frequencies.
        yarn_orig_ctx: length in tokens that the model was trained for.
        yarn_ext_factor: mix of extrapolation; 0: none.
        yarn_attn_factor: factor of attention's magnitude.
        yarn_beta_fast: rotations above which a dimension stays as it is.
        yarn_beta_slow: rotations below which a dimension is interpolated.
    """

    rope_scaling: str | None = _rope(None, words("none", "linear", "yarn").or_this(None))
    rope_freq_scale: float | None = _rope(None, _to(1.0), "X")
    rope_freq_base: float | None = _rope(None, _to(1e30), "X")
    yarn_orig_ctx: int | None = _rope(
        None,
        wholes(1, 2**31 - 1, "1 token or more").or_this(None),
        "TOKENS",
    )
    yarn_ext_factor: float | None = _rope(None, _to(1e6, least=0.0), "X")
    yarn_attn_factor: float | None = _rope(None, _to(1e6), "X")
    yarn_beta_fast: float | None = _rope(None, _to(1e6), "X")
    yarn_beta_slow: float | None = _rope(None, _to(1e6), "X")

    def __post_init__(self) -> None:
        keep_checked(self)

    @property
    def given(self) -> dict[str, Any]:
        """The values that are not None."""
        pairs = ((one.name, getattr(self, one.name)) for one in fields(self))
        return {name: value for name, value in pairs if value is not None}

    def length(self, n_ctx_train: int) -> int:
        """The length, in tokens, that these values make of the model's training length."""
        if self.rope_scaling == "none" or self.rope_freq_scale is None:
            return n_ctx_train
        original = self.yarn_orig_ctx if self.rope_scaling == "yarn" else None
        return int((original or n_ctx_train) / self.rope_freq_scale)

    def fill(self, lib: Any, params: Any) -> None:
        """Write these values into a ``struct llama_context_params``."""
        given = self.given
        scaling = given.pop("rope_scaling", None)
        if scaling:
            params.rope_scaling_type = getattr(lib, f"LLAMA_ROPE_SCALING_TYPE_{scaling.upper()}")
        for name, value in given.items():
            setattr(params, name, value)


@dataclass(frozen=True)
class ContextOptions:
    """Parameters of one context, in llama.cpp's terms.

    Attributes:
        mtp_head: False: the trunk (target); True: the MTP block alone, as in upstream.
        with_mtp: a target with the MTP block, which drafts itself; see :meth:`.Context.draft`.
            Needs the patched library.
        need_embd_pre_norm: keep hidden rows of every token in a tap, on the device that computes
            them; see :meth:`.Context.hidden_rows`. Needs the patched library.
        hidden: the hidden state for the tap and the MTP block: "post-norm" (after the final norm)
            or "pre-norm".
        tap: hidden rows in upstream's way, through the host: "off"; "all" tokens; "outputs" only.
        n_outputs_max: most output rows per decode call.
        n_rs_seq: recurrent-state snapshots kept for rollback.
        n_seq_max: sequences that may be in the caches at once.
        unified: sequences share the attention cache, and any of them may be in one graph; drafts
            of several need it. False: each has a part of n_ctx, and graphs have neighbours only.
        slice: drop rows that are no outputs before the final norm.
        rope: how positions become angles; the same for target and draft.
        trace: record the graph nodes of every decode; see :meth:`.Context.nodes`.
        times: adds up the costs of graph nodes; not together with `trace`.
    """

    n_ctx: int
    n_batch: int
    n_ubatch: int
    n_threads: int
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
    trace: bool = False
    times: NodeTimes | None = None

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
        self.rope.fill(lib, p)
        if self.mtp_head:
            p.ctx_type = lib.LLAMA_CONTEXT_TYPE_MTP
        elif self.with_mtp:
            p.ctx_type = lib.LLAMA_CONTEXT_TYPE_WITH_MTP
