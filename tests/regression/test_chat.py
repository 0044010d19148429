"""Conversations in Python: the template's prompt, thought apart, turns that go on."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from pyllama_mtp import BatchSession, CallPiece, ChatOptions, Grammar, Model, Sampling, Session
from pyllama_mtp.chats.tools import Tools, _tag
from pyllama_mtp.errors import UsageError

from .support import settings

THINKS = [{"role": "user", "content": "What does this function do?\ndef g(a, b):\n    return a"}]
ASKS = [{"role": "user", "content": "What does str.split() do?"}]


@pytest.mark.parametrize("depth", [0, 3])
def test_thought_is_an_attribute(demo: Model, depth: int) -> None:
    with Session(demo, settings(depth)) as session:
        plain = session.generate(ChatOptions().prompt(demo, THINKS), max_tokens=9).run()
        answer = session.chat(THINKS, thinking=8, max_tokens=40, sampling=Sampling())
        found: dict[bool, str] = {True: "", False: ""}
        for piece in answer:
            found[piece.thought] += piece
        assert (answer.reasoning, answer.text) == (found[True], found[False])
        assert plain.text == f"<think>\n{answer.reasoning}" and answer.text
        assert answer.tokens[:9] == plain.tokens, "the tag, and eight tokens of thought"
        assert 8 < answer.n_reasoning < 8 + 6, "the tags are tokens, too"
        assert session.chat(THINKS, thinking=False, max_tokens=40).run().reasoning == ""


def test_turns_go_on_and_fill_the_context(demo: Model) -> None:
    with Session(demo, settings(3, n_ctx=256)) as session:
        first = session.chat(ASKS, max_tokens=20, sampling=Sampling()).run()
        more = [*ASKS, {"role": "assistant", "content": first.text}, *ASKS]
        second = session.chat(more, sampling=Sampling(), stop=None)
        second.run()
        assert second.telemetry.n_cached >= first.telemetry.n_prompt
        n_used = second.telemetry.n_prompt + len(second.tokens)
        assert second.finish_reason == "eos" or n_used >= session.n_ctx - 1


def test_several_conversations_at_once(demo: Model) -> None:
    """Each gets the answer that it gets alone, its thought apart; and the repr shows it."""
    told: dict[str, Any] = {"thinking": 8, "max_tokens": 30, "sampling": Sampling()}
    with Session(demo, settings(3)) as session:
        alone = [session.chat(messages, **told).run() for messages in (THINKS, ASKS)]
    with BatchSession(demo, settings(3, n_ubatch=32), n_sequences=2) as batch:
        together = batch.chat([THINKS, ASKS], **told).run().results
        with pytest.raises(UsageError, match=r"conversations\[1\]: "):
            batch.chat([ASKS, [{"role": "user"}]])
        with pytest.raises(UsageError, match="a list of conversations, at least one"):
            batch.chat([])
    assert alone[0].reasoning
    for one, other in zip(alone, together, strict=True):
        assert (one.text, one.reasoning) == (other.text, other.reasoning)
        assert repr(one) == f"<Generation: {len(one.tokens)} tokens, {one.finish_reason}, " + (
            f"{one.text!r}>" if len(one.text) <= 60 else f"{one.text[:57] + '...'!r}>"
        )


SIZE = {"type": "integer", "minimum": 1, "maximum": 9}
ADD = {
    "type": "object",
    "properties": {"name": {"enum": ["def", "class"]}, "sizes": {"type": "array", "items": SIZE}},
    "required": ["name", "sizes"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": ADD}}]


@pytest.mark.parametrize("form", ["json", "xml"])
def test_a_tool_is_called_and_answers(
    demo: Model, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    if form == "xml":
        monkeypatch.setattr("pyllama_mtp.request.call_form", lambda template: "xml")
        monkeypatch.setattr("pyllama_mtp.chats.options.call_form", lambda template: "xml")
    options: Any = {"tools": TOOLS, "tool_choice": "add", "max_tokens": 120}
    found = []
    for depth in (0, 3):
        with Session(demo, settings(depth)) as session:
            answer = session.chat(ASKS, **options, sampling=Sampling())
            pieces = list(answer)
            found.append((answer.tokens, answer.tool_calls[0].arguments))
            assert not answer.text and not "".join(pieces) and len(pieces) > 3
            assert all(isinstance(piece, CallPiece) for piece in pieces)
            (call,) = answer.tool_calls
            assert call.name == "add" and answer.finish_reason == "stop"
            jsonschema.validate(json.loads(call.arguments), ADD)
            told = {"role": "tool", "tool_call_id": call.id, "content": "added"}
            turns = [*ASKS, answer.message, told]
            more = session.chat(turns, max_tokens=9, tools=TOOLS, sampling=Sampling()).run()
            assert more.tokens and not more.tool_calls
            assert more.telemetry.n_cached >= answer.telemetry.n_prompt - 16
            with pytest.raises(UsageError, match="another grammar"):
                session.chat(ASKS, **options, sampling=Sampling(grammar='root ::= "x"'))
    assert found[0] == found[1], "drafts change the call"


def test_tags_that_are_tokens(demo: Model) -> None:
    tools = Tools.of(TOOLS, "add")
    assert tools and _tag(demo, "<tool_call>") == '"<tool_call>"'
    tag = _tag(demo, "<|im_start|>")
    (token,) = demo.tokenize(tag, add_special=False, parse_special=True)
    sampling = Sampling(grammar=Grammar.lark(tools.lark("xml", tag, tag)))
    with Session(demo, settings(3)) as session:
        answer = session.generate("x", max_tokens=120, sampling=sampling).run()
    assert answer.finish_reason == "eos" and answer.text.startswith("\n<function=add>\n")
    assert answer.tokens[0] == answer.tokens[-2] == token


def test_going_on_with_a_word_of_the_template(demo: Model) -> None:
    """What the model has begun to say is also what its turn is called."""
    begun = [*ASKS, {"role": "assistant", "content": "assistant"}]
    prompt = ChatOptions().prompt(demo, begun, goes_on=True)
    turn = "<|im_start|>assistant\n"
    assert demo.detokenize(prompt, special=True).endswith(f"{turn}assistant")


def test_what_the_template_is_told(
    demo: Model, monkeypatch: pytest.MonkeyPatch, told: list[Any]
) -> None:
    call = "<function=f>\n<parameter=a>\nb\n</parameter>\n</function>"
    monkeypatch.setattr(demo, "chat_template", f"<tool_call>\n{call}\n</tool_call>")
    tools = [{"type": "function", "function": {"name": "f"}}]
    with Session(demo, settings(0)) as session:
        session.chat(ASKS)
        session.chat(ASKS, tools=tools, thinking=False)
        options = ChatOptions(reasoning_effort="high", variables={"x": 1})
        session.chat(ASKS, options=options)
    assert [variables for _, variables, _ in told] == [
        {},
        {"tools": tools, "enable_thinking": False},
        {"x": 1, "enable_thinking": True, "reasoning_effort": "high"},
    ]


@pytest.mark.parametrize("depth", [0, 3])
def test_a_stopped_answer_leaves_the_session_in_order(demo: Model, depth: int) -> None:
    with Session(demo, settings(depth)) as session:
        wanted = session.chat(ASKS, max_tokens=40, sampling=Sampling()).run().tokens
        answer = session.chat(ASKS, max_tokens=40, sampling=Sampling())
        for piece in answer:
            if piece:
                answer.stop()
                break
        assert answer.finish_reason == "interrupted" and list(answer) == []
        assert len(answer.tokens) < 40
        start = [*ChatOptions().prompt(demo, ASKS), *answer.tokens]
        more = session.generate(start, max_tokens=40 - len(answer.tokens)).run()
        assert [*answer.tokens, *more.tokens] == wanted
        assert more.telemetry.n_cached >= len(start) - 1, "what was computed is still there"
        more.stop()
        assert more.finish_reason != "interrupted"
