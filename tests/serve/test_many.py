"""Many clients at once, some of which hang up: no stream is lost, mixed up or left running."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from pyllama_mtp import Model
from pyllama_mtp.errors import FatalDecodeError, WorkerLostError
from pyllama_mtp.llama.context import Context
from pyllama_mtp.prefixcache import PrefixCache

from .conftest import LIMIT_S, Running, Start
from .support import QUESTIONS, alone, chat, chat_tokens, is_near_tie

CLIENTS, N = 32, 48
#: Every third client hangs up, after so many chunks of an answer that is far from done.
HANG_UP_AFTER, FAR = 3, 8000


def question(number: int) -> str:
    return f"{QUESTIONS[number % len(QUESTIONS)]} ({number})"


def client_of(server: Running, number: int, together: threading.Barrier) -> str | None:
    """A client's text; None when it has hung up."""
    together.wait(LIMIT_S)
    text, hangs_up = "", number % 3 == 0
    more: Any = {"extra_body": {"ignore_eos": True}, "stream": True}
    n_most = FAR if hangs_up else N
    with server.answer(chat(question(number)), max_tokens=n_most, **more) as stream:
        for n, chunk in enumerate(stream):
            if hangs_up and n == HANG_UP_AFTER:
                return None
            text += chunk.choices[0].delta.content or ""
            reason = chunk.choices[0].finish_reason
    assert reason == "length", "the stream has broken off"
    return text


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"draft_vocab": 256}], ids=str)
def test_32_streams_of_which_some_hang_up(
    start: Start, demo: Model, options: dict[str, object]
) -> None:
    """Also with a draft vocabulary, which all streams change."""
    server = start(n_sequences=6, n_ctx=8192, **options)
    together = threading.Barrier(CLIENTS)
    with ThreadPoolExecutor(CLIENTS) as pool:
        texts = list(pool.map(lambda i: client_of(server, i, together), range(CLIENTS)))
    server.wait_until_idle()
    assert (server.generator.total.draft_vocab["replaced"] > 0) is bool(options)
    survivors = {i: text for i, text in enumerate(texts) if text is not None}
    n_gone = CLIENTS - len(survivors)
    assert n_gone == len(range(0, CLIENTS, 3))
    n_equal = 0
    for number, text in survivors.items():
        prompt = chat_tokens(demo, chat(question(number)))
        wanted = alone(demo, prompt, N, ignore_eos=True).text
        n_equal += text == wanted
        assert text == wanted or is_near_tie(demo, prompt, text, wanted)
    assert n_equal >= len(survivors) * 7 // 8
    assert len(set(survivors.values())) > len(survivors) // 2, "too much alike to be mixed up"
    counts = server.generator.outcomes
    assert counts["length"] == len(survivors) and counts["cancelled"] == n_gone
    assert max(server.generator.total.passes) == 6, "they were not decoded together"
    # It serves, and says that it is idle.
    assert server.text("x") == alone(demo, demo.tokenize("x"), 8, ignore_eos=True).text
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok", "running": 0, "waiting": 0}


@pytest.mark.parametrize("stream", [True, False])
def test_hanging_up_stops_the_generation(start: Start, stream: bool) -> None:
    """The client of a running answer hangs up, and the client of a waiting one."""
    server = start(n_sequences=1, n_ctx=8192)
    body = {"prompt": "def", "max_tokens": 8000, "ignore_eos": True, "stream": stream}
    asked = httpx.Request("POST", f"{server.url}/v1/completions", json=body)
    head = "".join(f"{name}: {value}\r\n" for name, value in asked.headers.items())
    data = f"POST {asked.url.path} HTTP/1.1\r\n{head}\r\n".encode() + asked.content
    clients = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(2)]
    for client in clients:
        client.sendall(data)
    server.wait_until_busy(2)
    while not server.generator.total.n_generated:
        time.sleep(0.001)
    for client in clients:
        client.close()
    server.wait_until_idle()
    n = server.generator.total.n_generated
    assert 0 < n < 8000
    time.sleep(0.2)
    assert server.generator.total.n_generated == n
    assert server.generator.outcomes["cancelled"] == 2


