"""From a client's request to its response: the choices to generate, and how they are told."""

from __future__ import annotations

import asyncio
import codecs
import json
import logging
import math
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, TypeAlias

import msgspec

from pyllama_mtp.answer import TopLogprobs
from pyllama_mtp.chats.options import ChatOptions
from pyllama_mtp.chats.thinking import CLOSE, OPEN, Piece
from pyllama_mtp.chats.toolcalls import CallPiece, ToolCall
from pyllama_mtp.chats.tools import Tools
from pyllama_mtp.child import BusyError
from pyllama_mtp.errors import UsageError
from pyllama_mtp.images import pixels_of_url
from pyllama_mtp.llama.model import Model
from pyllama_mtp.llama.vision import ImagePrompt, Vision
from pyllama_mtp.request import Limits, Options, Request, make_request, tokens_of
from pyllama_mtp.scheduler import Progress
from pyllama_mtp.telemetry import Telemetry

from .bodies import ApiError, Body, ChatBody, CompletionBody, TokenizeBody, bad_request, busy
from .generator import Generator, Job, News
from .limits import PARAMETERS

#: The API's default of max_tokens for completions; a chat goes on to its end.
COMPLETION_TOKENS = 16
#: The value of max_tokens that means: as many as fit.
AS_MUCH_AS_FITS = -1
#: Seeds of a sampler are below this.
SEEDS = 2**32 - 1
#: The log of requests; see :func:`.app.log_requests`.
log = logging.getLogger("pyllama_mtp.serve.requests")

#: The API's words for why an answer has ended.
FINISH_REASONS = {"eos": "stop", "stop": "stop", "length": "length"}
#: The API's value for minus infinity, which JSON lacks.
LEAST_LOGPROB = -9999.0
#: The log probabilities of a token, and where in the answer its text begins, in characters.
Entry: TypeAlias = tuple[TopLogprobs, int]


def sse(data: str, event: str = "") -> bytes:
    """One server-sent event, with a name if it has one."""
    name = f"event: {event}\n" if event else ""
    return f"{name}data: {data}\n\n".encode()


DONE = sse("[DONE]")


def to_json(value: Any) -> str:
    """A value as compact JSON."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def one_line(text: str) -> str:
    """A client's text as a part of a line."""
    return printable(" ".join(text[:600].split())[:300])


