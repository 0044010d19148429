"""JSON schemas of parameters, as far as text must be turned into values by them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

#: What a schema that says nothing allows.
ANY = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})
#: How templates write what Python has for JSON's words.
_WORDS = {"True": True, "False": False, "None": None}
#: References within a schema, one to the other.
_DEEPEST = 16


def types_of(schema: Mapping[str, Any], key: str) -> frozenset[str]:
    """Types that the property `key` of an object's schema may have."""
    found = resolved(schema, schema)
    properties = found.get("properties") if isinstance(found, Mapping) else None
    one = properties.get(key) if isinstance(properties, Mapping) else None
    return _types(one, schema, 0) or ANY


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """What a schema's `$ref` refers to within `root`; a schema without one, or with one that leads
    nowhere, is itself."""
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
            each = [_types(one, root, depth + 1) for one in _listed(schema.get(word))]
            if each:
                found &= (
                    frozenset.intersection(*each) if word == "allOf" else frozenset().union(*each)
                )
    return found | {"null"} if schema.get("nullable") is True else found


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def type_of(value: Any) -> str:
    """The type of a JSON value."""
    if isinstance(value, bool):
        return "boolean"
    kinds = {int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return kinds.get(type(value), "null")


def typed(text: str, types: frozenset[str]) -> Any:
    """The value that a parameter's text is, where it may have these types; as a last resort, text.

    Text that may be a string and is another value that it may be is that value: "null", say.
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
