"""Reading llama-bench's JSON and llama-server's timings, from small samples of their output."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pyllama_mtp.measure.peers import (
    OutputError,
    parse_llama_bench,
    parse_system_info,
    parse_timings,
)


def bench_json(**changes: Any) -> str:
    """What `llama-bench -r 1 -o json` prints for one test, cut down to a few fields."""
    test = {"build_commit": "0c1e570", "n_prompt": 0, "n_gen": 192, "n_depth": 256}
    test |= {"avg_ts": 24.0, "samples_ns": [8000000000], "samples_ts": [24.0]}
    return json.dumps([test | changes])


def timings(**changes: Any) -> dict[str, Any]:
    """A response of llama-server, cut down to what is read."""
    found = {"cache_n": 0, "prompt_n": 256, "prompt_ms": 1280.0, "prompt_per_second": 200.0}
    found |= {"predicted_n": 193, "predicted_ms": 6400.0, "predicted_per_second": 30.0}
    return {"content": "", "timings": found | changes}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "error: unable to load model",
        "[]",
        "{}",
        "[1]",
        json.dumps([{"n_prompt": 1}]),
        bench_json(samples_ts=[1.0, 2.0]),
        bench_json(n_prompt=16),
    ],
)
def test_other_output_is_refused(text: str) -> None:
    with pytest.raises(OutputError):
        parse_llama_bench(text)


def test_a_server_that_generates_nothing() -> None:
    assert parse_timings(timings(predicted_n=0)).n_generated == 0


def test_a_cached_prompt_is_refused() -> None:
    with pytest.raises(OutputError, match="255 prompt tokens from its cache"):
        parse_timings(timings(cache_n=255, prompt_n=1))


@pytest.mark.parametrize("response", [{}, {"timings": {}}, {"timings": None}])
def test_a_response_without_timings_is_refused(response: dict[str, Any]) -> None:
    with pytest.raises(OutputError):
        parse_timings(response)


def test_system_info() -> None:
    line = "system_info: n_threads = 2 | CPU : SSE3 = 1 | AVX512 = 1 | REPACK = 1 | \n"
    assert parse_system_info(line) == {"SSE3": "1", "AVX512": "1", "REPACK": "1"}
    assert parse_system_info("nothing") == {}
