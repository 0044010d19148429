"""Images over HTTP, as OpenAI's clients send them."""

from __future__ import annotations

import base64
import io
import resource
import shutil
from argparse import Namespace
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

from ..processes import start as start_process
from ..unit.test_imagefile import bomb
from .conftest import Running, Start
from .support import question, url

Image = pytest.importorskip("PIL.Image")


def answer(server: Running, seed: int) -> str:
    got = server.answer(question(url(seed)), max_tokens=12)
    return str(got.choices[0].message.content)


def test_clients_send_images_at_once(start: Start, demo: Model, vision: Vision) -> None:
    """Ten clients with two images between them get the texts that a session of one gives, in a
    stream, too; the next turn does not process the image again."""
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
    chunks = server.answer(question(url(0)), max_tokens=12, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == wanted[0]
    said = {"role": "assistant", "content": wanted[0]}
    told = [*question(url(0)), said, {"role": "user", "content": "And?"}]
    usage = server.answer(told, max_tokens=4).usage
    assert usage.prompt_tokens_details.cached_tokens > 20


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
            {"type": "text", "text": "<__media__>"}, question(url(0))[0]["content"][1],
        ]}], "2 markers"),
    ]  # fmt: skip
    for served, messages, reason in cases:
        with pytest.raises(openai.BadRequestError, match=reason):
            served.answer(messages, max_tokens=4)
    assert server.text("a", 4), "the server goes on"


def data_url(kind: str, data: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def picture(kind: str, size: int) -> bytes:
    """The file of a square picture of noise."""
    out = io.BytesIO()
    pixels = np.random.default_rng(1).integers(0, 255, (size, size, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(out, kind)
    return out.getvalue()


@pytest.mark.long
def test_hostile_images_take_no_memory(demo_file: Path, demo: Model, tmp_path: Path) -> None:
    """Each is a 400 that says what to do, and after each the server's memory is as before."""
    model = shutil.copy(demo_file, tmp_path)
    write_synthetic_mmproj(tmp_path / "mmproj-F16.gguf", demo.n_embd_inp)
    large, jpeg = picture("BMP", 2400), picture("JPEG", 500)
    assert len(large) > 15e6
    cases = {
        data_url("bmp", large): "tokens; this server has room for 512",
        data_url("png", bomb(50_000, 50_000)): "67 million pixels, 16384 on a side; scale it down",
        data_url("png", b"This is a text. " * 1000): "not an image of the formats JPEG, PNG",
        data_url("jpeg", jpeg[: len(jpeg) // 2]): "the image is damaged",
    }
    words = ("--port", "0", "--model", model, "--threads", "1", "--n-ctx", "512")
    process = start_process("serve", *words, stderr=None, text=True)
    try:
        address = process.stdout.readline().split()[-1]

        def ask(image: str) -> httpx.Response:
            body = {"messages": question(image), "max_tokens": 2}
            return httpx.post(f"{address}/chat/completions", json=body)

        def resident() -> int:
            pages = Path(f"/proc/{process.pid}/statm").read_text().split()[1]
            return int(pages) * resource.getpagesize()

        before = list[int]()
        for i in range(4):
            for image, reason in cases.items():
                got = ask(image)
                assert got.status_code == 400 and reason in got.json()["error"]["message"], got.text
            before.append(resident())
            assert ask(url(i)).status_code == 200, "the server goes on"
        assert before[-1] - before[1] < len(large) / 2, before  # the first ones warm up
    finally:
        process.kill()
        process.wait()


def test_an_encoder_that_only_lies_there_stops_nothing(demo_file: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "mmproj.gguf"
    damaged.write_bytes(b"GGUF")
    with Model(shutil.copy(demo_file, tmp_path)) as model:
        with options.open_vision(Namespace(mmproj=None, n_threads=1), model, False) as vision:
            assert vision is None
        named = options.open_vision(Namespace(mmproj=damaged, n_threads=1), model, False)
        with pytest.raises(PyllamaMtpError), named:
            pass
