"""Requests that are refused, limits, keys and metrics."""

from __future__ import annotations

import logging
import socket
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from pydantic import ValidationError

from pyllama_mtp import calibration
from pyllama_mtp.drafting.depth import Costs, DepthController, Outcomes, round_time
from pyllama_mtp.serve.bodies import (
    ApiError,
    ChatBody,
    CompletionBody,
    Message,
    Strict,
    TextPart,
    parse,
)

from .conftest import LIMIT_S, NAME, Running, Start
from .support import chat, question
from .test_tools import STOP

CHAT = {"messages": chat("What is a list?")}
TEXT, INPUT = {"prompt": "x"}, {"input": "x"}
VARIABLES, NO_PROMPT, FORM = "chat_template_kwargs", "add_generation_prompt", "response_format"
AUDIO = [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]
NO_SCHEMA = {"type": "function", "function": {"name": "f", "parameters": {"type": 5}}}
CALL = {"function": {"name": "f", "arguments": "{"}}
NO_JSON = [*chat("x"), {"role": "assistant", "tool_calls": [CALL]}]


def part(kind: Any, **more: Any) -> list[Any]:
    return [{"role": "user", "content": [{"type": kind, **more}]}]


#: Path, body, parameter that is named (None: none), words.
BAD: list[tuple[str, Any, str | None, str]] = [
    ("chat", {}, "messages", "required"),
    ("text", {"prompt": ""}, "prompt", "empty"),
    ("text", {"prompt": [10**6]}, "prompt", "not in the vocabulary"),
    ("text", [1], None, "JSON object"),
    ("text", {**TEXT, "max_tokens": 0}, "max_tokens", "must be 1 or more, or -1"),
    ("text", {**TEXT, "temperature": -1}, "temperature", "0 (greedy) or above"),
    ("text", {**TEXT, "stop": [""]}, "stop", "at least 1 character"),
    ("text", {**TEXT, "n": 100}, "n", "takes at most 68"),
    ("chat", {**CHAT, "echo": True}, "echo", "'echo' is not supported"),
    ("text", {**TEXT, "tepid": 1}, "tepid", "'tepid' is not supported"),
    ("text", {**TEXT, "stream_options": {}}, "stream_options", "stream: true"),
    ("chat", {**CHAT, "top_logprobs": 2}, "top_logprobs", "logprobs: true"),
    ("chat", {**CHAT, "max_tokens": 4, "max_completion_tokens": 4}, "max_tokens", "one of them"),
    ("chat", {**CHAT, VARIABLES: {"messages": []}}, VARIABLES, "cannot be set"),
    ("text", {**TEXT, "logit_bias": {"5": "x"}}, "logit_bias", "finite numbers"),
    ("text", {**TEXT, "logit_bias": {"9999": 1}}, None, "not in the vocabulary"),
    ("chat", {"messages": [{"role": "judge", "content": "x"}]}, "messages.0.role", "'judge'"),
    ("chat", {"messages": [{"role": "usr", "content": "x"}]}, "messages.0.role", "mean 'user'?"),
    ("chat", {"messages": AUDIO}, "messages.0.content", "'input_audio' is not supported"),
    ("chat", {"messages": [{"role": "user", "content": 5}]}, "messages.0.content", "content is 5:"),
    ("chat", {"messages": part("text", text=5)}, "messages.0.content.0.text", "0.text is 5:"),
    ("chat", {"messages": part("text", text="x", tepid=1)}, "messages.0.content.0.tepid", "tepid"),
    ("chat", {"messages": part("image_url", image_url={})}, None, "content.0.image_url.url'"),
    ("chat", {"messages": part("text")}, None, "'messages.0.content.0.text' is required"),
    ("chat", {**CHAT, "continue_final_message": True}, "messages", "message of the assistant"),
    ("chat", {**CHAT, NO_PROMPT: False}, NO_PROMPT, "continue_final_message"),
    # -- forms of answers
    ("chat", {**CHAT, FORM: {"type": "json_schema"}}, None, "needs json_schema.sch"),
    ("text", {**TEXT, FORM: {"type": "json_schema", "json_schema": {}}}, None, "required"),
    ("text", {**TEXT, FORM: {"type": "yaml"}}, None, "response_format is"),
    ("text", {**TEXT, "json_schema": {"type": "objec"}}, None, "cannot be used: Invalid type: obj"),
    ("text", {**TEXT, "json_schema": "{"}, None, "JSON schema is not JSON"),
    ("text", {**TEXT, "json_schema": {"a": 1}, FORM: {"type": "json_object"}}, None, "give one of"),
    ("text", {**TEXT, "grammar": "root ::= missing"}, None, "not valid GBNF"),
    # -- tools
    ("chat", {**CHAT, "tools": [{"type": "custom"}]}, "tools", "tools[0]"),
    ("chat", {**CHAT, "tools": [STOP, STOP]}, "tools", "two functions 'stop'"),
    ("chat", {**CHAT, "tools": [STOP], "tool_choice": "some"}, "tool_choice", "stop"),
    ("chat", {**CHAT, "tools": [NO_SCHEMA], "tool_choice": "required"}, None, "cannot be used"),
    ("chat", {"messages": NO_JSON}, "messages", "messages[1].tool_calls[0].function.arguments"),
    ("chat", {"messages": [{"role": "tool", "tool_call_id": "x"}]}, "messages", "is required"),
    # -- images, without an encoder
    ("chat", {"messages": question("data:image/png;base64,AAAA")}, None, "an image encoder"),
    # -- the Responses API
    ("answer", {}, "input", "must be a list"),
    ("answer", {"input": [{"type": "item_reference", "id": "x"}]}, "input", "'item_reference'"),
    ("answer", {"input": part("input_file")}, "input", "'input_file'"),
    ("answer", {"input": part(["x"])}, "input", "is not supported"),
    ("answer", {**INPUT, "previous_response_id": "r"}, "previous_response_id", "not supported"),
    ("answer", {**INPUT, "background": True}, "background", "not supported"),
    ("answer", {**INPUT, "tools": [{"type": "web_search"}]}, "tools", "'web_search'"),
    ("answer", {**INPUT, "tepid": 1}, "tepid", "'tepid' is not supported"),
    ("answer", {**INPUT, "text": {"format": {"type": "xml"}}}, "response_format", "xml"),
    ("answer", {**INPUT, "include": ["file_search_call.results"]}, "include", "include may have"),
    ("answer", {**INPUT, "reasoning": 1}, "reasoning", "must be an object"),
    ("answer", {"input": [{"type": "reasoning", "content": [3]}]}, "input", "list of objects"),
]
PATHS = {"chat": "v1/chat/completions", "text": "v1/completions", "answer": "v1/responses"}


