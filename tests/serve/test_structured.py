"""Answers that follow a schema, in the forms of OpenAI's clients and of llama-server's."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import numpy as np
import openai
import pytest

from pyllama_mtp.sampling.sampler import Constraint

from .conftest import Running
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
    got = shared.answer(chat(QUESTIONS[0]), temperature=temperature, extra_body=given)
    (choice,) = got.choices
    assert choice.finish_reason == "stop"
    jsonschema.validate(json.loads(choice.message.content or ""), SCHEMA)


def test_any_object_and_gbnf(shared: Running) -> None:
    got = shared.answer(chat(QUESTIONS[0]), response_format={"type": "json_object"}, max_tokens=40)
    assert got.choices[0].message.content.startswith("{")
    said = shared.complete("x", extra_body={"grammar": 'root ::= "yes" | "no"'})
    assert re.fullmatch("yes|no", said.choices[0].text)


def test_a_grammar_that_fails_in_mid_answer_ends_only_its_request(
    shared: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may become too complex: its parser is then in an error state, as after a wrong token."""
    usual = Constraint.add

    def add(self: Constraint, token: int) -> None:
        usual(self, token)
        shared.wait_until_busy(2)
        if shared.generator.n_running > 1:
            self._matcher.consume_token(int(np.flatnonzero(~self.allowed())[0]))

    monkeypatch.setattr(Constraint, "add", add)
    failing = {"json_schema": {"type": "string", "minLength": 400}}
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(shared.complete, "x", max_tokens=300, extra_body=failing)
        shared.wait_until_busy(unless=first.done)
        text = shared.text("def", 100)
        with pytest.raises(openai.BadRequestError, match="JSON schema cannot be used"):
            first.result()
    assert text == shared.text("def", 100)
