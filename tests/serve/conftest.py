"""A server on the demo model, in this process, behind a real socket."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import httpx
import openai
import pytest

from pyllama_mtp import Model, Settings
from pyllama_mtp.llama.vision import Vision
from pyllama_mtp.models.mmproj import write_synthetic_mmproj
from pyllama_mtp.serve import app as server
from pyllama_mtp.serve import limits
from pyllama_mtp.serve.answers import Served
from pyllama_mtp.serve.app import build_app
from pyllama_mtp.serve.generator import Generator

NAME = "demo"
#: Seconds after which what should end, or come true, never will; also of calls of httpx.
LIMIT_S = 120
vars(httpx._config.DEFAULT_TIMEOUT_CONFIG).update(httpx.Timeout(LIMIT_S).as_dict())
for name in {"httpx", "httpx2"} & {*sys.modules}:  # each call makes a TLS context, in 20 ms
    transports = vars(sys.modules[f"{name}._transports.default"])
    transports["create_ssl_context"] = cache(transports["create_ssl_context"])


class Running:
    """A server that runs: where it is, and its generator."""

    def __init__(self, generator: Generator, served: Served, port: int, key: str | None) -> None:
        self.generator, self.served = generator, served
        self.url, self.port = f"http://127.0.0.1:{port}", port
        self.client = openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=key or "any", max_retries=0, timeout=LIMIT_S
        )

    def complete(self, prompt: object, **options: Any) -> Any:
        """The client's completion; greedy, if the options do not say otherwise."""
        usual: dict[str, Any] = {"model": NAME, "prompt": prompt, "temperature": 0}
        return self.client.completions.create(**{**usual, **options})

    def answer(self, messages: object, **options: Any) -> Any:
        """The client's answer to a chat; greedy, if the options do not say otherwise."""
        usual: dict[str, Any] = {"model": NAME, "messages": messages, "temperature": 0}
        return self.client.chat.completions.create(**{**usual, **options})

    def text(self, prompt: str, max_tokens: int = 8) -> str:
        """A greedy answer of `max_tokens` tokens."""
        got = self.complete(prompt, max_tokens=max_tokens, extra_body={"ignore_eos": True})
        return str(got.choices[0].text)

    def post(self, path: str, body: object) -> httpx.Response:
        """The answer to a request."""
        return httpx.post(self.url + path, json=body)

    def chat(self, messages: object, **options: Any) -> Any:
        """The greedy answer to a chat, as JSON."""
        body = {"messages": messages, "temperature": 0, **options}
        got = self.post("/v1/chat/completions", body)
        assert got.status_code == 200, got.text
        return got.json()

    def wait_until_busy(self, n: int = 1, unless: Callable[[], bool] = lambda: False) -> None:
        """Wait until `n` requests run or wait, or `unless` is true."""
        deadline = time.monotonic() + LIMIT_S
        while self.generator.n_running + self.generator.n_waiting < n and not unless():
            assert time.monotonic() < deadline, "the requests do not come"
            time.sleep(0.001)

    def wait_until_idle(self) -> None:
        """Wait until no request runs or waits; abandoned ones end soon."""
        deadline = time.monotonic() + LIMIT_S
        while self.generator.n_running or self.generator.n_waiting:
            assert time.monotonic() < deadline, "the server is still busy"
            time.sleep(0.01)


Start = Callable[..., Running]


@contextlib.contextmanager
def running(
    model: Model,
    *,
    n_sequences: int = 4,
    max_queue: int = 64,
    max_tokens: int | None = None,
    api_key: str | None = None,
    strict_model: bool = False,
    vision: Vision | None = None,
    image_urls: bool = False,
    origins: Sequence[str] = (),
    hosts: Sequence[str] = (),
    largest_body: int = limits.BODY,
    **options: object,
) -> Iterator[Running]:
    chosen = {"n_ctx": 512, "n_batch": 48, "n_ubatch": 32, "n_threads": 1, "draft_n_max": 3}
    settings = Settings(**{**chosen, **options})  # type: ignore[arg-type]
    generator = Generator(model, settings, n_sequences, max_queue)
    served = Served(
        *(model, NAME, generator.n_ctx, max_tokens),
        *("fp", 1_700_000_000),
        strict_model=strict_model,
        vision=vision,
        image_urls=image_urls,
    )
    listening = server.listen("127.0.0.1", 0)
    app = build_app(generator, served, api_key, origins, hosts, largest_body)
    http = server.Server(app, generator)
    generator.start()
    threading.Thread(target=http.run, name=NAME, args=([listening],), daemon=True).start()
    while not http.started:
        time.sleep(0.005)
    try:
        yield Running(generator, served, listening.getsockname()[1], api_key)
    finally:
        http.should_exit = True
        generator.end(0)
        generator.join(LIMIT_S)
        assert not generator.is_alive(), "the server does not end"


@pytest.fixture(scope="module", autouse=True)
def all_end() -> Iterator[None]:
    """A module waits for its servers; a test does not: uvicorn looks ten times a second."""
    yield
    for thread in threading.enumerate():
        if thread.name == NAME:
            thread.join(LIMIT_S)
            assert not thread.is_alive(), "the server does not end"


@pytest.fixture
def start(demo: Model) -> Iterator[Start]:
    """Starts servers; they end with the test."""
    with contextlib.ExitStack() as stack:
        yield lambda **options: stack.enter_context(running(demo, **options))


@pytest.fixture(scope="module")
def vision(demo: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vision]:
    """An image encoder of random weights."""
    path = write_synthetic_mmproj(tmp_path_factory.mktemp("vision") / "mm.gguf", demo.n_embd_inp)
    with Vision(demo, path, n_threads=1) as found:
        yield found


@pytest.fixture(scope="module")
def shared(demo: Model) -> Iterator[Running]:
    """A server for the tests of a module."""
    with running(demo) as found:
        yield found
