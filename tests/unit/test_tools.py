"""Tools and their calls through the templates of models that have them, and grammars of calls."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from pyllama_mtp.chats.options import call_form
from pyllama_mtp.chats.toolcalls import CallPiece, Form
from pyllama_mtp.chats.tools import Tools, for_template, in_words
from pyllama_mtp.errors import UsageError
from pyllama_mtp.grammar import Grammar
from pyllama_mtp.llama.chat import render

PROPERTIES: dict[str, Any] = {
    "path": {"type": "string"},
    "lines": {"type": "array", "items": {"type": "integer"}},
    "more": {"type": "object"},
    "force": {"type": "boolean"},
    "ratio": {"type": "number"},
    "mode": {"type": ["string", "null"], "enum": ["r", "w", None]},
}
EDIT = {
    "name": "edit",
    "description": "Ändert <b>",
    "parameters": {"type": "object", "properties": PROPERTIES, "required": ["path"]},
}
LS = {"name": "ls", "description": "", "parameters": {"type": "object", "properties": {}}}
OFFERED = [{"type": "function", "function": function} for function in (EDIT, LS)]
CALLS: list[tuple[str, dict[str, Any]]] = [
    (
        "edit",
        {
            "path": 'a "b"\\\n<parameter=x>\n',
            "lines": [1, 2],
            "more": {"x": [None, "</tool_call>"]},
            "force": True,
            "ratio": 0.5,
            "mode": None,
        },
    ),
    ("ls", {}),
]
#: Templates of upstream's collection, and how they write calls.
TEMPLATES: dict[str, Form | None] = {
    "Qwen3.5-4B": "xml",
    "Qwen3-Coder": "xml",
    "Qwen-Qwen3-0.6B": "json",
    "Qwen-Qwen2.5-7B-Instruct": "json",
    "GLM-4.6": None,
}


@pytest.fixture(scope="module")
def templates(pinned_archive: Path) -> dict[str, str]:
    """From the archive that the library was built from."""
    found: dict[str, str] = {}
    with tarfile.open(pinned_archive) as archive:
        for member in archive:
            path = Path(member.name)
            if path.parts[-3:-1] == ("models", "templates") and path.stem in TEMPLATES:
                source = archive.extractfile(member)
                assert source
                found[path.stem] = source.read().decode()
                if len(found) == len(TEMPLATES):
                    break
    return found


def conversation() -> list[dict[str, Any]]:
    """OpenAI's form of it: arguments are text, and content is null."""
    calls = [
        {"id": f"call_{i}", "type": "function", "function": {"name": n, "arguments": json.dumps(a)}}
        for i, (n, a) in enumerate(CALLS)
    ]
    return [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Edit it."},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_0", "content": "edited"},
        {"role": "tool", "tool_call_id": "call_1", "content": "a b"},
        {"role": "user", "content": "Thanks."},
    ]


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_a_template_writes_is_read(templates: dict[str, str], name: str) -> None:
    template, form = templates[name], TEMPLATES[name]
    assert call_form(template) == form
    tools = Tools.of(OFFERED)
    assert tools
    messages, offered = for_template(conversation()), list[Any](tools.offered)
    if form is None:
        messages, offered = in_words(messages, tools), []
    text = render(template, messages, tools=offered)
    assert all(words in text for words in ("edited", "a b", "Edit it."))
    assert "None" not in text.replace("\nNone\n", "")  # how templates write null
    if form is None:
        assert all(f'"{name}"' in text for name in ("edit", "ls")) and "Ändert <b>" in text
    # The turn as the model would have written it.
    answer = text[text.index("Edit it.") : text.index("edited")]
    answer = answer[answer.index("<tool_call>") : answer.rindex("</tool_call>") + 12]
    names, arguments = list[str](), list[str]()
    reader = tools.reader(form)
    for piece in [p for c in answer for p in reader.feed(c)] + reader.feed("", final=True):
        assert isinstance(piece, CallPiece) or not piece.strip()
        if isinstance(piece, CallPiece):
            names += [piece.name] if piece.name else []
            arguments += [""] if piece.name else []
            arguments[-1] += piece.arguments
    assert [(n, json.loads(a)) for n, a in zip(names, arguments, strict=True)] == CALLS