def test_bad_requests(shared: Running) -> None:
    for kind, body, param, words in BAD:
        got = shared.post(f"/{PATHS.get(kind, kind)}", body)
        error = got.json()["error"]
        assert got.status_code == 400, error
        assert words in error["message"] and error["type"] == "invalid_request_error"
        assert param is None or error["param"].startswith(param)


@pytest.mark.parametrize("kind", [ChatBody, CompletionBody, Message, TextPart])
def test_of_many_unknown_parameters_the_first_is_named(kind: type[Strict]) -> None:
    """There is no error for each of them."""
    with pytest.raises(ValidationError) as many:
        kind.model_validate({f"name {i}": i for i in range(60_000)})
    assert many.value.error_count() < 200
    with pytest.raises(ApiError, match="'name 0' is not supported"):
        parse(kind, dict.fromkeys([*kind.model_fields, *(f"name {i}" for i in range(999))], 1))


@pytest.mark.parametrize(
    ("kind", "words"), [("embeddings", "use a server of an embedding model"), ("images/edits", "")]
)
def test_what_it_does_not_have(shared: Running, kind: str, words: str) -> None:
    got = shared.post(f"/v1/{kind}", TEXT)
    error = got.json()["error"]
    assert (got.status_code, error["type"]) == (501, "server_error")
    assert f"does not have {kind.partition('/')[0]}" in error["message"]
    assert words in error["message"]


