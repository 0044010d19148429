"""What tools for llama-server and vLLM read: times and drafts of answers, places, counters."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from .conftest import NAME, Running, Start
from .support import chat
from .test_limits import figures


def check(timings: dict[str, Any], usage: dict[str, Any]) -> None:
    """Times of an answer agree with its usage."""
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert timings["cache_n"] == cached
    assert timings["prompt_n"] == usage["prompt_tokens"] - cached
    assert timings["predicted_n"] == usage["completion_tokens"]
    details = usage["completion_tokens_details"]
    accepted = details["accepted_prediction_tokens"]
    assert timings["draft_n_accepted"] == accepted > 0
    assert timings["draft_n"] == accepted + details["rejected_prediction_tokens"]
    n, ms = timings["prompt_n"], timings["prompt_ms"]
    assert timings["prompt_per_second"] == pytest.approx(1000 * n / ms)
    assert timings["prompt_per_token_ms"] * n == pytest.approx(ms if n else 0)
    n, ms = timings["predicted_n"] - 1, timings["predicted_ms"]  # the first is the prompt's
    assert timings["predicted_per_second"] == pytest.approx(1000 * n / ms)
    assert timings["predicted_per_token_ms"] == pytest.approx(ms / n)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_timings(shared: Running, path: str) -> None:
    """Of the whole answer, and in the last chunk of a stream only."""
    said: Any = {"prompt": "import os\n\n" * 40 + "def"} if path == "/v1/completions" else {}
    said = said or {"messages": chat("What is a list? " * 20)}
    body = {**said, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    whole = shared.post(path, body).json()
    check(whole["timings"], whole["usage"])
    again = shared.post(path, body).json()
    check(again["timings"], again["usage"])
    assert again["timings"]["cache_n"] > 0
    for with_usage in (False, True):
        asked = {"stream": True, "stream_options": {"include_usage": with_usage}}
        lines = shared.post(path, body | asked).text.split("\n\n")
        chunks = [httpx.Response(200, content=one[6:]).json() for one in lines[:-2]]
        assert [("timings" in chunk) for chunk in chunks[:-1]] == [False] * (len(chunks) - 1)
        last = chunks[-1]
        assert last["timings"]["predicted_n"] == 40
        if with_usage:
            check(last["timings"], last["usage"])
        else:
            assert last["choices"][0]["finish_reason"] == "length"
    several = shared.post(path, body | {"n": 2}).json()
    assert "timings" not in several


def test_vllm_counters(start: Start) -> None:
    """The same numbers as ours, by position from 0."""
    server = start()
    server.text("import os\n\n" * 9, 60)
    found, total = figures(server), server.generator.total
    name = "vllm:spec_decode_num_"
    assert found[f"{name}drafts_total,{NAME}"] == sum(total.held) > 0
    assert found[f"{name}draft_tokens_total,{NAME}"] == total.n_drafted > 0
    accepted = found[f"{name}accepted_tokens_total,{NAME}"]
    assert accepted == total.n_accepted > 0
    by_position = [
        value for key, value in found.items() if key.startswith(f"{name}accepted_tokens_per_pos")
    ]
    assert sum(by_position) == accepted and by_position == sorted(by_position, reverse=True)
    assert f"{name}accepted_tokens_per_pos_total,{NAME},0" in found


def test_props_and_slots(start: Start) -> None:
    server = start(n_sequences=2, n_ctx=8192, max_tokens=8000)
    props = httpx.get(f"{server.url}/props").json()
    settings = props["default_generation_settings"]
    assert settings["n_ctx"] == 8192 and settings["params"]["max_tokens"] == 8000
    assert settings["params"]["temperature"] == server.served.model.sampling.temperature
    assert (props["total_slots"], props["model_alias"]) == (2, NAME)
    assert props["modalities"] == {"vision": False, "audio": False}
    assert props["chat_template"] == server.served.model.chat_template
    assert "/" not in props["model_path"]

    url = f"{server.url}/slots"
    idle = {"n_ctx": 8192, "speculative": True, "is_processing": False}
    assert httpx.get(url).json() == [{"id": 0, **idle}, {"id": 1, **idle}]
    options: Any = {"max_tokens": 8000, "stream": True, "extra_body": {"ignore_eos": True}}
    stream = server.complete(["import os", "def f"], **options)
    begun = set[int]()
    while begun != {0, 1}:
        begun |= {choice.index for choice in next(stream).choices}
    slots = httpx.get(url).json()
    assert httpx.get(url, params={"fail_on_no_slot": 1}).status_code == 503
    stream.close()
    server.wait_until_idle()
    assert httpx.get(url, params={"fail_on_no_slot": 1}).status_code == 200
    first, second = slots
    assert first["id_task"] != second["id_task"] and first["is_processing"]
    assert first["n_prompt_tokens"] == len(server.served.model.tokenize("import os"))
    decoded = first["next_token"][0]
    assert decoded["n_decoded"] + decoded["n_remain"] == 8000
    assert not {"prompt", "generated"} & {*first}
