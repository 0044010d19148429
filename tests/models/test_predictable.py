"""Synthetic models whose heads draft well: what they are made of, and that drafts are accepted."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from pyllama_mtp import Model, Session, Settings
from pyllama_mtp.llama.context import Context
from pyllama_mtp.llama.contextoptions import ContextOptions
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


@pytest.mark.parametrize(("shape", "tensor_type"), [("tiny", "f16"), ("tiny-moe", "q8_0")])
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


@pytest.mark.parametrize(("shape", "tensor_type"), [("tiny", "q4_k_m"), ("tiny-moe", "iq4_nl")])
def test_drafts_are_accepted_in_mixtures(shape: str, tensor_type: str, tmp_path: Path) -> None:
    """Wide enough for blocks of 256, and with enough layers for the last one and the head's to get
    the same types, as they do in the published shapes."""
    wide = {"n_layer": 8, "n_embd": 256, "n_ff_exp" if shape == "tiny-moe" else "n_ff": 512}
    path = write_synthetic(tmp_path / "m.gguf", shape, tensor_type, head_noise=0.0, **wide)
    assert acceptance(path) > 0.5


@pytest.mark.parametrize("layers", ["attention", "recurrent"])
def test_the_trunk_keeps_a_trace_of_what_came_before(layers: str, tmp_path: Path) -> None:
    """The outputs of both kinds of layers are small, and not zero."""
    path = write_synthetic(tmp_path / "m.gguf", "tiny-moe", "q8_0", head_noise=0.0)
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