def test_grammars_of_calls() -> None:
    llguidance = pytest.importorskip("llguidance")
    byte = llguidance.LLTokenizer("byte")

    def follows(tools: Tools, form: Form, text: str) -> bool:
        grammar = Grammar.lark(tools.lark(form, '"<tool_call>"', '"</tool_call>"'))
        matcher = grammar.matcher(byte)
        taken = matcher.try_consume_tokens(list(text.encode()))
        return bool(taken == len(text.encode()) and matcher.is_accepting())

    several, one = Tools.of(OFFERED, "required"), Tools.of(OFFERED, "ls")
    assert several and one and several.must and one.must and several.parallel and not one.parallel
    ls = {
        "xml": "<tool_call>\n<function=ls>\n</function>\n</tool_call>",
        "json": '<tool_call>\n{"name": "ls", "arguments": {}}\n</tool_call>',
    }
    value = "<parameter={}>\n{}\n</parameter>\n".format
    for form, call in ls.items():
        assert follows(several, form, call) and follows(several, form, f"{call}\n{call}")  # type: ignore[arg-type]
        assert follows(one, form, call) and not follows(one, form, f"{call}\n{call}")  # type: ignore[arg-type]
        assert not follows(several, form, call.replace("ls", "rm"))  # type: ignore[arg-type]
        assert not follows(several, form, f"So: {call}")  # type: ignore[arg-type]
    for good, parts in {
        (True, value("path", "a\n</parameter> <b>")),
        (True, value("path", "") + value("lines", "[1, 2]") + value("force", "True")),
        (True, value("path", "x") + value("more", '{"x": [null]}') + value("mode", "null")),
        (False, ""),
        (False, value("force", "true")),
        (False, value("path", "x") + value("lines", '["x"]')),
        (False, value("path", "x") + value("force", "yes")),
        (False, value("path", "x") + value("other", "x")),
    }:
        call = f"<tool_call>\n<function=edit>\n{parts}</function>\n</tool_call>"
        assert follows(several, "xml", call) == good, parts
    for good, arguments in (
        (True, '{"path": "x", "lines": [1], "mode": "w"}'),
        (True, '{"path": "</tool_call>"}'),
        (False, "{}"),
        (False, '{"path": 5}'),
        (False, '{"path": "x", "other": 1}'),
    ):
        call = f'<tool_call>\n{{"name": "edit", "arguments": {arguments}}}\n</tool_call>'
        assert follows(several, "json", call) == good, arguments
    open_schema = {"type": "object", "properties": {"a b>": {}}, "additionalProperties": True}
    anything = Tools.of([{"function": {"name": "f", "parameters": open_schema}}], "f")
    assert anything
    call = f"<tool_call>\n<function=f>\n{value('k', 'v')}</function>\n</tool_call>"
    assert follows(anything, "xml", call)


def test_choices() -> None:
    def of(choice: Any, tools: Any = OFFERED) -> Any:
        found = Tools.of(tools, choice)
        return found and (found.must, found.name)

    assert of(None) == of("auto") == (False, None)
    assert of("none") is None and of("auto", []) is None and of(None, None) is None
    assert of("required") == (True, None)
    assert of("ls") == of({"type": "function", "function": {"name": "ls"}}) == (True, "ls")
    for choice in ("rm", 5, {"type": "function"}, {"type": "custom", "function": {"name": "ls"}}):
        with pytest.raises(UsageError, match="tool_choice is"):
            of(choice)
    with pytest.raises(UsageError, match="there are no tools"):
        of("required", [])
    for bad in (
        "ls",
        [5],
        [{"function": {"name": ""}}],
        [{"function": {"name": "f", "parameters": 5}}],
    ):
        with pytest.raises(UsageError, match=r"tools.* must be"):
            Tools.of(bad)
    with pytest.raises(UsageError, match="parallel_tool_calls"):
        Tools.of(OFFERED, parallel=1)


def test_messages_that_are_wrong() -> None:
    def called(call: Any) -> Any:
        return [{"role": "assistant", "tool_calls": [call]}]

    for messages, where in (
        (["x"], r"messages\[0\]"),
        ([{"role": "usr", "content": "x"}], "did you mean 'user'"),
        (called(5), r"messages\[0\]\.tool_calls\[0\]"),
        (called({"function": {}}), r"messages\[0\]\.tool_calls\[0\]"),
        (called({"function": {"name": "f", "arguments": "[1]"}}), r"\.function\.arguments"),
        (called({"function": {"name": "f", "arguments": "{"}}), r"\.function\.arguments"),
    ):
        with pytest.raises(UsageError, match=where):
            for_template(messages)
    assert for_template([{"role": "tool_call"}]), "a role that some templates know"
    empty = called({"function": {"name": "f", "arguments": ""}})
    assert for_template(empty)[0]["tool_calls"][0]["function"]["arguments"] == {}
    assert empty[0]["tool_calls"][0]["function"]["arguments"] == "", "the caller's are changed"
