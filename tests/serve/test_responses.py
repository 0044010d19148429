"""The Responses API through the real `openai` client: what a chat answers, in its form."""

from __future__ import annotations

from typing import Any

import httpx
import pydantic
import pytest

from pyllama_mtp import Model

from .conftest import NAME, Running
from .support import QUESTIONS, alone, chat, chat_tokens
from .test_thinking import QUESTION
from .test_tools import PAINT, TOOLS, check

N = 40
FUNCTIONS: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]


def ask(server: Running, said: object, **options: Any) -> Any:
    usual: dict[str, Any] = {"model": NAME, "input": said, "temperature": 0}
    return server.client.responses.create(**{**usual, **options})


def events_of(server: Running, said: object, **options: Any) -> list[Any]:
    return list(ask(server, said, stream=True, **options))


def test_it_is_what_the_driver_says(shared: Running, demo: Model) -> None:
    prompt = chat_tokens(demo, chat(QUESTIONS[0]))
    wanted = alone(demo, prompt, N)
    got = ask(shared, QUESTIONS[0], max_output_tokens=N, metadata={"for": "a test"})
    assert got.output_text == wanted.text and got.object == "response" and got.model == NAME
    assert got.status == ("incomplete" if wanted.finish_reason == "length" else "completed")
    assert got.usage.input_tokens == len(prompt)
    assert got.usage.output_tokens == len(wanted.tokens)
    assert got.metadata == {"for": "a test"} and got.max_output_tokens == N
    assert got.to_dict()["metrics"]["speculative_decoding"]["num_spec_steps"] > 0


def test_a_stream_adds_up_to_the_answer(shared: Running) -> None:
    """The events are numbered, and each item begins, grows and ends with the same text."""
    whole = ask(shared, QUESTIONS[1])
    assert whole.status == "completed"
    events = events_of(shared, QUESTIONS[1])
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    begin = ["created", "in_progress", "output_item.added", "content_part.added"]
    end = ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert kinds == begin + ["output_text.delta"] * len(deltas) + end and len(deltas) > 5
    assert events[2].item.status == "in_progress" and events[2].item.content == []
    assert "".join(deltas) == events[-4].text == events[-3].part.text == whole.output_text
    assert events[-1].response.output_text == whole.output_text
    assert events[-1].response.usage.output_tokens == whole.usage.output_tokens
    with shared.client.responses.stream(model=NAME, input=QUESTIONS[1], temperature=0) as stream:
        assert len(list(stream)) == len(events)
        assert stream.get_final_response().output_text == whole.output_text


def test_an_answer_that_is_cut_off(shared: Running) -> None:
    assert ask(shared, QUESTIONS[3], max_output_tokens=4).incomplete_details.reason == (
        "max_output_tokens"
    )
    last = events_of(shared, QUESTIONS[3], max_output_tokens=4)[-1]
    assert last.type == "response.incomplete" and last.response.status == "incomplete"


def test_a_conversation_as_chats_have_it(shared: Running) -> None:
    """Instructions, turns, calls and results become the messages of the same chat."""
    call = {"name": "paint", "arguments": '{"colour": "red"}'}
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Paint!"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": []},
        {"role": "assistant", "content": [{"type": "output_text", "text": "I do."}]},
        {"type": "function_call", "id": "fc_1", "call_id": "call_1", **call},
        {"type": "function_call_output", "call_id": "call_1", "output": "Done."},
    ]
    messages = [
        {"role": "system", "content": "Be brief."},
        *chat("Paint!"),
        {
            "role": "assistant",
            "content": "I do.",
            "tool_calls": [{"id": "call_1", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "Done."},
    ]
    more: Any = {"max_output_tokens": N, "store": False, "include": ["reasoning.encrypted_content"]}
    got = ask(shared, items, instructions="Be brief.", tools=FUNCTIONS, **more)
    wanted = shared.answer(messages, max_tokens=N, tools=TOOLS)
    assert got.output_text == wanted.choices[0].message.content
    assert got.usage.input_tokens == wanted.usage.prompt_tokens


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "paint"}])
def test_calls(shared: Running, choice: Any) -> None:
    """Their arguments are streamed, and fit the schema."""
    options: Any = {"tools": FUNCTIONS, "tool_choice": choice, "max_output_tokens": 200}
    whole = ask(shared, "Paint!", **options, parallel_tool_calls=False)
    (call,) = whole.output
    function = check(type("Call", (), {"function": call}))
    assert (call.type, call.status) == ("function_call", "completed") and call.call_id
    assert choice == "required" or function == PAINT["function"]["name"]
    events = events_of(shared, "Paint!", **options, parallel_tool_calls=False)
    deltas = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    done = next(e for e in events if e.type == "response.function_call_arguments.done")
    assert "".join(deltas) == done.arguments == call.arguments and len(deltas) > 1
    assert events[-1].response.output[0].name == call.name
    following = [*chat("Paint!"), call.to_dict()]
    following.append({"type": "function_call_output", "call_id": call.call_id, "output": "Done."})
    assert ask(shared, following, tools=FUNCTIONS, max_output_tokens=8).output


def test_a_thought_is_an_item(shared: Running) -> None:
    """It comes before the message, and goes back to the model with the next turn."""
    budget: Any = {"extra_body": {"thinking_budget": 9}, "max_output_tokens": 80}
    whole = ask(shared, QUESTION, **budget)
    thought, message = whole.output
    assert (thought.type, message.type) == ("reasoning", "message")
    assert thought.content[0].text and whole.usage.output_tokens_details.reasoning_tokens > 0
    events = events_of(shared, QUESTION, **budget)
    deltas = [e.delta for e in events if e.type == "response.reasoning_text.delta"]
    assert "".join(deltas) == thought.content[0].text
    assert [item.type for item in events[-1].response.output] == ["reasoning", "message"]
    items = [*chat(QUESTION), *(item.to_dict() for item in whole.output), *chat("And now?")]
    assert ask(shared, items, max_output_tokens=4).output


def test_a_form_and_log_probabilities(shared: Running) -> None:
    class Paint(pydantic.BaseModel):
        coats: int

    got = shared.client.responses.parse(
        model=NAME, input="Paint!", text_format=Paint, temperature=0, max_output_tokens=60
    )
    assert isinstance(got.output_parsed, Paint)
    got = ask(shared, "x", include=["message.output_text.logprobs"], top_logprobs=2)
    text = got.output[0].content[0]
    assert "".join(one.token for one in text.logprobs) == text.text
    assert all(len(one.top_logprobs) == 2 for one in text.logprobs)


def test_nothing_is_stored(shared: Running) -> None:
    got = httpx.get(f"{shared.url}/v1/responses/resp_1")
    assert got.status_code == 501 and "whole conversation" in got.json()["error"]["message"]
