"""Calls of tools in a model's answer, read in whatever pieces they come."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from pyllama_mtp import Model
from pyllama_mtp.chats.thinking import text_of
from pyllama_mtp.chats.toolcalls import CallPiece, CallReader, Form, typed, types_of

from ..fakes import like

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "metric": {"type": "boolean"},
        "where": {"$ref": "#/$defs/Point"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "any": {},
    },
    "required": ["city"],
    "$defs": {"Point": {"type": "array", "items": {"type": "number"}}},
}
FUNCTIONS: dict[str, Any] = {"weather": WEATHER, "now": {}}


def xml(name: str, **parameters: str) -> str:
    values = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in parameters.items())
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


def hermes(name: str, **arguments: Any) -> str:
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


Found = tuple[str, list[tuple[str, str]]]


def read(form: Form, parts: Iterable[str], **options: Any) -> Found:
    """The text, and (name, arguments) of each call."""
    reader, text, calls = CallReader(FUNCTIONS, form, **options), "", list[list[str]]()
    parts = list(parts)
    for i, part in enumerate([*parts, ""]):
        for piece in reader.feed(part, final=i == len(parts)):
            text += piece
            if isinstance(piece, CallPiece):
                if piece.name is not None:
                    assert piece.number == len(calls) and piece.id
                    calls.append([piece.name, ""])
                assert piece.number == len(calls) - 1
                calls[-1][1] += piece.arguments
    assert reader.n_calls == len(calls)
    return text, [(name, arguments) for name, arguments in calls]


def ways(text: str) -> Iterator[list[str]]:
    """Whole, by characters, in two at each place, at random."""
    yield [text]
    yield list(text)
    yield from ([text[:i], text[i:]] for i in range(1, len(text)))
    for seed in range(20):
        rng = random.Random(seed)
        cuts = sorted(rng.sample(range(len(text)), min(len(text), 9)))
        yield [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def always(form: Form, text: str, **options: Any) -> Found:
    found = [read(form, parts, **options) for parts in ways(text)]
    assert all(one == found[0] for one in found)
    return found[0]


SOURCE = 'def f():\n    return "</parameter>\n"  # é \\ \t\n'
GOOD: list[tuple[Form, str, str, list[tuple[str, Any]]]] = [
    (
        "xml",
        xml("weather", city="Paris", days="3"),
        "",
        [("weather", {"city": "Paris", "days": 3})],
    ),
    (
        "xml",
        "I look.\n\n" + xml("weather", city="") + "\n" + xml("now") + "\n",
        "I look.",
        [("weather", {"city": ""}), ("now", {})],
    ),
    (
        "xml",
        xml("weather", city=SOURCE, metric="True", where="[1, 2.5]", note="null", any="5"),
        "",
        [("weather", {"city": SOURCE, "metric": True, "where": [1, 2.5], "note": None, "any": 5})],
    ),
    # What models leave out, and what has another type than it should.
    ("xml", "<function=now></function>", "", [("now", {})]),
    (
        "xml",
        "a <function=weather>\n<parameter=city>x</parameter></function>\n</tool",
        "a",
        [("weather", {"city": "x"})],
    ),
    (
        "xml",
        "<tool_call><function=weather><parameter=days>many</parameter></tool_call>",
        "",
        [("weather", {"days": "many"})],
    ),
    (
        "json",
        hermes("weather", city='</tool_call>"{'),
        "",
        [("weather", {"city": '</tool_call>"{'})],
    ),
    (
        "json",
        "So:\n" + hermes("now") + "\n" + hermes("weather", where=[[1], {"a": "}"}]) + " Done.",
        "So: Done.",
        [("now", {}), ("weather", {"where": [[1], {"a": "}"}]})],
    ),
    (
        "json",
        '<tool_call>{"arguments": "{\\"city\\": \\"x\\"}", "name": "weather"}</tool_call>',
        "",
        [("weather", {"city": "x"})],
    ),
    ("json", '<tool_call>\n{"name": "now"}', "", [("now", {})]),
]
BROKEN: list[tuple[Form, str]] = [
    ("xml", "no call at all, a < b  "),
    ("xml", "<tool_call>"),
    ("xml", xml("nobody", city="x")),
    ("xml", "<tool_call>\n<function=weather>\nParis\n</function>\n</tool_call> more"),
    ("xml", xml("weather", city="Paris")[:60]),
    ("xml", "<tool_call>\n<function=weather>\n<parameter=city>\nx\n</parameter>\n"),
    ("json", hermes("nobody")),
    ("json", "<tool_call>\n{'name': 'now'}\n</tool_call>"),
    ("json", '<tool_call>\n{"name": "now", "arguments": [1]}\n</tool_call>'),
    ("json", '<tool_call>\n{"name": "now"} and more\n</tool_call>'),
    ("json", "<tool_call>" + '{"a":' * 3000),
    ("json", "<tool_call>" + '{"name": "now", "arguments": ' + "[" * 3000 + "]" * 3000 + "}"),
]


@pytest.mark.parametrize(("form", "text", "content", "calls"), GOOD)
def test_calls(form: Form, text: str, content: str, calls: list[tuple[str, Any]]) -> None:
    found, named = always(form, text)
    assert found == content
    assert [(name, json.loads(arguments)) for name, arguments in named] == calls


@pytest.mark.parametrize(("form", "text"), BROKEN)
def test_what_is_no_call_is_text(form: Form, text: str) -> None:
    parts = ways(text) if len(text) < 1000 else [[text], [text[:2000], text[2000:]]]
    assert all(read(form, one) == (text, []) for one in parts)


def test_a_broken_call_does_not_hide_the_next_one() -> None:
    broken = "<tool_call>\n<function=nobody>\n</function>\n"
    assert always("xml", broken + xml("now")) == (broken.rstrip(), [("now", "{}")])


@pytest.mark.parametrize(("form", "text", "content", "calls"), GOOD[:1] + GOOD[2:3] + GOOD[6:7])
def test_a_sure_call_comes_as_it_is_written(
    form: Form, text: str, content: str, calls: list[tuple[str, Any]]
) -> None:
    assert always(form, text, sure=True) == always(form, text)
    reader = CallReader(FUNCTIONS, form, sure=True)
    came = [[p.arguments for p in reader.feed(c) if isinstance(p, CallPiece)] for c in text]
    steps = [i for i, parts in enumerate(came) if any(parts)]
    assert steps[0] < len(text) * 0.6 and len(steps) > 2, "the arguments come at the end"


@pytest.mark.parametrize("form", ["xml", "json"])
def test_wherever_a_sure_call_is_cut_off(form: Form) -> None:
    values: dict[str, Any] = {"city": 'a "b"', "days": 3}
    if form == "xml":
        text = f"{xml('weather', **{k: str(v) for k, v in values.items()})}\n{xml('now')}"
    else:
        text = f"{hermes('weather', **values)}\n{hermes('now')}"
    whole = read(form, [text], sure=True)[1]
    assert [json.loads(arguments) for _, arguments in whole] == [values, {}]
    for end in range(len(text)):
        found, calls = read(form, list(text[:end]), sure=True)
        assert (found, calls) == read(form, [text[:end]], sure=True) and not found
        for (name, arguments), (other, complete) in zip(calls, whole, strict=False):
            sure = re.split(r"\n|\\n|<", arguments)[0]  # without what of the closing tag has come
            assert name == other and complete.startswith(sure)


def test_one_call_where_there_may_be_no_more() -> None:
    text = xml("now") + "\n" + xml("now")
    reader = CallReader(FUNCTIONS, "xml", parallel=False)
    assert [type(piece) for piece in reader.feed(text)] == [CallPiece, CallPiece]
    assert reader.done and not reader.feed("more", final=True)


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"enum": ["a", 1]}, {"string", "integer"}),
        ({"const": True}, {"boolean"}),
        ({"oneOf": [{"type": "number"}, {"$ref": "#/$defs/Point"}]}, {"number", "array"}),
        ({"allOf": [{"$ref": "#/$defs/Point"}, {"description": "x"}]}, {"array"}),
        ({"type": "string", "nullable": True}, {"string", "null"}),
        ({"$ref": "#/properties/x"}, None),
        ({"$ref": "#/nowhere"}, None),
        (True, None),
        ({"type": 5, "anyOf": 3, "enum": "x"}, None),
    ],
)
def test_types(schema: Any, types: set[str] | None) -> None:
    root = {"properties": {"x": schema}, "$defs": WEATHER["$defs"]}
    found = types_of(root, "x")
    assert found == types if types else len(found) == 7
    assert len(types_of(root, "absent")) == 7


def test_values() -> None:
    optional = frozenset({"string", "null"})
    assert [typed(text, optional) for text in ("None", '"x"', "5")] == [None, '"x"', "5"]
    number = frozenset({"number"})
    assert [typed(text, number) for text in ("5", "1e3", "NaN", "x")] == [5, 1000.0, "NaN", "x"]
    assert typed("[" * 100_000, frozenset({"array"})) == "[" * 100_000
    assert typed("9" * 10_000, frozenset({"integer"})) == "9" * 10_000


def test_tags_that_have_no_text_of_their_own() -> None:
    def piece(token: int, special: bool = False) -> bytes:
        return (b"<tool_call>", b"x", b"<s>")[token] if special else (b"", b"x", b"")[token]

    model = like(Model, piece=piece)
    assert [text_of(model, token) for token in range(3)] == [b"<tool_call>", b"x", b""]


WORDS = (
    *("<tool_call>", "</tool_call>", "<function=now>", "<function=weather>", "</function>", "<"),
    *("<parameter=city>", "<parameter=days>", "</parameter>", "\n", "\n", " ", "a", "5", '"', "\\"),
    *("{", "}", "[", "]", '{"name": "now"', ', "arguments": ', "</", "{}", "}\n</tool_call>", "é"),
    *('<tool_call>{"name": "now"}', '<tool_call>{"name": "weather", "arguments": {"city":'),
)


@pytest.mark.parametrize("form", ["xml", "json"])
def test_whatever_comes(form: Form) -> None:
    """The pieces change nothing, and what is no call is not lost."""
    rng, n_calls = random.Random(0), 0
    for _ in range(1500):
        text = "".join(rng.choices(WORDS, k=rng.randrange(1, 14)))
        found = read(form, [text])
        cut = rng.randrange(len(text) + 1)
        assert read(form, list(text)) == read(form, [text[:cut], text[cut:]]) == found, text
        assert found[1] or found[0] == text
        assert all(isinstance(json.loads(arguments), dict) for _, arguments in found[1]), text
        n_calls += len(found[1])
    assert n_calls > 20
