"""Calls of tools, read from a model's answer as it comes.

There are two forms; the chat template shows which one a model writes (see :mod:`.tools`)::

    <tool_call>                                   <tool_call>
    <function=NAME>                               {"name": "NAME", "arguments": {"KEY": VALUE}}
    <parameter=KEY>                               </tool_call>
    VALUE
    </parameter>
    </function>
    </tool_call>
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from ..arguments import listed
from .thinking import CLOSE_CALL, OPEN_CALL, Piece, overlap

FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
#: The start of a call in JSON as our grammar has it; its arguments can be streamed.
_HEADER = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*')

#: All types of JSON, which a schema without a type allows.
ANY = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})
#: Python's words for values, as templates write them.
_WORDS = {"True": True, "False": False, "None": None}
#: Most references to follow, one after the other.
_DEEPEST = 16

Form: TypeAlias = Literal["xml", "json"]
#: Yields the name of a function, then its arguments as JSON, in parts. None: needs more text.
_Parts: TypeAlias = Generator[str | None, None, None]


@dataclass
class ToolCall:
    """A call of a function.

    Attributes:
        id: identifies the call, for its result.
        arguments: a JSON object, incomplete if the answer was cut off.
    """

    id: str
    name: str
    arguments: str = ""

    def to_message(self) -> dict[str, Any]:
        """The call as an item of `tool_calls` in OpenAI's messages."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


class CallPiece(Piece):
    """A part of a call; its text is empty.

    Attributes:
        number: index of the call in its answer, from 0.
        id, name: those of the call in its first part, then None.
        arguments: more of the arguments' JSON.
    """

    __slots__ = ("arguments", "id", "name", "number")
    number: int
    id: str | None
    name: str | None
    arguments: str

    def __new__(
        cls, number: int, id: str | None = None, name: str | None = None, arguments: str = ""
    ) -> CallPiece:
        """A part of a call."""
        piece = str.__new__(cls, "")
        piece.thought, piece.number = False, number
        piece.id, piece.name, piece.arguments = id, name, arguments
        return piece


class _Broken(Exception):
    """The text is not a call."""


class _Source:
    """The text of a call so far, and how far it is read. `final`: the text is complete."""

    def __init__(self) -> None:
        self.text, self.at, self.final = "", 0, False

    def mark(self, *marks: str, needed: bool = True) -> Generator[None, None, str]:
        """Read white space and one of these marks. Unless `needed`, the text may end before it."""
        while True:
            rest = self.text[self.at :].lstrip()
            for mark in marks:
                if rest.startswith(mark):
                    self.at = len(self.text) - len(rest) + len(mark)
                    return mark
            begun = any(mark.startswith(rest) for mark in marks)
            if self.final and begun and not needed:
                self.at = len(self.text)
                return ""
            self.check(begun)
            yield

    def until(self, mark: str) -> Generator[None, None, str]:
        """Read up to the mark, which must be in the same line; return the text before it."""
        while (end := self.text.find(mark, self.at)) < 0:
            self.check("\n" not in self.text[self.at :])
            yield
        found = self.take(end)
        self.at += len(mark)
        if "\n" in found:
            raise _Broken
        return found.strip()

    def check(self, ok: bool) -> None:
        """Raise unless more text can still make a call."""
        if self.final or not ok:
            raise _Broken

    def object(self) -> _Parts:
        """Read white space and a JSON object, as it comes; only its brackets are checked."""
        while not (rest := self.text[self.at :].lstrip()):
            self.check(True)
            yield None
        self.at = len(self.text) - len(rest)
        depth, quoted, escaped = 0, False, False
        at = self.at
        while True:
            for i in range(at, len(self.text)):
                char = self.text[i]
                if quoted:
                    quoted = escaped or char != '"'
                    escaped = char == "\\" and not escaped
                elif not depth and char != "{":
                    raise _Broken
                else:
                    quoted = char == '"'
                    depth += (char in "{[") - (char in "}]")
                    if not depth:
                        yield self.take(i + 1)
                        return
            at = len(self.text)
            yield self.take(at)
            self.check(True)
            yield None

    def take(self, end: int) -> str:
        """Read up to the index `end`."""
        found, self.at = self.text[self.at : end], end
        return found

    def value(self, sure: bool) -> _Parts:
        """Read a parameter's text, as it comes, without the line ends around it.

        The text may contain closing tags. It ends at the closing tag before the next parameter or
        the end of the call; in a `sure` call, at the first closing tag with a line of its own.
        """
        after = ("\n",) if sure else (PARAMETER, END_FUNCTION, CLOSE_CALL)
        closing = f"\n{END_PARAMETER}" if sure else END_PARAMETER
        while self.at == len(self.text):
            self.check(True)
            yield None
        self.at += self.text[self.at] == "\n"
        look = self.at
        while True:
            end = self.text.find(closing, look)
            if end < 0:
                tail = self.text[max(self.at, len(self.text) - len(END_PARAMETER) - 1) :]
                look = len(self.text) - overlap(tail, [f"\n{END_PARAMETER}", closing])
                self.check(True)
                yield self.take(look)
                yield None
                continue
            rest = self.text[end + len(closing) :]
            rest = rest if sure else rest.lstrip()
            if rest.startswith(after) or (self.final and not rest):
                found = self.take(end)
                yield found if sure else found.removesuffix("\n")
                self.at += len(closing)
                return
            if self.final or not any(mark.startswith(rest) for mark in after):
                look = end + len(closing)
            else:
                yield None


