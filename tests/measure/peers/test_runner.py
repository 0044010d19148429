"""Runners of llama-server, llama-bench and llama-cpp-python give samples as our own do."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pyllama_mtp.measure.peers import PeerError
from pyllama_mtp.measure.peers.find import find
from pyllama_mtp.measure.peers.runner import PeerRunner
from pyllama_mtp.measure.runner import Measured, Task
from pyllama_mtp.settings import Sampling, Settings

SETTINGS = Settings(n_ctx=256, n_threads=2, draft_n_max=0, cache_type_k="q8_0")
TASK = Task(SETTINGS, Sampling(), [[*range(5, 105)]], 13, 64)
#: Tokens take 0: 3 and 1: 1 ms; a prompt takes 0.5 ms per token that is not in the cache.
LLAMA_CPP = """
import ctypes, json, os, time
__version__ = "0.0-fake"
GGML_TYPE_F16, GGML_TYPE_Q8_0 = 1, 8
def llama_supports_gpu_offload(): return False
def say(**said):
    with open(os.environ["FAKE_LOG"], "a") as file: file.write(json.dumps(said) + "\\n")
class Llama:
    def __init__(self, **given):
        say(given=given)
        self.cached = []
        print("a library prints to stdout")
    def reset(self): self.cached = []
    def generate(self, tokens, temp, top_k):
        say(generate=[len(tokens), temp, top_k, len(self.cached)])
        self.cached = tokens
        while True: yield 7
"""


def measured(name: str, task: Task = TASK, n_gpu_layers: int = 0) -> Measured:
    runner = PeerRunner(find(name), "m.gguf", n_gpu_layers)
    runner.check(task.settings)
    runner.begin(4, task)
    runner.read(4, 50)
    assert runner.advance(4, 1) == task.max_tokens
    return runner.finish(4)


def test_the_server_measures_once(peers: Any) -> None:
    drafting = replace(SETTINGS, draft_n_max=2, synthetic_acceptance=(0.5, 0.25), p_min=0.5)
    task = replace(TASK, settings=drafting)
    sample = measured("llama-server", task).sample
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
    sample = measured("llama-bench", n_gpu_layers=3).sample
    assert (sample.prefill_tps, sample.decode_tps) == (500, 50)
    assert (sample.n_prompt, sample.n_generated, sample.rounds) == (100, 13, 12)
    prefill, decode = peers.log("arguments")
    assert prefill[-8:] == ["-p", "100", "-n", "0", "-r", "1", "-o", "json"]
    assert decode[-10:-4] == ["-p", "0", "-n", "12", "-d", "100"]
    assert prefill[prefill.index("-ngl") + 1] == "3"


def test_one_token_is_all_prefill(peers: Any) -> None:
    task = replace(TASK, max_tokens=1)
    for name in ("llama-bench", "llama-server"):
        sample = measured(name, task).sample
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


@pytest.fixture
def llama_cpp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fake module `llama_cpp`; returns the file in which it logs its arguments."""
    (tmp_path / "llama_cpp.py").write_text(LLAMA_CPP)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "log"))
    return tmp_path / "log"


def test_llama_cpp_python_generates_after_a_warm_up_it_forgets(llama_cpp: Path) -> None:
    assert find("llama-cpp-python").build.variant == "0.0-fake"
    sample = measured("llama-cpp-python").sample
    assert (sample.n_prompt, sample.n_generated) == (100, 13)
    assert sample.prefill_s > 0 and sample.decode_tps == pytest.approx(12 / sample.decode_s)
    given, warm_up, generated = map(json.loads, llama_cpp.read_text().splitlines())
    wanted = {"model_path": "m.gguf", "n_ctx": 256, "n_threads": 2, "type_k": 8, "type_v": 1}
    assert wanted.items() <= given["given"].items()
    assert warm_up["generate"] == [64, 0.0, 1, 0]
    assert generated["generate"] == [100, 0.0, 1, 0]  # nothing is cached


def test_llama_cpp_python_that_fails(llama_cpp: Path) -> None:
    broken = "    def generate(self, *a, **k): raise ValueError('no slot')\n"
    module = llama_cpp.with_name("llama_cpp.py")
    module.write_text(LLAMA_CPP + broken)
    with pytest.raises(PeerError, match=r"llama-cpp-python failed \(1\): [^!]*no slot"):
        measured("llama-cpp-python")
