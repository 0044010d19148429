"""Anthropic's Messages API through the real `anthropic` client: a chat's answer in its form."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pydantic
import pytest

from pyllama_mtp import Grammar, Model, Sampling
from pyllama_mtp.llama.vision import Vision

from .conftest import NAME, Running, Start, running
from .support import QUESTIONS, alone, chat, chat_tokens, question, url
from .test_thinking import QUESTION
from .test_tools import TOOLS, check

anthropic: Any = pytest.importorskip("anthropic")

N = 40
FUNCTIONS: Any = [
    {
        "name": tool["function"]["name"],
        "description": tool["function"].get("description", ""),
        "input_schema": tool["function"].get("parameters", {"type": "object", "properties": {}}),
        "cache_control": {"type": "ephemeral"},
    }
    for tool in TOOLS
]


def client(server: Running, **options: Any) -> Any:
    usual: dict[str, Any] = {"api_key": "any", "max_retries": 0, "timeout": 120}
    return anthropic.Anthropic(base_url=server.url, **{**usual, **options})


def given(said: Any, **options: Any) -> dict[str, Any]:
    """A greedy request."""
    messages = chat(said) if isinstance(said, str) else said
    extra = {"temperature": 0, **options.pop("extra_body", {})}
    usual: dict[str, Any] = {"model": NAME, "max_tokens": 200, "messages": messages}
    return {**usual, **options, "extra_body": extra}


def ask(server: Running, said: Any, **options: Any) -> Any:
    return client(server).messages.create(**given(said, **options))


def streamed(server: Running, said: Any, **options: Any) -> tuple[list[Any], Any]:
    """The events of a stream, and the message that the client makes of them."""
    asked = given(said, **options)
    events = list(client(server).messages.create(**asked, stream=True))
    with client(server).messages.stream(**asked) as stream:
        return events, stream.get_final_message()


def same(whole: Any, other: Any) -> bool:
    """Whether two messages are the same but for what no two share: ids, times, the cache."""
    forms = [
        {name: one.to_dict()[name] for name in ("role", "model", "stop_reason", "stop_sequence")}
        | {"content": [{**block.to_dict(), "id": ""} for block in one.content]}
        | {"n": one.usage.output_tokens}
        for one in (whole, other)
    ]
    for form in forms:
        for block in form["content"]:
            block.pop("parsed_output", None)
    return bool(forms[0] == forms[1])


def test_it_is_what_the_driver_says(shared: Running, demo: Model) -> None:
    prompt = chat_tokens(demo, chat(QUESTIONS[0]))
    wanted = alone(demo, prompt, N)
    got = ask(shared, QUESTIONS[0], max_tokens=N, metadata={"user_id": "somebody"})
    (block,) = got.content
    assert (block.type, block.text) == ("text", wanted.text)
    assert (got.type, got.role, got.model) == ("message", "assistant", NAME)
    assert got.stop_reason == ("max_tokens" if wanted.finish_reason == "length" else "end_turn")
    usage = got.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == len(prompt)
    assert usage.output_tokens == len(wanted.tokens)
    assert got.to_dict()["timings"]["predicted_n"] == len(wanted.tokens)


def test_a_stream_adds_up_to_the_answer(shared: Running) -> None:
    whole = ask(shared, QUESTIONS[1])
    assert whole.stop_reason == "end_turn"
    events, message = streamed(shared, QUESTIONS[1])
    assert same(whole, message)
    kinds = [event.type for event in events if event.type != "ping"]
    n = kinds.count("content_block_delta")
    begin, end = ["message_start", "content_block_start"], ["content_block_stop", "message_delta"]
    assert kinds == [*begin, *["content_block_delta"] * n, *end, "message_stop"] and n > 5
    assert events[0].message.content == [] and events[0].message.stop_reason is None
    body = {**given(QUESTIONS[1]), "stream": True, "temperature": 0}
    del body["extra_body"]
    lines = shared.post("/v1/messages", body).text.split("\n\n")
    assert lines[-2].startswith("event: message_stop")
    assert "timings" in lines[-3], "llama-swap reads them beside the usage"


def test_a_long_prompt(shared: Running) -> None:
    """While it is processed, a stream has pings. What is not processed again is told apart."""
    said = "Sort these words: " + "one two three four " * 40
    body = {"messages": chat(said), "max_tokens": 4, "stream": True}
    text = shared.post("/v1/messages", body).text
    assert text.count("event: ping") > 2
    assert text.rindex("event: ping") < text.index("event: content_block_start")
    n_prompt = client(shared).messages.count_tokens(model=NAME, messages=chat(said)).input_tokens
    events, message = streamed(shared, said, max_tokens=4)
    again = ask(shared, said, max_tokens=4)
    for usage in (events[0].message.usage, message.usage, again.usage):
        assert usage.input_tokens + usage.cache_read_input_tokens == n_prompt
    assert message.usage.cache_read_input_tokens > 100 < again.usage.cache_read_input_tokens


def test_why_it_has_ended(shared: Running) -> None:
    whole = ask(shared, QUESTIONS[0])
    text = whole.content[0].text
    stop = text[20:24]
    for options in (
        {"max_tokens": 4},
        {"stop_sequences": ["\0", stop]},
        {"stop_sequences": [text[:3]]},
    ):
        got, (_, message) = (f(shared, QUESTIONS[0], **options) for f in (ask, streamed))
        assert same(got, message)
        if "max_tokens" in options:
            assert (got.stop_reason, got.stop_sequence) == ("max_tokens", None)
        else:
            found = options["stop_sequences"][-1]
            assert (got.stop_reason, got.stop_sequence) == ("stop_sequence", found)
            assert "".join(block.text for block in got.content) == text[: text.index(found)]


def test_a_conversation_as_chats_have_it(shared: Running) -> None:
    """System, turns, thought, calls and results become the messages of the same chat."""
    header = "x-anthropic-billing-header: cc_version=2.1; cch=a5145;"
    call = {"type": "tool_use", "id": "call_1", "name": "paint", "input": {"colour": "red"}}
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "Paint!"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Red.", "signature": "unsigned"},
                {"type": "text", "text": "I do."},
                call,
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "call_1", "content": "Done."},
                {"type": "text", "text": "Thanks."},
            ],
        },
        {"role": "system", "content": "Be kind."},
    ]
    function = {"name": "paint", "arguments": '{"colour":"red"}'}
    messages = [
        {"role": "system", "content": "Be brief."},
        *chat("Paint!"),
        {
            "role": "assistant",
            "content": "I do.",
            "reasoning_content": "Red.",
            "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "Done."},
        *chat("Thanks.\n<system-reminder>\nBe kind.\n</system-reminder>\n"),
    ]
    system = [{"type": "text", "text": header}, {"type": "text", "text": "Be brief."}]
    more: Any = {"context_management": {"edits": []}, "output_config": {"effort": "high"}}
    got = ask(shared, turns, system=system, tools=FUNCTIONS, max_tokens=N, extra_body=more)
    stop = {**TOOLS[1]["function"], "parameters": FUNCTIONS[1]["input_schema"]}
    wanted = shared.answer(
        messages, max_tokens=N, tools=[TOOLS[0], {"type": "function", "function": stop}]
    )
    assert got.content[0].text == wanted.choices[0].message.content
    n_prompt = got.usage.input_tokens + got.usage.cache_read_input_tokens
    assert n_prompt == wanted.usage.prompt_tokens
    counted = client(shared).messages.count_tokens(
        model=NAME, messages=turns, system=system, tools=FUNCTIONS
    )
    assert counted.input_tokens == n_prompt


def test_an_answer_that_is_begun(shared: Running) -> None:
    """The model goes on with its last turn."""
    text = ask(shared, QUESTIONS[0], max_tokens=N).content[0].text
    turns = [*chat(QUESTIONS[0]), {"role": "assistant", "content": text[:20]}]
    assert ask(shared, turns, max_tokens=N).content[0].text[:8] == text[20:28]


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "paint"}])
def test_calls(shared: Running, choice: Any) -> None:
    """Their arguments are streamed, and fit the schema; they and their results go back."""
    options: Any = {"tools": FUNCTIONS}
    options["tool_choice"] = {**choice, "disable_parallel_tool_use": True}
    whole = ask(shared, "Paint!", **options)
    (block,) = whole.content
    assert (whole.stop_reason, block.type) == ("tool_use", "tool_use") and block.id
    about = {"name": block.name, "arguments": json.dumps(block.input)}
    assert check(type("Call", (), {"function": type("Function", (), about)})) == block.name
    assert choice["type"] == "any" or block.name == choice["name"]
    turns = [
        *chat("Paint!"),
        {"role": "assistant", "content": [one.to_dict() for one in whole.content]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": block.id}]},
    ]
    assert ask(shared, turns, tools=FUNCTIONS, max_tokens=8).usage.output_tokens == 8
    events, message = streamed(shared, "Paint!", **options)
    assert same(whole, message)
    deltas = [event.delta for event in events if event.type == "content_block_delta"]
    assert len(deltas) > 1 and {delta.type for delta in deltas} == {"input_json_delta"}


def test_text_and_several_calls(
    shared: Running, demo: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A grammar of one text stands in for a model that knows tools."""
    function = '{"name": "paint", "arguments": {"colour": "red", "coats": 2}}'
    call = f"\n<tool_call>\n{function}\n</tool_call>"
    grammar = Grammar.lark(f"start: {json.dumps('I do.' + 2 * call)}")
    monkeypatch.setattr(demo, "sampling", Sampling(grammar=grammar))
    whole = ask(shared, "Paint!", tools=FUNCTIONS)
    assert [block.type for block in whole.content] == ["text", "tool_use", "tool_use"]
    assert [one.input for one in whole.content[1:]] == 2 * [{"colour": "red", "coats": 2}]
    assert whole.stop_reason == "tool_use"
    events, message = streamed(shared, "Paint!", tools=FUNCTIONS)
    assert same(whole, message)
    assert [e.index for e in events if e.type == "content_block_start"] == [0, 1, 2]
    none = ask(shared, "Paint!", tools=FUNCTIONS, tool_choice={"type": "none"})
    assert [block.type for block in none.content] == ["text"]


