"""Thought in the server: told apart, turned off, ended."""

from __future__ import annotations

from typing import Any

import pytest

from pyllama_mtp import Model

from .conftest import Running
from .support import alone, chat, chat_tokens

QUESTION = "What does this function do?\ndef g(a, b):\n    return a + b"
N = 80


def ask(server: Running, **options: Any) -> Any:
    return server.chat(**{"messages": chat(QUESTION), "max_tokens": N, **options})


@pytest.mark.parametrize("opened", [False, True])
def test_thought_is_told_apart(
    shared: Running, demo: Model, monkeypatch: pytest.MonkeyPatch, opened: bool
) -> None:
    if opened:
        plain = demo.apply_chat_template
        monkeypatch.setattr(demo, "apply_chat_template", lambda *a, **k: plain(*a) + "<think>\n")
    prompt = chat_tokens(demo, chat(QUESTION))
    text = alone(demo, prompt, N).text
    assert text.startswith("<think>") != opened, "the question does not make it think"
    answer = ask(shared)
    message = answer["choices"][0]["message"]
    assert message["content"] == ""
    assert message["reasoning_content"] == text.removeprefix("<think>").strip()
    assert message["reasoning"] == message["reasoning_content"]
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == N


@pytest.mark.parametrize("stream", [False, True])
def test_a_budget_and_an_answer(shared: Running, stream: bool) -> None:
    budget = {"extra_body": {"thinking_budget": 9}}
    got = shared.answer(chat(QUESTION), max_tokens=N, stream=stream, **budget)
    if not stream:
        message = got.choices[0].message
        thought, answer = message.reasoning_content, message.content
    else:
        deltas = [chunk.choices[0].delta for chunk in got]
        thought = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
        answer = "".join(delta.content or "" for delta in deltas)
    whole = ask(shared, thinking_budget_tokens=9)
    assert (thought, answer) == (
        whole["choices"][0]["message"]["reasoning_content"],
        whole["choices"][0]["message"]["content"],
    )
    assert thought and answer and "think>" not in thought + answer
    details = whole["usage"]["completion_tokens_details"]
    assert 9 < details["reasoning_tokens"] < 9 + 8, "the tags, and nine tokens between them"


@pytest.mark.parametrize(
    "options",
    [
        {"enable_thinking": False},
        {"reasoning_effort": "none"},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ],
)
def test_no_thought(shared: Running, options: Any) -> None:
    message = ask(shared, **options)["choices"][0]["message"]
    assert message["content"] and "reasoning_content" not in message


def test_what_the_template_is_told(shared: Running, told: list[Any]) -> None:
    turn = {"role": "assistant", "content": "b", "reasoning": "a"}
    messages = [*chat("x"), turn, *chat("y")]
    ask(shared, messages=messages, max_tokens=1, reasoning_effort="low")
    ask(shared, max_tokens=1, chat_template_kwargs={"enable_thinking": True, "more": 1})
    ask(shared, max_tokens=1)
    assert told[0][0][1] == {"role": "assistant", "content": "b", "reasoning_content": "a"}
    assert [variables for _, variables, _ in told] == [
        {"enable_thinking": True, "reasoning_effort": "low"},
        {"enable_thinking": True, "more": 1},
        {},
    ]


def test_logprobs_of_thought_and_answer(shared: Running) -> None:
    answer = ask(shared, thinking_budget=4, logprobs=True, max_tokens=30)
    entries = answer["choices"][0]["logprobs"]["content"]
    assert len(entries) == answer["usage"]["completion_tokens"] == 30
    assert "<think>" in "".join(entry["token"] for entry in entries)
