"""How a conversation is put to a model: thinking, tools, variables of the chat template."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..arguments import flag, whole
from ..errors import UsageError, refusal
from ..images import take_images
from ..llama.chat import render
from ..llama.vision import with_images
from ..settings import Sampling
from .thinking import CLOSE_CALL, OPEN_CALL
from .toolcalls import Form
from .tools import Messages, Tools, for_template, in_words

if TYPE_CHECKING:
    from ..llama.model import Model
    from ..llama.vision import ImagePrompt, Vision

#: A conversation with a call, to see how a template writes calls.
_ASKED = {"role": "user", "content": "?"}
_CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": "b"}}}
_CALLED = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_FORMS: dict[Form, str] = {
    "xml": "<function=f>\n<parameter=a>\nb\n</parameter>\n</function>",
    "json": '{"name": "f", "arguments": {"a": "b"}}',
}


@functools.lru_cache(maxsize=16)
def call_form(template: str) -> Form | None:
    """The form in which a chat template writes calls of tools; None: an unknown form, or none."""
    try:
        written = render(template, [_ASKED, _CALLED], tools=[])
    except UsageError:
        return None
    calls = {form: f"{OPEN_CALL}\n{call}\n{CLOSE_CALL}" for form, call in _FORMS.items()}
    return next((form for form, call in calls.items() if call in written), None)


@dataclass(frozen=True)
class ChatOptions:
    """How a conversation is put to a model. Raises UsageError for a bad value.

    Attributes:
        thinking: whether the model thinks before it answers: the template's `enable_thinking`.
            None: the template decides.
        budget: most tokens of thought; then the model must answer. None: no limit.
        reasoning_effort: how much the model thinks, if the template asks; "none": not at all.
        variables: more variables of the template.
    """

    thinking: bool | None = None
    budget: int | None = None
    reasoning_effort: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.thinking is not None:
            flag("thinking", self.thinking)
        if self.budget is not None:
            whole("budget", self.budget, 0, math.inf, "0 tokens of thought or more, or None")
        effort: object = self.reasoning_effort
        if effort is not None and (not isinstance(effort, str) or not effort):
            raise refusal("reasoning_effort", effort, "a word that the template knows, or None")
        ours = {"messages", "template", "add_generation_prompt", "tools"} & {*self.variables}
        if ours:
            raise UsageError(f"the template's variable {sorted(ours)[0]!r} cannot be set")

    @property
    def _thinks(self) -> bool | None:
        """`enable_thinking`; None: the template decides."""
        if self.thinking is not None:
            return self.thinking
        if self.reasoning_effort is not None:
            return self.reasoning_effort != "none"
        given = self.variables.get("enable_thinking")
        return given if isinstance(given, bool) else None

    def prompt(
        self, model: Model, messages: Messages, tools: Tools | None = None, *, goes_on: bool = False
    ) -> list[int]:
        """Token ids of :meth:`text`, with the template's control tokens."""
        text = self.text(model, messages, tools, goes_on=goes_on)
        return model.tokenize(text, add_special=False, parse_special=True)

    def turn(
        self,
        model: Model,
        messages: Messages,
        tools: Tools | None = None,
        vision: Vision | None = None,
        check_length: Callable[[int], object] | None = None,
    ) -> list[int] | ImagePrompt:
        """:meth:`prompt` of a conversation that may have images; see :func:`.take_images`.

        Args:
            vision: the model's image encoder.
            check_length: see :meth:`.Vision.prompt`.

        Raises:
            UsageError: see :meth:`text` and :meth:`.Vision.prompt`; or there is no encoder.
        """
        messages, images = take_images(messages)
        if not images:
            return self.prompt(model, messages, tools)
        text = self.text(model, messages, tools)
        return with_images(vision, text, images, add_special=False, check_length=check_length)

    def text(
        self, model: Model, messages: Messages, tools: Tools | None = None, *, goes_on: bool = False
    ) -> str:
        """The text of a conversation that the model is to answer, control tokens spelled out.

        Args:
            messages: ``{"role": ..., "content": ...}`` each; see :mod:`pyllama_mtp.chats.tools`.
            tools: functions that the model may call.
            goes_on: continue the last message, the assistant's, instead of a new one.
        """
        effort, messages = self.reasoning_effort, for_template(messages)
        offered = list(tools.offered) if tools else None
        calls = tools or any(message.get("tool_calls") for message in messages)
        if calls and call_form(model.chat_template) is None:
            messages, offered = in_words(messages, tools), None
        given = {
            "enable_thinking": self._thinks,
            "reasoning_effort": None if effort == "none" else effort,
            "tools": offered,
        }
        said = {name: value for name, value in given.items() if value is not None}
        if goes_on:
            said["add_generation_prompt"] = False
        text = model.apply_chat_template(messages, **{**self.variables, **said})
        return _until_the_end_of(messages[-1], text) if goes_on else text

    def sampling(
        self, sampling: Sampling, model: Model | None = None, tools: Tools | None = None
    ) -> Sampling:
        """`sampling` with the budget of thought, and with the grammar of a call if the answer must
        be a call. The budget is 0 if the model is told not to think, as some think all the same.

        Raises:
            UsageError: `sampling` has another grammar.
        """
        if tools and tools.must and model:
            if sampling.grammar is not None:
                raise UsageError("an answer that must be a call cannot follow another grammar, too")
            grammar = tools.grammar(model, call_form(model.chat_template))
            sampling = dataclasses.replace(sampling, grammar=grammar)
        budget = 0 if self._thinks is False else self.budget
        if budget is None:
            return sampling
        return dataclasses.replace(sampling, reasoning_budget=budget)


def _until_the_end_of(message: Mapping[str, Any], text: str) -> str:
    """The rendered `text` up to the end of this message's content."""
    content = message.get("content")
    if message.get("role") != "assistant" or not isinstance(content, str) or not content.strip():
        raise UsageError("only a last message of the assistant, with text, can be continued")
    for said in (content, content.strip()):
        at = text.rfind(said)
        if at >= 0:
            return text[: at + len(said)]
    raise UsageError("the chat template changes the last message: it cannot be continued")