def test_a_thought_is_a_block(shared: Running) -> None:
    """It comes before the text, and goes back to the model with the next turn."""
    options: Any = {"thinking": {"type": "enabled", "budget_tokens": 9}, "max_tokens": 80}
    whole = ask(shared, QUESTION, **options)
    thought, text = whole.content
    assert (thought.type, text.type) == ("thinking", "text") and thought.signature
    message = shared.chat(chat(QUESTION), max_tokens=80, thinking_budget=9)["choices"][0]["message"]
    assert (thought.thinking, text.text) == (message["reasoning_content"], message["content"])
    assert whole.usage.output_tokens_details.thinking_tokens > 9
    _, message = streamed(shared, QUESTION, **options)
    assert same(whole, message)
    turn = {"role": "assistant", "content": [block.to_dict() for block in whole.content]}
    assert ask(shared, [*chat(QUESTION), turn, *chat("And now?")], max_tokens=4).content
    for kind in ("disabled", "adaptive"):
        blocks = ask(shared, QUESTION, thinking={"type": kind}).content
        assert (blocks[0].type == "thinking") == (kind == "adaptive")


def test_a_form(shared: Running) -> None:
    class Paint(pydantic.BaseModel):
        coats: int

    got = client(shared).messages.parse(**given("Paint!", output_format=Paint, max_tokens=60))
    assert isinstance(got.parsed_output, Paint)


