"""Requests of clients as jobs for the generator: chat template, tokens, sampling, limits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from pyllama_mtp.chats.options import ChatOptions
from pyllama_mtp.chats.thinking import CLOSE, OPEN
from pyllama_mtp.chats.tools import Tools
from pyllama_mtp.errors import UsageError
from pyllama_mtp.llama.model import Model
from pyllama_mtp.request import Limits, Options, make_request, tokens_of

from .bodies import ApiError, Body, ChatBody, CompletionBody, TokenizeBody, bad_request
from .generator import Job

#: The API's default of max_tokens for completions; a chat goes on to its end.
COMPLETION_TOKENS = 16
#: The value of max_tokens that means: as many as fit.
AS_MUCH_AS_FITS = -1
#: Seeds of a sampler are below this.
SEEDS = 2**32 - 1


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
    """

    model: Model
    name: str
    n_ctx: int
    max_tokens: int | None
    fingerprint: str
    created: int
    chat: ChatOptions = ChatOptions()  # noqa: RUF009 - frozen
    strict_model: bool = False

    def check_name(self, name: str) -> None:
        """Raise ApiError: 404 unless this is the model's name."""
        if name != self.name:
            why = f"the model {name!r} is not served here; use {self.name!r}"
            raise ApiError(404, why, param="model", code="model_not_found")


def make_jobs(served: Served, body: Body) -> list[Job]:
    """Jobs for all choices: `n` for each prompt, those of the first prompt first.

    Raises:
        ApiError: 400 or 404: the prompt is too long or empty, a bad value, another model.
    """
    if served.strict_model and body.model is not None:
        served.check_name(body.model)
    chat = isinstance(body, ChatBody)
    options, tools = _chat_options(served, body), _tools(body)
    prompts = _prompts(served, body, options, tools)
    jobs: list[Job] = []
    with _refused(None):
        sampling = replace(served.model.sampling, **body.sampling)
        if chat:
            sampling = options.sampling(sampling, served.model, tools)
        told = _told(body, tools)
        for tokens in prompts:
            limits = Limits(_max_tokens(served, body, len(tokens)), body.ignore_eos)
            for number in range(body.n):
                if body.seed is not None:
                    sampling = replace(sampling, seed=(body.seed + number) % SEEDS)
                request = make_request(served.model, tokens, limits, sampling, told)
                jobs.append(Job(len(jobs), request, progress=body.stream and body.return_progress))
    return jobs


@contextmanager
def _refused(param: str | None) -> Iterator[None]:
    """Turn a UsageError into a response: 400, for this parameter."""
    try:
        yield
    except UsageError as error:
        raise bad_request(str(error), param) from None


def _prompts(
    served: Served, body: Body, options: ChatOptions, tools: Tools | None
) -> list[list[int]]:
    """Token ids of each prompt."""
    if isinstance(body, ChatBody):
        messages = [message.to_template() for message in body.messages]
        with _refused("messages"):
            goes_on = body.continue_final_message
            return [options.prompt(served.model, messages, tools, goes_on=goes_on)]
    assert isinstance(body, CompletionBody)
    with _refused("prompt"):
        return [tokens_of(served.model, prompt) for prompt in body.prompts]


def _tools(body: Body) -> Tools | None:
    """The functions that may be called. Raises ApiError: 400."""
    if not isinstance(body, ChatBody):
        return None
    try:
        return Tools.of(body.tools, body.tool_choice, body.parallel_tool_calls)
    except UsageError as error:
        param = "tool_choice" if str(error).startswith("tool_choice") else "tools"
        raise bad_request(str(error), param) from None


def tokenize(served: Served, body: TokenizeBody) -> list[int]:
    """Token ids of a text or a chat. Raises UsageError."""
    if body.messages:
        messages = [message.to_template() for message in body.messages]
        return served.chat.prompt(served.model, messages)
    return served.model.tokenize(body.content or "", body.add_special, body.parse_special)


def _chat_options(served: Served, body: Body) -> ChatOptions:
    """The options of a chat. Raises ApiError: 400: a template variable that cannot be set."""
    found = served.chat
    if not isinstance(body, ChatBody):
        return found
    variables = body.chat_template_kwargs
    with _refused("chat_template_kwargs"):
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


def _told(body: Body, tools: Tools | None) -> Options:
    """What is told of the answers."""
    assert isinstance(body, ChatBody | CompletionBody)
    options = Options(stop=body.stop, logprobs=body.n_logprobs)
    if not isinstance(body, ChatBody):
        return options
    said = body.messages[-1].to_template()["content"] if body.continue_final_message else ""
    in_thought = said.rfind(OPEN) > said.rfind(CLOSE)
    return replace(options, split=True, in_thought=in_thought, tools=tools)
