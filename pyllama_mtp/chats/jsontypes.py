"""Types of parameters in JSON schemas, and text turned into values of these types."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..arguments import listed

#: All types of JSON, which a schema without a type allows.
ANY = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})
#: Python's words for values, as templates write them.
_WORDS = {"True": True, "False": False, "None": None}
#: Most references to follow, one after the other.
_DEEPEST = 16


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
