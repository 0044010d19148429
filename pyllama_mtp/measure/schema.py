"""Checks a line of a file of measurements against ``schema-2.json``, which describes it in words.

This is the part of JSON Schema (draft 2020-12) that the document uses. The package needs no
validator for it; a test compares its verdicts with those of ``jsonschema``.
"""

from __future__ import annotations

import json
from functools import lru_cache
from importlib import resources
from typing import Any

from pyllama_mtp.errors import UsageError

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}


@lru_cache(maxsize=1)
def document() -> dict[str, Any]:
    """The JSON Schema document."""
    text = resources.files("pyllama_mtp.measure").joinpath("schema-2.json").read_text("utf-8")
    return dict(json.loads(text))


def check_record(record: dict[str, Any]) -> None:
    """Check an object of schema 2.

    Raises:
        UsageError: it does not fit; the message names the place.
    """
    kinds = document()["properties"]["kind"]["enum"]
    kind = record.get("kind")
    if kind not in kinds:
        raise UsageError(f"unknown kind {kind!r}; known are {', '.join(kinds)}")
    problem = _problem(record, document(), "") or _problem(record, document()["$defs"][kind], "")
    if problem:
        raise UsageError(f"not a record of kind {kind}: {problem}")


def _problem(value: Any, rule: dict[str, Any], where: str) -> str | None:
    """What is wrong with `value`, at the place `where`; None if nothing."""
    if "$ref" in rule:
        rule = {**document()["$defs"][rule["$ref"].rpartition("/")[2]], **rule}
    name = where or "the record"
    if "const" in rule and value != rule["const"]:
        return f"{name} is {value!r}, not {rule['const']!r}"
    if "enum" in rule and value not in rule["enum"]:
        return f"{name} is {value!r}, not one of {', '.join(map(str, rule['enum']))}"
    allowed = rule.get("type", [])
    words = [allowed] if isinstance(allowed, str) else allowed
    if words and not any(_is(value, word) for word in words):
        return f"{name} is {value!r:.60}, not {' or '.join(words)}"
    if isinstance(value, (int, float)) and value < rule.get("minimum", value):
        return f"{name} is {value}, the least is {rule['minimum']}"
    if isinstance(value, str) and len(value) < rule.get("minLength", 0):
        return f"{name} is empty"
    if isinstance(value, list):
        parts = [(f"{where}[{i}]", item, rule.get("items")) for i, item in enumerate(value)]
    elif isinstance(value, dict):
        missing = [key for key in rule.get("required", ()) if key not in value]
        if missing:
            return f"{where + ' ' if where else ''}lacks {missing[0]}"
        named, others = rule.get("properties", {}), rule.get("additionalProperties")
        prefix = where + "." if where else ""
        parts = [(prefix + key, item, named.get(key, others)) for key, item in value.items()]
    else:
        return None
    found = (_problem(item, of, place) for place, item, of in parts if of is not None)
    return next((problem for problem in found if problem), None)


def _is(value: Any, word: str) -> bool:
    """Whether a value is of a JSON type. A whole float is an integer, and a bool is no number."""
    if isinstance(value, bool):
        return word == "boolean"
    if word == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES[word])