class CallReader:
    """Tells calls from text.

    A complete call becomes pieces. A broken call, or a call of an unknown function, is text. If
    calls are `sure`, because a grammar enforces them, their parts come at once, and there is no
    text.
    """

    def __init__(
        self,
        functions: Mapping[str, Mapping[str, Any]],
        form: Form,
        *,
        sure: bool = False,
        parallel: bool = True,
    ) -> None:
        """`functions`: the JSON schemas of parameters, by name. `parallel`: allow several calls."""
        self._functions, self._sure, self._parallel = functions, sure, parallel
        self._steps: Callable[[_Source], _Parts] = self._xml if form == "xml" else self._json
        # Models that write XML sometimes leave the first tag out.
        bare = [f"{FUNCTION}{name}>" for name in functions] if form == "xml" else []
        self._openings = [OPEN_CALL, *bare]
        self._held = ""
        self._source: _Source | None = None
        self._before = ""  # white space before the call, and its tag
        self._parts: _Parts
        self._kept: list[str] = []
        self._named = False  # the first part of the call is out
        self.n_calls = 0

    @property
    def done(self) -> bool:
        """Whether the answer is complete: it has a call, and may have only one."""
        return self.n_calls > 0 and not self._parallel

    def feed(self, text: str, final: bool = False) -> list[Piece]:
        """Add text; return the pieces that are certain by now. `final`: the text is complete."""
        self._held += text
        pieces: list[Piece] = []
        while not self.done and (self._source or self._begin(pieces, final)):
            if not self._go_on(pieces, final):
                break
        return pieces

    def _begin(self, pieces: list[Piece], final: bool) -> bool:
        """Give out the text up to the next call; False: no call has begun."""
        starts = [(at, mark) for mark in self._openings if (at := self._held.find(mark)) >= 0]
        if not starts:
            self._give_text(pieces, final)
            return False
        at, mark = min(starts)
        text = self._held[:at].rstrip()
        if text and not self._sure:
            pieces.append(Piece(text))
        read = at + len(mark) if mark == OPEN_CALL else at
        self._before, self._held = self._held[len(text) : read], self._held[read:]
        self._source, self._kept, self._named = _Source(), [], False
        self._parts = self._steps(self._source)
        return True

    def _give_text(self, pieces: list[Piece], final: bool) -> None:
        """Give out what is certainly text: no white space before a call or after the last call."""
        sure = len(self._held)
        if not final:
            sure -= overlap(self._held, self._openings)
            sure = len(self._held[:sure].rstrip())
        text, self._held = self._held[:sure], self._held[sure:]
        if (text.strip() or not self.n_calls) and text and not self._sure:
            pieces.append(Piece(text))

    def _go_on(self, pieces: list[Piece], final: bool) -> bool:
        """Read on in the open call; False: its text is not complete."""
        source = self._source
        assert source
        source.text, source.final, self._held = source.text + self._held, final, ""
        try:
            for part in self._parts:
                if part is None:
                    break
                self._kept.append(part)
            else:
                self._source, self._held = None, source.text[source.at :]
        except _Broken:
            if not self._sure:
                self._give_up(pieces, source)
                return True
            self._source = None  # the answer was cut off
        if self._sure or not self._source:
            self._give_call(pieces)
        self.n_calls += self._named and not self._source
        return not self._source

    def _give_call(self, pieces: list[Piece]) -> None:
        """Give out the new parts of the call."""
        if not self._named and any(self._kept):
            name, self._named = self._kept.pop(0), True
            pieces.append(CallPiece(self.n_calls, f"call_{secrets.token_hex(12)}", name))
        arguments = "".join(self._kept)
        if arguments:
            pieces.append(CallPiece(self.n_calls, arguments=arguments))
        self._kept = []

    def _give_up(self, pieces: list[Piece], source: _Source) -> None:
        """Give out the opening of a broken call as text."""
        bare = 0 if self._before.endswith(OPEN_CALL) else 1
        pieces.append(Piece(self._before + source.text[:bare]))
        self._source, self._held = None, source.text[bare:]

    # -- the two forms -------------------------------------------------------------------------

    def _schema(self, name: str) -> Mapping[str, Any]:
        """The schema of a function's parameters."""
        if name not in self._functions:
            raise _Broken
        return self._functions[name]

    def _xml(self, source: _Source) -> _Parts:
        yield from source.mark(FUNCTION)
        name = yield from source.until(">")
        schema = self._schema(name)
        yield name
        before = "{"
        while (yield from source.mark(PARAMETER, END_FUNCTION, CLOSE_CALL)) == PARAMETER:
            key = yield from source.until(">")
            yield f"{before}{to_json(key)}: "
            before = ", "
            types = types_of(schema, key)
            if types == {"string"}:
                yield '"'
                try:
                    for part in source.value(self._sure):
                        yield part and to_json(part)[1:-1]
                except _Broken:
                    yield to_json(source.take(len(source.text)))[1:-1]
                    raise
                yield '"'
            else:
                parts: list[str] = []
                try:
                    yield from _collected(source.value(self._sure), parts)
                except _Broken:
                    yield "".join(parts) + source.take(len(source.text))
                    raise
                yield to_json(typed("".join(parts), types))
        yield "{}" if before == "{" else "}"
        if not source.text[: source.at].endswith(CLOSE_CALL):
            yield from source.mark(CLOSE_CALL, needed=False)

    def _json(self, source: _Source) -> _Parts:
        if not self._sure:
            parts: list[str] = []
            yield from _collected(source.object(), parts)
            yield from self._whole("".join(parts))
        else:
            while not (header := _HEADER.match(source.text, source.at)):
                source.check(True)
                yield None
            name = json.loads(header[1])
            self._schema(name)
            yield name
            source.at = header.end()
            yield from source.object()
            yield from source.mark("}", needed=False)
        yield from source.mark(CLOSE_CALL, needed=False)

    def _whole(self, text: str) -> Iterator[str]:
        """The name and the arguments of a complete call in JSON."""
        try:
            call = json.loads(text)
            name, arguments = call.get("name"), call.get("arguments", call.get("parameters", {}))
            if isinstance(arguments, str):
                arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            raise _Broken from None
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise _Broken
        self._schema(name)
        yield name
        yield to_json(arguments)


