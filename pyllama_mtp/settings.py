"""What a user can set: how contexts are made (`Settings`), how tokens are chosen (`Sampling`)."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass

from .errors import UsageError

CACHE_TYPES = ("f16", "q8_0", "q4_0", "bf16", "f32")
FLASH_ATTENTION = ("auto", "on", "off")
PROMPT_ROWS = ("last", "all")
PROMPT_SYNC = ("auto", "kv", "full")
HIDDEN = ("post-norm", "pre-norm")
HANDOFF = ("auto", "device", "host")
ROLLBACK = ("auto", "snapshot", "replay")
DRAFTING = ("auto", "chain", "stepwise")
#: Most checkpoints: the tap has that many rows to keep beside the carry row.
CHECKPOINT_LIMIT = 30
MOST_TOKENS = 2**31 - 1
MOST_THREADS = 512  # GGML_MAX_N_THREADS
#: Parentheses of a grammar, one within the other.
GRAMMAR_DEPTH = 500
#: A draft vocabulary of fewer tokens saves nothing more and rejects nearly every draft.
DRAFT_VOCAB_LEAST = 256
#: Most drafts per round where the depth is chosen while generating: one more costs a snapshot of
#: the recurrent state, and is used only where nearly everything is accepted.
AUTO_DEPTH = 6
#: Most drafts per round. Beyond it the chance that a further draft is reached is negligible.
DRAFT_LIMIT = 64


def available_threads() -> int:
    """CPUs this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _require(ok: bool, name: str, value: object, allowed: str) -> None:
    if not ok:
        raise UsageError(f"{name} is {value!r}, it must be {allowed}")


def _choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    _require(value in allowed, name, value, "one of " + ", ".join(allowed))