@pytest.mark.parametrize("cost", ["the contents", "the context"])
def test_a_decode_that_fails_costs_what_ran_and_no_more(
    start: Start, demo: Model, monkeypatch: pytest.MonkeyPatch, cost: str
) -> None:
    """The first of two requests fails. The second one, which begins alike, is answered: with new
    contexts if need be, and with nothing that the first one has left."""
    server = start(n_sequences=1)
    decode, calls = Context.decode_batch, iter(range(1000))

    def fail_once(context: Context, batch: Any) -> None:
        if next(calls) == 3:
            error = FatalDecodeError("made up")
            if cost == "the context":
                context._lose(error)
            raise error
        decode(context, batch)

    monkeypatch.setattr(Context, "decode_batch", fail_once)
    more: Any = {"max_tokens": 8, "extra_body": {"ignore_eos": True}}

    def stream() -> None:
        with pytest.raises(openai.APIError, match="the computation failed: made up"):
            list(server.complete("def", stream=True, **more))

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(stream)
        server.wait_until_busy(unless=first.done)
        second = pool.submit(server.complete, "def main(", **more)
        first.result(LIMIT_S)
        got = second.result(LIMIT_S)
    wanted = alone(demo, demo.tokenize("def main("), 8, ignore_eos=True)
    assert got.choices[0].text == wanted.text
    assert got.usage.prompt_tokens_details.cached_tokens == 0
    assert server.generator.outcomes["error"] == 1
    assert httpx.get(f"{server.url}/health").json()["status"] == "ok"


@pytest.mark.parametrize(
    ("api", "last"),
    [
        ("chat/completions", 'data: {"error"'),
        ("responses", "event: response.failed"),
        ("messages", "event: error"),
    ],
)
def test_each_api_tells_what_has_failed(
    start: Start, monkeypatch: pytest.MonkeyPatch, api: str, last: str
) -> None:
    """Before the answer has a place, and in a stream, at whose end it stands."""
    server = start()
    body = {"input" if api == "responses" else "messages": chat("x"), "ignore_eos": True}
    loop = server.generator._loop
    for n_steps in (0, 9):
        steps = [loop.step] * n_steps

        def step(steps: list[Any] = steps) -> Any:
            if not steps:
                raise FatalDecodeError("no more")
            return steps.pop()()

        with monkeypatch.context() as patch:
            patch.setattr(loop, "step", step)
            got = server.post(f"/v1/{api}", {**body, "stream": n_steps > 0})
        assert got.status_code == (200 if n_steps else 500) and "no more" in got.text
        assert not n_steps or got.text.rpartition(last)[2].count("no more") == 1
        server.wait_until_idle()


def test_a_request_that_cannot_enter_costs_itself(
    start: Start, demo: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that fails while it enters frees its place."""
    server = start(n_sequences=1)
    bring, calls = PrefixCache.bring, iter(range(1000))

    def fail_once(*arguments: Any) -> Any:
        if next(calls) == 0:
            raise RuntimeError("/a/path/of/the/server")
        return bring(*arguments)

    monkeypatch.setattr(PrefixCache, "bring", fail_once)

    with pytest.raises(openai.InternalServerError, match="RuntimeError") as raised:
        server.text("def")
    assert "/a/path" not in str(raised.value)
    assert server.text("def") == alone(demo, demo.tokenize("def"), 8, ignore_eos=True).text
    server.wait_until_idle()


def test_a_lost_worker_ends_the_service(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Running requests get 500; waiting and later ones get 503."""
    server = start()

    def lost(context: Context, batch: Any) -> None:
        server.wait_until_busy(2)
        raise WorkerLostError("the worker at 127.0.0.1:1 is lost", "127.0.0.1:1")

    def ask() -> int:
        with pytest.raises(openai.InternalServerError) as raised:
            server.text("x")
        assert "the worker at 127.0.0.1:1 is lost" in str(raised.value)
        return raised.value.status_code

    monkeypatch.setattr(Context, "decode_batch", lost)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(ask)
        server.wait_until_busy(unless=first.done)
        second = pool.submit(ask)
        assert (first.result(LIMIT_S), second.result(LIMIT_S)) == (500, 503)
    assert ask() == 503
    assert httpx.get(f"{server.url}/health").status_code == 503
