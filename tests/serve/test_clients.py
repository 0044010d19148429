"""Clients that people use, against the server: from their packages, or as the requests they send.

The demo model knows no tools: it is made to call one, and its words do not matter here.
"""

from __future__ import annotations

import json
import os
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from .conftest import NAME, Running
from .support import QUESTIONS, chat


class Paint(BaseModel):
    """Paint it."""

    colour: Literal["red", "dark blue"]
    coats: int = Field(ge=1, le=9)


PAINT = {
    "type": "function",
    "function": {"name": "paint", "description": "", "parameters": Paint.model_json_schema()},
}


def test_openai_with_its_helpers(shared: Running) -> None:
    completions, ask = shared.client.chat.completions, chat("Paint!")
    options: Any = {"model": NAME, "messages": ask, "temperature": 0, "max_tokens": 200}
    tool = {"tools": [openai.pydantic_function_tool(Paint)], "parallel_tool_calls": False}
    message = completions.parse(**options, **tool, tool_choice="required").choices[0].message
    assert message.tool_calls
    call = message.tool_calls[0]
    assert isinstance(call.function.parsed_arguments, Paint)

    with completions.stream(**options, **tool, tool_choice="required") as stream:
        kinds = [event.type for event in stream]
        again = stream.get_final_completion().choices[0].message.tool_calls
    assert again and again[0].function.parsed_arguments == call.function.parsed_arguments
    assert kinds.count("tool_calls.function.arguments.delta") > 3
    assert "tool_calls.function.arguments.done" in kinds

    # The turn goes back as it came, with the tool's result.
    told = [*ask, message, {"role": "tool", "tool_call_id": call.id, "content": "done"}]
    assert completions.create(**{**options, "messages": told}).choices[0].message.content
    parsed = completions.parse(**options, response_format=Paint).choices[0].message.parsed
    assert isinstance(parsed, Paint)


@pytest.mark.long
def test_langchain(shared: Running) -> None:
    langchain = pytest.importorskip("langchain_openai")
    messages = pytest.importorskip("langchain_core.messages")
    model = langchain.ChatOpenAI(
        base_url=f"{shared.url}/v1", api_key="any", model=NAME, temperature=0, max_tokens=200
    )
    with_tools = model.bind_tools([Paint], tool_choice="any", parallel_tool_calls=False)
    answer = with_tools.invoke("Paint!")
    (call,) = answer.tool_calls
    assert call["name"] == "Paint" and Paint(**call["args"]) and not answer.invalid_tool_calls
    whole = None
    for chunk in with_tools.stream("Paint!"):
        whole = chunk if whole is None else whole + chunk
    assert whole.tool_calls[0]["args"] == call["args"]
    told = [
        messages.HumanMessage("Paint!"),
        answer,
        messages.ToolMessage("done", tool_call_id=call["id"]),
    ]
    assert model.bind_tools([Paint]).invoke(told).content
    for method in ("function_calling", "json_schema"):
        found = model.with_structured_output(Paint, method=method).invoke("Paint!")
        assert isinstance(found, Paint)


