"""Log lines, CORS, tokenizing, continued answers and progress of prompts."""

from __future__ import annotations

import json
import logging
import re
from typing import Any

import httpx
import pytest

from pyllama_mtp import Model

from .conftest import NAME, Running, Start
from .support import QUESTIONS, chat, chat_tokens

ASK = {"messages": chat(QUESTIONS[0]), "temperature": 0, "max_tokens": 30}


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "pyllama_mtp.serve.requests"]


def test_a_line_for_each_request(shared: Running, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "pyllama_mtp.serve.requests"):
        for stream in (False, True):
            answer = shared.post("/v1/chat/completions", {**ASK, "stream": stream, "model": "m\nx"})
            asked, line = lines(caplog)
            name = re.findall(r"chatcmpl-\w+", answer.text)[0]
            assert asked.startswith(f"{name} /v1/chat/completions asks for") and "30" in asked
            found = re.fullmatch(
                r"(\S+) m x 200: prompt (\d+) \((\d+) cached\), answer (\d+) at [\d.]+ tok/s, "
                r"drafts (\d+) of (\d+), (eos|length), [\d.]+ s",
                line,
            )
            assert found and found[1] == name, line
            if not stream:
                usage = answer.json()["usage"]
                details = usage["completion_tokens_details"]
                assert [int(found[i]) for i in (2, 3, 4, 5)] == [
                    usage["prompt_tokens"],
                    usage["prompt_tokens_details"]["cached_tokens"],
                    usage["completion_tokens"],
                    details["accepted_prediction_tokens"],
                ]
            caplog.clear()


def test_a_line_for_refusals_and_clients_that_leave(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    server = start(n_ctx=8192)
    with caplog.at_level(logging.INFO, "pyllama_mtp.serve.requests"):
        server.post("/v1/completions", {"prompt": "x", "tepid": "a\nb"})
        assert lines(caplog) == [
            "- POST /v1/completions 400: the parameter 'tepid' is not supported by this server; "
            "leave it out"
        ]
        caplog.clear()
        body = {"prompt": "x", "max_tokens": 8000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as answer:
            next(answer.iter_lines())
        server.wait_until_idle()
        for _ in range(100):
            if lines(caplog):
                break
            httpx.get(f"{server.url}/health")
        (line,) = lines(caplog)
        assert f"{NAME} 499: prompt" in line and "the client went away" in line


def test_pages_of_other_origins(shared: Running, start: Start) -> None:
    """Only of those that were named, also where a key is asked for."""
    origin, server = "http://localhost:3000", start(origins=["http://localhost:3000"], api_key="k")
    for asked, of, allowed in (
        (server, origin, origin),
        (server, "http://elsewhere", None),
        (shared, origin, None),
    ):
        headers = {"Origin": of, "Access-Control-Request-Method": "POST"}
        got = httpx.options(f"{asked.url}/v1/chat/completions", headers=headers)
        assert got.headers.get("access-control-allow-origin") == allowed


def test_tokens_and_back(shared: Running, demo: Model) -> None:
    text = "<|im_start|>def main():"
    tokens = demo.tokenize(text, add_special=False, parse_special=True)
    for name in ("content", "prompt"):
        got = shared.post("/tokenize", {name: text}).json()
        assert got["tokens"] == tokens and got["count"] == len(tokens)
    got = shared.post("/tokenize", {"messages": ASK["messages"]}).json()
    assert got["tokens"] == chat_tokens(demo, chat(QUESTIONS[0]))
    assert shared.post("/tokenize", {"content": 400_000 * "x "}).json()["count"] > 100_000
    assert shared.post("/tokenize", {"content": 600_000 * "x "}).status_code == 400
    assert shared.post("/detokenize", {"tokens": tokens}).json()["content"] == text


@pytest.mark.parametrize("thought", [False, True])
def test_an_answer_is_gone_on_with(shared: Running, demo: Model, thought: bool) -> None:
    question = (
        "What does this function do?\ndef g(a, b):\n    return a" if thought else QUESTIONS[0]
    )
    ask = {**ASK, "messages": chat(question)}
    tokens = chat_tokens(demo, chat(question))
    whole = shared.post("/v1/completions", {**ASK, "prompt": tokens, "messages": None}).json()
    text = whole["choices"][0]["text"]
    cut = text.index(" ", 12)  # where a token begins
    begun = {"role": "assistant", "content": text[:cut]}
    body = {**ask, "messages": [*chat(question), begun], "continue_final_message": True}
    more = shared.post("/v1/chat/completions", {**body, "add_generation_prompt": False}).json()
    message = more["choices"][0]["message"]
    found = message["reasoning_content"] if thought else message["content"]
    assert found.strip().startswith(text[cut:].strip()), "it starts anew"
    assert more["usage"]["prompt_tokens"] > len(tokens)


def test_a_prompt_tells_how_far_it_is(start: Start) -> None:
    """As in llama-server: chunks of progress before the first text, when a stream asks for them."""
    text = "Name the methods of a list and say what each of them does. " * 60
    options = {"stream": True, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    server = start(n_ctx=2048)

    def chunks_of(path: str, said: str, wanted: bool) -> list[Any]:
        ask = {"messages": chat(said)} if "chat" in path else {"prompt": said}
        got = server.post(path, {**ask, **options, "return_progress": wanted})
        lines = got.text.split("\n\n")
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]

    for path in ("/v1/chat/completions", "/v1/completions"):
        assert not any("prompt_progress" in chunk for chunk in chunks_of(path, text, False))
        chunks = chunks_of(path, f"{text}And why? ", True)
        told = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
        first, last = told[0], told[-1]
        assert chunks[0]["prompt_progress"] == first and "prompt_progress" not in chunks[-1]
        assert first.keys() == {"total", "cache", "processed", "time_ms"}
        assert last["processed"] == last["total"] > last["cache"] == first["processed"] > 0
        assert last["time_ms"] >= first["time_ms"] >= 0
