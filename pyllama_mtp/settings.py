"""What a user can set: how contexts are made (`Settings`), how tokens are chosen (`Sampling`)."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from .arguments import (
    as_float,
    as_index,
    choice,
    flag,
    instance,
    listed,
    number,
    numbers_of,
    refusal,
    require,
    stop_strings,
    whole,
)
from .contextoptions import RopeScaling
from .errors import UsageError
from .grammar import Grammar

CACHE_TYPES = ("f16", "q8_0", "q4_0", "bf16", "f32")
FLASH_ATTENTION = ("auto", "on", "off")
PROMPT_ROWS = ("last", "all")
PROMPT_SYNC = ("auto", "kv", "full")
HIDDEN = ("post-norm", "pre-norm")
ROLLBACK = ("auto", "snapshot", "replay")
#: Most checkpoints along a text.
CHECKPOINT_LIMIT = 30
MOST_TOKENS = 2**31 - 1
MOST_THREADS = 512  # GGML_MAX_N_THREADS
#: Types that rows of the draft head can be given. The last three need an importance matrix, and are
#: refused where the head is made.
HEAD_TYPES = (
    *("auto", "file", "f32", "f16", "bf16", "q8_0", "q6_k", "q5_k", "q5_1", "q5_0", "q4_k", "q4_1"),
    *("q4_0", "iq4_nl", "iq4_xs", "mxfp4", "nvfp4", "q3_k", "iq3_s", "iq3_xxs", "q2_k", "iq2_s"),
    *("iq2_xs", "iq2_xxs", "iq1_s"),
)
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


def _keep(of: Settings | Sampling, name: str, value: object) -> None:
    """Set a field of a frozen object, as it is made."""
    object.__setattr__(of, name, value)


#: ([n] int32 token ids, [n_vocab] float32 logits of the token after them) -> logits.
LogitsProcessor: TypeAlias = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Settings:
    """How a model is run, with MTP or without. Raises UsageError for a value out of range.

    Attributes:
        n_ctx: context length in tokens. 0: 8192, or what prompt and answer need where they are
            known; at most the model's training length, and less (but what is needed) where it would
            take more than half of the host's free memory, or 0.9 of a device's.
        n_batch: most tokens per decode call.
        n_ubatch: most tokens per graph (the physical batch).
        n_threads: CPU threads; None means all CPUs this process may use.
        cache_type_k, cache_type_v: type of the K and V caches, one of CACHE_TYPES. A quantized V
            cache needs flash attention.
        flash_attn: "auto", "on" or "off".
        rope: RoPE and YaRN for texts longer than the model was trained for, in both contexts.
        draft_n_max: drafts per round; 0 turns MTP off. "auto": 0 to AUTO_DEPTH, as many as make
            this generation fastest on this machine, by the costs and the acceptance measured
            meanwhile.
        ngram: with draft_n_max "auto", draft what followed the last time the newest tokens occurred
            in the text (prompt lookup), in rounds where that promises more than the head does. For
            one sequence; not at imposed acceptance.
        draft_vocab: tokens that can be drafted: a number (the best of a ranking made from the
            tokenizer), a file made with ``pyllama-mtp draft-vocab``, or "full"; "auto": as many as
            pay (see draft_head_type), or else 32,768 if that is less than half of the vocabulary
            and the library can. Fewer make drafting cheaper and are never wrong: the model verifies
            over its whole vocabulary. A model file may have an MTP head that is trimmed to some
            tokens: "auto" is then that head, and "full" is refused; a number or a file takes rows
            of the model's own LM head.
        draft_follow: tokens of the text that a draft vocabulary lacks take the rows of its least
            likely ones. Not with draft_sampling, nor at imposed acceptance.
        draft_head_type: type of the rows that drafts come from, one of HEAD_TYPES. Smaller ones
            make drafts cheaper, over the whole vocabulary ("full") too, and lose a little
            acceptance, never text. "file": as they are in the model file. Others are quantized
            when the session is made: 1,000 rows of 1,024 values take two cores 10 ms (q4_0), 20 to
            90 ms (k-quants) or 300 ms (iq4_nl). Types that need an importance matrix are refused.
            "auto": "file" where draft_vocab is given. Where both are "auto" and the vocabulary has
            more than 65,536 tokens, size and type ("file" or q4_0) are chosen together: by what
            drafts cost here, which takes half a second to measure, and by what each size leaves
            out of the text, when the session is made and again as text is seen. Not with
            draft_sampling, imposed acceptance or RPC workers.
        p_min: drafting stops at a draft less probable than this, in [0, 1]. The probability is the
            one among the head's ten best candidates, as in upstream's draft-mtp.
        draft_sampling: at temperature > 0, drafts are drawn from the head's own distribution and
            accepted by rejection sampling (Leviathan et al. 2023), where usually the head's best
            token is drafted: more drafts are accepted, and the text is still the target's draw.
        prompt_rows: "last": the LM head runs on the last prompt row only. "all": on every row,
            which is the defect that this project removes, kept for before/after measurements.
        prompt_sync: how the MTP head is kept in step with the model: "kv": every decode writes the
            head's K and V, too, and drafts come from one graph; "full": upstream's way, kept to
            compare with: the head in a context of its own, which runs its whole block for every
            token, on hidden states that go over the host, and drafts token by token; "auto": "kv"
            if the library can.
        hidden: the target's hidden state that the block is given: "post-norm" (after the final
            norm: Qwen3.5 and 3.6 are trained so) or "pre-norm".
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
    rope: RopeScaling = RopeScaling()  # noqa: RUF009 - it is frozen
    draft_n_max: int | str = "auto"
    ngram: bool = True
    draft_vocab: str | int = "auto"
    draft_follow: bool = True
    draft_head_type: str = "auto"
    p_min: float = 0.0
    draft_sampling: bool = False
    prompt_rows: str = "last"
    prompt_sync: str = "auto"
    hidden: str = "post-norm"
    checkpoints: int = 4
    rollback: str = "auto"
    synthetic_acceptance: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        length = f"0 (as much as is usual) to {MOST_TOKENS} tokens"
        self._whole("n_ctx", 0, MOST_TOKENS, length)
        for name in ("n_batch", "n_ubatch"):
            self._whole(name, 1, MOST_TOKENS, f"from 1 to {MOST_TOKENS} tokens")
        if self.n_threads is not None:
            self._whole("n_threads", 1, MOST_THREADS, f"from 1 to {MOST_THREADS}, or None (all)")
        choice("cache_type_k", self.cache_type_k, CACHE_TYPES)
        choice("cache_type_v", self.cache_type_v, CACHE_TYPES)
        choice("flash_attn", self.flash_attn, FLASH_ATTENTION)
        instance("rope", self.rope, RopeScaling, "RopeScaling(...)")
        choice("prompt_rows", self.prompt_rows, PROMPT_ROWS)
        choice("prompt_sync", self.prompt_sync, PROMPT_SYNC)
        choice("hidden", self.hidden, HIDDEN)
        choice("rollback", self.rollback, ROLLBACK)
        choice("draft_head_type", self.draft_head_type, HEAD_TYPES)
        self._whole("checkpoints", 0, CHECKPOINT_LIMIT, f"from 0 (none) to {CHECKPOINT_LIMIT}")
        if not isinstance(self.draft_n_max, str) or self.draft_n_max != "auto":
            depths = f"a draft depth from 0 (no MTP) to {DRAFT_LIMIT}, or 'auto'"
            self._whole("draft_n_max", 0, DRAFT_LIMIT, depths)
        p_min = number("p_min", self.p_min, lambda p: 0 <= p <= 1, "a probability from 0 to 1")
        _keep(self, "p_min", p_min)
        if self.cache_type_v in ("q8_0", "q4_0") and self.flash_attn == "off":
            raise UsageError(
                f"a {self.cache_type_v} V cache needs flash attention: "
                "use flash_attn 'auto' or 'on', or cache_type_v 'f16'"
            )
        _keep(self, "ngram", flag("ngram", self.ngram))
        _keep(self, "draft_follow", flag("draft_follow", self.draft_follow))
        _keep(self, "draft_sampling", flag("draft_sampling", self.draft_sampling))
        self._check_synthetic()
        if self.draft_sampling:
            self._check_draft_sampling()
        self._check_draft_vocab()

    def _whole(self, name: str, least: int, most: int, allowed: str) -> None:
        _keep(self, name, whole(name, getattr(self, name), least, most, allowed))

    def _check_draft_vocab(self) -> None:
        given: object = self.draft_vocab
        size = as_index(given)
        named = os.fspath(given) if isinstance(given, os.PathLike) else given
        ok = size >= DRAFT_VOCAB_LEAST if size is not None else isinstance(named, str) and named
        allowed = f"'auto', 'full', a number of tokens from {DRAFT_VOCAB_LEAST}, or a file"
        require(bool(ok), "draft_vocab", given, allowed)
        _keep(self, "draft_vocab", named if size is None else size)

    def _check_draft_sampling(self) -> None:
        if self.synthetic_acceptance is not None:
            raise UsageError(
                "draft_sampling accepts by probabilities, synthetic_acceptance by imposed rates: "
                "use one of them"
            )

    def _check_synthetic(self) -> None:
        given = self.synthetic_acceptance
        if given is None:
            return
        name, allowed = "synthetic_acceptance", "one or more rates from 0 to 1 that do not increase"
        rates = numbers_of(name, given, allowed)
        falling = all(a >= b for a, b in itertools.pairwise(rates))
        require(
            bool(rates) and all(0.0 <= r <= 1.0 for r in rates) and falling, name, given, allowed
        )
        _keep(self, name, rates)
        require(
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

    Applied in this order: logits processors, logit bias, penalties, DRY, grammar, top-n-sigma,
    top-k, typical, top-p, min-p, XTC, temperature, draw. llama.cpp's samplers do the work.

    Attributes:
        temperature: 0 is greedy (the filters then have no effect, the penalties have).
        top_k: keep the k best; 0 keeps all.
        top_p: keep the smallest set with this probability mass; 1 keeps all.
        min_p: drop tokens less probable than this share of the best one's; 0 keeps all.
        repeat_penalty: divides positive (multiplies negative) logits of recent tokens; 1 is off.
        frequency_penalty: subtracted from a token's logit for each time it is recent; 0 is off.
        presence_penalty: subtracted once from the logits of recent tokens; 0 is off.
        repeat_last_n: how many recent tokens these three look at, those of the prompt included; 0
            turns them off.
        top_n_sigma: drop tokens whose logit is more than this many standard deviations below the
            best one's (Top-n-sigma, https://arxiv.org/abs/2411.07641); 0 keeps all.
        typical_p: keep the tokens whose surprise is closest to the expected one, to this mass
            (locally typical sampling, https://arxiv.org/abs/2202.00666); 1 keeps all.
        xtc_probability: how often the best tokens are dropped, all of at least `xtc_threshold` but
            the last of them (exclude top choices); 0 is never.
        xtc_threshold: a probability; above 0.5 XTC is off.
        dry_multiplier: DRY ("don't repeat yourself") subtracts dry_multiplier * dry_base ** (n -
            dry_allowed_length) from the logit of a token that would continue a repetition of n >=
            dry_allowed_length tokens; 0 is off.
        dry_base, dry_allowed_length: see dry_multiplier; the base is at least 1.
        dry_penalty_last_n: how many recent tokens DRY looks at, those of the prompt included.
        dry_sequence_breakers: texts that no repetition goes across.
        logit_bias: added to the logits of these token ids; minus infinity excludes one.
        logits_processors: functions of (ids, logits) that return logits, one after the other, as in
            Hugging Face's transformers: [n] int32, prompt and answer so far, and [n_vocab] float32;
            minus infinity excludes a token. They are called for each position, in order, and with
            MTP for positions that are drafted, too, never out of order. Slow.
        grammar: a :class:`.Grammar`, or GBNF with a rule `root`; the answer follows it, from its
            beginning or from the end of a thought that the prompt opens. None: any text.
        reasoning_budget: most tokens of a thought, which a prompt that ends with ``<think>`` opens,
            or the model at the start of its answer; then the closing tag follows, whatever the
            model says. None: as many as the model likes.
        seed: of the random draw, 0 to 2**32 - 2; None draws one.
    """

    temperature: float = 0.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repeat_last_n: int = 64
    top_n_sigma: float = 0.0
    typical_p: float = 1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = 64
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    logit_bias: Mapping[int, float] | None = None
    logits_processors: Sequence[LogitsProcessor] = ()
    grammar: str | Grammar | None = None
    reasoning_budget: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        self._number("temperature", lambda t: math.isfinite(t) and t >= 0, "0 (greedy) or above")
        self._whole("top_k", math.inf, "0 (off) or above")
        self._number("top_p", lambda p: 0 < p <= 1, "above 0, at most 1")
        self._number("min_p", lambda p: 0 <= p <= 1, "from 0 to 1")
        self._number("repeat_penalty", lambda p: math.isfinite(p) and p > 0, "above 0")
        for name in ("repeat_last_n", "dry_penalty_last_n"):
            self._whole(name, 2**20, "from 0 (off) to 1048576 tokens")
        for name in ("frequency_penalty", "presence_penalty"):
            self._number(name, math.isfinite, "finite; 0 is off")
        for name in ("top_n_sigma", "dry_multiplier"):
            self._number(name, lambda n: math.isfinite(n) and n >= 0, "0 (off) or above")
        self._number("typical_p", lambda p: 0 < p <= 1, "above 0, at most 1")
        self._number("xtc_probability", lambda p: 0 <= p <= 1, "from 0 (off) to 1")
        self._number("xtc_threshold", lambda p: 0 <= p <= 1, "from 0 to 1")
        self._number("dry_base", lambda b: math.isfinite(b) and b >= 1, "1 or above")
        self._whole("dry_allowed_length", 2**20, "from 0 to 1048576 tokens")
        given = self.logits_processors
        functions = (given,) if callable(given) else tuple(listed(given) or (None,))
        none = listed(given) == []
        if not none and not all(map(callable, functions)):
            raise refusal("logits_processors", given, "functions of (ids, logits)")
        _keep(self, "logits_processors", () if none else functions)
        breakers = tuple(stop_strings(self.dry_sequence_breakers, "dry_sequence_breakers"))
        _keep(self, "dry_sequence_breakers", breakers)
        self._check_biases()
        grammar: object = self.grammar
        usable = grammar is None or (isinstance(grammar, Grammar | str) and grammar != "")
        require(usable, "grammar", grammar, "a Grammar, GBNF, or None")
        if isinstance(grammar, str):
            Grammar.gbnf(grammar)
        if self.reasoning_budget is not None:
            self._whole("reasoning_budget", MOST_TOKENS, "0 tokens or more, or None")
        if self.seed is not None:
            self._whole("seed", 2**32 - 2, "from 0 to 2**32 - 2, or None")

    @property
    def constraint(self) -> Grammar | None:
        """`grammar` as a :class:`.Grammar`."""
        return Grammar.gbnf(self.grammar) if isinstance(self.grammar, str) else self.grammar

    def _number(self, name: str, usable: Callable[[float], bool], allowed: str) -> None:
        _keep(self, name, number(name, getattr(self, name), usable, allowed))

    def _whole(self, name: str, most: float, allowed: str) -> None:
        _keep(self, name, whole(name, getattr(self, name), 0, most, allowed))

    def _check_biases(self) -> None:
        given: object = self.logit_bias
        if given is None:
            return
        allowed = "a mapping of token ids to finite numbers, or minus infinity"
        if not isinstance(given, Mapping):
            raise refusal("logit_bias", given, allowed)
        kept: dict[int, float] = {}
        for key, value in given.items():
            token, bias = as_index(key), as_float(value)
            if token is None or bias is None or not (math.isfinite(bias) or bias == -math.inf):
                raise refusal("logit_bias", given, allowed)
            kept[token] = bias
        _keep(self, "logit_bias", kept)

    @property
    def greedy(self) -> bool:
        """True for temperature 0, and for one so small that dividing by it overflows."""
        return self.temperature < 1e-5

    @property
    def plain_greedy(self) -> bool:
        """True when the next token is the argmax of the raw logits."""
        return self.greedy and not self.reorders

    @property
    def penalizes(self) -> bool:
        """Whether recent tokens have a penalty of their own."""
        given = self.repeat_penalty != 1.0 or self.frequency_penalty or self.presence_penalty
        return bool(given) and self.repeat_last_n > 0

    @property
    def dry(self) -> bool:
        """Whether repetitions have one."""
        return self.dry_multiplier > 0 and self.dry_penalty_last_n > 0

    @property
    def reorders(self) -> bool:
        """Whether another token than the best one of the raw logits may become the best."""
        biased = bool(self.logit_bias) or self.grammar is not None
        return biased or self.penalizes or self.dry or bool(self.logits_processors)
