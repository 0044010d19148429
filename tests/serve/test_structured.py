"""Answers that follow a schema, in the forms of OpenAI's clients and of llama-server's."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import openai
import pytest

from .conftest import NAME, Running
from .support import QUESTIONS, chat

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "size": {"enum": [1, 2, "big"]}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
OPENAI = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}


@pytest.mark.parametrize(
    "given",
    [
        {"response_format": OPENAI},
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"json_schema": SCHEMA},
        {"json_schema": json.dumps(SCHEMA)},
    ],
    ids=["openai", "with json_object", "llama-server", "as text"],
)
@pytest.mark.parametrize("temperature", [0, 1])
def test_json_that_fits(shared: Running, given: dict[str, Any], temperature: int) -> None:
    got = shared.client.chat.completions.create(
        model=NAME, messages=chat(QUESTIONS[0]), temperature=temperature, extra_body=given
    )
    (choice,) = got.choices
    assert choice.finish_reason == "stop"
    jsonschema.validate(json.loads(choice.message.content or ""), SCHEMA)


def test_any_object_and_gbnf(shared: Running) -> None:
    got = shared.client.chat.completions.create(
        model=NAME, messages=chat(QUESTIONS[0]), response_format={"type": "json_object"}, seed=1
    )
    assert (got.choices[0].message.content or "").startswith("{")
    gbnf = {"grammar": 'root ::= "yes" | "no"'}
    said = shared.client.completions.create(model=NAME, prompt="x", seed=1, extra_body=gbnf)
    assert re.fullmatch("yes|no", said.choices[0].text)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"json_schema": {"type": "objec"}}, "JSON schema cannot be used: Invalid type: objec"),
        ({"json_schema": "{"}, "JSON schema is not JSON"),
        ({"json_schema": SCHEMA, "response_format": OPENAI}, "give one of"),
        ({"grammar": "root ::= missing"}, "not valid GBNF"),
        ({"response_format": {"type": "yaml"}}, "response_format is"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "required"),
    ],
)
def test_bad_schemas(shared: Running, given: dict[str, Any], reason: str) -> None:
    with pytest.raises(openai.BadRequestError, match=reason):
        shared.client.completions.create(model=NAME, prompt="x", extra_body=given)