def printable(text: str) -> str:
    """A text without control characters, which may be commands of a terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def usage(choices: Sequence[Choice], n: int, told: bool = False) -> dict[str, Any]:
    """The usage of all choices; a prompt with `n` choices counts once. `told`: of what a stream has
    told so far."""
    counts = [choice.told if told else choice.request.answer.counts for choice in choices]
    n_generated, drafted, accepted = (sum(column) for column in zip(*counts, strict=True))
    telemetries = [choice.request.answer.telemetry for choice in choices]
    n_prompt = sum(len(choice.request.prompt) for choice in choices[::n])
    n_reasoning = sum(choice.request.answer.n_reasoning for choice in choices)
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_generated,
        "total_tokens": n_prompt + n_generated,
        "prompt_tokens_details": {"cached_tokens": sum(t.n_cached for t in telemetries[::n])},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
            "reasoning_tokens": n_reasoning,
        },
    }


def speculation(telemetry: Telemetry, depth: int) -> dict[str, Any]:
    """What became of an answer's drafts, as vLLM's `metrics.speculative_decoding`, which AIPerf
    reads (https://github.com/vllm-project/vllm/pull/48915). Steps are rounds that had drafts of the
    head or of n-grams.

    Args:
        depth: most drafts of a round.
    """
    held = telemetry.held + [0] * (depth + 1 - len(telemetry.held))
    n_steps, drafted, accepted = sum(held), telemetry.n_drafted, telemetry.n_accepted
    return {
        "mean_acceptance_length": 1 + accepted / n_steps if n_steps else 1.0,
        "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
        "acceptance_histogram": held,
        "num_spec_steps": n_steps,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": depth,
    }


def timings(telemetry: Telemetry) -> dict[str, float]:
    """Times of an answer as llama-server's `timings`, which its benchmarks and llama-swap read. As
    there, cached tokens are not among the prompt's, whose time ends with the first token."""
    n_prompt, n_steps = telemetry.n_prefilled, max(0, telemetry.n_generated - 1)
    prompt_ms, predicted_ms = 1000 * telemetry.prefill_s, 1000 * telemetry.decode_s
    found = {
        "cache_n": telemetry.n_cached,
        "prompt_n": n_prompt,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": prompt_ms / n_prompt if n_prompt else 0.0,
        "prompt_per_second": telemetry.prefill_tps,
        "predicted_n": telemetry.n_generated,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": predicted_ms / n_steps if n_steps else 0.0,
        "predicted_per_second": telemetry.decode_tps,
    }
    if telemetry.n_drafted:
        found |= {"draft_n": telemetry.n_drafted, "draft_n_accepted": telemetry.n_accepted}
    return found


@dataclass(frozen=True)
class Part:
    """A part of an answer, or all of it. Each API makes its own form of it.

    Attributes:
        text, thought: more of these.
        calls: parts of calls, one of each call.
        logprobs: of the text since the part before; None: they are not asked for.
        finish_reason: see :class:`.Answer`; None: the answer goes on.
        first: nothing was told before.
    """

    text: str
    thought: str
    calls: Sequence[CallPiece]
    logprobs: list[Entry] | None
    finish_reason: str | None
    first: bool


def _merged(pieces: Sequence[Piece]) -> list[CallPiece]:
    """The parts of calls among these, one of each call."""
    parts: dict[int, CallPiece] = {}
    for piece in pieces:
        if isinstance(piece, CallPiece):
            begin = CallPiece(piece.number, piece.id, piece.name)
            parts.setdefault(piece.number, begin).arguments += piece.arguments
    return list(parts.values())


def _message(part: Part, whole: bool) -> dict[str, Any]:
    """A part as a message of a chat, or as the delta of a chunk."""
    found: dict[str, Any] = {"role": "assistant", "content": ""} if part.first else {}
    if part.text:
        found["content"] = part.text
    if part.thought:  # by the name that most clients know, and by the newer name
        found |= {"reasoning_content": part.thought, "reasoning": part.thought}
    if whole:
        found |= {"refusal": None, "content": part.text or (None if part.calls else "")}
    for piece in part.calls:
        call: dict[str, Any] = {} if whole else {"index": piece.number}
        if piece.id is None:
            call["function"] = {"arguments": piece.arguments}
        else:
            call |= ToolCall(piece.id, piece.name or "", piece.arguments).to_message()
        found.setdefault("tool_calls", []).append(call)
    return found


@dataclass(frozen=True)
class Served:
    """The model that is served, and the server's defaults.

    Attributes:
        name: the model's name for clients.
        n_ctx: most tokens of prompt and answer together.
        max_tokens: most tokens of an answer; None: as many as fit.
        fingerprint: the build.
        created: when the server started, in seconds since 1970.
        chat: defaults for chats.
        strict_model: refuse requests that name another model.
        vision: the model's image encoder, or None.
        image_urls: images of http(s) URLs are fetched.
    """

    model: Model
    name: str
    n_ctx: int
    max_tokens: int | None
    fingerprint: str
    created: int
    chat: ChatOptions = ChatOptions()  # noqa: RUF009 - frozen
    strict_model: bool = False
    vision: Vision | None = None
    image_urls: bool = False

    @cached_property
    def most_text(self) -> int:
        """Characters of a prompt that may fit, as text or as the JSON of messages."""
        model = self.model
        return 1000 + self.n_ctx * 2 * max(
            len(model.piece(n, special=True)) for n in range(model.n_vocab)
        )

    def check_length(self, prompt: Any) -> None:
        """Raise ApiError: 400: a prompt is too long, however it is tokenized."""
        n = len(prompt if isinstance(prompt, str) else msgspec.json.encode(prompt))
        if n > self.most_text:
            raise bad_request(
                f"the prompt has {n} characters; this server has room for {self.n_ctx} tokens. "
                "Shorten the prompt",
                None,
                "context_length_exceeded",
            )

    def check_name(self, name: str) -> None:
        """Raise ApiError: 404 unless this is the model's name."""
        if name != self.name:
            why = f"the model {name!r} is not served here; use {self.name!r}"
            raise ApiError(404, why, param="model", code="model_not_found")


# -- what a client asks for ------------------------------------------------------------------------


def make_choices(served: Served, body: Body) -> list[Choice]:
    """The choices of a request: `n` for each prompt, those of the first prompt first.

    Raises:
        ApiError: 400 or 404: the prompt is too long or empty, a bad value, another model.
    """
    options, tools = _chat_options(served, body), _tools(body)
    prompts = _prompts(served, body, options, tools)
    choices: list[Choice] = []
    with refused():
        sampling = replace(served.model.sampling, **body.sampling)
        if isinstance(body, ChatBody):
            sampling = options.sampling(sampling, served.model, tools)
        wanted = _answer_options(body, tools)
        for tokens in prompts:
            limits = Limits(_max_tokens(served, body, len(tokens)), body.ignore_eos)
            for number in range(body.n):
                if body.seed is not None:
                    sampling = replace(sampling, seed=(body.seed + number) % SEEDS)
                request = make_request(served.model, tokens, limits, sampling, wanted)
                echo = _echo(served.model, body, len(choices) // body.n)
                choices.append(Choice(served.model, body, len(choices), request, echo))
    return choices


@contextmanager
def refused(param: str | None = None) -> Iterator[None]:
    """Turn a UsageError into a response: 400, for this parameter; or 503: no worker was free."""
    try:
        yield
    except (UsageError, UnicodeEncodeError) as error:  # a lone surrogate, in JSON within JSON
        if isinstance(error.__cause__, BusyError):
            raise busy(str(error)) from None
        raise bad_request(str(error), param) from None


def _prompts(
    served: Served, body: Body, options: ChatOptions, tools: Tools | None
) -> list[list[int] | ImagePrompt]:
    """Token ids of each prompt, or a chat with images."""
    if served.strict_model and body.model is not None:
        served.check_name(body.model)
    if isinstance(body, ChatBody):
        messages = [message.to_template() for message in body.messages]
        served.check_length(messages)
        urls = [image.url for message in body.messages for image in message.images]
        with refused("messages"):
            goes_on = body.continue_final_message
            if not urls:
                return [options.prompt(served.model, messages, tools, goes_on=goes_on)]
            if served.vision is None:
                raise UsageError(
                    "this model was started without an image encoder (serve --mmproj FILE)"
                )
            text = options.text(served.model, messages, tools, goes_on=goes_on)
            return [
                served.vision.prompt(
                    text,
                    urls,
                    add_special=False,
                    check_length=partial(_max_tokens, served, body),
                    read=pixels_of_url,
                )
            ]
    assert isinstance(body, CompletionBody)
    for prompt in body.prompts:
        if isinstance(prompt, str):
            served.check_length(prompt)
        else:
            _max_tokens(served, body, len(prompt))
    with refused("prompt"):
        return [tokens_of(served.model, prompt) for prompt in body.prompts]


def _echo(model: Model, body: Body, number: int) -> str:
    """The text of a prompt, if it is to come before the answer."""
    if not (isinstance(body, CompletionBody) and body.echo):
        return ""
    prompt = body.prompts[number]
    return prompt if isinstance(prompt, str) else model.detokenize(prompt, special=True)


def _tools(body: Body) -> Tools | None:
    """The functions that may be called. Raises ApiError: 400."""
    if not isinstance(body, ChatBody):
        return None
    try:
        return Tools.of(body.tools, body.tool_choice, body.parallel_tool_calls)
    except UsageError as error:
        param = "tool_choice" if str(error).startswith("tool_choice") else "tools"
        raise bad_request(str(error), param) from None


def count_tokens(served: Served, body: ChatBody) -> int:
    """Tokens of a chat's prompt, with its tools; rows of images count. Raises ApiError: 400, 404:
    see :func:`make_choices`."""
    return len(_prompts(served, body, _chat_options(served, body), _tools(body))[0])


def tokenize(served: Served, body: TokenizeBody) -> list[int]:
    """Token ids of a text or a chat. Raises UsageError."""
    if body.messages:
        if any(message.images for message in body.messages):
            raise UsageError("tokens of images are not counted here; send the text only")
        messages = [message.to_template() for message in body.messages]
        served.check_length(messages)
        return served.chat.prompt(served.model, messages)
    text = body.content or ""
    if len(text) > PARAMETERS:  # shorter texts may be counted though they do not fit
        served.check_length(text)
    return served.model.tokenize(text, body.add_special, body.parse_special)


def _chat_options(served: Served, body: Body) -> ChatOptions:
    """The options of a chat. Raises ApiError: 400: a template variable that cannot be set."""
    found = served.chat
    if not isinstance(body, ChatBody):
        return found
    variables = body.chat_template_kwargs
    with refused("chat_template_kwargs"):
        found = replace(found, variables={**found.variables, **variables})
    if body.reasoning_effort is not None or "enable_thinking" in variables:
        found = replace(found, thinking=None, reasoning_effort=body.reasoning_effort)
    if body.enable_thinking is not None:
        found = replace(found, thinking=body.enable_thinking)
    if body.thinking_budget is not None:
        found = replace(found, budget=body.thinking_budget)
    return found


def _max_tokens(served: Served, body: Body, n_prompt: int) -> int:
    """Most tokens of an answer to a prompt of so many tokens.

    Raises:
        ApiError: 400: there is no room for an answer.
    """
    asked, room = body.max_tokens, served.n_ctx - n_prompt
    if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
        asked = body.max_completion_tokens
    if room < 1:
        raise bad_request(
            f"the prompt has {n_prompt} tokens; this server has room for {served.n_ctx}, prompt "
            "and answer together. Shorten the prompt",
            None,
            "context_length_exceeded",
        )
    if asked is None and isinstance(body, CompletionBody):
        asked = COMPLETION_TOKENS
    most = min(room, served.max_tokens or room)
    return most if asked in (None, AS_MUCH_AS_FITS) else min(asked, most)


def _answer_options(body: Body, tools: Tools | None) -> Options:
    """What is told of the answers."""
    if isinstance(body, CompletionBody):
        n = body.logprobs
        return Options(stop=body.stop, logprobs=n, prompt_logprobs=body.echo and n is not None)
    assert isinstance(body, ChatBody)
    n = (body.top_logprobs or 0) if body.logprobs else None
    said = body.messages[-1].to_template()["content"] if body.continue_final_message else ""
    in_thought = said.rfind(OPEN) > said.rfind(CLOSE)
    return Options(body.stop, logprobs=n, split=True, in_thought=in_thought, tools=tools)


# -- what it is told -------------------------------------------------------------------------------


class Choice(Job):
    """One choice of an answer, and its form in the API; `echo`: text that comes before it."""

    def __init__(
        self, model: Model, body: Body, index: int, request: Request, echo: str = ""
    ) -> None:
        super().__init__(request, tells_progress=body.stream and body.return_progress)
        self._model, self._index, self._chat = model, index, isinstance(body, ChatBody)
        keeps = request.answer.n_logprobs is not None
        self._logprobs = _LogprobStream(model, len(echo)) if keeps else None
        self._echo, self._scored = echo, False  # log probabilities of the prompt were sent
        self._begun = False  # a part was sent
        self._n_ids = 0 if body.return_token_ids else None  # tokens whose ids were sent
        self.told = (0, 0, 0)  # see Answer.counts

    def _entries(self, finish_reason: str | None, n_taken: int) -> list[Entry] | None:
        """Log probabilities of the text since the last call, up to `n_taken`."""
        if self._logprobs is None:
            return None
        entries = self._logprobs.release(n_taken)
        if self.request.answer.prompt_logprobs is not None:
            entries = self._with_prompt(entries, finish_reason)
        return entries

    def _with_prompt(self, entries: list[Entry], finish_reason: str | None) -> list[Entry]:
        """Entries of the prompt's tokens before the answer's first, and that of an end token, which
        has no text: clients that score prompts count tokens (lm-eval)."""
        assert self._logprobs
        answer = self.request.answer
        if answer.tokens and not self._scored:
            told, self._scored = _LogprobStream(self._model, special=True), True
            unknown = TopLogprobs(self.request.prompt[0], math.nan, [])
            told.feed([unknown, *(answer.prompt_logprobs or ())])
            entries = told.release(math.inf) + entries
        if finish_reason in ("eos", "length"):
            entries = entries + self._logprobs.release(math.inf)
        return entries

    def whole(self) -> Part:
        """The complete answer."""
        answer = self.request.answer
        calls = [
            CallPiece(number, call.id, call.name, call.arguments)
            for number, call in enumerate(answer.tool_calls)
        ]
        if self._logprobs:
            self._logprobs.feed(answer.logprobs)
        reason = answer.finish_reason
        entries = self._entries(reason, answer.n_taken)
        return Part(self._echo + answer.text, answer.reasoning, calls, entries, reason, True)

    def part(self, step: Progress, always: bool = False) -> Part | None:
        """A step's part. None: there is nothing to send, and it is needed neither `always` nor as
        the first."""
        begun = self._begun
        if step.tokens:
            self.told = step.counts
        if self._logprobs:
            self._logprobs.feed(step.logprobs)
        if begun and not (step.pieces or step.finish_reason or always):
            return None
        text, thought = (
            "".join(piece for piece in step.pieces if piece.thought is which)
            for which in (False, True)
        )
        self._begun, reason = True, step.finish_reason
        entries = self._entries(reason, step.n_taken)
        text = text if begun else self._echo + text
        return Part(text, thought, _merged(step.pieces), entries, reason, not begun)

    def logprobs_of(self, part: Part) -> dict[str, Any] | None:
        """The log probabilities of a part in the API's form."""
        make = _for_chat if self._chat else _for_completion
        return None if part.logprobs is None else make(self._model, part.logprobs)

    def to_dict(self, part: Part, whole: bool) -> dict[str, Any]:
        """A part as a choice of a completion or chat, the `whole` answer or a chunk."""
        content: dict[str, Any] = {"text": part.text}
        if self._chat:
            content = {"message" if whole else "delta": _message(part, whole)}
        reason = FINISH_REASONS[part.finish_reason] if part.finish_reason else None
        if reason == "stop" and self.request.answer.tool_calls:
            reason = "tool_calls"
        if self._n_ids is not None:  # as vLLM sends them; llama-benchy counts them
            ids = self.request.answer.tokens
            begin, self._n_ids = self._n_ids, len(ids) if whole else self.told[0]
            content["token_ids"] = ids[begin : self._n_ids]
        logprobs = self.logprobs_of(part)
        return {"index": self._index, **content, "logprobs": logprobs, "finish_reason": reason}


def head(served: Served, body: Body) -> dict[str, Any]:
    """What an answer, and each chunk of it, begins with."""
    chat = isinstance(body, ChatBody)
    kind = "chat.completion" if chat else "text_completion"
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
        "object": f"{kind}.chunk" if chat and body.stream else kind,
        "created": int(time.time()),
        "model": served.name,
        "system_fingerprint": served.fingerprint,
    }


class Reply:
    """The response to a client's request, while its choices are generated.

    Attributes:
        name: the answer's id.
    """

    def __init__(self, served: Served, body: Body) -> None:
        """Read the request, which takes a while; see :func:`make_choices`."""
        self._body, self._began = body, time.monotonic()
        self._choices = make_choices(served, body)
        self._n_left = 0
        self._news: asyncio.Queue[tuple[Choice, News]] = asyncio.Queue()
        self._head = head(served, body)
        self.name = self._head["id"]

    def start(self, generator: Generator) -> None:
        """Submit the choices. Raises ApiError: the generator does not take them."""
        for choice in self._choices:
            choice.post = partial(self._take, choice)
        generator.submit(self._choices)
        self._generator, self._n_left = generator, len(self._choices)

    def _take(self, choice: Choice, news: News) -> None:
        self._news.put_nowait((choice, news))

    async def news(self) -> AsyncGenerator[tuple[Choice, Progress | dict[str, float]], None]:
        """All news of all choices. Raises ApiError: one has failed, and the others are
        cancelled."""
        while self._n_left:
            choice, news = await self._news.get()
            if isinstance(news, ApiError):
                self.close()
                raise news
            self._n_left -= isinstance(news, Progress) and news.finish_reason is not None
            yield choice, news

    def close(self) -> bool:
        """Cancel the choices that are not complete; returns whether there were any."""
        n_left, self._n_left = self._n_left, 0
        if n_left:
            self._generator.cancel(self._choices)
        return n_left > 0

    def log(self, status: int, why: str = "") -> None:
        """Log a line about the request: how it ended, tokens, speed, drafts, seconds."""
        counts = usage(self._choices, self._body.n)
        details = counts["completion_tokens_details"]
        accepted = details["accepted_prediction_tokens"]
        drafted = accepted + details["rejected_prediction_tokens"]
        answers = [choice.request.answer for choice in self._choices]
        seconds = max(answer.telemetry.decode_s for answer in answers)
        speed = counts["completion_tokens"] / seconds if seconds else 0.0
        log.info(
            "%s %s %d: prompt %d (%d cached), answer %d at %.1f tok/s, drafts %d of %d, %s, %.2f s",
            *(self.name, one_line(self._body.model or str(self._head["model"])), status),
            *(counts["prompt_tokens"], counts["prompt_tokens_details"]["cached_tokens"]),
            *(counts["completion_tokens"], speed, accepted, drafted),
            one_line(why) or ", ".join(answer.finish_reason or "?" for answer in answers),
            time.monotonic() - self._began,
        )

    def whole(self) -> dict[str, Any]:
        """The complete answer."""
        return {
            **self._head,
            "choices": [choice.to_dict(choice.whole(), True) for choice in self._choices],
            **self._figures(),
        }

    def _figures(self) -> dict[str, Any]:
        """The usage; of a lone choice, times and what became of its drafts, too."""
        return {"usage": usage(self._choices, self._body.n), **self._telemetry()}

    def _telemetry(self) -> dict[str, Any]:
        """Times and drafts of a lone choice."""
        if len(self._choices) > 1:
            return {}
        telemetry, depth = self._choices[0].request.answer.telemetry, self._generator.depth
        found: dict[str, Any] = {"timings": timings(telemetry)}
        if depth:
            found["metrics"] = {"speculative_decoding": speculation(telemetry, depth)}
        return found

    async def chunks(self) -> AsyncIterator[bytes]:
        """The events of a stream; an error is the last of them."""
        for event in self._opening():
            yield event
        try:
            async for choice, news in self.news():
                for event in self._events(choice, news):
                    yield event
            self.log(200)
            for event in self._closing():
                yield event
        except ApiError as error:
            self.log(error.status, error.message)
            yield self._failure(error)

    def _opening(self) -> Iterable[bytes]:
        """The events before the first news."""
        return ()

    def _events(self, choice: Choice, news: Progress | dict[str, float]) -> Iterator[bytes]:
        """The events of news of a choice."""
        options, told = self._body.stream_options, dict[str, Any]()
        step = Progress(choice.request) if isinstance(news, dict) else news
        if isinstance(news, dict):
            told["prompt_progress"] = news
        if part := choice.part(step, always=bool(told)):
            if options.continuous_usage_stats:
                told["usage"] = usage(self._choices, self._body.n, told=True)
            elif options.include_usage:
                told["usage"] = None
            if part.finish_reason and not options.include_usage:
                told |= self._telemetry()
            choices = [choice.to_dict(part, False)]
            yield sse(to_json({**self._head, "choices": choices, **told}))

    def _closing(self) -> Iterator[bytes]:
        """The events after the last news."""
        if self._body.stream_options.include_usage:
            yield sse(to_json({**self._head, "choices": [], **self._figures()}))
        yield DONE

    def _failure(self, error: ApiError) -> bytes:
        """The events that say why the answer has failed."""
        return sse(to_json(error.body())) + DONE


# --- log probabilities --------------------------------------------------------------------------


class _LogprobStream:
    """Holds entries back until their text is emitted; entries without text are dropped."""

    def __init__(self, model: Model, length: int = 0, special: bool = False) -> None:
        """`length`: characters before the text; `special`: control tokens have text, too."""
        self._model, self._special = model, special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = self._start = length
        self._held: list[Entry] = []

    def feed(self, found: Sequence[TopLogprobs]) -> None:
        """Add those of the next tokens."""
        for one in found:
            self._held.append((one, self._length))
            piece = self._model.piece(one.token, special=self._special)
            self._length += len(self._decoder.decode(piece))

    def release(self, n_emitted: float) -> list[Entry]:
        """The entries whose text begins within the first `n_emitted` characters of the answer."""
        ready = [entry for entry in self._held if entry[1] < self._start + n_emitted]
        self._held = self._held[len(ready) :]
        return ready


def _for_chat(model: Model, entries: Sequence[Entry]) -> dict[str, Any]:
    """`logprobs` of a choice of /v1/chat/completions."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        data = model.piece(token, special=True)
        return {
            "token": data.decode("utf-8", "replace"),
            "logprob": max(logprob, LEAST_LOGPROB),
            "bytes": list(data),
        }

    content = [
        {
            **one(found.token, found.logprob),
            "top_logprobs": [one(token, logprob) for token, logprob in found.top],
        }
        for found, _ in entries
    ]
    return {"content": content, "refusal": None}


def _for_completion(model: Model, entries: Sequence[Entry]) -> dict[str, Any]:
    """`logprobs` of a choice of /v1/completions."""

    def text(token: int) -> str:
        return model.piece(token, special=True).decode("utf-8", "replace")

    def known(found: TopLogprobs, value: Any) -> Any:
        return None if math.isnan(found.logprob) else value  # of a prompt's first token

    return {
        "tokens": [text(found.token) for found, _ in entries],
        "token_logprobs": [known(found, max(found.logprob, LEAST_LOGPROB)) for found, _ in entries],
        "top_logprobs": [
            known(found, {text(token): max(logprob, LEAST_LOGPROB) for token, logprob in found.top})
            for found, _ in entries
        ],
        "text_offset": [offset for _, offset in entries],
    }
