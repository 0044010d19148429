"""What once ended the process is refused by name: findings.json holds what was done to the demo.

Each of them ended it, by an assertion, a division by zero or a wrong access, before the validator
had the rule that its message comes from; the last five gave wrong text, or took memory without end.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fuzzkit.document import apply, read_document
from fuzzkit.pool import Case, Pool

from pyllama_mtp.errors import ModelFileError
from pyllama_mtp.models.ggufinfo import validate_model_file

FINDINGS: list[dict[str, Any]] = json.loads(
    Path(__file__).with_name("findings.json").read_text(encoding="utf-8")
)


@pytest.fixture(scope="module")
def outcomes(demo_file: Path) -> dict[int, Any]:
    """The outcomes by index; a worker that dies is replaced."""
    cases = [Case("model", index, f["edits"]) for index, f in enumerate(FINDINGS)]
    with Pool(demo_file, jobs=1) as pool:
        return {outcome.case.seed: outcome for outcome in pool.run(cases)}


@pytest.mark.parametrize("index", range(len(FINDINGS)), ids=[f["name"] for f in FINDINGS])
def test_a_finding_is_refused(index: int, outcomes: dict[int, Any]) -> None:
    outcome = outcomes[index]
    assert outcome.outcome == "refused by the validator", outcome.detail
    assert FINDINGS[index]["message"] in outcome.detail


def changed(demo_file: Path, folder: Path, edit: dict[str, Any]) -> Path:
    path = folder / "changed.gguf"
    path.write_bytes(apply(read_document(demo_file), [edit]))
    return path


@pytest.mark.parametrize(
    "edit",
    [
        {"key": "qwen35.attention.causal", "type": 7, "value": 1},
        {"key": "qwen35.embedding_length_out", "type": 4, "value": 192},
        {"key": "qwen35.pooling_type", "type": 4, "value": 0},
        {"key": "qwen35.rope.scaling.type", "type": 8, "value": "yarn"},
        {"key": "qwen35.attention.head_count_kv", "element": 4, "value": [2] * 7},
        {"key": "qwen35.attention.recurrent_layers", "element": 7, "value": [1, 1, 0, 1, 1, 0, 0]},
        {"key": "qwen35.expert_used_count", "type": 4, "value": 0},
    ],
)
def test_what_is_right_is_not_refused(
    edit: dict[str, Any], demo_file: Path, tmp_path: Path
) -> None:
    """As llama.cpp's converter may write it, for these architectures or in newer releases."""
    validate_model_file(changed(demo_file, tmp_path, {"op": "set", **edit}))


def test_an_error_says_where(demo_file: Path, tmp_path: Path) -> None:
    after = demo_file.read_bytes().index(b"qwen35.block_count") + len("qwen35.block_count") + 4
    path = changed(demo_file, tmp_path, {"op": "bytes", "at": after - 4, "text": chr(77)})
    message = rf"value of 'qwen35\.block_count' has unknown type 77 \(at byte {after}\)"
    with pytest.raises(ModelFileError, match=message):
        validate_model_file(path)
