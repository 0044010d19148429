"""Tools: what is called, in which form, and what templates are told."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from pyllama_mtp import Grammar, Model, Sampling

from .conftest import Running
from .support import chat

PAINT = {
    "type": "function",
    "function": {
        "name": "paint",
        "description": "Paint it.",
        "parameters": {
            "type": "object",
            "properties": {
                "colour": {"type": "string", "enum": ["red", "dark blue"]},
                "coats": {"$ref": "#/$defs/few"},
                "gloss": {"type": "boolean"},
                "where": {"type": "array", "items": {"enum": ["door", "roof"]}, "maxItems": 3},
            },
            "required": ["colour", "coats", "gloss", "where"],
            "$defs": {"few": {"type": "integer", "minimum": 1, "maximum": 9}},
        },
    },
}
STOP = {"type": "function", "function": {"name": "stop"}}
TOOLS: Any = [PAINT, STOP]
#: Writes calls as templates of the Qwen3.5 family do.
XML = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls %}<tool_call>
<function={{ call.function.name }}>
{% for key, value in call.function.arguments|items %}<parameter={{ key }}>
{{ value if value is string else value | tojson }}
</parameter>
{% endfor %}</function>
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@pytest.fixture(params=["json", "xml"])
def form(request: pytest.FixtureRequest, demo: Model, monkeypatch: pytest.MonkeyPatch) -> str:
    """A template that knows tools, in XML; or the demo model's, which does not."""
    if request.param == "xml":
        monkeypatch.setattr(demo, "chat_template", XML)
    return str(request.param)


def ask(server: Running, **options: Any) -> Any:
    given = {"messages": chat("Paint!"), "max_tokens": 200, **options}
    return server.chat(**given)["choices"][0]