@pytest.fixture(scope="module")
def seeing(demo: Model, vision: Vision) -> Iterator[Running]:
    with running(demo, vision=vision) as found:
        yield found


def test_images(seeing: Running) -> None:
    """They are what a chat's are, also in a tool's result; URLs are not fetched."""
    data = url(1).partition(",")[2]
    assert base64.b64decode(data)
    source = {"type": "base64", "media_type": "image/png", "data": data}
    image, text = {"type": "image", "source": source}, {"type": "text", "text": "What is this? "}
    turns = [{"role": "user", "content": [text, image]}]
    got = ask(seeing, turns, max_tokens=8)
    wanted = seeing.answer(question(url(1)), max_tokens=8)
    assert got.content[0].text == wanted.choices[0].message.content
    n_prompt = got.usage.input_tokens + got.usage.cache_read_input_tokens
    assert n_prompt == wanted.usage.prompt_tokens
    counted = client(seeing).messages.count_tokens(model=NAME, messages=turns)
    assert counted.input_tokens == n_prompt
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": [text, image]}
    call = {"type": "tool_use", "id": "call_1", "name": "paint", "input": {}}
    looked = [*chat("Look!"), {"role": "assistant", "content": [call]}]
    looked += [{"role": "user", "content": [result]}]  # type: ignore[dict-item]
    assert ask(seeing, looked, max_tokens=8).usage.input_tokens > n_prompt // 2
    source = {"type": "url", "url": "http://127.0.0.1/a.png"}
    with pytest.raises(anthropic.BadRequestError, match="URLs are not fetched"):
        ask(seeing, [{"role": "user", "content": [{"type": "image", "source": source}]}])


