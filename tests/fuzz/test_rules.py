"""Rules of the validator against wrong text or unbounded memory, not against crashes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fuzzkit.document import apply, read_document

from pyllama_mtp.errors import ModelFileError
from pyllama_mtp.models.ggufinfo import validate_model_file

_SET: dict[str, Any] = {"op": "set"}


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"key": "qwen35.attention.causal", "type": 7, "value": 0}, "attention.causal is false"),
        ({"key": "qwen35.context_length", "type": 4, "value": 1 << 31}, "positions have 31 bits"),
        ({"key": "qwen35.pooling_type", "type": 4, "value": 9}, "pooling_type is 9"),
        ({"key": "qwen35.rope.freq_base", "type": 6, "value": 0.0}, "rope.freq_base is 0.0"),
        (
            {"key": "qwen35.attention.recurrent_layers", "type": 7, "value": 1},
            "no list of flags, one per block",
        ),
    ],
)
def test_a_rule(edit: dict[str, Any], message: str, demo_file: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=message):
        validate_model_file(_changed(demo_file, tmp_path, [_SET | edit]))


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
    validate_model_file(_changed(demo_file, tmp_path, [_SET | edit]))


def test_an_error_says_where(demo_file: Path, tmp_path: Path) -> None:
    after = demo_file.read_bytes().index(b"qwen35.block_count") + len("qwen35.block_count") + 4
    edit = {"op": "bytes", "at": after - 4, "text": chr(77)}
    path = _changed(demo_file, tmp_path, [edit])
    message = rf"value of 'qwen35\.block_count' has unknown type 77 \(at byte {after}\)"
    with pytest.raises(ModelFileError, match=message):
        validate_model_file(path)


def _changed(demo_file: Path, folder: Path, edits: list[dict[str, Any]]) -> Path:
    path = folder / "changed.gguf"
    path.write_bytes(apply(read_document(demo_file), edits))
    return path
