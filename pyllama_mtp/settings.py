"""Settings of a session, and of how tokens are chosen: each field is declared once, with check and
command-line option."""

from __future__ import annotations

import itertools
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, TypeAlias

from .arguments import (
    FLAG,
    Kind,
    as_float,
    as_index,
    between,
    file_name,
    instance,
    keep_checked,
    listed,
    numbers,
    numbers_of,
    option,
    require,
    stop_strings,
    wholes,
    words,
)
from .arguments import MOST_TOKENS as MOST_TOKENS
from .errors import UsageError, refusal
from .grammar import Grammar

CACHE_TYPES = ("f16", "q8_0", "q4_0", "bf16", "f32")
#: Most checkpoints along a text.
CHECKPOINT_LIMIT = 30
#: Tokens per graph.
USUAL_N_UBATCH = 512
MOST_THREADS = 512  # GGML_MAX_N_THREADS
#: Types for rows of the draft head. The last three need an importance matrix, and are refused where
#: the head is made.
HEAD_TYPES = (
    *("file", "f32", "f16", "bf16", "q8_0", "q6_k", "q5_k", "q5_1", "q5_0", "q4_k", "q4_1"),
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
#: Published acceptance, by name, and whose it is. With thinking, depths 1 to 8 give 1.93 2.73 3.39
#: 3.97 4.41 4.80 5.04 5.21 tokens per round, of which these rates are the differences. Source:
#: SemiAnalysis InferenceX, golden_al_distribution.
GOLDEN = {"golden:qwen3.5": (0.93, 0.8, 0.66, 0.58, 0.44, 0.39, 0.24, 0.17)}
GOLDEN_SOURCES = {"golden:qwen3.5": "InferenceX: Qwen3.5's own head, SPEED-Bench's coding prompts"}


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


def falling_rates(name: str, value: object) -> tuple[float, ...]:
    """The rates that are given, or named in GOLDEN. Raises UsageError, with the names."""
    if isinstance(value, str) and value in GOLDEN:
        return GOLDEN[value]
    allowed = f"one or more rates from 0 to 1 that do not increase, or {', '.join(GOLDEN)}"
    rates = numbers_of(name, value, allowed)
    falling = all(a >= b for a, b in itertools.pairwise(rates))
    require(bool(rates) and all(0 <= r <= 1 for r in rates) and falling, name, value, allowed)
    return rates


_BATCH = wholes(1, MOST_TOKENS, f"from 1 to {MOST_TOKENS} tokens")
_ROPE = Kind(lambda name, value: instance(name, value, RopeScaling, "RopeScaling(...)"))
_rope = partial(option, part="rope")
_speed, _cost = partial(option, part="speed"), partial(option, part="cost")
_depth, _ngram, _sampling, _cache, _research = (
    partial(option, part=part) for part in ("depth", "ngram", "sampling", "cache", "research")
)
_MEBIBYTES = wholes(0, 2**40, "0 MiB or more")


def _to(most: float, least: float = 1e-6) -> Kind:
    allowed = f"from {least:g} to {most:g}, or None (as the file says)"
    return between(least, most, allowed).or_this(None)


#: Fields about prompts that are stored: they change no speed of a prompt or a round.
STORE = ("cache_ram", "cache_dir", "cache_disk")


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
        None, wholes(1, 2**31 - 1, "1 token or more").or_this(None), "TOKENS"
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
        n_ubatch: tokens per graph; "auto": 2048 for a model whose experts are all on GPUs, if that
            fits the free memory; else 512.
        n_threads: CPU threads; "auto": as many as cores, and fewer while other programs keep the
            cores busy and that is faster. On an x86 CPU no bit depends on it.
        cache_type_k: type of the K cache. One of CACHE_TYPES.
        cache_type_v: type of the V cache; a quantized one needs flash attention.
        flash_attn: flash attention; "auto": where the backend has it.
        rope: RoPE and YaRN for texts longer than the model was trained for, in both contexts.
        draft_n_max: tokens drafted per round; 0: no MTP; "auto": as many as make it fastest, 0 to
            6. What drafts cost is measured when a session is made, in some seconds, and
            kept in the user's cache folder; how many are accepted is learned from the text.
        ngram: with draft depth "auto", draft what followed the same words earlier in this text or
            in past ones, instead of the head or behind its drafts, when that pays. For one sequence
            (prompt lookup); not at imposed acceptance.
        prompt_rows: prompt rows that the LM head runs on; "all" brings back the slow prefill that
            this package exists to avoid.
        prompt_sync: how the MTP head is kept in step with the model. "kv": each decode of the model
            also writes the head's K and V, and all drafts of a round are one graph. "full": as
            upstream does, with a context of its own for the head, which runs its whole block for
            every token. "auto": "kv" if library and model can.
        hidden: the hidden state that the head gets: after the model's final norm, as Qwen3.5 and
            3.6 were trained, or before it.
        draft_vocab: tokens that can be drafted: the N best by the tokenizer; those of a file made
            by 'pyllama-mtp draft-vocab'; "full": all; "auto": 32,768 of a vocabulary of more than
            65,536 tokens, else all. A list of ids is allowed, too. Fewer tokens make drafts
            cheaper, and never change the text. If the model file has a trimmed MTP head, "auto" is
            that head, and "full" is refused.
        draft_follow: tokens of the text that the draft vocabulary lacks replace its least likely
            ones. Not with draft_sampling, nor at imposed acceptance.
        draft_head_type: type of the rows that drafts come from. "file": as in the model file. q8_0,
            q6_k, q4_k, q4_0, ...: quantized when the session is made. One of HEAD_TYPES, without
            those that need an importance matrix. Smaller types make drafts cheaper, lose some
            acceptance, and never change the text.
        p_min: stop drafting at a token that the head gives less probability than this, 0 to 1,
            among its ten best candidates, as upstream's draft-mtp does.
        draft_window: drafts attend to the first 64 and so many of the last tokens; 0: to all. For
            CPUs: in long contexts they make drafts faster. A GPU gains nothing. Fewer drafts may be
            accepted; the text stays the model's. Not with prompt_sync "full".
        draft_sampling: draw drafts from the head's distribution, and accept them by rejection
            sampling: more are accepted where the temperature is high, and the text is still the
            model's.
        checkpoints: most states of the recurrent layers kept along the text, for prompts that share
            only a part of it; 0: none.
        cache_ram: memory for processed texts that other texts have displaced, in MiB; 0: none. A
            prompt that begins like one of them goes on from there. The least recently used go
            first. It takes no more than half of the memory that is free.
        cache_dir: folder for files of processed texts: another process goes on from them. Those in
            use are written at the end. Several may share it. Only for folders of people you trust:
            the states in the files go to native code.
        cache_disk: most MiB of files in that folder; those used longest ago go first.
        rollback: how rejected drafts leave the recurrent state: a "snapshot" for each token, or a
            checkpoint and a "replay" of the accepted tokens; "auto": snapshots where possible.
        synthetic_acceptance: impose these unconditional acceptance rates, 0 to 1, on draft 1, 2,
            ... (0.8,0.7,0.6), or published ones (golden:qwen3.5), to measure speed at a chosen
            rate; text and acceptance then mean nothing, and every output says so.
    """

    n_ctx: int = _speed(
        0,
        wholes(0, MOST_TOKENS, f"0 (as much as is usual) to {MOST_TOKENS} tokens"),
        "-c --n-ctx TOKENS",
    )
    n_batch: int = _speed(2048, _BATCH, "TOKENS")
    n_ubatch: int | str = _speed("auto", _BATCH.or_this("auto"), "TOKENS|auto")
    n_threads: int | str = _speed(
        "auto",
        wholes(1, MOST_THREADS, f"from 1 to {MOST_THREADS}, or 'auto'").or_this("auto"),
        "-t --threads N|auto",
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
    prompt_rows: str = _research("last", words("last", "all"), "--rows")
    prompt_sync: str = _research("auto", words("auto", "kv", "full"), "--sync")
    hidden: str = _research("post-norm", words("post-norm", "pre-norm"))
    draft_vocab: str | int | tuple[int, ...] = _cost("auto", Kind(_draft_vocab), "N|FILE|full")
    draft_follow: bool = _cost(True, FLAG)
    draft_head_type: str = _cost("file", words(*HEAD_TYPES), "TYPE")
    p_min: float = _speed(0.0, between(0, 1, "a probability from 0 to 1"), "P")
    draft_window: int = _speed(
        0, wholes(0, MOST_TOKENS, f"0 (all) to {MOST_TOKENS} tokens"), "TOKENS"
    )
    draft_sampling: bool = _sampling(False, FLAG)
    checkpoints: int = _speed(
        4, wholes(0, CHECKPOINT_LIMIT, f"from 0 (none) to {CHECKPOINT_LIMIT}"), "N"
    )
    cache_ram: int = _cache(0, _MEBIBYTES, "MIB")
    cache_dir: str | None = _cache(
        None, Kind(partial(file_name, kind="a folder")).or_this(None), "DIR"
    )
    cache_disk: int = _cache(16384, _MEBIBYTES, "MIB")
    rollback: str = _speed("auto", words("auto", "snapshot", "replay"))
    synthetic_acceptance: tuple[float, ...] | None = _research(
        None,
        Kind(falling_rates, lambda text: tuple(map(float, text.split(",")))).or_this(None),
        "P1,P2,...|NAME",
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
    def ubatch(self) -> int:
        """`n_ubatch`; "auto": the usual one."""
        return self.n_ubatch if isinstance(self.n_ubatch, int) else USUAL_N_UBATCH

    @property
    def threads(self) -> int:
        """`n_threads`; "auto": one for each CPU, the most there may be."""
        return self.n_threads if isinstance(self.n_threads, int) else available_threads()


# -- how tokens are chosen -------------------------------------------------------------------------


MOST = sys.float_info.max
#: ([n] int32 token ids, [n_vocab] float32 logits of the token after them) -> logits.
LogitsProcessor: TypeAlias = Callable[[Any, Any], Any]


def _processors(name: str, given: Any) -> tuple[LogitsProcessor, ...]:
    functions = [given] if callable(given) else listed(given)
    if functions is None or not all(map(callable, functions)):
        raise refusal(name, given, "functions of (ids, logits)")
    return tuple(functions)


def _grammar(name: str, given: Any) -> str | Grammar:
    if not isinstance(given, Grammar | str) or given == "":
        raise refusal(name, given, "a Grammar, GBNF, or None")
    if isinstance(given, str):
        Grammar.gbnf(given)
    return given


def _biases(name: str, given: Any) -> dict[int, float]:
    allowed = "a mapping of token ids to finite numbers, or minus infinity"
    if not isinstance(given, Mapping):
        raise refusal(name, given, allowed)
    kept: dict[int, float] = {}
    for key, value in given.items():
        token, bias = as_index(key), as_float(value)
        if token is None or bias is None or not (math.isfinite(bias) or bias == -math.inf):
            raise refusal(name, given, allowed)
        kept[token] = bias
    return kept


_MASS = numbers(lambda p: 0 < p <= 1, "above 0, at most 1")
_FINITE = numbers(math.isfinite, "finite; 0 is off")
_OFF_OR_ABOVE = between(0, MOST, "0 (off) or above")
_LAST_N = wholes(0, 2**20, "from 0 (off) to 1048576 tokens")


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen from the target's logits. Raises UsageError when out of range.

    llama.cpp's samplers apply in this order: logits processors, logit bias, penalties, DRY,
    grammar, top-n-sigma, top-k, typical, top-p, min-p, XTC, temperature, draw.

    Attributes:
        temperature: 0 takes the likeliest token (greedy); higher is more varied. At 0 penalties
            still have an effect, filters have not.
        top_k: keep the K likeliest; 0: all.
        top_p: keep the likeliest that sum up to P; 1: all.
        min_p: keep those with at least P times the probability of the likeliest; 0: all.
        repeat_penalty: divide positive, and multiply negative, logits of recent tokens by X; 1: no
            penalty.
        repeat_last_n: how many recent tokens, the prompt's included, the repeat, frequency and
            presence penalties look at; 0: none.
        frequency_penalty: subtract X from the logit of a recent token, for each time that it is
            among them; 0: no penalty.
        presence_penalty: subtract X from the logit of a recent token, once; 0: no penalty.
        top_n_sigma: keep those whose logit is within N standard deviations of the likeliest's; 0:
            all. Top-n-sigma, https://arxiv.org/abs/2411.07641.
        typical_p: keep those of the most usual surprise that sum up to P; 1: all. Locally typical
            sampling, https://arxiv.org/abs/2202.00666.
        xtc_probability: how often all tokens above the threshold but the least likely are dropped
            (XTC); 0: never.
        xtc_threshold: their least probability; above 0.5 XTC is off.
        dry_multiplier: penalty for a token that continues a repetition (DRY): X times the base to
            the power of the tokens beyond the allowed length; 0: none.
        dry_base: base of DRY's penalty.
        dry_allowed_length: tokens that may be repeated.
        dry_penalty_last_n: how many tokens back DRY looks; 0: none.
        dry_sequence_breakers: DRY: repetitions end at these texts.
        logits_processors: functions of (ids, logits) that return logits, one after the other, as in
            Hugging Face's transformers: [n] int32, prompt and answer so far, and [n_vocab] float32;
            minus infinity excludes a token. They are called for each position, drafted ones among
            them, in order. Slow.
        grammar: a :class:`.Grammar`, or GBNF with a rule `root`, that the answer follows from its
            beginning, or from the end of a thought that the prompt opens. None: any text.
        logit_bias: added to the logits of these token ids; minus infinity excludes one.
        reasoning_budget: most tokens of a thought, which a prompt that ends with ``<think>`` opens,
            or the model at the start of its answer. The closing tag is forced then. None: any
            number.
        seed: same seed, same text (default: random). 0 to 2**32 - 2.
    """

    temperature: float = _sampling(
        0.0, between(0, MOST, "0 (greedy) or above"), "--temp --temperature T"
    )
    top_k: int = _sampling(40, wholes(0, math.inf, "0 (off) or above"), "K")
    top_p: float = _sampling(0.95, _MASS, "P")
    min_p: float = _sampling(0.05, between(0, 1, "from 0 to 1"), "P")
    repeat_penalty: float = _sampling(1.0, numbers(lambda x: 0 < x <= MOST, "above 0"), "X")
    repeat_last_n: int = _sampling(64, _LAST_N, "TOKENS")
    frequency_penalty: float = _sampling(0.0, _FINITE, "X")
    presence_penalty: float = _sampling(0.0, _FINITE, "X")
    top_n_sigma: float = _sampling(0.0, _OFF_OR_ABOVE, "--top-n-sigma --top-nsigma N")
    typical_p: float = _sampling(1.0, _MASS, "--typical --typical-p P")
    xtc_probability: float = _sampling(0.0, between(0, 1, "from 0 (off) to 1"), "P")
    xtc_threshold: float = _sampling(0.1, between(0, 1, "from 0 to 1"), "P")
    dry_multiplier: float = _sampling(0.0, _OFF_OR_ABOVE, "X")
    dry_base: float = _sampling(1.75, between(1, MOST, "1 or above"), "X")
    dry_allowed_length: int = _sampling(2, wholes(0, 2**20, "from 0 to 1048576 tokens"), "TOKENS")
    dry_penalty_last_n: int = _sampling(64, _LAST_N, "TOKENS")
    dry_sequence_breakers: tuple[str, ...] = option(
        ("\n", ":", '"', "*"), Kind(lambda name, given: tuple(stop_strings(given, name)))
    )
    logits_processors: Sequence[LogitsProcessor] = option((), Kind(_processors))
    grammar: str | Grammar | None = option(None, Kind(_grammar).or_this(None))
    logit_bias: Mapping[int, float] | None = option(None, Kind(_biases).or_this(None))
    reasoning_budget: int | None = option(
        None, wholes(0, MOST_TOKENS, "0 tokens or more, or None").or_this(None)
    )
    seed: int | None = option(
        None,
        wholes(0, 2**32 - 2, "from 0 to 2**32 - 2, or None").or_this(None),
        "N",
        part="seed",
    )

    def __post_init__(self) -> None:
        keep_checked(self)

    @property
    def constraint(self) -> Grammar | None:
        """`grammar` as a :class:`.Grammar`."""
        return Grammar.gbnf(self.grammar) if isinstance(self.grammar, str) else self.grammar

    @property
    def greedy(self) -> bool:
        """True for temperature 0, and for one so small that dividing by it overflows."""
        return self.temperature < 1e-5

    @property
    def plain_greedy(self) -> bool:
        """True if the next token is the argmax of the raw logits."""
        return self.greedy and not self.reorders

    @property
    def penalizes(self) -> bool:
        """Whether a repeat, frequency or presence penalty is on."""
        given = self.repeat_penalty != 1.0 or self.frequency_penalty or self.presence_penalty
        return bool(given) and self.repeat_last_n > 0

    @property
    def dry(self) -> bool:
        """Whether DRY is on."""
        return self.dry_multiplier > 0 and self.dry_penalty_last_n > 0

    @property
    def reorders(self) -> bool:
        """Whether a token other than the best of the raw logits may become the best."""
        biased = bool(self.logit_bias) or self.grammar is not None
        return biased or self.penalizes or self.dry or bool(self.logits_processors)
