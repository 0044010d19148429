"""Anthropic's Messages API: a request becomes a :class:`.ChatBody`, and the answer, whole or in
parts, becomes content blocks and events."""

from __future__ import annotations

import contextlib
import json
import re
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from pyllama_mtp.chats.toolcalls import CallPiece

from .answers import Part, Served, sse, to_json, usage
from .bodies import (
    MESSAGES_PATH,
    ApiError,
    ChatBody,
    bad_request,
    objects,
    parse,
    pop_object,
    schema,
    unsupported,
    unsupported_content,
    without_neutral,
)
from .items import ItemsReply

#: Parameters that change nothing here, and that Claude Code sends.
IGNORED = (
    *("cache_control", "context_management", "diagnostics", "inference_geo", "metadata"),
    *("service_tier", "speed", "user_profile_id", "workspace_id"),
)
#: Parameters that would change the answer, with the values that change nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {"container": (), "mcp_servers": ([],), "n": (1,)}
ROLES = ("user", "assistant", "system")
#: Around what the system says between turns, as Claude Code marks it within a user's turn.
REMINDER, END_REMINDER = "\n<system-reminder>\n", "\n</system-reminder>\n"
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
#: The first line of Claude Code's system message. It differs each time, so that no prompt would
#: begin as an earlier one.
BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*?\bcch=\w*;\s*")
#: Clients send a thought back only if it has a signature.
SIGNATURE = "unsigned"
#: The API's words for why an answer has ended.
STOP_REASONS = {"eos": "end_turn", "stop": "end_turn", "length": "max_tokens"}
#: The body, for the description of the endpoints.
SCHEMA = schema(
    "messages",
    **dict.fromkeys(("messages", "tools"), "objects"),
    **dict.fromkeys(("thinking", "tool_choice", "output_config"), "object"),
    **{"max_tokens": "integer", "stop_sequences": "array", "stream": "boolean", "system": "texts"},
)


# -- what a client asks for ------------------------------------------------------------------------


def read_messages(asked: Mapping[str, Any]) -> ChatBody:
    """The chat that a request asks for. Raises ApiError: 400: see :func:`.parse`."""
    given = without_neutral(asked, NEUTRAL)
    for name in IGNORED:
        given.pop(name, None)
    messages = _messages(given.pop("system", None), given.get("messages"))
    given["messages"] = messages
    last = messages[-1] if messages else {}
    if last.get("role") == "assistant" and last["content"] and "tool_calls" not in last:
        given |= {"continue_final_message": True, "add_generation_prompt": False}
    if "stop_sequences" in given:
        given["stop"] = given.pop("stop_sequences")
    if "tools" in given:
        given["tools"] = [_tool(tool) for tool in objects("tools", given["tools"])]
    given |= _tool_choice(pop_object(given, "tool_choice"))
    given |= _thinking(pop_object(given, "thinking"))
    config = pop_object(given, "output_config")
    config.pop("task_budget", None)
    if effort := config.pop("effort", None):  # as a variable: it does not turn thought on
        given["chat_template_kwargs"] = {
            "reasoning_effort": effort,
            **pop_object(given, "chat_template_kwargs"),
        }
    if form := pop_object(config, "format"):
        wanted = {"schema": form.get("schema")}
        given["response_format"] = {"type": form.get("type"), "json_schema": wanted}
    for name in config:
        raise unsupported(f"output_config.{name}")
    if given.get("stream"):
        given["return_progress"] = True  # as pings
    return parse(ChatBody, given)


