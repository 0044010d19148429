"""Requests: what is asked of a model, in the form that the scheduler takes.

:func:`make_request` is where sessions, the server and the command line make them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from .answer import Answer
from .arguments import (
    FLAG,
    MOST_TOKENS,
    Kind,
    instance,
    keep_checked,
    option,
    require,
    stop_strings,
    token_ids,
    whole,
)
from .chats.options import call_form
from .chats.thinking import Splitter, opened
from .chats.tools import Tools
from .errors import UsageError, refusal
from .llama.model import Model
from .llama.vision import ImagePrompt, PlacedImage, text_tokens
from .sampling.sampler import Sampler
from .settings import Sampling
from .telemetry import Telemetry

#: Text, or token ids.
Prompt: TypeAlias = str | Sequence[int] | npt.NDArray[np.integer[Any]]
#: Called while a prompt is processed, with (tokens done, tokens in all).
OnProgress: TypeAlias = Callable[[int, int], object]


def tokens_of(model: Model, prompt: Prompt) -> list[int]:
    """Token ids of a prompt: of text, in which control tokens are recognised, or ids as they are.
    Raises UsageError: neither text nor token ids, an id that is not in the vocabulary, or none."""
    if isinstance(prompt, str):
        tokens = model.tokenize(prompt, add_special=True, parse_special=True)
    else:
        tokens = token_ids("prompt", prompt, "text, or ")
        model.check_tokens(tokens)
    if not tokens:
        raise UsageError("the prompt is empty; give at least one token of text")
    return tokens


def _max_tokens(name: str, value: object) -> int:
    allowed = "at least 1, or -1 (as many as there is room for)"
    n = whole(name, value, -1, math.inf, allowed)
    require(n != 0, name, value, allowed)
    return n if n > 0 else MOST_TOKENS


@dataclass(frozen=True)
class Limits:
    """When to stop, and whether to draft. `ignore_eos`: generate on after an end token.

    `max_tokens` -1 becomes MOST_TOKENS, more than any context has room for. Raises UsageError for a
    bad value.
    """

    max_tokens: int = option(MISSING, Kind(_max_tokens))
    ignore_eos: bool = option(False, FLAG)
    draft: bool = option(True, FLAG)

    def __post_init__(self) -> None:
        keep_checked(self)


def _number_or_none(name: str, value: object) -> int | None:
    return value if value is None else whole(name, value, 0, math.inf, "0 or more, or None")


def _function_or_none(name: str, value: object) -> object:
    if value is not None and not callable(value):
        raise refusal(name, value, "a function, or None")
    return value


@dataclass(frozen=True)
class Options:
    """What is told of an answer; see :meth:`.Session.generate`.

    Attributes:
        split: tell thought from answer; `in_thought`: the prompt ends within a thought, however it
            ends.
        tools: tell calls of these from text.
        prompt_logprobs: keep log probabilities of the prompt's tokens, too, which is then processed
            as a whole, in parts of as many tokens as rounds have rows.

    Raises UsageError for a bad value.
    """

    stop: Iterable[str] | None = option((), Kind(lambda name, stop: stop_strings(stop)))
    log_pairs: bool = option(False, FLAG)
    log_ties: bool = option(False, FLAG)
    logprobs: int | None = option(None, Kind(_number_or_none))
    on_progress: OnProgress | None = option(None, Kind(_function_or_none))
    split: bool = option(False, FLAG)
    in_thought: bool = option(False, FLAG)
    tools: Tools | None = option(None, Kind(lambda name, tools: tools))
    prompt_logprobs: bool = option(False, FLAG)

    def __post_init__(self) -> None:
        keep_checked(self)


@dataclass(eq=False)
class Request:
    """A prompt, its sampler and limits, and the answer to fill.

    The request owns the sampler, which is closed when the request is done. `on_progress` counts
    tokens of the prompt that were kept from before as done.
    """

    prompt: list[int]
    sampler: Sampler
    limits: Limits
    answer: Answer
    on_progress: OnProgress | None = None
    images: tuple[PlacedImage, ...] = ()

    @property
    def text(self) -> list[int]:
        """The prompt's token ids, without images."""
        return text_tokens(self.prompt) if self.images else self.prompt


def rows_wanted(requests: Sequence[Request]) -> tuple[bool, int]:
    """Whether the samplers of all requests can do with the best token or some best ones of a row,
    and with how many; else they need all logits."""
    few, most = True, 0
    for request in requests:
        n, best = request.sampler.n_candidates, request.sampler.sampling.plain_greedy
        few = few and (n > 0 or best) and request.answer.n_logprobs is None
        most = max(most, n)
    return few, most


def make_request(
    model: Model,
    prompt: list[int] | ImagePrompt,
    limits: Limits,
    sampling: Sampling | None = None,
    options: Options | None = None,
    kind: type[Answer] = Answer,
) -> Request:
    """A request whose answer, of this kind, is still empty.

    Args:
        prompt: token ids, at least one; see :func:`tokens_of` and :meth:`.ChatOptions.prompt`; or
            a prompt with images.
        sampling: default greedy.

    Raises:
        UsageError: a grammar, a bias or options that do not fit the model.
    """
    o = options or Options()
    sampling = Sampling() if sampling is None else sampling
    instance("sampling", sampling, Sampling, "Sampling(...), or None")
    if o.log_ties and not model._library.has_tap:
        raise UsageError("log_ties needs the patched library; this is upstream's")
    if o.logprobs is not None:
        allowed = "from 0 to the vocabulary's size, or None"
        whole("logprobs", o.logprobs, 0, model.n_vocab, allowed)
    telemetry = Telemetry(
        pairs=[] if o.log_pairs else None,
        near_ties=[] if o.log_ties and sampling.plain_greedy else None,
    )
    images = prompt if isinstance(prompt, ImagePrompt) else ImagePrompt(prompt)
    telemetry.n_image_tokens = sum(one.image.n_tokens for one in images.images)
    telemetry.encode_s = images.encode_s
    text = text_tokens(images.entries) if images.images else images.entries
    splitter = Splitter(o.in_thought or opened(model, text)) if o.split else None
    calls = o.tools.reader(call_form(model.chat_template)) if o.tools else None
    stop = [*(o.stop or ())]
    answer = kind(model, limits.ignore_eos, stop, telemetry, o.logprobs, splitter, calls)
    answer.prompt_logprobs = [] if o.prompt_logprobs else None
    sampler = Sampler(model, sampling, text, telemetry.near_ties)
    return Request(images.entries, sampler, limits, answer, o.on_progress, images.images)
