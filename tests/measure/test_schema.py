"""The schema document, and our reading of it against that of ``jsonschema``."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pyllama_mtp.errors import UsageError
from pyllama_mtp.measure.cells import SCHEMA, Sample
from pyllama_mtp.measure.schema import check_record, document

jsonschema = pytest.importorskip("jsonschema", reason="the extra 'test' has it")

spec = importlib.util.spec_from_file_location(
    "measure_schema_records", Path(__file__).parent / "records.py"
)
assert spec and spec.loader
records = importlib.util.module_from_spec(spec)
spec.loader.exec_module(records)

EXAMPLES = [records.run(), records.sample(), records.skipped(), records.dropped()]
EXAMPLES.append(records.profile())


def test_the_document_is_a_json_schema_of_this_version() -> None:
    jsonschema.Draft202012Validator.check_schema(document())
    assert document()["properties"]["schema"] == {
        "const": SCHEMA,
        "description": "The version of this description.",
    }


@pytest.mark.parametrize("record", EXAMPLES, ids=lambda record: record["kind"])
def test_good_records_are_good_for_both(record: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator(document()).validate(record)
    check_record(record)


def test_every_field_of_a_sample_is_described() -> None:
    described = document()["$defs"]["figures"]
    fields = dataclasses.fields(Sample)
    assert [field.name for field in fields] == list(described["properties"])
    required = [field.name for field in fields if _must_be_given(field)]
    assert required == described["required"]


def _must_be_given(field: dataclasses.Field[Any]) -> bool:
    missing = dataclasses.MISSING
    return field.default is missing and field.default_factory is missing


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a record, the record itself left out."""
    parts = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in parts:
        yield (*path, key)
        if isinstance(item, (dict, list)):
            yield from places(item, (*path, key))


VALUES = [None, True, 0, -1, 2.0, 2.5, "", "x", [], ["x"], [1], {}, {"x": 1}, {"x": "y"}]


def damaged(record: dict[str, Any], draw: random.Random) -> Iterator[dict[str, Any]]:
    """The record with one place removed, or replaced by values of every type."""
    for path in places(record):
        for value in [..., *draw.sample(VALUES, 6)]:
            changed = copy.deepcopy(record)
            inner = changed
            for key in path[:-1]:
                inner = inner[key]
            if value is ...:
                del inner[path[-1]]
            else:
                inner[path[-1]] = value
            yield changed


@pytest.mark.parametrize("record", EXAMPLES, ids=lambda record: record["kind"])
def test_damaged_records_get_the_verdict_of_jsonschema(record: dict[str, Any]) -> None:
    validator = jsonschema.Draft202012Validator(document())
    verdicts = {True: 0, False: 0}
    for changed in damaged(record, random.Random(record["kind"])):
        expected = validator.is_valid(changed)
        verdicts[expected] += 1
        try:
            check_record(changed)
            ours = True
        except UsageError:
            ours = False
        assert ours == expected, changed
    assert min(verdicts.values()) >= 5, "both verdicts must occur"