def test_what_is_refused(shared: Running) -> None:
    """In Anthropic's form."""
    for options, why in (
        ({"extra_body": {"fallbacks": ["x"]}}, "'fallbacks' is not supported"),
        ({"extra_body": {"mcp_servers": [{"name": "x"}]}}, "'mcp_servers' is not supported"),
        ({"extra_body": {"n": 2}}, "'n' is not supported"),
        ({"extra_body": {"output_config": {"more": 1}}}, "'output_config.more' is not supported"),
        ({"thinking": {"type": "deep"}}, "thinking.type is 'deep'; use enabled"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type is 'some'; use auto"),
        ({"tool_choice": {"type": []}}, "tool_choice.type is []; use auto"),
        ({"tools": [{"type": "web_search_20250305", "name": "x"}]}, "'web_search_20250305' are"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages.0.content must be a list"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "type 'document'"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": "x" * 99_999}]}, "prompt is too long: the pr"),
        ({"messages": [{"role": "user", "content": "a b " * 999}]}, "prompt is too long: the pr"),
    ):
        with pytest.raises(anthropic.BadRequestError) as refusal:
            ask(shared, "x", **options)
        body = refusal.value.body
        assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
        assert why in body["error"]["message"]


def test_keys_hosts_and_bounds(start: Start) -> None:
    """They hold as for the other APIs; either header has the key."""
    server = start(api_key="right", largest_body=10_000, strict_model=True)
    for auth in ({"api_key": "right"}, {"auth_token": "right", "api_key": None}):
        one = client(server, **auth)
        assert one.messages.create(**given("x", max_tokens=4)).content
        assert one.messages.count_tokens(model=NAME, messages=chat("x")).input_tokens
    assert httpx.get(f"{server.url}/v1/models", headers={"x-api-key": "right"}).status_code == 200
    for path in ("", "/count_tokens"):
        headers = {"x-api-key": "right"}
        asked = [
            ({"x-api-key": "wrong"}, {}, 401, "authentication_error"),
            ({}, {}, 401, "authentication_error"),
            (headers | {"Host": "evil.example"}, {}, 403, "permission_error"),
            (headers | {"Origin": "http://evil.example"}, {}, 403, "permission_error"),
            (headers, {"messages": chat("x" * 10_000)}, 413, "request_too_large"),
            (headers, {"messages": chat("x"), "model": "other"}, 404, "not_found_error"),
        ]
        for sent, body, status, kind in asked:
            target = f"{server.url}/v1/messages{path}"
            got = httpx.post(target, json={"messages": chat("x"), **body}, headers=sent)
            assert (got.status_code, got.json()["error"]["type"]) == (status, kind)
    batches = httpx.get(f"{server.url}/v1/messages/batches", headers={"x-api-key": "right"})
    assert batches.status_code == 501 and batches.json()["type"] == "error"