def _collected(parts: _Parts, into: list[str]) -> Iterator[None]:
    """Collect the parts; yield None whenever more text is needed."""
    for part in parts:
        if part is None:
            yield None
        else:
            into.append(part)


# -- types of parameters -----------------------------------------------------------------------


def types_of(schema: Mapping[str, Any], key: str) -> frozenset[str]:
    """The types that an object's schema allows for the property `key`."""
    found = resolved(schema, schema)
    properties = found.get("properties") if isinstance(found, Mapping) else None
    one = properties.get(key) if isinstance(properties, Mapping) else None
    return _types(one, schema, 0) or ANY


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """The schema that `$ref` refers to within `root`; `schema` itself without a usable `$ref`."""
    for _ in range(_DEEPEST):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        found: Any = root
        for word in reference[2:].split("/"):
            name = word.replace("~1", "/").replace("~0", "~")
            found = found.get(name) if isinstance(found, Mapping) else None
        schema = found
    return schema


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> frozenset[str]:
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return ANY
    said = schema.get("type")
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(said, str | list):
        found = frozenset({said} if isinstance(said, str) else map(str, said)) & ANY
    elif isinstance(values, list):
        found = frozenset(map(type_of, values))
    else:
        found = ANY
        for word in ("anyOf", "oneOf", "allOf"):
            each = [_types(one, root, depth + 1) for one in listed(schema.get(word)) or ()]
            if each:
                found &= (
                    frozenset.intersection(*each) if word == "allOf" else frozenset().union(*each)
                )
    return found | {"null"} if schema.get("nullable") is True else found


def to_json(value: Any) -> str:
    """A value as JSON in one line; of a text also as Lark writes it."""
    return json.dumps(value, ensure_ascii=False)


def type_of(value: Any) -> str:
    """The type of a JSON value."""
    if isinstance(value, bool):
        return "boolean"
    kinds = {int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return kinds.get(type(value), "null")


def typed(text: str, types: frozenset[str]) -> Any:
    """The value of a parameter's text as one of these types; else the text itself.

    Another type that fits goes before "string": "null" becomes None if the types include null.
    """
    if types == {"string"}:
        return text
    word = text.strip()
    try:
        value = _WORDS[word] if word in _WORDS else json.loads(word, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return text
    kind = type_of(value)
    if kind == "string" and "string" in types:
        return text
    return value if kind in types or (kind == "integer" and "number" in types) else text


def _refuse(word: str) -> None:
    raise ValueError(word)
