"""OpenAI's Responses API: a request becomes a :class:`.ChatBody`, and the answer, whole or in
parts, becomes items and events.

Nothing is stored: a client sends the whole conversation as `input`.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from pyllama_mtp.chats.toolcalls import CallPiece

from .answers import Part, Served, sse, to_json
from .bodies import (
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

#: Parameters that chats do not have, or have in another form, with the values that change nothing;
#: :func:`chat_body` maps those with others.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "background": (None, False),
    "conversation": (None,),
    "max_tool_calls": (None,),
    "n": (None, 1),
    "previous_response_id": (None,),
    "prompt": (None,),
    "truncation": (None, "disabled"),
}
LOGPROBS = "message.output_text.logprobs"
#: What `include` may ask for; thought is sent as text, so nothing of it is encrypted.
INCLUDED = (LOGPROBS, "reasoning.encrypted_content")
#: Parts of content by type, and the key that has their text.
TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
#: What a response repeats of its request.
REPEATED: dict[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "reasoning": {"effort": None, "summary": None},
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": None,
    "user": None,
}
#: The body, for the description of the endpoints.
SCHEMA = schema(
    "input",
    **dict.fromkeys(("reasoning", "text"), "object"),
    **{"input": "texts", "instructions": "string", "max_output_tokens": "integer"},
    **{"stream": "boolean", "tools": "objects"},
)


# -- what a client asks for ------------------------------------------------------------------------


def read_responses(asked: Mapping[str, Any]) -> tuple[ChatBody, dict[str, Any]]:
    """The chat that a request asks for, and what the response repeats of it. Raises ApiError: 400:
    see :func:`.parse`."""
    given = without_neutral(asked, NEUTRAL)
    given.pop("store", None)
    messages = _messages(given.pop("input", None))
    if (instructions := given.pop("instructions", None)) is not None:
        messages.insert(0, {"role": "system", "content": instructions})
    given["messages"] = messages
    if "max_output_tokens" in given:
        given["max_completion_tokens"] = given.pop("max_output_tokens")
    given |= _form(pop_object(given, "text")) | _effort(pop_object(given, "reasoning"))
    options = pop_object(given, "stream_options")
    options.pop("include_obfuscation", None)
    included = given.pop("include", [])
    if not isinstance(included, list) or any(one not in INCLUDED for one in included):
        raise bad_request(f"include may have {' and '.join(INCLUDED)}", "include")
    if LOGPROBS in included or "top_logprobs" in given:
        given["logprobs"] = True
    if options:
        given["stream_options"] = options
    if "tools" in given:
        given["tools"] = [_tool(tool) for tool in objects("tools", given["tools"])]
    choice = given.get("tool_choice")
    if isinstance(choice, dict) and "name" in choice:
        function = {"name": choice["name"]}
        given["tool_choice"] = {"type": choice.get("type"), "function": function}
    repeated = {name: asked[name] for name in REPEATED if asked.get(name) is not None}
    return parse(ChatBody, given), REPEATED | repeated


def _form(text: dict[str, Any]) -> dict[str, Any]:
    """`text`: the form of the answer."""
    found, form = dict[str, Any](), pop_object(text, "format")
    kind = form.pop("type", None)
    if kind is not None:
        wanted = {"json_schema": form} if kind == "json_schema" else form
        found["response_format"] = {"type": kind, **wanted}
    if text.pop("verbosity", "medium") != "medium":
        raise unsupported("text.verbosity")
    for name in text:
        raise unsupported(f"text.{name}")
    return found


def _effort(reasoning: dict[str, Any]) -> dict[str, Any]:
    """`reasoning`; thought is not summed up, but sent as it is."""
    for name in reasoning.keys() - {"effort", "summary", "generate_summary"}:
        raise unsupported(f"reasoning.{name}")
    return {"reasoning_effort": reasoning["effort"]} if "effort" in reasoning else {}


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise bad_request(f"tools of type {tool.get('type')!r} are not supported", "tools")
    function = {key: value for key, value in tool.items() if key != "type" and value is not None}
    return {"type": "function", "function": function}


def _messages(items: Any) -> list[dict[str, Any]]:
    """Messages of a chat; thought, text and calls of a turn are one message."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[dict[str, Any]] = []

    def turn(*taken: str) -> dict[str, Any]:
        """The model's last message, if it goes on and has none of these yet; else a new one."""
        last = messages[-1] if messages else {}
        if last.get("role") != "assistant" or any(name in last for name in taken):
            last = {"role": "assistant"}
            messages.append(last)
        return last

    for item in objects("input", items):
        kind = item.get("type", "message")
        if kind == "message":
            content, role = _content(item.get("content")), item.get("role")
            if role == "assistant":
                turn("content", "tool_calls")["content"] = content
            else:
                messages.append({"role": role, "content": content})
        elif kind == "reasoning":
            parts = objects("input", item.get("content") or [])
            thought = "".join(str(part.get("text", "")) for part in parts)
            turn("reasoning_content", "content", "tool_calls")["reasoning_content"] = thought
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            turn().setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            content = _content(item.get("output"))
            messages.append(
                {"role": "tool", "tool_call_id": item.get("call_id"), "content": content}
            )
        else:
            raise bad_request(f"items of type {kind!r} are not supported", "input")
    return messages


