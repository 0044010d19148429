"""Matrices whose prompts begin with an image: sizes, what is measured of it, and who takes it. The
encoder has random weights."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyllama_mtp import Model, Settings, bench
from pyllama_mtp.errors import UsageError
from pyllama_mtp.images import Pixels
from pyllama_mtp.measure.peers import PeerError, PeerRunner
from pyllama_mtp.measure.plan import ImageFile
from pyllama_mtp.measure.prompts import ImageText, Imaging, Picture, Prompts
from pyllama_mtp.measure.runner import Runner, Task
from pyllama_mtp.models.mmproj import write_synthetic_mmproj
from pyllama_mtp.settings import Sampling

from ..cells import made_cell, made_sample

SETTINGS = Settings(n_ctx=256, n_threads=1, draft_n_max=2, ngram=False)
PIXELS: Pixels = np.random.default_rng(5).integers(0, 255, (96, 160, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def mmproj(demo: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_synthetic_mmproj(tmp_path_factory.mktemp("vision") / "mm.gguf", demo.n_embd_inp)


@pytest.fixture(scope="module")
def imaging(demo: Model, mmproj: Path) -> Iterator[Imaging]:
    with Imaging(demo, Picture.read(PIXELS, mmproj), 1) as found:
        yield found


@pytest.fixture(scope="module")
def results(demo: Model, mmproj: Path, tmp_path_factory: pytest.TempPathFactory) -> bench.Results:
    """Text and image side by side; `commands` hold the file."""
    folder = tmp_path_factory.mktemp("results")
    picture = pytest.importorskip("PIL.Image").fromarray(PIXELS)
    picture.save(folder / "photo.png")
    found = bench.matrix(
        *(demo,),
        **{"sizes": 64, "depths": (0, 2), "max_tokens": 8, "repeat": 2, "settings": SETTINGS},
        **{"classes": ("text", "image"), "image": folder / "photo.png", "mmproj": mmproj},
        output=folder / "m.jsonl",
    )
    return bench.Results(found.cells, {"file": str(folder / "m.jsonl")})


def task(prompt: ImageText, settings: Settings = SETTINGS) -> Task:
    return Task(settings, Sampling(), [prompt], 8, len(prompt))


def test_every_sample_encodes_and_says_what_the_image_takes(
    results: bench.Results, imaging: Imaging
) -> None:
    for cell in results:
        assert len(cell.samples) == 2
        for sample in cell.samples:
            assert sample.n_prompt == 64
            assert sample.elapsed_s == pytest.approx(
                sample.prefill_s + sample.encode_s + sample.decode_s
            )
            if cell.prompt_class == "image":
                assert sample.n_image_tokens == imaging.file.n_tokens == 15
                assert sample.encode_s > 0 and 0 < sample.time_s["image"] < sample.prefill_s
                assert sample.prompt_tps < sample.prefill_tps
            else:
                assert (sample.n_image_tokens, sample.encode_s) == (0, 0.0)
                assert "image" not in sample.time_s and cell.image is None


def test_the_file_keeps_the_image(results: bench.Results, mmproj: Path) -> None:
    file = Path(results.commands["file"])
    assert bench.read(file).cells == results.cells
    image = results.select(prompt_class="image").cells[0].image
    assert image is not None
    assert (image.name, image.width, image.height) == ("photo.png", 160, 96)
    assert image.mmproj == mmproj.name and str(mmproj.parent) not in file.read_text()
    again = Picture.read(str(file.with_name("photo.png")))
    assert again.file.sha256 == image.sha256 != Picture.read(PIXELS[::-1]).file.sha256


def test_sizes_are_exact_with_text_that_is_cut_anywhere(demo: Model, imaging: Imaging) -> None:
    odd = ["Zoë's naïve 日本語 🙂🙂 text-with_many.pieces 123456789\n\n\t x;" * 40]
    prompts = Prompts(demo, odd, imaging=imaging)
    for size in range(imaging.n_around + 1, imaging.n_around + 60, 7):
        prompt = prompts.prompt("image", size, size % 3)
        assert isinstance(prompt, ImageText) and len(imaging.encode(prompt)) == len(prompt) == size
    with pytest.raises(UsageError, match=f"give at least {imaging.n_around + 1}, or a smaller"):
        prompts.prompt("image", imaging.n_around, 0)


def test_prompts_of_several_sequences(demo: Model, imaging: Imaging) -> None:
    prompt = Prompts(demo, imaging=imaging).prompt("image", 64, 0)
    assert isinstance(prompt, ImageText)
    runner = Runner(demo, imaging)
    runner.check(SETTINGS, 2)
    runner.begin(1, replace(task(prompt), prompts=[prompt, prompt]))
    runner.advance(1, 1)
    both = runner.finish(1)[0]
    assert (both.n_prompt, both.n_image_tokens, both.n_generated) == (128, 30, 16)


# -- other programs --------------------------------------------------------------------------------


def test_llama_server_gets_the_same_pixels_and_text(peers: Any, mmproj: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    picture = Picture.read(PIXELS, mmproj)
    prompt = ImageText("x" * 100, 115)
    runner = PeerRunner("llama-server", "m.gguf", 0, "", str(mmproj), picture)
    runner.begin(0, replace(task(prompt), warm_up=23))
    sample = runner.finish(0)[0]
    assert sample.n_prompt == 115 and sample.prompt_tps == sample.prefill_tps
    warm_up, request = (one["prompt"] for one in peers.log("request"))
    assert request["prompt_string"] == "<a marker>" + prompt.text
    assert warm_up["prompt_string"] == "<a marker>" + prompt.text[:20]
    for given in (warm_up, request):
        (data,) = given["multimodal_data"]
        assert (np.asarray(image.open(io.BytesIO(base64.b64decode(data)))) == PIXELS).all()
    (arguments,) = peers.log("arguments")
    assert arguments[arguments.index("--mmproj") + 1] == str(mmproj)
    assert "--no-mmproj-offload" in arguments


def test_prompts_are_compared_with_the_time_to_encode_on_both_sides() -> None:
    """Ours: 0.5 s to encode and 1 s of prefill; theirs: 1.25 s for both."""
    image = ImageFile("photo.png", "ab", 160, 96, 15, "mm.gguf", "cd")
    about: dict[str, Any] = {"image": image, "prompt_class": "image", "n_prompt": 100}
    ours = made_sample(100, 8, 100.0, 10.0, encode_s=0.5, time_s={"image": 0.25})
    cells = [
        made_cell(0, [ours], **about),
        made_cell(0, [made_sample(100, 8, 80.0, 10.0)], program="llama-server", **about),
    ]
    table = bench.Results(cells).markdown()
    assert "encoding and prefill ~0.8x, decode ~1.0x" in table
    mine, theirs = (row for row in table.splitlines() if row.startswith("| 100 |"))
    assert "| 15 | 500.0 | 250.0 |" in mine and "| 15 | - | - |" in theirs


def test_llama_bench_takes_none(peers: Any, mmproj: Path) -> None:
    picture = Picture.read(PIXELS, mmproj)
    runner = PeerRunner("llama-bench", "m.gguf", 0, "", str(mmproj), picture)
    with pytest.raises(PeerError, match="llama-bench takes no images"):
        runner.begin(0, task(ImageText("x", 20)))
