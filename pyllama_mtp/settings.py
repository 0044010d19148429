"""Settings of a session: each field is declared once, with check and command-line option."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any

from .arguments import (
    FLAG,
    Kind,
    as_index,
    between,
    instance,
    keep_checked,
    listed,
    numbers_of,
    option,
    refusal,
    require,
    wholes,
    words,
)
from .arguments import MOST_TOKENS as MOST_TOKENS
from .errors import UsageError
from .samplingoptions import LogitsProcessor as LogitsProcessor
from .samplingoptions import Sampling as Sampling

if TYPE_CHECKING:
    from .llama.model import Model
    from .resolved import Resolved

CACHE_TYPES = ("f16", "q8_0", "q4_0", "bf16", "f32")
#: Most checkpoints along a text.
CHECKPOINT_LIMIT = 30
MOST_THREADS = 512  # GGML_MAX_N_THREADS
#: Types for rows of the draft head. The last three need an importance matrix, and are refused where
#: the head is made.
HEAD_TYPES = (
    *("auto", "file", "f32", "f16", "bf16", "q8_0", "q6_k", "q5_k", "q5_1", "q5_0", "q4_k", "q4_1"),
    *("q4_0", "iq4_nl", "iq4_xs", "mxfp4", "nvfp4", "q3_k", "iq3_s", "iq3_xxs", "q2_k", "iq2_s"),
    *("iq2_xs", "iq2_xxs", "iq1_s"),
)
#: A draft vocabulary of fewer tokens saves nothing more and rejects nearly every draft.
DRAFT_VOCAB_LEAST = 256
#: Most drafts per round of draft_n_max "auto". One more costs a snapshot of the recurrent state,
#: and pays only where nearly everything is accepted.
AUTO_DEPTH = 6
#: Most drafts per round. Further drafts would hardly ever be reached.
DRAFT_LIMIT = 64


def available_threads() -> int:
    """CPUs this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _draft_vocab(name: str, value: object) -> str | int | tuple[int, ...]:
    size = as_index(value)
    named = os.fspath(value) if isinstance(value, os.PathLike) else value
    if isinstance(named, str) and named:
        return named
    allowed = (
        f"'auto', 'full', a number of tokens from {DRAFT_VOCAB_LEAST}, or a file, or a list of "
        "token ids"
    )
    if size is None and (ids := listed(value)):
        found = [as_index(one) for one in ids]
        if None not in found:
            return tuple(one for one in found if one is not None)
    if size is None or size < DRAFT_VOCAB_LEAST:
        raise refusal(name, value, allowed)
    return size


def _falling_rates(name: str, value: object) -> tuple[float, ...]:
    allowed = "one or more rates from 0 to 1 that do not increase"
    rates = numbers_of(name, value, allowed)
    falling = all(a >= b for a, b in itertools.pairwise(rates))
    require(bool(rates) and all(0 <= r <= 1 for r in rates) and falling, name, value, allowed)
    return rates


_BATCH = wholes(1, MOST_TOKENS, f"from 1 to {MOST_TOKENS} tokens")
_ROPE = Kind(lambda name, value: instance(name, value, RopeScaling, "RopeScaling(...)"))
_rope = partial(option, part="rope")
_speed, _cost = partial(option, part="speed"), partial(option, part="cost")
_depth, _ngram, _sampling = (partial(option, part=part) for part in ("depth", "ngram", "sampling"))


def _to(most: float, least: float = 1e-6) -> Kind:
    allowed = f"from {least:g} to {most:g}, or None (as the file says)"
    return between(least, most, allowed).or_this(None)


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