def test_too_long_is_refused_with_the_numbers(shared: Running) -> None:
    n_ctx = shared.generator.n_ctx
    for n in (n_ctx, n_ctx + 9):
        error = shared.post("/v1/completions", {"prompt": [5] * n}).json()["error"]
        assert str(n) in error["message"] and str(n_ctx) in error["message"]
        assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize("asked", [2, 100_000, -1])
def test_an_answer_gets_what_fits(shared: Running, asked: int) -> None:
    n_ctx = shared.generator.n_ctx
    body = {"prompt": [5] * (n_ctx - 9), "max_tokens": asked, "ignore_eos": True}
    got = shared.post("/v1/completions", body).json()
    n = min(asked, 9) if asked > 0 else 9
    assert got["usage"]["completion_tokens"] == n
    assert got["choices"][0]["finish_reason"] == "length"


def test_neutral_values_of_unsupported_parameters(shared: Running) -> None:
    body = {
        **CHAT,
        **{"max_tokens": 2, "tools": [], "frequency_penalty": 0, "presence_penalty": 0.0},
        **{"response_format": {"type": "text"}, "user": "me", "logit_bias": {}, "store": False},
    }
    assert shared.post("/v1/chat/completions", body).status_code == 200


def test_bodies_that_are_no_json(shared: Running, start: Start) -> None:
    url, json_type = f"{shared.url}/v1/completions", {"content-type": "application/json"}
    got = httpx.post(url, content=b"{", headers=json_type)
    assert got.status_code == 400 and "not valid JSON" in got.json()["error"]["message"]
    got = httpx.post(url, content=b"[" * 100_000, headers=json_type)
    assert got.status_code == 400
    got = httpx.post(url, content=b'{"prompt": "x"}', headers={"content-type": "text/plain"})
    assert got.status_code == 415 and "is 'text/plain'; send" in got.json()["error"]["message"]
    said = httpx.post(url, content=b'{"prompt": "x"}').json()["error"]["message"]
    assert said == "there is no Content-Type; send the header Content-Type: application/json"
    got = start(largest_body=1000).post("/v1/completions", {"prompt": "x" * 1000})
    assert got.status_code == 413
    assert httpx.get(f"{shared.url}/v2").json()["error"]["message"].startswith("Not Found")
    assert httpx.get(url).status_code == 405


def test_max_tokens_of_the_server(start: Start) -> None:
    server = start(max_tokens=5)
    for asked in ({}, {"max_tokens": 9}, {"max_completion_tokens": -1}):
        assert server.chat(**CHAT, **asked, ignore_eos=True)["usage"]["completion_tokens"] == 5


def test_names_of_other_models(shared: Running, start: Start) -> None:
    body = {**TEXT, "model": "gpt-9", "max_tokens": 2}
    got = shared.post("/v1/completions", body)
    assert got.status_code == 200 and got.json()["model"] == NAME
    got = start(strict_model=True).post("/v1/completions", body)
    assert got.status_code == 404 and f"use '{NAME}'" in got.json()["error"]["message"]
    assert got.json()["error"]["param"] == "model"


def test_api_key(start: Start) -> None:
    server = start(api_key="right")
    assert server.complete("x").choices
    wrong = openai.OpenAI(base_url=f"{server.url}/v1", api_key="wröng", max_retries=0)
    wrong = wrong.with_options(default_headers={"Authorization": "Bearer wrong"})
    with pytest.raises(openai.AuthenticationError, match="API key is missing or wrong"):
        wrong.models.list()
    for path in ("/v1/models", "/metrics"):
        assert httpx.get(server.url + path).status_code == 401
    assert server.post("/v1/completions", TEXT).status_code == 401
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert server.generator.outcomes["unauthorized"] == 4


def test_a_full_queue(start: Start) -> None:
    server = start(n_sequences=1, max_queue=1, n_ctx=4096)
    more: Any = {"max_tokens": 4000, "extra_body": {"ignore_eos": True}, "stream": True}
    streams = [server.complete("x", **more) for _ in range(2)]
    server.wait_until_busy(2)
    with pytest.raises(openai.RateLimitError, match="the queue is full") as refused:
        server.complete("x")
    assert int(refused.value.response.headers["retry-after"]) > 0
    health = httpx.get(f"{server.url}/health").json()
    assert (health["running"], health["waiting"]) == (1, 1)
    for stream in streams:
        stream.close()
    server.wait_until_idle()
    assert server.complete("x").choices
    assert server.generator.outcomes["rejected"] == 1


