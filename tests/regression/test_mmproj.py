"""Files of image encoders: what is damaged or does not fit is an error, and ends no process."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter

from pyllama_mtp import IMAGE_MARKER, Model, Session, Settings, Vision
from pyllama_mtp.errors import ModelFileError, UsageError
from pyllama_mtp.models.mmproj import (
    Tower,
    find_mmproj,
    fitting_mmprojs,
    read_mmproj,
    write_synthetic_mmproj,
)

from ..conftest import loading_at_once
from ..marks import usual
from ..plain import write_model
from ..trimmed import add_values, finish


@pytest.fixture
def mmproj(demo: Model, tmp_path: Path) -> Path:
    return write_synthetic_mmproj(tmp_path / "mmproj.gguf", demo.n_embd_inp)


def test_files_that_do_not_fit(demo: Model, demo_file: Path, mmproj: Path, tmp_path: Path) -> None:
    other = write_synthetic_mmproj(tmp_path / "other.gguf", demo.n_embd_inp + 1)
    audio = tmp_path / "audio.gguf"
    writer = GGUFWriter(audio, "clip")
    writer.add_bool("clip.has_audio_encoder", True)
    finish(writer, {})
    cases = [
        (other, f"models of width {demo.n_embd_inp + 1}"),
        (demo_file, "not an mmproj file"),
        (audio, "encoder of audio"),
        (tmp_path / "none.gguf", "no such"),
    ]
    for path, reason in cases:
        with pytest.raises(ModelFileError, match=reason):
            Vision(demo, path)


def write_other_tower(
    path: Path, n_embd: int, kind: str = "lightonocr", **shapes: tuple[int, ...]
) -> Path:
    """An encoder of LightOnOCR or Gemma 3 with random weights; or one that says it is another."""
    width, n_ff = 32, 64
    writer = GGUFWriter(path, "clip")
    switches = {"has_vision_encoder": True, "use_silu": True, "projector_type": kind}
    numbers = {
        **{"projection_dim": n_embd, "embedding_length": width, "feed_forward_length": n_ff},
        **{"attention.head_count": 2, "block_count": 1, "patch_size": 16, "image_size": 256},
        **{"attention.layer_norm_epsilon": 1e-5, "image_mean": [0.5] * 3, "image_std": [0.5] * 3},
    }
    add_values(writer, {f"clip.{name}": value for name, value in switches.items()})
    add_values(writer, {f"clip.vision.{name}": value for name, value in numbers.items()})
    tensors: dict[str, tuple[int, ...]] = {
        "v.patch_embd.weight": (width, 3, 16, 16),
        **{f"v.blk.0.attn_{part}.weight": (width, width) for part in ("q", "k", "v", "out")},
        **{f"v.blk.0.ffn_{part}.weight": (n_ff, width) for part in ("gate", "up")},
        "v.blk.0.ffn_down.weight": (width, n_ff),
        **{f"v.blk.0.{name}.weight": (width,) for name in ("ln1", "ln2")},
        **{"mm.1.weight": (n_embd, width), "mm.2.weight": (n_embd, n_embd)},
        # Gemma 3 has these two instead.
        **{"mm.input_projection.weight": (width, n_embd), "mm.soft_emb_norm.weight": (width,)},
    }
    rng, drawn = np.random.default_rng(3), {}
    for name, shape in tensors.items():
        last = name.removesuffix(".weight").rpartition(".")[2]
        numbers_of = rng.standard_normal(shapes.get(last, shape), dtype=np.float32)
        drawn[name] = numbers_of / np.sqrt(shape[-1], dtype=np.float32)
    finish(writer, drawn)
    return path


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    path = write_model(tmp_path_factory.mktemp("llama") / "model.gguf", "llama")
    with loading_at_once():
        model = Model(path)
    with model:
        yield model


def test_another_tower(llama: Model, tmp_path: Path) -> None:
    """A tower that upstream knows works in the same way, after a child process has tried it; drafts
    from the text change nothing. A token is a patch."""
    picture = np.random.default_rng(1).integers(0, 255, (96, 160, 3), dtype=np.uint8)
    path = write_other_tower(tmp_path / "mmproj.gguf", llama.n_embd_inp)
    texts = []
    with Vision(llama, path, n_threads=1) as vision:
        prompt = vision.prompt(f"abc {IMAGE_MARKER} abc", [picture])
        other = vision.prompt(f"abc {IMAGE_MARKER} abc", [255 - picture])
    image = prompt.images[0].image
    assert image.n_tokens == image.n_positions > 50 and image.positions.shape[1] == 1
    for depth, shown in ((0, prompt), ("auto", prompt), (0, other)):
        settings = Settings(n_ctx=256, n_threads=1, draft_n_max=depth)
        with Session(llama, settings) as session:
            texts.append(session.generate(shown, max_tokens=30, ignore_eos=True).run().tokens)
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("changes", "reason"),
    usual(
        ({"kind": "gemma3"}, "of its kind, gemma3, need attention in both directions"),
        ({"attn_q": (7, 9)}, "GGML_ASSERT|the process that tried to load it"),
        long=[
            ({"kind": "nonsense"}, "unknown projector type|nonsense"),
            ({"kind": "pixtral"}, "img_break"),
            ({"n_embd": 80}, "mismatch between text model"),
        ],
    ),
)
def test_other_towers_that_do_not_work(
    llama: Model, tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    """Whatever upstream does with them, this process goes on."""
    path = write_other_tower(tmp_path / "mmproj.gguf", **{"n_embd": llama.n_embd_inp, **changes})
    with pytest.raises(ModelFileError, match=reason):
        Vision(llama, path)


def test_an_encoder_beside_the_model(mmproj: Path, demo: Model, tmp_path: Path) -> None:
    model = mmproj.with_name("model.gguf")
    assert find_mmproj(model) == mmproj
    with Model(shutil.copy(demo.path, model), mtp=False) as found, Vision(found) as vision:
        assert vision.path == mmproj
        (tmp_path / "alone").mkdir()
        found.path = tmp_path / "alone" / "model.gguf"
        with pytest.raises(UsageError, match="no mmproj"):
            Vision(found)
    tower = read_mmproj(mmproj)
    assert isinstance(tower, Tower) and tower.n_embd == demo.n_embd_inp
    better = mmproj.with_name("mmproj-f16.gguf")
    better.write_bytes(b"")
    assert find_mmproj(model) == better
    assert find_mmproj("none/model.gguf") is None and find_mmproj("a\0/b") is None


def test_which_of_several_encoders() -> None:
    """The one with the model's name, or with none; F16 first. One of other models is taken only
    where it is the only one: its name may be the base model's."""
    for files, best in (
        (["mmproj-BF16", "mmproj-F16", "mmproj-F32"], "mmproj-F16"),
        (["mmproj-F32", "mmproj-model-bf16", "mmproj-Q8_0"], "mmproj-model-bf16"),
        (["mmproj-F16", "mmproj-Qwen-4B-Q8_0", "mmproj-Qwen-Q8_0"], "mmproj-Qwen-4B-Q8_0"),
        (["mmproj-F16", "mmproj-Qwen-9B-F16", "mmproj-Qwen-4Bx-F16"], "mmproj-F16"),
        (["Qwen-4B.mmproj-bf16", "mmproj-Qwen-9B-F16"], "Qwen-4B.mmproj-bf16"),
        (["mmproj-Base-4B-BF16", "mmproj-Base-4B-F16"], "mmproj-Base-4B-F16"),
        (["mmproj-Qwen-9B-F16", "mmproj-Qwen-27B-F16"], None),
        (["mtp-Qwen-4B-F16", "Qwen-4B-F16", "mmprojector"], None),
    ):
        found = fitting_mmprojs("Qwen-4B-Q4_K_M.gguf", [f"{file}.gguf" for file in files])
        assert (found or [None])[0] == (best and f"{best}.gguf")
