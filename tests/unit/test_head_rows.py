"""Rows of a model's LM head, as the draft head takes them from its file."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from pyllama_mtp.drafting.head import HeadRows
from pyllama_mtp.errors import ModelFileError
from pyllama_mtp.models.ggufinfo import read_gguf
from pyllama_mtp.models.synth import write_synthetic

from ..trimmed import head_rows, write_bare

IDS = np.array([0, 1, 7, 1000, 2046, 2047], dtype=np.int32)


def rows_by_gguf(path: Path, name: str) -> tuple[int, np.ndarray[Any, Any]]:
    """Type and rows of a tensor as the gguf package reads them, as bytes."""
    (tensor,) = (t for t in gguf.GGUFReader(path).tensors if t.name == name)
    data = np.ascontiguousarray(tensor.data)
    return int(tensor.tensor_type), data.view(np.uint8).reshape(len(data), -1)


def assert_rows(found: HeadRows, path: Path, name: str, ids: Any) -> None:
    number, rows = rows_by_gguf(path, name)
    assert found.type == number
    assert found.data.dtype == np.uint8 and found.data.flags.c_contiguous
    assert type(found.data) is np.ndarray and found.data.base is None, "a copy: the file is closed"
    assert np.array_equal(found.data, rows[ids])


@pytest.mark.parametrize("kind", ["f32", "f16", "q8_0", "q4_0", "iq4_nl"])
def test_rows_are_those_of_the_file(tmp_path: Path, kind: str) -> None:
    path = write_synthetic(tmp_path / "m.gguf", "tiny", kind, pure=True)
    found = head_rows(path, IDS)
    assert_rows(found, path, "token_embd.weight", IDS)
    assert found.type == gguf.GGMLQuantizationType[kind.upper()]
    assert len({row.tobytes() for row in found.data}) == len(IDS)


def test_rows_come_in_the_order_of_the_ids(demo_file: Path) -> None:
    for ids in (IDS[::-1], np.array([5, 5, 3], np.int32), np.array([], np.int32)):
        assert_rows(head_rows(demo_file, ids), demo_file, "token_embd.weight", ids)
    info = read_gguf(demo_file)
    assert_rows(head_rows(info, IDS), demo_file, "token_embd.weight", IDS)


def test_the_head_of_a_model_that_is_not_tied(moe_file: Path) -> None:
    assert_rows(head_rows(moe_file, IDS), moe_file, "output.weight", IDS)


@pytest.mark.parametrize("kind", ["Q2_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "BF16"])
def test_the_block_has_a_head_of_its_own(tmp_path: Path, kind: str) -> None:
    """Files of other makers have types that `synth` does not write."""
    quant = gguf.GGMLQuantizationType[kind]
    block, block_bytes = gguf.GGML_QUANT_SIZES[quant]
    data = np.random.default_rng(0).integers(0, 256, (40, 512 // block * block_bytes), np.uint8)
    own = "blk.2.nextn.shared_head_head.weight"
    tensors = {name: (data[::-1].copy(), quant) for name in ("output.weight", "token_embd.weight")}
    tensors["blk.1.nextn.shared_head_head.weight"] = tensors["output.weight"]
    path = write_bare(tmp_path / "m.gguf", ["a"], [1], ["a b"], {**tensors, own: (data, quant)})
    ids = np.array([0, 17, 39], np.int32)
    found = head_rows(path, ids)
    assert found.type == int(quant)
    assert np.array_equal(found.data, data[ids])


def test_rows_that_a_file_has_not(demo_file: Path, tmp_path: Path) -> None:
    for ids in ([0, 2048], [-1, 5]):
        message = f"token_embd.weight has 2048 rows, wanted are {ids[0]} to {ids[1]}"
        with pytest.raises(ModelFileError, match=message):
            head_rows(demo_file, np.array(ids, np.int32))
    tensors = {"output_norm.weight": (np.ones(32, np.float32), None)}
    with pytest.raises(ModelFileError, match="has no LM head"):
        head_rows(write_bare(tmp_path / "m.gguf", ["a"], [1], ["a b"], tensors), IDS)


def test_a_type_whose_blocks_do_not_fit_a_row(tmp_path: Path) -> None:
    path = write_synthetic(tmp_path / "m.gguf", "tiny", "q8_0")
    data, name = bytearray(path.read_bytes()), b"token_embd.weight"
    at = data.index(struct.pack("<Q", len(name)) + name) + 8 + len(name) + 4 + 16
    assert struct.unpack_from("<I", data, at) == (gguf.GGMLQuantizationType.Q8_0,)
    struct.pack_into("<I", data, at, gguf.GGMLQuantizationType.Q4_K)
    path.write_bytes(data)
    with pytest.raises(ModelFileError, match="has rows of 128, Q4_K needs multiples of 256"):
        head_rows(path, IDS)


def test_a_file_that_became_shorter_or_went_away(tmp_path: Path) -> None:
    path = write_synthetic(tmp_path / "m.gguf", "tiny", "q8_0")
    info = read_gguf(path)
    os.truncate(path, 1000)
    with pytest.raises(ModelFileError, match="it has become shorter"):
        head_rows(info, IDS)
    path.unlink()
    with pytest.raises(ModelFileError, match=r"cannot read .*No such file"):
        head_rows(info, IDS)
