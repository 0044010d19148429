"""Rows of the draft head in another type than the file's: cheaper drafts, and the same text."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from pyllama_mtp import Model
from pyllama_mtp.drafting import head as drafthead
from pyllama_mtp.drafting.head import draft_head, set_draft_head
from pyllama_mtp.errors import UsageError
from pyllama_mtp.models.ggufheader import NOT_WEIGHTS, TENSOR_TYPES
from pyllama_mtp.models.ggufinfo import read_gguf
from pyllama_mtp.models.synth import write_synthetic
from pyllama_mtp.settings import HEAD_TYPES

from ..trimmed import head_rows, write_trimmed
from .draftheads import context, logits_of, set_head


def everything(model: Model) -> np.ndarray:
    return np.arange(model.n_vocab, dtype=np.int32)


def values(model: Model) -> np.ndarray:
    """The demo model's LM head as the file has it, in F32."""
    data = head_rows(model.info, everything(model)).data
    return data.view("<f2").astype(np.float32)


def test_every_type_is_one_of_ggmls() -> None:
    """Every head type is one that weights may have."""
    known = {name.lower() for name, _, _ in TENSOR_TYPES.values() if name not in NOT_WEIGHTS}
    assert HEAD_TYPES[0] == "file" and set(HEAD_TYPES[1:]) <= known


@pytest.mark.parametrize("kind", ["f32", "bf16", "q8_0", "q4_0", "q5_1"])
def test_rows_are_what_ggmls_quantizers_make_of_them(demo: Model, kind: str) -> None:
    """Rows are those of the gguf package's quantizers, to the bit."""
    ids = everything(demo)[5:700:3]
    found = head_rows(demo.info, ids, kind)
    number = GGMLQuantizationType[kind.upper()]
    assert found.type == number
    assert found.data.tobytes() == quantize(values(demo)[ids], number).tobytes()


@pytest.mark.parametrize(("stored", "kind"), [("q8_0", "q4_k"), ("q4_0", "q6_k"), ("f32", "q3_k")])
def test_rows_that_are_quantized_already(stored: str, kind: str, tmp_path: Path) -> None:
    """Quantized rows become F32 first."""
    file = tmp_path / "model.gguf"
    write_synthetic(file, "tiny-moe", stored, n_vocab=600, n_embd=256)
    info = read_gguf(file)
    ids = np.arange(0, 600, 7, dtype=np.int32)
    before, after = head_rows(info, ids), head_rows(info, ids, kind)
    wanted = dequantize(before.data, GGMLQuantizationType(before.type)).ravel()
    found = dequantize(after.data, GGMLQuantizationType(after.type)).ravel()
    assert np.corrcoef(wanted, found)[0, 1] > 0.97
    assert np.abs(found - wanted).mean() < 0.2 * np.abs(wanted).mean()


def test_slices(
    demo: Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Many of them make the same rows as one; what takes long says how far it is."""
    ids = everything(demo)[::-1].copy()
    wanted = head_rows(demo.info, ids, "q4_0").data
    monkeypatch.setattr(drafthead, "_SLICE", 100 * demo.n_embd)
    monkeypatch.setattr(drafthead, "_PERIOD_S", -1.0)
    with caplog.at_level(logging.INFO, "pyllama_mtp"):
        assert head_rows(demo.info, ids, "q4_0").data.tobytes() == wanted.tobytes()
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == -(-len(ids) // 100) and "Q4_0: 54 %" in " ".join(said)


@pytest.mark.parametrize("vocab", ["full", 512])
def test_logits_are_those_of_the_converted_rows(demo: Model, vocab: str | int) -> None:
    """An F32 head of the dequantized rows gives them too, to the rounding of activations."""
    head = draft_head(demo.info, vocab, "q8_0")
    rows = head.rows() if head else None
    assert head and rows
    with context(demo) as draft:
        set_draft_head(draft, rows, head.ids)
        found = logits_of(draft)
        values = dequantize(rows.data, GGMLQuantizationType.Q8_0)
        exact = drafthead.HeadRows(0, values.view(np.uint8))
        set_draft_head(draft, exact, head.ids)
        wanted = logits_of(draft)
        np.testing.assert_allclose(found, wanted, rtol=0, atol=0.02 * np.abs(wanted).max())
        set_head(draft, head.ids[::-1][:10][::-1])
        assert logits_of(draft).shape[1] == 10


def test_the_files_own_type_over_the_whole_vocabulary(demo: Model) -> None:
    """Nothing to convert: no second head in memory."""
    assert draft_head(demo.info, "full", "f16") is None
    assert draft_head(demo.info, "full", "file") is None


def test_a_trimmed_head_of_a_file(demo_file: Path, tmp_path: Path) -> None:
    """Is used as it is; rows of the model's own head can be of another type."""
    ids = np.arange(0, 2048, 3, dtype=np.int32)
    info = read_gguf(write_trimmed(demo_file, tmp_path / "trimmed.gguf", ids, ids))
    with pytest.raises(UsageError, match=r"MTP head of .* is used as it is"):
        draft_head(info, "auto", "q4_0")
    head = draft_head(info, 300, "q4_0")
    assert head and head.rows().type == GGMLQuantizationType.Q4_0