def _content(content: Any) -> Any:
    """The content of a message, with the names of chats."""
    if isinstance(content, str):
        return content
    parts: list[dict[str, Any]] = []
    for part in objects("input", content):
        kind = str(part.get("type"))
        if kind in TEXTS:
            parts.append({"type": "text", "text": part.get(TEXTS[kind])})
        elif kind == "input_image" and part.get("image_url"):
            parts.append({"type": "image_url", "image_url": {"url": part["image_url"]}})
        else:
            raise unsupported_content(kind, "input")
    return parts


# -- what it is told -------------------------------------------------------------------------------

#: The API's names of kinds of items, and how their ids begin.
KINDS = {
    "thought": ("reasoning", "rs"),
    "text": ("message", "msg"),
    "call": ("function_call", "fc"),
}


class ResponsesReply(ItemsReply):
    """The response to a request of this API."""

    def __init__(self, served: Served, body: ChatBody, repeated: Mapping[str, Any]) -> None:
        """See :class:`.Reply`; `repeated`: what it repeats of the request."""
        super().__init__(served, body)
        self.name, self._n_events = f"resp_{uuid.uuid4().hex}", 0
        self._status, self._repeated = "in_progress", repeated

    def _response(self, error: ApiError | None = None) -> dict[str, Any]:
        """The response as it is now."""
        found: dict[str, Any] = {
            "id": self.name,
            "object": "response",
            "created_at": self._head["created"],
            "model": self._head["model"],
            "status": self._status,
            "error": {"code": "server_error", "message": error.message} if error else None,
            "incomplete_details": None,
            "output": self._items,
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "usage": None,
            **self._repeated,
        }
        if self._status == "incomplete":
            found["incomplete_details"] = {"reason": "max_output_tokens"}
        if self._status in ("completed", "incomplete"):
            figures = self._figures()
            counts = figures.pop("usage")
            thought = counts["completion_tokens_details"]["reasoning_tokens"]
            found["usage"] = {
                "input_tokens": counts["prompt_tokens"],
                "input_tokens_details": counts["prompt_tokens_details"],
                "output_tokens": counts["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": thought},
                "total_tokens": counts["total_tokens"],
            }
            found |= figures
        return found

    def _opening(self) -> Iterator[bytes]:
        yield self._event("created", response=self._response())
        yield self._event(self._status, response=self._response())

    def _closing(self) -> Iterator[bytes]:
        yield self._event(self._status, response=self._response())

    def _failure(self, error: ApiError) -> bytes:
        self._status = "failed"
        return self._event(self._status, response=self._response(error))

    def _end(self, finish_reason: str) -> Iterator[bytes]:
        """An answer without text has an empty item."""
        self._status = "incomplete" if finish_reason == "length" else "completed"
        if not self._items:
            yield from self._begin("text")
        yield from super()._end(finish_reason)

    def _event(self, kind: str, **content: Any) -> bytes:
        kind, number = f"response.{kind}", self._n_events
        self._n_events += 1
        return sse(to_json({"type": kind, "sequence_number": number, **content}), kind)

    def _begin(self, kind: str, call: CallPiece | None = None) -> Iterator[bytes]:
        name, prefix = KINDS[kind]
        item: dict[str, Any] = {"type": name, "id": f"{prefix}_{uuid.uuid4().hex}"}
        item["status"] = "in_progress"
        empty: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        if call is not None:
            item |= {"call_id": call.id, "name": call.name, "arguments": ""}
        elif kind == "text":
            empty = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item |= {"role": "assistant", "content": []}
        else:
            item |= {"summary": [], "content": []}
        self._items.append(item)
        index = len(self._items) - 1
        yield self._event("output_item.added", output_index=index, item=item)
        if call is None:
            where = {"item_id": item["id"], "output_index": index, "content_index": 0}
            yield self._event("content_part.added", **where, part=empty)
            item["content"] = [empty]

    def _extend(self, text: str, part: Part) -> Iterator[bytes]:
        item = self._items[-1]
        where: dict[str, Any] = {"item_id": item["id"], "output_index": len(self._items) - 1}
        more: dict[str, Any] = {}
        if item["type"] == "function_call":
            item["arguments"] += text
            name = "function_call_arguments"
        else:
            content = item["content"][0]
            content["text"] += text
            where["content_index"], name = 0, content["type"]
            if item["type"] == "message":
                found = self._choices[0].logprobs_of(part)
                more["logprobs"] = found["content"] if found else []
                content["logprobs"] += more["logprobs"]
        if text:
            yield self._event(f"{name}.delta", **where, delta=text, **more)

    def _close(self) -> Iterator[bytes]:
        item = self._items[-1]
        item["status"] = "completed" if self._status == "in_progress" else self._status
        where: dict[str, Any] = {"item_id": item["id"], "output_index": len(self._items) - 1}
        if item["type"] == "function_call":
            about = {key: item[key] for key in ("name", "arguments")}
            yield self._event("function_call_arguments.done", **where, **about)
        else:
            part = item["content"][0]
            more = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
            at = {**where, "content_index": 0}
            yield self._event(f"{part['type']}.done", **at, text=part["text"], **more)
            yield self._event("content_part.done", **at, part=part)
        yield self._event("output_item.done", output_index=where["output_index"], item=item)
