"""llama-server: its start, its port, its answers, its end; with a fake one."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pyllama_mtp.measure import peers as peers_module
from pyllama_mtp.measure.peers import (
    HOST,
    Installed,
    LlamaServer,
    PeerError,
    PeerOptions,
    completion_request,
    server_options,
)
from pyllama_mtp.measure.peers import measure as measure_sample
from pyllama_mtp.measure.records import Build, Sample
from pyllama_mtp.measure.runner import Task
from pyllama_mtp.settings import Sampling, Settings

Ended = Callable[[int], bool]
SETTINGS = Settings(n_ctx=256, n_threads=2, draft_n_max=3)
DRAFTING = PeerOptions(SETTINGS, "m.gguf", -1)
PLAIN = PeerOptions(dataclasses.replace(SETTINGS, draft_n_max=0), "m.gguf", -1)


def server(peers: Any) -> LlamaServer:
    return LlamaServer(str(peers.folder / "llama-server"), server_options(DRAFTING))


def measure(peers: Any, options: PeerOptions = DRAFTING) -> Sample:
    build = Build("llama-server", "", "", "", "CPU")
    installed = Installed((str(peers.folder / "llama-server"),), build)
    task = Task(options.settings, Sampling(), [[*range(100)]], 13, 10)
    return measure_sample(installed, options, task)


@pytest.fixture(autouse=True)
def none_is_left(peers: Any, ended: Ended, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever a test does, no server is left running."""
    monkeypatch.setattr(peers_module, "START_TIMEOUT_S", 20.0)
    yield
    assert all(ended(pid) for pid in peers.log("pid"))


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that somebody else has."""
    with socket.socket() as other:
        other.bind((HOST, 0))
        yield int(other.getsockname()[1])


def test_plain_and_with_drafts(peers: Any) -> None:
    plain, drafting = measure(peers, PLAIN), measure(peers)
    assert (plain.prefill_tps, plain.decode_tps, plain.rounds) == (500, 50, 12)
    assert (drafting.decode_tps, drafting.rounds, drafting.tokens_per_round) == (80, 4, 3)
    assert {(one.n_prompt, one.n_generated) for one in (plain, drafting)} == {(100, 13)}
    without, given = peers.log("arguments")
    assert "--spec-type" not in without
    assert given[given.index("--spec-type") + 1] == "draft-mtp"
    assert given[given.index("--spec-draft-n-max") + 1] == "3"
    for arguments in (without, given):
        assert arguments[:2] == ["-m", "m.gguf"]
        assert arguments[arguments.index("-ngl") + 1] == "999"
        assert arguments[arguments.index("--host") + 1] == HOST
        assert "--spec-synth-rates" not in arguments
    warm_up, request = peers.log("request")[:2]
    assert warm_up["prompt"] == [*range(10)] and warm_up["n_predict"] == 8
    assert request["prompt"] == [*range(100)] and request["n_predict"] == 13
    wanted = {"temperature": 0, "top_k": 1, "ignore_eos": True, "cache_prompt": False}
    assert wanted.items() <= request.items()


def test_a_head_in_a_file_of_its_own_is_a_draft_model() -> None:
    assert "-md" not in server_options(dataclasses.replace(PLAIN, head="mtp-m.gguf"))
    given = server_options(dataclasses.replace(DRAFTING, head="mtp-m.gguf"))
    assert given[given.index("-md") + 1] == "mtp-m.gguf"
    assert "-md" not in server_options(DRAFTING)


def test_no_port_at_all(peers: Any, taken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "free_port", lambda: taken)
    with pytest.raises(PeerError, match=r"ended at its start \(1\): couldn't bind"):
        measure(peers)


def test_another_server_at_the_port_is_not_measured(
    peers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another server answers at the port; ours cannot bind it and starts again at another one."""
    with server(peers) as other:
        taken = int(other.url.rpartition(":")[2])
        free, ports = peers_module.free_port, [taken, taken]
        monkeypatch.setattr(peers_module, "free_port", lambda: ports.pop() if ports else free())
        with server(peers) as ours:
            assert ours.url != other.url and ours._is_ours()
        ours.url = other.url
        assert not ours._is_ours()
    assert len(peers.log("arguments")) == 1 + 3


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("dies", r"ended at its start \(3\): error: unknown model architecture: 'qwen99'"),
        ("dies later", r"llama-server: .*GGML_ASSERT failed"),
        ("garbage", "answered what is no JSON"),
        ("refuses", "answered 400: .*exceeds the context"),
    ],
)
def test_failures_say_what_it_said(
    peers: Any, mode: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_MODE", mode)
    with pytest.raises(PeerError, match=message):
        measure(peers)


def test_of_a_stream_the_last_event_counts(peers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    request = {**completion_request([1, 2, 3], 9, 0), "stream": True}
    with server(peers) as one:
        assert one.complete(request)["timings"]["predicted_n"] == 9
    monkeypatch.setenv("FAKE_MODE", "garbage")
    with server(peers) as one, pytest.raises(PeerError, match="answered what is no JSON"):
        one.complete(request)


def test_one_that_is_never_ready(peers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_MODE", "never ready")
    monkeypatch.setattr(peers_module, "START_TIMEOUT_S", 1.0)
    with pytest.raises(PeerError, match="was not ready in 1 s"), server(peers):
        pass


def test_an_interruption_while_it_starts_ends_it(
    peers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setenv("FAKE_MODE", "never ready")
    monkeypatch.setattr("pyllama_mtp.measure.peers.time.sleep", interrupt)
    with pytest.raises(KeyboardInterrupt), server(peers):
        pass