def figures(server: Running) -> dict[str, float]:
    """Samples of /metrics, by name and labels."""
    text = httpx.get(f"{server.url}/metrics").text
    return {
        sample.name + "".join(f",{value}" for value in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics(start: Start) -> None:
    server = start(n_sequences=2, n_ctx=4096)
    n_prompt = n_generated = 0
    for _ in range(2):
        usage = server.post(
            "/v1/completions", {"prompt": "import os\n\ndef", "max_tokens": 60, "temperature": 0}
        ).json()["usage"]
        n_prompt += usage["prompt_tokens"]
        n_generated += usage["completion_tokens"]
    server.post("/v1/completions", {"prompt": ""})
    found = figures(server)
    assert found["pyllama_mtp_prompt_tokens_total"] == n_prompt
    assert found["pyllama_mtp_generated_tokens_total"] == n_generated
    assert found["pyllama_mtp_prefill_tokens_per_second"] > 0
    assert found["pyllama_mtp_decode_tokens_per_second"] > 0
    assert found["pyllama_mtp_requests_total,length"] == 2
    assert found["pyllama_mtp_requests_total,invalid"] == 1
    for position in "123":
        drafted = found[f"pyllama_mtp_drafted_tokens_total,{position}"]
        accepted = found[f"pyllama_mtp_accepted_tokens_total,{position}"]
        assert 0 < accepted <= drafted
        assert found[f"pyllama_mtp_acceptance,{position}"] == pytest.approx(accepted / drafted)
    assert found["pyllama_mtp_requests_running"] == found["pyllama_mtp_requests_waiting"] == 0
    stream = server.complete("x", max_tokens=4000, stream=True, extra_body={"ignore_eos": True})
    next(stream)
    assert figures(server)["pyllama_mtp_requests_running"] == 1
    stream.close()


def test_metrics_say_how_many_drafts_pay(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where two sequences' rows cost twice as much as one's, and a draft as much as a step."""
    dear = Costs((0.0, *(float(n) for n in range(1, 8))), (0.0, *(float(n) for n in range(1, 7))))
    cheap = Costs((0.0, *[1.0] * 7), (0.0, *[0.01] * 6))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(calibration, "measure_costs", lambda _, n: {1: cheap, 2: dear}[n])
    learn = DepthController.update

    def update(self: DepthController, n_drafted: int, outcomes: Outcomes, *_: float) -> None:
        """Rounds that take as long as these costs say."""
        costs = self.costs.costs(len(outcomes))
        learn(self, n_drafted, outcomes, round_time(costs, n_drafted))

    monkeypatch.setattr(DepthController, "update", update)
    server = start(n_sequences=2, draft_n_max="auto", ngram=False)
    server.complete(["import os", "def"], max_tokens=30, extra_body={"ignore_eos": True})
    found = figures(server)
    assert found["pyllama_mtp_paying_drafts,1"] > 0 == found["pyllama_mtp_paying_drafts,2"]
    assert found["pyllama_mtp_passes_total,0,2"] > 20, "no drafts, two sequences"


def test_a_client_that_dies_while_it_uploads_is_one_line(
    shared: Running, caplog: pytest.LogCaptureFixture
) -> None:
    # Named, because a command that ran in this process before leaves a level of its own.
    caplog.set_level(logging.INFO, logger="pyllama_mtp.serve.requests")
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", shared.port)) as client:
        client.sendall(f"{head}Content-Length: 1000\r\n\r\n".encode() + b'{"prompt": ')
    deadline, lines = time.monotonic() + LIMIT_S, list[str]()
    while not lines and time.monotonic() < deadline:
        time.sleep(0.01)
        own = (r for r in caplog.records if r.name.startswith(("pyllama", "uvicorn")))
        lines = [r.getMessage() for r in own]
    (line,) = lines
    assert "/v1/completions 499: the client went away" in line