@pytest.mark.long
def test_litellm(shared: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is installed: it takes 250 MB."""
    monkeypatch.setitem(os.environ, "LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm = pytest.importorskip("litellm")
    pytest.importorskip("mcp", reason="litellm needs it for tools")
    options: Any = {
        "model": f"openai/{NAME}",
        "api_base": f"{shared.url}/v1",
        "api_key": "any",
        "messages": chat("Paint!"),
        "max_tokens": 200,
        "temperature": 0,
    }
    assert litellm.completion(**{**options, "max_tokens": 8}).choices[0].message.content
    options |= {"tools": [PAINT], "tool_choice": "required", "parallel_tool_calls": False}
    found = litellm.completion(**options).choices[0]
    assert found.finish_reason == "tool_calls"
    chunks = list(litellm.completion(**options, stream=True))
    built = litellm.stream_chunk_builder(chunks).choices[0]
    for choice in (found, built):
        (call,) = choice.message.tool_calls
        assert Paint(**json.loads(call.function.arguments)) and call.function.name == "paint"
    assert built.message.tool_calls[0].id


@pytest.mark.long
def test_instructor(shared: Running) -> None:
    instructor = pytest.importorskip("instructor")
    options: Any = {"model": NAME, "messages": chat("Paint!"), "temperature": 0, "max_tokens": 200}
    completions = instructor.from_openai(shared.client).chat.completions
    found = completions.create(**options, response_model=Paint, max_retries=0)
    assert isinstance(found, Paint)
    *_, last = completions.create_partial(**options, response_model=Paint)
    assert (last.colour, last.coats) == (found.colour, found.coats)


@pytest.mark.long
def test_llama_index(shared: Running) -> None:
    like = pytest.importorskip("llama_index.llms.openai_like").OpenAILike
    core = pytest.importorskip("llama_index.core")
    about: Any = {"model": NAME, "api_base": f"{shared.url}/v1", "api_key": "any", "temperature": 0}
    model = like(**about, is_chat_model=True, is_function_calling_model=True, max_tokens=200)
    message = core.llms.ChatMessage(role="user", content=QUESTIONS[0])
    wanted = shared.answer(chat(QUESTIONS[0]), max_tokens=200).choices[0].message.content
    assert model.chat([message]).message.content == wanted
    assert "".join(part.delta for part in model.stream_chat([message])) == wanted
    found = model.structured_predict(Paint, core.PromptTemplate("Paint!"))
    assert isinstance(found, Paint)
    plain = like(**about, is_chat_model=False, max_tokens=8)
    assert plain.complete("def f").text == shared.complete("def f", max_tokens=8).choices[0].text


def test_token_ids(shared: Running) -> None:
    """vLLM's `return_token_ids`, whole and in a stream, whose chunks have those of their rounds."""
    options: Any = {"max_tokens": 12, "extra_body": {"return_token_ids": True}}
    whole = shared.complete("def f", **options)
    ids = whole.choices[0].token_ids
    assert len(ids) == whole.usage.completion_tokens
    chunks = [chunk.choices[0] for chunk in shared.complete("def f", stream=True, **options)]
    assert [one for chunk in chunks for one in chunk.token_ids] == ids
    assert shared.served.model.detokenize(ids) == whole.choices[0].text
    assert not hasattr(shared.complete("def f").choices[0], "token_ids")


# -- recorded --------------------------------------------------------------------------------------

#: As aider sends them (through litellm), and Open WebUI: a chat, its title, a chat with tools.
AIDER = {
    "model": NAME,
    "messages": [
        {"role": "system", "content": "Act as an expert software developer.\n"},
        {"role": "user", "content": "I am not sharing any files yet."},
        {"role": "assistant", "content": "Ok."},
        {"role": "user", "content": QUESTIONS[0]},
    ],
    "temperature": 0,
    "stream": True,
    "stream_options": {"include_usage": True},
}
WEBUI = {
    "stream": True,
    "model": NAME,
    "messages": [{"role": "user", "content": [{"type": "text", "text": QUESTIONS[1]}]}],
    "temperature": 0.8,
    "top_p": 0.9,
    "frequency_penalty": 0.1,
    "seed": 7,
    "stop": ["\n\n\n"],
    "reasoning_effort": "low",
    "logit_bias": {"5": -100},
    "stream_options": {"include_usage": True},
}
WEBUI_TITLE = {
    "model": NAME,
    "messages": [{"role": "user", "content": "### Task:\nGenerate a concise title."}],
    "stream": False,
    "max_completion_tokens": 30,
}
WEBUI_CALL = {
    "index": 0,
    "id": "call_0",
    "type": "function",
    "function": {"name": "paint", "arguments": '{"colour": "red", "coats": 1}'},
}
WEBUI_TOOLS = {
    **WEBUI,
    "messages": [
        {"role": "system", "content": "User Context:\n\n"},
        *chat("Paint!"),
        {"role": "assistant", "content": "", "tool_calls": [WEBUI_CALL]},
        {"role": "tool", "tool_call_id": "call_0", "content": '{"done": true}'},
    ],
    "tools": [PAINT],
}


@pytest.mark.parametrize("body", [AIDER, WEBUI, WEBUI_TITLE, WEBUI_TOOLS])
def test_recorded_requests(shared: Running, body: dict[str, Any]) -> None:
    limited = {"max_tokens": 20, **body}
    if "max_completion_tokens" in body:
        del limited["max_tokens"]
    got = shared.post("/v1/chat/completions", limited)
    assert got.status_code == 200, got.text
    if not body["stream"]:
        assert got.json()["usage"]["completion_tokens"] > 0
        return
    *events, done = [line[6:] for line in got.text.splitlines() if line.startswith("data: ")]
    assert done == "[DONE]"
    *chunks, last = map(json.loads, events)
    assert last["usage"]["completion_tokens"] > 0 and last["choices"] == []
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content", "") for delta in deltas)
