"""Runners of llama-server and llama-bench give samples as our own do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pyllama_mtp.measure.peers import PeerError, PeerRunner, find
from pyllama_mtp.measure.records import Sample
from pyllama_mtp.measure.runner import Task
from pyllama_mtp.settings import Sampling, Settings

SETTINGS = Settings(n_ctx=256, n_threads=2, draft_n_max=0, cache_type_k="q8_0")
TASK = Task(SETTINGS, Sampling(), [[*range(5, 105)]], 13, 64)


def measured(name: str, task: Task = TASK, n_gpu_layers: int = 0) -> Sample:
    runner = PeerRunner(find(name), "m.gguf", n_gpu_layers)
    runner.check(task.settings)
    runner.begin(4, task)
    runner.read(4, 50)
    assert runner.advance(4, 1) == task.max_tokens
    return runner.finish(4)[0]


def test_the_server_measures_once(peers: Any) -> None:
    drafting = replace(SETTINGS, draft_n_max=2, synthetic_acceptance=(0.5, 0.25), p_min=0.5)
    task = replace(TASK, settings=drafting)
    sample = measured("llama-server", task)
    assert (sample.n_prompt, sample.n_generated) == (100, 13)
    assert (sample.prefill_tps, sample.decode_tps) == (500, 70)
    assert sample.elapsed_s == pytest.approx(100 / 500 + 12 / 70)
    assert (sample.rounds, sample.tokens_per_round) == (6, 2)
    assert sample.drafted == sample.accepted == []
    warm_up, request = peers.log("request")
    assert (len(warm_up["prompt"]), request["prompt"]) == (64, TASK.prompts[0])
    (given,) = peers.log("arguments")
    assert given[given.index("--spec-synth-rates") + 1] == "0.5,0.25"
    assert given[given.index("--spec-draft-p-min") + 1] == "0.5"
    assert given[given.index("-c") + 1] == "256" and given[given.index("-ctk") + 1] == "q8_0"


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
    assert prefill[prefill.index("-ngl") + 1] == "3"


def test_one_token_is_all_prefill(peers: Any) -> None:
    task = replace(TASK, max_tokens=1)
    for name in ("llama-bench", "llama-server"):
        sample = measured(name, task)
        assert (sample.n_generated, sample.decode_tps, sample.decode_s) == (1, 0, 0)


@pytest.mark.parametrize(
    ("name", "mode", "message"),
    [
        ("llama-server", "short", "processed 100 tokens and generated 10, where 100 and 13 were"),
        ("llama-bench", "garbage", "no usable field"),
        ("llama-bench", "nan", "a speed of nan"),
    ],
)
def test_what_is_no_measurement_is_refused(
    peers: Any, name: str, mode: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_MODE", mode)
    with pytest.raises(PeerError, match=message):
        measured(name)