@dataclass(frozen=True)
class Settings:
    """How the target and the draft context are made. Raises UsageError for a value out of range.

    Attributes:
        n_ctx: context length in tokens; 0 means the model's training length.
        n_batch: most tokens per decode call.
        n_ubatch: most tokens per graph (the physical batch).
        n_threads: CPU threads; None means all CPUs this process may use.
        cache_type_k, cache_type_v: type of the K and V caches, one of CACHE_TYPES. A quantized V
            cache needs flash attention.
        flash_attn: "auto", "on" or "off".
        draft_n_max: drafts per round; 0 turns MTP off. "auto": 0 to AUTO_DEPTH, as many as make
            this generation fastest on this machine, by the costs and the acceptance measured
            meanwhile.
        ngram: with draft_n_max "auto", draft what followed the last time the newest tokens occurred
            in the text (prompt lookup), in rounds where that promises more than the head does. For
            one sequence; not at imposed acceptance.
        drafting: "chain": the drafts of a round come from one graph; "stepwise": from one graph
            each; "auto": chain if the library can and drafts are not drawn. The same drafts either
            way.
        draft_vocab: tokens that can be drafted: a number (the best of a ranking made from the
            tokenizer), a file made with ``pyllama-mtp draft-vocab``, or "full"; "auto": 32,768 if
            that is less than half of the vocabulary and the library can. Fewer make drafting
            cheaper and are never wrong: the model verifies over its whole vocabulary. A model file
            may have an MTP head that is trimmed to some tokens: "auto" is then that head, and
            "full" is refused; a number or a file takes rows of the model's own LM head.
        p_min: drafting stops at a draft less probable than this, in [0, 1]. The probability is the
            one among the head's ten best candidates, as in upstream's draft-mtp.
        draft_sampling: at temperature > 0, drafts are drawn from the head's own distribution and
            accepted by rejection sampling (Leviathan et al. 2023), where usually the head's best
            token is drafted: more drafts are accepted, and the text is still the target's draw.
            Stepwise drafting only.
        prompt_rows: "last": the LM head runs on the last prompt row only. "all": on every row,
            which is the defect that this project removes, kept for before/after measurements.
        prompt_sync: what the MTP block computes to fill its cache: "kv": K and V only; "full": the
            whole block, as upstream does; "auto": "kv" if the library can.
        hidden: the target's hidden state that the block is given: "post-norm" (after the final
            norm: Qwen3.5 and 3.6 are trained so) or "pre-norm".
        handoff: how it gets there: "device": its rows stay where they were computed; "host": they
            are copied to the host and back, as upstream does; "auto": "device" if the library can.
        checkpoints: most checkpoints of the recurrent state along the text, for prompts that share
            a part of it only; 0 keeps none. One is as large as the recurrent state of a sequence.
        rollback: how rejected drafts leave the recurrent state: "snapshot" (`n_rs_seq`), "replay"
            (checkpoint, then decode the accepted tokens again), or "auto" (snapshot if possible).
        synthetic_acceptance: unconditional acceptance per draft position, imposed for speed
            measurements; the text is then not the model's. None: real acceptance.
    """

    n_ctx: int = 0
    n_batch: int = 2048
    n_ubatch: int = 512
    n_threads: int | None = None
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    flash_attn: str = "auto"
    draft_n_max: int | str = "auto"
    ngram: bool = True
    drafting: str = "auto"
    draft_vocab: str | int = "auto"
    p_min: float = 0.0
    draft_sampling: bool = False
    prompt_rows: str = "last"
    prompt_sync: str = "auto"
    hidden: str = "post-norm"
    handoff: str = "auto"
    checkpoints: int = 4
    rollback: str = "auto"
    synthetic_acceptance: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        length = f"0 (the model's own length) to {MOST_TOKENS} tokens"
        _require(0 <= self.n_ctx <= MOST_TOKENS, "n_ctx", self.n_ctx, length)
        for name in ("n_batch", "n_ubatch"):
            value = getattr(self, name)
            _require(1 <= value <= MOST_TOKENS, name, value, f"from 1 to {MOST_TOKENS} tokens")
        threads = 1 if self.n_threads is None else self.n_threads
        _require(1 <= threads <= MOST_THREADS, "n_threads", threads, f"from 1 to {MOST_THREADS}")
        _choice("cache_type_k", self.cache_type_k, CACHE_TYPES)
        _choice("cache_type_v", self.cache_type_v, CACHE_TYPES)
        _choice("flash_attn", self.flash_attn, FLASH_ATTENTION)
        _choice("prompt_rows", self.prompt_rows, PROMPT_ROWS)
        _choice("prompt_sync", self.prompt_sync, PROMPT_SYNC)
        _choice("hidden", self.hidden, HIDDEN)
        _choice("handoff", self.handoff, HANDOFF)
        _choice("rollback", self.rollback, ROLLBACK)
        _choice("drafting", self.drafting, DRAFTING)
        _require(
            0 <= self.checkpoints <= CHECKPOINT_LIMIT,
            "checkpoints",
            self.checkpoints,
            f"from 0 (none) to {CHECKPOINT_LIMIT}",
        )
        depth = self.draft_n_max
        _require(
            depth == "auto" or (isinstance(depth, int) and 0 <= depth <= DRAFT_LIMIT),
            "draft_n_max",
            depth,
            f"a draft depth from 0 (no MTP) to {DRAFT_LIMIT}, or 'auto'",
        )
        _require(0.0 <= self.p_min <= 1.0, "p_min", self.p_min, "a probability from 0 to 1")
        if self.cache_type_v in ("q8_0", "q4_0") and self.flash_attn == "off":
            raise UsageError(
                f"a {self.cache_type_v} V cache needs flash attention: "
                "use flash_attn 'auto' or 'on', or cache_type_v 'f16'"
            )
        _require(isinstance(self.ngram, bool), "ngram", self.ngram, "True or False")
        drawn = self.draft_sampling
        _require(isinstance(drawn, bool), "draft_sampling", drawn, "True or False")
        if drawn:
            self._check_draft_sampling()
        vocab = self.draft_vocab
        number = vocab if isinstance(vocab, int) else DRAFT_VOCAB_LEAST
        _require(
            vocab != "" and not isinstance(vocab, bool) and number >= DRAFT_VOCAB_LEAST,
            "draft_vocab",
            vocab,
            f"'auto', 'full', a number of tokens from {DRAFT_VOCAB_LEAST}, or a file",
        )
        self._check_synthetic()

    def _check_draft_sampling(self) -> None:
        if self.drafting == "chain":
            raise UsageError("a chain drafts best tokens; draft_sampling needs drafting 'stepwise'")
        if self.synthetic_acceptance is not None:
            raise UsageError(
                "draft_sampling accepts by probabilities, synthetic_acceptance by imposed rates: "
                "use one of them"
            )

    def _check_synthetic(self) -> None:
        rates = self.synthetic_acceptance
        if rates is None:
            return
        name, allowed = "synthetic_acceptance", "one or more rates from 0 to 1 that do not increase"
        falling = all(a >= b for a, b in itertools.pairwise(rates))
        _require(
            bool(rates) and all(0.0 <= r <= 1.0 for r in rates) and falling, name, rates, allowed
        )
        _require(
            len(rates) >= self.depth_limit,
            name,
            rates,
            f"one rate for each of the {self.depth_limit} draft positions",
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
        """`n_threads`, resolved."""
        return self.n_threads or available_threads()


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen from the target's logits. Raises UsageError when out of range.

    Applied in this order: logit bias, repetition penalty, grammar, top-k, top-p, min-p,
    temperature, draw. llama.cpp's samplers do the work.

    Attributes:
        temperature: 0 is greedy (the other filters then have no effect, the penalty has).
        top_k: keep the k best; 0 keeps all.
        top_p: keep the smallest set with this probability mass; 1 keeps all.
        min_p: drop tokens less probable than this share of the best one's; 0 keeps all.
        repeat_penalty: divides positive (multiplies negative) logits of recent tokens; 1 is off.
        repeat_last_n: how many recent tokens it looks at; 0 is off.
        logit_bias: added to the logits of these token ids; minus infinity excludes one.
        grammar: GBNF with a rule `root`; the text follows it. None: any text.
        seed: of the random draw, 0 to 2**32 - 2; None draws one.
    """

    temperature: float = 0.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    logit_bias: Mapping[int, float] | None = None
    grammar: str | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        heat = self.temperature
        _require(math.isfinite(heat) and heat >= 0, "temperature", heat, "0 (greedy) or above")
        _require(self.top_k >= 0, "top_k", self.top_k, "0 (off) or above")
        _require(0.0 < self.top_p <= 1.0, "top_p", self.top_p, "above 0, at most 1")
        _require(0.0 <= self.min_p <= 1.0, "min_p", self.min_p, "from 0 to 1")
        penalty = self.repeat_penalty
        _require(math.isfinite(penalty) and penalty > 0, "repeat_penalty", penalty, "above 0")
        window = self.repeat_last_n
        _require(0 <= window <= 2**20, "repeat_last_n", window, "from 0 (off) to 1048576 tokens")
        biases = (self.logit_bias or {}).values()
        usable = all(math.isfinite(bias) or bias == -math.inf for bias in biases)
        _require(usable, "logit_bias", self.logit_bias, "finite numbers, or minus infinity")
        _require(self.grammar != "", "grammar", self.grammar, "GBNF, or None")
        depths = itertools.accumulate((c == "(") - (c == ")") for c in self.grammar or "")
        if max(depths, default=0) > GRAMMAR_DEPTH:  # llama.cpp's parser recurses
            raise UsageError(f"the grammar has more than {GRAMMAR_DEPTH} parentheses open at once")
        _require(
            self.seed is None or 0 <= self.seed < 2**32 - 1,
            "seed",
            self.seed,
            "from 0 to 2**32 - 2",
        )

    @property
    def greedy(self) -> bool:
        """True for temperature 0, and for one so small that dividing by it overflows."""
        return self.temperature < 1e-5

    @property
    def plain_greedy(self) -> bool:
        """True when the next token is the argmax of the raw logits."""
        penalty = self.repeat_penalty != 1.0 and self.repeat_last_n > 0
        return self.greedy and not (penalty or self.logit_bias or self.grammar is not None)
