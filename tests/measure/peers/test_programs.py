"""llama-server and llama-bench give samples as our own runners do: their options, their output,
their failures, their end; with fakes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from pyllama_mtp.measure import peers as peers_module
from pyllama_mtp.measure.figures import Sample
from pyllama_mtp.measure.peers import (
    HOST,
    LlamaServer,
    PeerError,
    PeerOptions,
    PeerRunner,
    find,
    parse_llama_bench,
    parse_timings,
    server_options,
)
from pyllama_mtp.measure.runner import Task
from pyllama_mtp.settings import Sampling, Settings

PLAIN = Settings(n_ctx=256, n_threads=2, draft_n_max=0, cache_type_k="q8_0")
DRAFTING = replace(PLAIN, draft_n_max=2, synthetic_acceptance=(0.5, 0.25), p_min=0.5)
TASK = Task(PLAIN, Sampling(), [[*range(5, 105)]], 13, 64)


@pytest.fixture(autouse=True)
def none_is_left(
    peers: Any, ended: Callable[[int], bool], monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Whatever a test does, no server is left running."""
    monkeypatch.setattr(peers_module, "START_TIMEOUT_S", 120.0)
    yield
    assert all(ended(pid) for pid in peers.log("pid"))


def measured(name: str, task: Task = TASK, n_gpu_layers: int = 0) -> Sample:
    runner = PeerRunner(name, "m.gguf", n_gpu_layers)
    runner.check(task.settings)
    runner.begin(4, task)
    assert runner.advance(4, 1) == task.max_tokens
    return runner.finish(4)[0]


def value(arguments: list[str], option: str) -> str:
    return arguments[arguments.index(option) + 1]


def test_the_server_measures_once_without_drafts_and_with_them(peers: Any) -> None:
    plain = measured("llama-server", n_gpu_layers=-1)
    drafting = measured("llama-server", replace(TASK, settings=DRAFTING))
    assert (plain.prefill_tps, plain.decode_tps, plain.rounds) == (500, 50, 12)
    assert (drafting.prefill_tps, drafting.decode_tps) == (500, 70)
    assert drafting.elapsed_s == pytest.approx(100 / 500 + 12 / 70)
    assert (drafting.rounds, drafting.mean_acceptance_length) == (6, 2)
    for sample in (plain, drafting):
        assert (sample.n_prompt, sample.n_generated) == (100, 13)
        assert sample.drafted == sample.accepted == []
    warm_up, request, *_ = peers.log("request")
    assert warm_up["prompt"] == TASK.prompts[0][:64] and warm_up["n_predict"] == 8
    wanted = {"temperature": 0, "top_k": 1, "ignore_eos": True, "cache_prompt": False}
    assert wanted.items() <= request.items()
    assert request["prompt"] == TASK.prompts[0] and request["n_predict"] == 13
    without, given = peers.log("arguments")
    assert (
        not {"--spec-type", "--spec-synth-rates"} & {*without} and value(without, "-ngl") == "999"
    )
    assert value(given, "--spec-type") == "draft-mtp" and value(given, "--host") == HOST
    assert value(given, "--spec-draft-n-max") == "2" and value(given, "-m") == "m.gguf"
    assert value(given, "--spec-synth-rates") == "0.5,0.25"
    assert value(given, "--spec-draft-p-min") == "0.5"
    assert value(given, "-c") == "256" and value(given, "-ctk") == "q8_0"


def test_a_head_in_a_file_of_its_own_is_a_draft_model() -> None:
    plain, drafting = (PeerOptions(one, "m.gguf", -1, "mtp-m.gguf") for one in (PLAIN, DRAFTING))
    assert "-md" not in server_options(plain)
    assert value(server_options(drafting), "-md") == "mtp-m.gguf"
    assert "-md" not in server_options(replace(drafting, head=""))