def _thinking(thinking: dict[str, Any]) -> dict[str, Any]:
    """`thinking`; "adaptive" and none at all leave it to the server and the template."""
    kind = thinking.get("type")
    if kind not in (None, "enabled", "disabled", "adaptive"):
        raise bad_request(f"thinking.type is {kind!r}; use enabled, disabled or adaptive")
    found = {"thinking_budget": thinking["budget_tokens"]} if "budget_tokens" in thinking else {}
    return found | ({} if kind in (None, "adaptive") else {"enable_thinking": kind == "enabled"})


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A function; hints on caching and on how its arguments are sent are left out."""
    if tool.get("type") not in (None, "custom"):
        raise bad_request(f"tools of type {tool['type']!r} are not supported", "tools")
    named = {"name": tool.get("name"), "description": tool.get("description")}
    function = {key: value for key, value in named.items() if value}
    return {"type": "function", "function": {**function, "parameters": tool.get("input_schema")}}


def _tool_choice(choice: dict[str, Any]) -> dict[str, Any]:
    if not choice:
        return {}
    kind = choice.get("type")
    if kind == "tool":
        wanted: Any = {"type": "function", "function": {"name": choice.get("name")}}
    elif isinstance(kind, str) and kind in CHOICES:
        wanted = CHOICES[kind]
    else:
        raise bad_request(f"tool_choice.type is {kind!r}; use auto, any, tool or none")
    several = not choice.get("disable_parallel_tool_use")
    return {"tool_choice": wanted, "parallel_tool_calls": several}


def _messages(system: Any, turns: Any) -> list[dict[str, Any]]:
    """Messages of a chat. Results of tools come before the rest of their turn. What the system says
    between turns is told by the user: few templates allow it."""
    messages: list[dict[str, Any]] = []
    if system is not None:
        parts = _parts("system", system)
        for part in parts:
            if isinstance(part.get("text"), str):
                part["text"] = BILLING.sub("", part["text"])
        messages.append({"role": "system", "content": parts})
    for number, turn in enumerate(objects("messages", turns)):
        role, parts, more = turn.get("role"), list[dict[str, Any]](), dict[str, Any]()
        where, content = f"messages.{number}.content", turn.get("content")
        if role not in ROLES:
            raise bad_request(f"messages.{number}.role is {role!r}; use {' or '.join(ROLES)}")
        for block in _blocks(where, content):
            kind = block.get("type")
            if kind == "thinking":
                thought = more.get("reasoning_content", "") + str(block.get("thinking", ""))
                more["reasoning_content"] = thought
            elif kind == "tool_use":
                arguments = to_json(block.get("input") or {})
                function = {"name": block.get("name"), "arguments": arguments}
                call = {"id": block.get("id"), "type": "function", "function": function}
                more.setdefault("tool_calls", []).append(call)
            elif kind == "tool_result":
                result = _parts(where, block.get("content") or "")
                about = {"role": "tool", "tool_call_id": block.get("tool_use_id")}
                messages.append({**about, "content": result or ""})
            elif kind != "redacted_thinking":
                parts.append(_part(block))
        last = messages[-1] if messages else {}
        if role == "system" and messages:
            role, parts = "user", [_text(REMINDER), *parts, _text(END_REMINDER)]
        if role == "user" == last.get("role"):
            last["content"] += parts
        elif parts or more or not content:
            messages.append({"role": role, "content": parts, **more})
    return messages


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _blocks(where: str, content: Any) -> list[dict[str, Any]]:
    """A content as blocks."""
    return [_text(content)] if isinstance(content, str) else objects(where, content)


def _parts(where: str, content: Any) -> list[dict[str, Any]]:
    """A content of texts and images, with the names of chats."""
    return [_part(block) for block in _blocks(where, content)]


def _part(block: dict[str, Any]) -> dict[str, Any]:
    kind, source = block.get("type"), block.get("source")
    if kind == "text":
        return {"type": "text", "text": block.get("text")}
    url = None
    if kind == "image" and isinstance(source, dict):
        if source.get("type") == "url":
            url = source.get("url")
        elif source.get("type") == "base64":
            url = f"data:{source.get('media_type')};base64,{source.get('data')}"
    if url is None:
        raise unsupported_content(kind, "messages")
    return {"type": "image_url", "image_url": {"url": url}}


# -- what it is told -------------------------------------------------------------------------------


class MessagesReply(ItemsReply):
    """The response to a request of this API."""

    def __init__(self, served: Served, body: ChatBody) -> None:
        """See :class:`.Reply`."""
        super().__init__(served, body)
        self.name, self._arguments = f"msg_{uuid.uuid4().hex}", ""  # of the call that grows

    def whole(self) -> dict[str, Any]:
        """The complete message."""
        return {**super().whole(), **self._telemetry()}

    def _response(self) -> dict[str, Any]:
        return {
            "id": self.name,
            "type": "message",
            "role": "assistant",
            "model": self._head["model"],
            "content": self._items,
            **self._stop(),
            "usage": self._usage(),
        }

    def _stop(self) -> dict[str, str | None]:
        """Why the answer has ended, if it has."""
        answer = self._choices[0].request.answer
        reason = STOP_REASONS.get(answer.finish_reason or "")
        if reason == "end_turn" and answer.tool_calls:
            reason = "tool_use"
        elif reason == "end_turn" and answer.stop_string:
            return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop_string}
        return {"stop_reason": reason, "stop_sequence": None}

    def _usage(self) -> dict[str, Any]:
        """The usage so far; cached tokens are not among the input's."""
        counts = usage(self._choices, 1)
        cached = counts["prompt_tokens_details"]["cached_tokens"]
        thought = counts["completion_tokens_details"]["reasoning_tokens"]
        return {
            "input_tokens": counts["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"thinking_tokens": thought},
        }

    def _opening(self) -> Iterator[bytes]:
        message = {**self._response(), "stop_reason": None, "stop_sequence": None}
        yield _event("message_start", message=message)

    def _waiting(self) -> bytes:
        return _event("ping")

    def _closing(self) -> Iterator[bytes]:
        told = {"usage": self._usage(), **self._telemetry()}
        yield _event("message_delta", delta=self._stop(), **told)
        yield _event("message_stop")

    def _failure(self, error: ApiError) -> bytes:
        return sse(to_json(error.body(MESSAGES_PATH)), "error")

    def _begin(self, kind: str, call: CallPiece | None = None) -> Iterator[bytes]:
        block: dict[str, Any] = {"type": "text", "text": ""}
        if kind == "thought":
            block = {"type": "thinking", "thinking": "", "signature": ""}
        elif call is not None:
            block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
        self._items.append(block)
        self._arguments = ""
        yield self._event("start", content_block=block)

    def _extend(self, text: str, part: Part) -> Iterator[bytes]:
        block = self._items[-1]
        kind = block["type"]
        if kind == "tool_use":
            self._arguments += text
            delta = {"type": "input_json_delta", "partial_json": text}
        else:
            block[kind] += text
            delta = {"type": f"{kind}_delta", kind: text}
        if text:
            yield self._event("delta", delta=delta)

    def _close(self) -> Iterator[bytes]:
        block = self._items[-1]
        if block["type"] == "thinking":
            block["signature"] = SIGNATURE
            yield self._event("delta", delta={"type": "signature_delta", "signature": SIGNATURE})
        elif block["type"] == "tool_use":
            with contextlib.suppress(ValueError):  # cut off
                block["input"] = json.loads(self._arguments)
        yield self._event("stop")

    def _event(self, kind: str, **content: Any) -> bytes:
        """An event of the last block."""
        return _event(f"content_block_{kind}", index=len(self._items) - 1, **content)


def _event(kind: str, **content: Any) -> bytes:
    return sse(to_json({"type": kind, **content}), kind)