@dataclass(frozen=True)
class Settings:
    """How a model is run, with MTP or without. Raises UsageError for a value out of range.

    Attributes:
        n_ctx: context in tokens, rounded up to a multiple of 256; 0: 8192, or what prompt and
            answer need. A context of 0 has at most the model's training length. It is cut, but not
            below the need, if it takes more than half of the host's free memory, or 0.9 of a
            device's.
        n_batch: tokens per decode call.
        n_ubatch: tokens per graph.
        n_threads: CPU threads (default: as many as cores).
        cache_type_k: type of the K cache. One of CACHE_TYPES.
        cache_type_v: type of the V cache; a quantized one needs flash attention.
        flash_attn: flash attention; "auto": where the backend has it.
        rope: RoPE and YaRN for texts longer than the model was trained for, in both contexts.
        draft_n_max: tokens drafted per round; 0: no MTP; "auto": as many as make it fastest, 0 to
            AUTO_DEPTH. What drafts cost is measured when a session is made, in some seconds, and
            kept in the user's cache folder; how many are accepted is learned from the text.
        ngram: with draft depth "auto", draft what followed the same words earlier in the text, when
            that is likelier to be accepted. For one sequence (prompt lookup); not at imposed
            acceptance.
        prompt_rows: prompt rows that the LM head runs on; "all" brings back the slow prefill that
            this package exists to avoid.
        prompt_sync: how the MTP head is kept in step with the model. "kv": each decode of the model
            also writes the head's K and V, and all drafts of a round are one graph. "full": as
            upstream does, with a context of its own for the head, which runs its whole block for
            every token. "auto": "kv" if library and model can.
        hidden: the hidden state that the head gets: after the model's final norm, as Qwen3.5 and
            3.6 were trained, or before it.
        draft_vocab: tokens that can be drafted: the N best by the tokenizer; those of a file made
            by 'pyllama-mtp draft-vocab'; a list of ids (in Python); "full": all; "auto": as many as
            pay. Fewer tokens make drafts cheaper, and never change the text. Where "auto" cannot
            measure what pays, it takes 32,768 tokens of a vocabulary of more than twice as many. If
            the model file has a trimmed MTP head, "auto" is that head, and "full" is refused.
        draft_follow: tokens of the text that the draft vocabulary lacks replace its least likely
            ones. Not with draft_sampling, nor at imposed acceptance.
        draft_head_type: type of the rows that drafts come from. "file": as in the model file. q8_0,
            q6_k, q4_k, q4_0, ...: quantized when the session is made. "auto": "file" or q4_0,
            whichever is faster; "file" if draft_vocab is given. One of HEAD_TYPES, without those
            that need an importance matrix. Smaller types make drafts cheaper, lose a little
            acceptance, and never change the text. If both are "auto" and the vocabulary has more
            than 65,536 tokens, size and type are chosen together, when the session is made and
            again as text is seen. Not with draft_sampling, imposed acceptance or RPC workers.
        p_min: stop drafting at a token that the head gives less probability than this, 0 to 1,
            among its ten best candidates, as upstream's draft-mtp does.
        draft_sampling: draw drafts from the head's distribution, and accept them by rejection
            sampling: more are accepted where the temperature is high, and the text is still the
            model's.
        checkpoints: most states of the recurrent layers kept along the text, for prompts that share
            only a part of it; 0: none.
        rollback: how rejected drafts leave the recurrent state: a "snapshot" for each token, or a
            checkpoint and a "replay" of the accepted tokens; "auto": snapshots where possible.
        synthetic_acceptance: impose these unconditional acceptance rates, 0 to 1, on draft 1, 2,
            ... (0.8,0.7,0.6), to measure speed at a chosen rate; text and acceptance then mean
            nothing, and every output says so.
    """

    n_ctx: int = _speed(
        0,
        wholes(0, MOST_TOKENS, f"0 (as much as is usual) to {MOST_TOKENS} tokens"),
        "-c --n-ctx TOKENS",
    )
    n_batch: int = _speed(2048, _BATCH, "TOKENS")
    n_ubatch: int = _speed(512, _BATCH, "TOKENS")
    n_threads: int | None = _speed(
        None,
        wholes(1, MOST_THREADS, f"from 1 to {MOST_THREADS}, or None (all)").or_this(None),
        "-t --threads N",
    )
    cache_type_k: str = _speed("f16", words(*CACHE_TYPES))
    cache_type_v: str = _speed("f16", words(*CACHE_TYPES))
    flash_attn: str = _speed("auto", words("auto", "on", "off"))
    rope: RopeScaling = option(RopeScaling(), _ROPE)
    draft_n_max: int | str = _depth(
        "auto",
        wholes(
            0, DRAFT_LIMIT, f"a draft depth from 0 (no MTP) to {DRAFT_LIMIT}, or 'auto'"
        ).or_this("auto"),
        "N|auto",
    )
    ngram: bool = _ngram(True, FLAG)
    prompt_rows: str = _cost(
        "last",
        words("last", "all"),
        "--rows",
    )
    prompt_sync: str = _cost(
        "auto",
        words("auto", "kv", "full"),
        "--sync",
    )
    hidden: str = _cost(
        "post-norm",
        words("post-norm", "pre-norm"),
    )
    draft_vocab: str | int | tuple[int, ...] = _cost(
        "auto",
        Kind(_draft_vocab),
        "N|FILE|full",
    )
    draft_follow: bool = _cost(
        True,
        FLAG,
    )
    draft_head_type: str = _cost(
        "auto",
        words(*HEAD_TYPES),
        "TYPE",
    )
    p_min: float = _speed(
        0.0,
        between(0, 1, "a probability from 0 to 1"),
        "P",
    )
    draft_sampling: bool = _sampling(
        False,
        FLAG,
    )
    checkpoints: int = _speed(
        4,
        wholes(0, CHECKPOINT_LIMIT, f"from 0 (none) to {CHECKPOINT_LIMIT}"),
        "N",
    )
    rollback: str = _speed(
        "auto",
        words("auto", "snapshot", "replay"),
    )
    synthetic_acceptance: tuple[float, ...] | None = _speed(
        None,
        Kind(_falling_rates, lambda text: tuple(map(float, text.split(",")))).or_this(None),
        "P1,P2,...",
    )

    def __post_init__(self) -> None:
        keep_checked(self)
        if self.cache_type_v in ("q8_0", "q4_0") and self.flash_attn == "off":
            raise UsageError(
                f"a {self.cache_type_v} V cache needs flash attention: "
                "use flash_attn 'auto' or 'on', or cache_type_v 'f16'"
            )
        rates = self.synthetic_acceptance
        if rates is None:
            return
        require(
            len(rates) >= self.depth_limit,
            "synthetic_acceptance",
            rates,
            f"one rate for each of the {self.depth_limit} draft positions",
        )
        if self.draft_sampling:
            raise UsageError(
                "draft_sampling accepts by probabilities, synthetic_acceptance by imposed rates: "
                "use one of them"
            )

    @property
    def depth_limit(self) -> int:
        """Most drafts that a round may have."""
        if isinstance(self.draft_n_max, int):
            return self.draft_n_max
        imposed = self.synthetic_acceptance
        return AUTO_DEPTH if imposed is None else min(AUTO_DEPTH, len(imposed))

    @property
    def threads(self) -> int:
        """`n_threads`; None: one for each CPU."""
        return self.n_threads or available_threads()

    def resolve(self, model: Model, n_sequences: int = 1, room: int = 0) -> Resolved:
        """These settings as they hold for a model, once: what contexts are made by.

        `n_ctx` stays as it is, if it is not 0. Else it is `room`, but at least 8192 and at most the
        training length. Where that takes more than 0.9 of a device's free memory, or half of the
        host's, it is halved, but not below `room` or 1024.

        Args:
            n_sequences: number of sequences, each of `n_ctx` tokens.
            room: tokens of prompt and answer; 0: not known.

        Raises:
            UsageError: settings that do not go together with this model.
            InsufficientMemoryError: the length asked for does not fit.
        """
        from .resolved import resolve

        return resolve(self, model, n_sequences, room)