def test_the_draw_of_the_server_differs_from_repeat_to_repeat(peers: Any) -> None:
    measured("llama-server")
    measured("llama-server")
    measured("llama-server", replace(TASK, prompts=[TASK.prompts[0][::-1]]))
    first, again, other = (request["seed"] for request in peers.log("request")[1::2])
    assert first == again != other


def test_bench_measures_prefill_and_decode_apart(peers: Any) -> None:
    sample = measured("llama-bench", n_gpu_layers=3)
    assert (sample.prefill_tps, sample.decode_tps) == (500, 50)
    assert (sample.n_prompt, sample.n_generated, sample.rounds) == (100, 13, 12)
    prefill, decode = peers.log("arguments")
    assert prefill[-8:] == ["-p", "100", "-n", "0", "-r", "1", "-o", "json"]
    assert decode[-10:-4] == ["-p", "0", "-n", "12", "-d", "100"]
    assert value(prefill, "-ngl") == "3"


def test_after_a_context(peers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Filled by a completion of no token, or by -d; the prompt's figures are those of the rest."""
    task = replace(TASK, n_context=60)
    for name in ("llama-server", "llama-bench"):
        sample = measured(name, task)
        assert (sample.n_prompt, sample.n_generated) == (40, 13)
        assert (sample.prefill_s, sample.decode_tps) == (40 / 500, 50)
    _, filling, request = peers.log("request")
    assert (filling["prompt"], filling["n_predict"]) == (TASK.prompts[0][:60], 0)
    assert request["prompt"] == TASK.prompts[0]
    prefill, decode = peers.log("arguments")[1:]
    assert prefill[-10:-4] == ["-p", "40", "-n", "0", "-d", "60"]
    assert decode[-10:-4] == ["-p", "0", "-n", "12", "-d", "100"]
    monkeypatch.setenv("FAKE_MODE", "forgets")
    with pytest.raises(PeerError, match="took 0 prompt tokens from its cache, where 60 were"):
        measured("llama-server", task)


# -- failures --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "mode", "message"),
    [
        ("llama-server", "short", "processed 100 tokens and generated 10, where 100 and 13 were"),
        ("llama-server", "dies", r"ended at its start \(3\): error: unknown model architecture"),
        ("llama-server", "dies later", r"llama-server: .*GGML_ASSERT failed"),
        ("llama-server", "garbage", "answered what is no JSON"),
        ("llama-server", "refuses", "answered 400: .*exceeds the context"),
        ("llama-bench", "garbage", "no usable field"),
        ("llama-bench", "nan", "a speed of nan"),
    ],
)
def test_what_is_no_measurement_is_refused_with_what_it_said(
    peers: Any, name: str, mode: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_MODE", mode)
    with pytest.raises(PeerError, match=message):
        measured(name)


def server() -> LlamaServer:
    return LlamaServer(*find("llama-server").command, [])


def test_one_that_is_never_ready(peers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_MODE", "never ready")
    monkeypatch.setattr(peers_module, "START_TIMEOUT_S", 1.0)
    with pytest.raises(PeerError, match="was not ready in 1 s"), server():
        pass


# -- output ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        *("", "error: unable to load model", "[]", "{}", "[1]", '[{"n_prompt": 1}]'),
        '[{"n_prompt": 0, "n_gen": 192, "samples_ts": [1.0, 2.0]}]',
    ],
)
def test_other_output_of_bench_is_refused(text: str) -> None:
    with pytest.raises(PeerError, match="no usable field"):
        parse_llama_bench(text)


def test_timings_of_the_server() -> None:
    """A server that generates nothing; a prompt from its cache; no timings."""
    known = {"cache_n": 0, "prompt_n": 256, "prompt_per_second": 200.0, "predicted_n": 0}
    assert parse_timings({"timings": known}).n_generated == 0
    with pytest.raises(PeerError, match="255 prompt tokens from its cache"):
        parse_timings({"timings": {**known, "cache_n": 255}})
    for response in ({}, {"timings": {}}, {"timings": None}, json.loads("[]")):
        with pytest.raises(PeerError, match="no usable timings"):
            parse_timings(response)
