"""Synthetic models: valid, deterministic, streamed, and never left half-written; their heads draft
well, if that is wanted."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from pyllama_mtp import Model, Session, Settings
from pyllama_mtp.errors import UsageError
from pyllama_mtp.llama.context import Context
from pyllama_mtp.llama.contextoptions import ContextOptions
from pyllama_mtp.memory import HOST
from pyllama_mtp.models.ggufinfo import validate_model_file
from pyllama_mtp.models.shapes import SHAPES, TensorSpec, model_tensors
from pyllama_mtp.models.synth import (
    TENSOR_TYPES,
    Draw,
    synthetic_size,
    synthetic_vocabulary,
    tensor_chunks,
    write_synthetic,
)
from pyllama_mtp.models.tokenizer import byte_alphabet

from ..marks import usual
from ..processes import Cli, RunPython


@pytest.mark.parametrize("tensor_type", TENSOR_TYPES)
@pytest.mark.parametrize("shape", ["tiny", "tiny-moe"])
def test_every_type_is_valid(shape: str, tensor_type: str, tmp_path: Path) -> None:
    path = write_synthetic(tmp_path / "m.gguf", shape, tensor_type, pure=True)
    info = validate_model_file(path)
    assert info.tensor_types.keys() == {tensor_type.upper(), "F32"}
    reader = gguf.GGUFReader(path)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        assert np.isfinite(values).all(), tensor.name


def test_the_vocabulary_of_a_file(demo: Model, demo_file: Path, tmp_path: Path) -> None:
    text = demo.apply_chat_template([{"role": "user", "content": "Grüße, import os\n"}])
    with Model(write_synthetic(tmp_path / "m.gguf", "tiny", "q8_0", vocab=demo_file)) as model:
        assert model.tokenize(text, parse_special=True) == demo.tokenize(text, parse_special=True)
        assert model.chat_template == demo.chat_template


@pytest.mark.long
def test_a_real_vocabulary(real_vocabulary: Path, tmp_path: Path) -> None:
    """Texts become the tokens that the pin's own tests expect."""
    path = write_synthetic(tmp_path / "m.gguf", "tiny", "q8_0", vocab=real_vocabulary)
    texts = Path(f"{real_vocabulary}.inp").read_text(encoding="utf-8")
    wanted = Path(f"{real_vocabulary}.out").read_text().splitlines()
    with Model(path) as model:
        found = [model.tokenize(text) for text in texts.split("\n__ggml_vocab_test__\n")]
        assert found[: len(wanted)] == [[int(token) for token in line.split()] for line in wanted]
        assert model.chat_template


@pytest.mark.parametrize("tensor_type", TENSOR_TYPES)
def test_matrices_have_the_stated_statistics(tensor_type: str) -> None:
    spec = TensorSpec("m.weight", (1024, 1024), "matrix")
    raw = np.frombuffer(
        b"".join(tensor_chunks(spec, tensor_type, 0, Draw(spec.name))), dtype=np.uint8
    )
    kind = gguf.GGMLQuantizationType[tensor_type.upper()]
    rows = raw.reshape(1024, -1)
    values = gguf.dequantize(rows, kind) if tensor_type != "f32" else rows.view("<f4")
    values = values.astype(np.float64)
    assert values.shape == (1024, 1024)
    assert values.std() == pytest.approx(1 / 32, rel=0.01)
    assert abs(values.mean()) < 0.003 / 32 * 3
    if tensor_type == "q8_0":
        assert (rows.reshape(1024, 32, 34)[:, :, 2:] != 0x80).all()


def test_same_seed_same_bytes(tmp_path: Path) -> None:
    paths = [
        write_synthetic(tmp_path / f"{i}.gguf", "tiny", "q4_0", seed)
        for i, seed in enumerate((7, 7, 8))
    ]
    first, again, other = (p.read_bytes() for p in paths)
    assert first == again
    start = gguf.GGUFReader(paths[0]).tensors[0].data_offset
    assert first[start:] != other[start:]


BOUNDED = """
import resource, sys
from pyllama_mtp.models.synth import write_synthetic
mapped = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
limit = mapped + (150 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
write_synthetic(sys.argv[1], "tiny", "f16", n_embd=2048, n_ff=8192, n_layer=2)
"""


