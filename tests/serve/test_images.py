"""Images over HTTP, as OpenAI's clients send them."""

from __future__ import annotations

import base64
import io
import shutil
from argparse import Namespace
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest

from pyllama_mtp import Model, Sampling, Session, Settings
from pyllama_mtp.cli import options
from pyllama_mtp.errors import PyllamaMtpError
from pyllama_mtp.llama.vision import IMAGE_MARKER, Vision
from pyllama_mtp.models.mmproj import write_synthetic_mmproj

from .conftest import Running, Start

Image = pytest.importorskip("PIL.Image")


@pytest.fixture(scope="module")
def vision(demo: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vision]:
    path = write_synthetic_mmproj(tmp_path_factory.mktemp("vision") / "mm.gguf", demo.n_embd_inp)
    with Vision(demo, path, n_threads=1) as found:
        yield found


def url(seed: int) -> str:
    """The data URL of a picture."""
    pixels = np.random.default_rng(seed).integers(0, 255, (64, 96, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"


def question(*urls: str) -> list[dict[str, object]]:
    parts: list[dict[str, object]] = [{"type": "text", "text": "What is this? "}]
    parts += [{"type": "image_url", "image_url": {"url": one}} for one in urls]
    return [{"role": "user", "content": parts}]


def answer(server: Running, seed: int) -> str:
    got = server.answer(question(url(seed)), max_tokens=12)
    return str(got.choices[0].message.content)


def test_clients_send_images_at_once(start: Start, demo: Model, vision: Vision) -> None:
    """Ten clients with two images between them get the texts that a session of one gives."""
    server = start(vision=vision)
    with ThreadPoolExecutor(10) as pool:
        found = list(pool.map(lambda i: answer(server, i % 2), range(10)))
    usual = Settings(n_ctx=512, n_batch=48, n_ubatch=32, n_threads=1, draft_n_max=3)
    with Session(demo, usual, vision=vision) as session:
        wanted = [
            session.chat(question(url(seed)), max_tokens=12, sampling=Sampling()).run().text
            for seed in (0, 1)
        ]
    assert found == wanted * 5


def test_figures_of_images(start: Start, vision: Vision) -> None:
    server = start(vision=vision)
    server.answer(question(url(7)), max_tokens=4)
    said = httpx.get(f"{server.url}/metrics").text
    n = vision.prompt(IMAGE_MARKER, [url(7)]).images[0].image.n_tokens
    assert f"pyllama_mtp_image_tokens_total {n}.0" in said
    assert "pyllama_mtp_image_encode_seconds_total 0.0\n" not in said
    counted = server.post("/tokenize", {"messages": question(url(7))})
    assert counted.status_code == 400 and "not counted" in counted.text


def test_what_is_refused(start: Start, vision: Vision, tmp_path: Path) -> None:
    secret = tmp_path / "secret.png"
    secret.write_bytes(b"")
    server, blind = start(vision=vision), start()
    cases = [
        (server, question("https://example.com/a.png"), "not fetched"),
        (server, question(str(secret)), "not fetched"),
        (server, question("data:image/png;base64,AAAA"), "not an image"),
        (blind, question(url(0)), "without an image encoder"),
        (server, [{"role": "user", "content": [{"type": "input_audio"}]}], "not supported"),
        (server, [{"role": "user", "content": [
            {"type": "text", "text": "<__media__>"}, question(url(0))[0]["content"][1],  # type: ignore[index]
        ]}], "2 markers"),
    ]  # fmt: skip
    for served, messages, reason in cases:
        with pytest.raises(openai.BadRequestError, match=reason):
            served.answer(messages, max_tokens=4)
    assert server.text("a", 4), "the server goes on"


def test_an_encoder_that_only_lies_there_stops_nothing(demo_file: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "mmproj.gguf"
    damaged.write_bytes(b"GGUF")
    with Model(shutil.copy(demo_file, tmp_path)) as model:
        with options.open_vision(Namespace(mmproj=None, n_threads=1), model, False) as vision:
            assert vision is None
        named = options.open_vision(Namespace(mmproj=damaged, n_threads=1), model, False)
        with pytest.raises(PyllamaMtpError), named:
            pass
