"""Functions that a model may call: how a prompt offers them, and the grammar that enforces a call.

Functions, calls and results go through the model's chat template. If the template writes calls in
neither form of :mod:`.toolcalls`, the system message describes the functions instead.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..arguments import flag, listed, nearest
from ..errors import UsageError, refusal
from ..grammar import Grammar
from .thinking import CLOSE_CALL, OPEN_CALL
from .toolcalls import CallReader, Form, resolved, to_json, types_of

if TYPE_CHECKING:
    from ..llama.model import Model

Messages = Sequence[Mapping[str, Any]]

#: The system message for templates that do not know tools.
IN_WORDS = """\
You may call these functions to help the user:
<tools>
{tools}
</tools>
To call one, answer with its name and its arguments as JSON within tags:
<tool_call>
{{"name": "NAME", "arguments": {{"KEY": "VALUE"}}}}
</tool_call>"""
_NAME = re.compile(r"[\w.:/-]{1,128}")
#: JSON as templates write it. llguidance ignores the keywords of a schema that it does not know.
_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_JSON = {"x-guidance": {**_LAYOUT, "lenient": True}}
#: Roles that every template may know; there are templates with more.
ROLES = ("system", "developer", "user", "assistant", "tool")
_CHOICES = "'none', 'auto', 'required', or a function's name"


@dataclass(frozen=True)
class Tools:
    """Functions that a model may call; make them with :meth:`of`.

    Attributes:
        offered: the functions in OpenAI's form, for templates.
        functions: the JSON schemas of the functions' parameters, by name.
        must: whether the answer must be a call.
        name: the function that must be called; None: any of them.
        parallel: whether an answer may have several calls.
    """

    offered: tuple[Mapping[str, Any], ...]
    functions: Mapping[str, Mapping[str, Any]]
    must: bool = False
    name: str | None = None
    parallel: bool = True

    @classmethod
    def of(cls, tools: object, choice: object = None, parallel: object = True) -> Tools | None:
        """Tools as OpenAI's API takes them.

        Args:
            tools: ``{"type": "function", "function": {"name": ..., "parameters": ...}}`` each.
            choice: None or "auto": the model decides; "required": it must call a function; "none":
                the functions are left out; a name, or ``{"type": "function", "function": {"name":
                ...}}``: it must call this function.
            parallel: whether an answer may have several calls.

        Returns:
            None if there are no functions, or `choice` is "none".

        Raises:
            UsageError: a bad argument.
        """
        given = [] if tools is None else listed(tools)
        if given is None:
            raise refusal("tools", tools, "a list of functions in OpenAI's form")
        functions: dict[str, Mapping[str, Any]] = {}
        for number, tool in enumerate(given):
            name, schema = _function(f"tools[{number}]", tool)
            if name in functions:
                raise UsageError(f"tools has two functions {name!r}; name them differently")
            functions[name] = schema
        must, only = _chosen(choice, functions)
        if choice == "none" or not functions:
            return None
        several = flag("parallel_tool_calls", parallel) and not only
        return cls(tuple(given), functions, must, only, several)

    def reader(self, form: Form | None) -> CallReader:
        """A reader of the calls in an answer."""
        usable = {self.name: self.functions[self.name]} if self.name else self.functions
        return CallReader(usable, form or "json", sure=self.must, parallel=self.parallel)

    def grammar(self, model: Model, form: Form | None) -> Grammar:
        """The grammar of an answer that must be a call. Raises UsageError: an unusable schema."""
        lark = self.lark(form or "json", *(_tag(model, tag) for tag in (OPEN_CALL, CLOSE_CALL)))
        return Grammar.lark(lark)

    def lark(self, form: Form, opening: str, closing: str) -> str:
        """The grammar's Lark source; `opening` and `closing` are tokens or texts in Lark."""
        names = [self.name] if self.name else list(self.functions)
        more = ' ("\\n" call)*' if self.parallel else ""
        each = " | ".join(f"f{number}" for number in range(len(names)))
        rules = [f"start: call{more}", f'call: {opening} "\\n" ({each}) "\\n" {closing}']
        for number, name in enumerate(names):
            write = _xml_rules if form == "xml" else _json_rules
            rules += write(f"f{number}", name, self.functions[name])
        if form == "xml":
            rules.append('text[suffix="\\n</parameter>\\n"]: /(.|\\n)*/')
            rules.append('other: "<parameter=" /[^>\\n]+/ ">\\n" text')
        return "\n".join(rules)