@pytest.mark.long
def test_memory_stays_bounded_on_a_large_file(run_python: RunPython, tmp_path: Path) -> None:
    """A 260 MB file in a process that may map only 150 MB more than it starts with."""
    path = tmp_path / "large.gguf"
    done = run_python(BOUNDED, path, env={"OPENBLAS_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert path.stat().st_size > 250 << 20


def test_bad_arguments(tmp_path: Path) -> None:
    for arguments, message in (
        ({"shape": "gpt-5"}, "unknown shape"),
        ({"tensor_type": "q3_k"}, "unknown type"),
        ({"tensor_type": "q4_k_m", "head_type": "q4_k_m"}, "unknown head type"),
        ({"tensor_type": "q4_k_m", "head_type": "q8_0", "n_mtp": 0}, "no MTP head"),
        ({"tensor_type": "q4_k_m", "pure": True}, "one type of f32, f16"),
        ({"tensor_type": "iq2_xs"}, "importance matrix"),
        ({"seed": -1}, "seed is -1"),
        ({"n_layers": 3}, "unknown dimension 'n_layers'"),
        ({"n_layer": "many"}, "expected a whole number"),
        ({"n_layer": 0}, "n_layer is 0"),
        ({"n_layer": 600}, "601 layers"),
        ({"n_head": 3, "n_head_kv": 2}, "n_head 3"),
        ({"ssm_v_heads": 3}, "ssm_v_heads"),
        ({"n_embd": 100, "tensor_type": "q8_0"}, "rows of 100"),
        ({"n_vocab": 300}, "n_vocab is 300"),
        ({"n_vocab": 10_000_000}, "n_vocab is 10000000"),
        ({"head_dim": 4}, "head_dim is 4"),
        ({"n_mtp": 2}, "n_mtp is 2"),
        ({"tied_embeddings": "perhaps"}, "true or false"),
        ({"head_noise": -0.1}, "head noise is -0.1"),
        ({"head_noise": math.nan}, "head noise is nan"),
        ({"head_noise": 0.1, "n_mtp": 0}, "n_mtp"),
    ):
        call = {"shape": "tiny", "tensor_type": "f16", **arguments}
        with pytest.raises(UsageError, match=message):
            write_synthetic(tmp_path / "m.gguf", **call)  # type: ignore[arg-type]
        assert not list(tmp_path.iterdir())


#: Billions of weights, as llama.cpp prints them for the published files: without the head, with it.
PUBLISHED = {
    "qwen3.5-0.8b": (0.75239, None),
    "qwen3.5-2b": (1.88, 1.94),
    "qwen3.5-4b": (4.21, 4.33),
    "qwen3.5-9b": (8.95, 9.20),
    "qwen3.5-397b-a17b": (396.35, None),
    "qwen3.6-27b": (26.90, 27.32),
    "qwen3.6-35b-a3b": (34.66, 35.51),
    "qwen3.8-27b": (26.90, 27.32),
}
#: Gigabytes of published files.
GIGABYTES = {("qwen3.6-35b-a3b", "iq4_nl"): 20.0, ("qwen3.8-27b", "q8_0"): 29.05}


def test_the_published_shapes_are_all_there() -> None:
    assert PUBLISHED.keys() == {n for n, s in SHAPES.items() if "not published" not in s.source}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name: str) -> None:
    for shape, billions in zip(
        (replace(SHAPES[name], n_mtp=0), SHAPES[name]), PUBLISHED[name], strict=True
    ):
        count = sum(int(np.prod(s.shape, dtype=np.int64)) for s in model_tensors(shape))
        assert billions is None or count / 1e9 == pytest.approx(billions, rel=0.005)
    for (model, tensor_type), gigabytes in GIGABYTES.items():
        if model == name:
            size = synthetic_size(SHAPES[name], tensor_type) / 1e9
            assert size == pytest.approx(gigabytes, rel=0.02)
    assert SHAPES[name].rope_sections == (11, 11, 10, 0)


SOME = ("qwen3.5-0.8b", "qwen3.6-35b-a3b")


@pytest.mark.parametrize("name", usual(*SOME, long=sorted({*PUBLISHED} - {*SOME})))
def test_memory_of_published_shapes(cli: Cli, name: str, tmp_path: Path) -> None:
    """A file with a hole instead of weights takes no room; inspect says what the model needs."""
    path, shape = tmp_path / "m.gguf", SHAPES[name]
    smaller = ("--set", "n_vocab=4096")  # the whole takes seconds to write and read
    cli("synth", path, "--shape", name, "--type", "q4_k_m", "--empty", *smaller)
    assert path.stat().st_blocks * 512 < 4e6 < path.stat().st_size
    said = json.loads(cli("inspect", path, "--json").out)["memory"]
    needed = {way: said[way]["devices"][HOST] for way in ("no_mtp", "mtp")}
    info = validate_model_file(path)
    cells = 8192 * 2 * 2 * shape.n_head_kv * shape.head_dim
    states = shape.ssm_v_heads * shape.ssm_head_dim**2 * 4 * len(shape.recurrent_layers)
    trunk = cells * len(info.attention_layers) + states
    assert needed["no_mtp"]["target_context"] == pytest.approx(trunk, rel=0.1)
    assert needed["mtp"]["weights"] == pytest.approx(info.weight_bytes, rel=0.2)
    assert needed["mtp"]["target_context"] >= trunk + cells


def test_vocabulary_spells_any_text() -> None:
    vocab = synthetic_vocabulary(248320)
    assert len(vocab.tokens) == len(set(vocab.tokens)) == len(vocab.types) == 248320
    assert set(byte_alphabet()) <= set(vocab.tokens)
    assert (vocab.endoftext, vocab.im_end) == (248044, 248046)
    known = set(vocab.tokens)
    for merge in vocab.merges:
        left, right = merge.split(" ")
        assert {left, right, left + right} <= known


# -- heads that draft well -------------------------------------------------------------------------

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