def check(call: Any) -> str:
    """The function's name; the arguments must fit its schema."""
    tool = next(tool for tool in TOOLS if tool["function"]["name"] == call.function.name)
    schema = tool["function"].get("parameters", {"maxProperties": 0})
    jsonschema.validate(json.loads(call.function.arguments), schema)
    return str(call.function.name)


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "paint"}}]
)
@pytest.mark.parametrize("temperature", [0, 1.2])
def test_a_call_that_must_be_made(
    shared: Running, form: str, choice: Any, temperature: float
) -> None:
    options: Any = {"temperature": temperature, "max_tokens": 300, "seed": 5}
    options |= {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
    found = shared.answer(chat("Paint!"), **options).choices[0]
    assert found.finish_reason == "tool_calls" and found.message.content is None
    assert found.message.tool_calls and len(found.message.tool_calls) == 1
    call = found.message.tool_calls[0]
    assert call.type == "function" and call.id.startswith("call_")
    assert check(call) == "paint" or choice == "required"

    parts, reasons, names, deltas = "", [], [], 0
    for chunk in shared.answer(chat("Paint!"), stream=True, **options):
        delta = chunk.choices[0].delta
        assert not delta.content
        for part in delta.tool_calls or ():
            assert part.index == 0 and len(delta.tool_calls) == 1
            parts += part.function.arguments
            names += [part.function.name] if part.id else []
            deltas += 1
        reasons.append(chunk.choices[0].finish_reason)
    assert (names, parts) == ([call.function.name], call.function.arguments)
    assert reasons[-1] == "tool_calls" and not any(reasons[:-1])
    assert deltas > 3 or call.function.name == "stop", "arguments do not come in pieces"


def test_several_calls(shared: Running, form: str) -> None:
    options: Any = {"tools": [STOP], "tool_choice": "required", "max_tokens": 110}
    chunks = shared.answer(chat("Stop!"), stream=True, **options)
    parts = [part for chunk in chunks for part in chunk.choices[0].delta.tool_calls or ()]
    began = [part.index for part in parts if part.id]
    assert len(began) > 1 and began == list(range(len(began))), "the model makes one call only"
    assert len({part.id for part in parts if part.id}) == len(began)


def test_a_thought_before_the_call(
    shared: Running, demo: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        demo, "chat_template", XML.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
    )
    for n in (1, 2):
        found = ask(  # log probabilities of tokens that the grammar forces, too
            shared, tools=TOOLS, tool_choice="required", thinking_budget=9, logprobs=True, n=n
        )
        message = found["message"]
        assert message["reasoning_content"] and message["content"] is None
        assert message["tool_calls"] and found["logprobs"]["content"]


def test_calls_that_the_model_makes(
    shared: Running, demo: Model, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A grammar of one text stands in for a model that knows tools."""

    def say(text: str) -> Any:
        grammar = Grammar.lark(f"start: {json.dumps(text)}")
        monkeypatch.setattr(demo, "sampling", Sampling(grammar=grammar))
        whole = ask(shared, tools=TOOLS)
        chunks = shared.answer(chat("Paint!"), tools=TOOLS, stream=True)
        content, calls = "", list[dict[str, str]]()
        for chunk in chunks:
            delta = chunk.choices[0].delta
            content += delta.content or ""
            for part in delta.tool_calls or ():
                calls += [{"name": part.function.name, "arguments": ""}] if part.id else []
                calls[part.index]["arguments"] += part.function.arguments
        message = whole["message"]
        assert calls == [call["function"] for call in message.get("tool_calls", [])]
        assert content == (message["content"] or "")
        assert whole["finish_reason"] == ("tool_calls" if calls else "stop")
        return content, [(one["name"], json.loads(one["arguments"])) for one in calls]

    calls = {
        "json": '<tool_call>\n{"name": "paint", "arguments": {"colour": "red", "coats": 2}}\n'
        "</tool_call>",
        "xml": "<tool_call>\n<function=paint>\n<parameter=colour>\nred\n</parameter>\n"
        "<parameter=coats>\n2\n</parameter>\n</function>\n</tool_call>",
    }
    call, wanted = calls[form], ("paint", {"colour": "red", "coats": 2})
    assert say(f"I do.\n\n{call}\n{call}") == ("I do.", [wanted, wanted])
    assert say(call) == ("", [wanted])
    assert say(call[:-20]) == (call[:-20], [])
    assert say(call.replace("paint", "print")) == (call.replace("paint", "print"), [])
    assert say("Nothing to <tool>.") == ("Nothing to <tool>.", [])


def test_what_the_template_is_told(
    shared: Running, demo: Model, form: str, told: list[Any]
) -> None:
    function = {"name": "paint", "arguments": '{"colour": "red", "where": ["<a>"]}'}
    call = {"id": "call_1", "index": 0, "type": "function", "function": function}
    messages = [
        {"role": "system", "content": "Be brief."},
        *chat("Paint!"),
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "Done."}]},
    ]
    ask(shared, messages=messages, tools=TOOLS, max_tokens=1)
    ask(shared, messages=messages, tools=TOOLS, max_tokens=1, tool_choice="none")
    ask(shared, messages=chat("Hello"), max_tokens=1)
    told_of_tools, told_nothing, usual = (text for _, _, text in told)
    where = '<parameter=where>\n["<a>"]\n' if form == "xml" else '"where": ["<a>"]}}\n</tool_call>'
    for text in (told_of_tools, told_nothing):
        assert where in text and "Done." in text and "None" not in text
    assert '"description": "Paint it."' in told_of_tools
    assert "description" not in told_nothing and usual == demo.apply_chat_template(chat("Hello"))
    if form == "xml":
        assert told[0][1]["tools"] == TOOLS and "tools" not in told[1][1]
        assert told[0][0][2]["tool_calls"][0]["function"]["arguments"]["where"] == ["<a>"]
    else:
        assert "tools" not in told[0][1]
        roles = [message["role"] for message in told[0][0]]
        assert roles == ["system", "user", "assistant", "user"]
        assert told[0][0][0]["content"].startswith("Be brief.\n\n")