def _function(where: str, tool: object) -> tuple[str, Mapping[str, Any]]:
    """The name of a function, and the schema of its parameters."""
    function = tool.get("function") if isinstance(tool, Mapping) else None
    kind = tool.get("type", "function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or kind != "function":
        raise refusal(where, tool, "{'type': 'function', 'function': {'name': ...}}")
    name, schema = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise refusal(f"{where}.function.name", name, "letters, digits and _.:/-, at most 128")
    if schema is None:
        schema = {"type": "object", "properties": {}}
    if not isinstance(schema, Mapping):
        raise refusal(f"{where}.function.parameters", schema, "a JSON schema: a dict")
    return name, schema


def _chosen(choice: object, functions: Mapping[str, object]) -> tuple[bool, str | None]:
    """Whether a call must be made, and of which function."""
    if isinstance(choice, Mapping):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        name = name if choice.get("type", "function") == "function" else None
    else:
        name = choice
    if name in (None, "none", "auto") and not isinstance(choice, Mapping):
        return False, None
    if not isinstance(name, str):
        raise refusal("tool_choice", choice, _CHOICES)
    if name == "required" and name is choice:
        if not functions:
            raise UsageError("tool_choice is 'required', and there are no tools")
        return True, None
    if name not in functions:
        raise refusal("tool_choice", choice, f"{_CHOICES}: {', '.join(functions) or 'none given'}")
    return True, name


# -- grammars ----------------------------------------------------------------------------------


def _tag(model: Model, tag: str) -> str:
    """A tag in Lark: a special token where the vocabulary has one, else text."""
    ids, lib = model.tokenize(tag, add_special=False, parse_special=True), model._lib
    special = lib.LLAMA_TOKEN_ATTR_CONTROL | lib.LLAMA_TOKEN_ATTR_USER_DEFINED
    return tag if len(ids) == 1 and model.attributes(ids[0]) & special else to_json(tag)


def _json_rules(rule: str, name: str, schema: Mapping[str, Any]) -> list[str]:
    """A call in JSON."""
    if "properties" in schema:
        schema = {"additionalProperties": False, **schema}
    begin = to_json(f'{{"name": {to_json(name)}, "arguments": ')
    return [f'{rule}: {begin} %json {json.dumps({**schema, **_JSON})} "}}"']


def _xml_rules(rule: str, name: str, schema: Mapping[str, Any]) -> list[str]:
    """A call with a tag for each parameter, in the schema's order."""
    own = resolved(schema, schema)
    own = own if isinstance(own, Mapping) else {}
    properties, required = own.get("properties"), listed(own.get("required")) or []
    found = dict(properties) if isinstance(properties, Mapping) else {}
    found |= {key: True for key in required if key not in found}
    rules, parts = [], []
    for number, (key, value) in enumerate(found.items()):
        if isinstance(key, str) and not re.search(r"[>\n]", key):
            part = f"{rule}_{number}"
            written = _value(resolved(value, schema), schema, types_of(schema, key))
            rules.append(f"{part}: {to_json(f'<parameter={key}>' + chr(10))} {written}")
            parts.append(part if key in required else f"{part}?")
    if own.get("additionalProperties", not isinstance(properties, Mapping)):
        parts.append("other*")
    begin = to_json(f"<function={name}>\n")
    return [f'{rule}: {" ".join([begin, *parts])} "</function>"', *rules]


def _value(schema: Any, root: Mapping[str, Any], types: frozenset[str]) -> str:
    """A parameter's value and its closing tag."""
    end = to_json("\n</parameter>\n")
    said = schema if isinstance(schema, Mapping) else {}
    values = listed(said.get("enum", [said["const"]] if "const" in said else None))
    if types == {"boolean"} and values is None:
        values = [True, False, "True", "False"]  # templates write Python's words
    if values:
        words = [value if isinstance(value, str) else json.dumps(value) for value in values]
        return f"({' | '.join(map(to_json, words))}) {end}"
    if "string" in types:
        return "text"
    definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
    return f"%json {json.dumps({**definitions, **said, **_JSON})} {end}"


# -- templates ---------------------------------------------------------------------------------


def for_template(messages: Messages) -> list[dict[str, Any]]:
    """Messages in OpenAI's form as templates want them: text in place of None, and arguments as an
    object. Raises UsageError: arguments that are not a JSON object, or a misspelled role."""
    found = []
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise refusal(f"messages[{number}]", message, "{'role': ..., 'content': ...}")
        one = dict(message)
        role = str(one.get("role"))
        if role not in ROLES and (near := nearest(role.lower(), ROLES, 0.8)):
            raise refusal(f"messages[{number}].role", role, f"a role; did you mean {near!r}?")
        if one.get("content") is None and one.get("role") in ("assistant", "tool"):
            one["content"] = ""
        if one.get("tool_calls"):
            where = f"messages[{number}].tool_calls"
            calls = listed(one["tool_calls"]) or []
            one["tool_calls"] = [_with_object(f"{where}[{i}]", c) for i, c in enumerate(calls)]
        else:
            one.pop("tool_calls", None)
        found.append(one)
    return found


def _with_object(where: str, call: object) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise refusal(where, call, "{'function': {'name': ..., 'arguments': ...}}")
    given = arguments = function.get("arguments")
    if isinstance(arguments, str) or arguments is None:
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, Mapping):
        raise refusal(f"{where}.function.arguments", given, "a JSON object")
    return {**dict(call), "function": {**function, "arguments": arguments}}  # type: ignore[call-overload]


def in_words(messages: Messages, tools: Tools | None) -> list[dict[str, Any]]:
    """Messages of :func:`for_template` for a template that does not know tools: the system message
    describes the tools, calls are text, and results are messages of the user."""
    found: list[dict[str, Any]] = []
    answered = False
    for message in messages:
        one = dict(message)
        role, calls = one.get("role"), one.pop("tool_calls", None) or []
        said = [text for text in [str(one.get("content", "")).strip()] if text]
        for call in calls:
            function = call["function"]
            shown = {"name": function["name"], "arguments": function["arguments"]}
            said.append(f"{OPEN_CALL}\n{to_json(shown)}\n{CLOSE_CALL}")
        if role == "tool":
            said = [f"<tool_response>\n{one['content']}\n</tool_response>"]
            one = {"role": "user"}
            if answered:  # results of one turn are one message
                said.insert(0, found.pop()["content"])
        if calls or role == "tool":
            one["content"] = "\n".join(said)
        answered = role == "tool"
        found.append(one)
    if tools:
        offered = "\n".join(to_json(tool) for tool in tools.offered)
        words = IN_WORDS.format(tools=offered)
        if found and found[0].get("role") == "system":
            found[0]["content"] = f"{found[0]['content']}\n\n{words}"
        else:
            found.insert(0, {"role": "system", "content": words})
    return found
