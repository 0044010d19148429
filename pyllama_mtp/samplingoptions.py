"""How tokens are chosen."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from .arguments import (
    MOST_TOKENS,
    Kind,
    as_float,
    as_index,
    between,
    keep_checked,
    listed,
    numbers,
    option,
    refusal,
    stop_strings,
    wholes,
)
from .grammar import Grammar

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


_sampling = partial(option, part="sampling")


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
        0.0,
        between(0, MOST, "0 (greedy) or above"),
        "--temp --temperature T",
    )
    top_k: int = _sampling(40, wholes(0, math.inf, "0 (off) or above"), "K")
    top_p: float = _sampling(0.95, _MASS, "P")
    min_p: float = _sampling(
        0.05,
        between(0, 1, "from 0 to 1"),
        "P",
    )
    repeat_penalty: float = _sampling(
        1.0,
        numbers(lambda x: 0 < x <= MOST, "above 0"),
        "X",
    )
    repeat_last_n: int = _sampling(64, _LAST_N, "TOKENS")
    frequency_penalty: float = _sampling(
        0.0,
        _FINITE,
        "X",
    )
    presence_penalty: float = _sampling(0.0, _FINITE, "X")
    top_n_sigma: float = _sampling(
        0.0,
        _OFF_OR_ABOVE,
        "--top-n-sigma --top-nsigma N",
    )
    typical_p: float = _sampling(
        1.0,
        _MASS,
        "--typical --typical-p P",
    )
    xtc_probability: float = _sampling(
        0.0,
        between(0, 1, "from 0 (off) to 1"),
        "P",
    )
    xtc_threshold: float = _sampling(0.1, between(0, 1, "from 0 to 1"), "P")
    dry_multiplier: float = _sampling(
        0.0,
        _OFF_OR_ABOVE,
        "X",
    )
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
