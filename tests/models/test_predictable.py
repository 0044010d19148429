"""Synthetic models whose heads draft well: what they are made of, and that drafts are accepted."""

from __future__ import annotations

import math
from pathlib import Path

import gguf
import numpy as np
import pytest

from pyllama_mtp import Model, Session, Settings
from pyllama_mtp.errors import UsageError
from pyllama_mtp.llama.context import Context
from pyllama_mtp.llama.contextoptions import ContextOptions
from pyllama_mtp.models.ggufinfo import validate_model_file
from pyllama_mtp.models.shapes import get_shape
from pyllama_mtp.models.synth import write_synthetic

SETTINGS = Settings(n_ctx=256, n_threads=1, draft_n_max=1)


def acceptance(path: Path) -> float:
    """Share of first drafts accepted, over three random prompts."""
    accepted = drafted = 0
    with Model(path) as model, Session(model, SETTINGS) as session:
        for seed in range(3):
            prompt = np.random.default_rng(seed).integers(256, 2000, 16).tolist()
            telemetry = session.generate(prompt, max_tokens=96, ignore_eos=True).run().telemetry
            accepted, drafted = accepted + telemetry.accepted[0], drafted + telemetry.drafted[0]
    return accepted / drafted


@pytest.mark.parametrize("shape", ["tiny", "tiny-moe"])
@pytest.mark.parametrize("tensor_type", ["f16", "q8_0"])
def test_drafts_are_accepted_and_less_so_with_noise(
    shape: str, tensor_type: str, tmp_path: Path
) -> None:
    found = []
    for noise in (0.0, 0.5, 10.0):
        path = write_synthetic(
            tmp_path / "m.gguf", shape, tensor_type, head_noise=noise, force=True
        )
        found.append(acceptance(path))
    right, less, wrong = found
    assert right > 0.75 and wrong < 0.2
    assert wrong < less < right


@pytest.mark.parametrize("tensor_type", ["q4_k_m", "iq4_nl"])
@pytest.mark.parametrize("shape", ["tiny", "tiny-moe"])
def test_drafts_are_accepted_in_mixtures(shape: str, tensor_type: str, tmp_path: Path) -> None:
    """Wide enough for blocks of 256, and with enough layers for the last one and the head's to get
    the same types, as they do in the published shapes."""
    wide = {"n_layer": 8, "n_embd": 256, "n_ff_exp" if shape == "tiny-moe" else "n_ff": 512}
    path = write_synthetic(tmp_path / "m.gguf", shape, tensor_type, head_noise=0.0, **wide)
    assert acceptance(path) > 0.5


@pytest.mark.parametrize("shape", ["tiny", "tiny-moe"])
@pytest.mark.parametrize("tensor_type", ["f16", "q8_0"])
@pytest.mark.parametrize("layers", ["attention", "recurrent"])
def test_the_trunk_keeps_a_trace_of_what_came_before(
    shape: str, tensor_type: str, layers: str, tmp_path: Path
) -> None:
    """The outputs of both kinds of layers are small, and not zero."""
    path = write_synthetic(tmp_path / "m.gguf", shape, tensor_type, head_noise=0.0)
    other = "ssm_out" if layers == "attention" else "attn_output"
    reader = gguf.GGUFReader(path, "r+")
    for tensor in reader.tensors:
        if f".{other}." in tensor.name:
            tensor.data[:] = 0
    del reader
    options = ContextOptions(n_ctx=64, n_batch=16, n_ubatch=16, n_threads=1)
    logits = []
    with Model(path) as model:
        for first in (300, 301):
            with Context(model, options) as context:
                ones = np.array([0, 0, 0, 1], dtype=np.int8)
                context.decode(np.array([first, 310, 320, 330], dtype=np.int32), 0, ones)
                logits.append(context.logits(3).copy())
    assert not np.array_equal(*logits)
    assert np.abs(logits[0] - logits[1]).max() < 0.2 * logits[0].std()


@pytest.mark.parametrize("tensor_type", ["f32", "f16", "q8_0", "q4_0"])
@pytest.mark.parametrize("shape", ["tiny", "tiny-moe"])
def test_what_the_head_is_made_of(shape: str, tensor_type: str, tmp_path: Path) -> None:
    path = write_synthetic(tmp_path / "m.gguf", shape, tensor_type, head_noise=0.25, pure=True)
    validate_model_file(path)
    reader = gguf.GGUFReader(path)
    values = {t.name: gguf.dequantize(t.data, t.tensor_type) for t in reader.tensors}
    raw = {t.name: t.data.tobytes() for t in reader.tensors}
    dimensions = get_shape(shape)
    n, head, last = dimensions.n_embd, dimensions.n_layer, dimensions.n_layer - 1
    passed = values[f"blk.{head}.nextn.eh_proj.weight"]
    assert passed.shape == (n, 2 * n)
    assert np.allclose(passed[:, :n], np.eye(n), atol=2e-3)
    assert passed[:, n:].std() == pytest.approx(1 / math.sqrt(2 * n), rel=0.05)
    ffn = [name for name in raw if name.startswith(f"blk.{head}.ffn_")]
    assert len(ffn) == (8 if dimensions.n_expert else 3)
    for name in ffn:
        assert raw[name] == raw[name.replace(f"blk.{head}.", f"blk.{last}.")], name
    assert (values[f"blk.{head}.nextn.hnorm.weight"] > 0).all()
    field = reader.get_field("pyllama_mtp.synthetic.head_noise")
    assert field and field.contents() == 0.25


def test_rare_tokens_have_short_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The border may lie inside a chunk that is written at once."""
    monkeypatch.setattr("pyllama_mtp.models.synth.COMMON", 1000)
    path = write_synthetic(tmp_path / "m.gguf", "tiny", "q8_0", head_noise=0.0)
    embeddings = next(t for t in gguf.GGUFReader(path).tensors if t.name == "token_embd.weight")
    norms = np.linalg.norm(gguf.dequantize(embeddings.data, embeddings.tensor_type), axis=1)
    assert norms[:1000].mean() == pytest.approx(2 * norms[1000:].mean(), rel=0.02)
    assert norms[:1000].min() > norms[1000:].max()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head_noise": -0.1}, "head noise is -0.1"),
        ({"head_noise": math.nan}, "head noise is nan"),
        ({"head_noise": 0.1, "n_mtp": 0}, "n_mtp"),
    ],
)
def test_what_cannot_be_made(options: dict[str, object], message: str, tmp_path: Path) -> None:
    chosen = {"tensor_type": "q8_0", **options}
    with pytest.raises(UsageError, match=message):
        write_synthetic(tmp_path / "m.gguf", "tiny", **chosen)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
