"""bench/serve.py: what is compared with what, and one dry run on the demo model."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import serve
from benchkit import openai_client, servers
from benchkit.openai_client import ClientError, Stream

from pyllama_mtp import Settings


def test_the_speed_is_that_of_the_tokens_after_the_first() -> None:
    stream = Stream(n_generated=11, first_s=3.0, decode_s=2.0, n_chunks=4)
    assert stream.decode_tps == 5 == stream.to_dict()["decode_tps"]


def test_ratios_and_equal_acceptance() -> None:
    drafted = {"decode_tps": 5.0, "rounds": 20, "accepted": 30, "decode_s": 10.0}
    samples = {
        "driver": [{"decode_tps": 20.0}, {"decode_tps": 10.0}],
        "server": [{"decode_tps": 19.0}, {"decode_tps": 9.9}],
        "one": [{"tps": 10.0}],
        "all": [{"tps": 25.0}],
        "peer plain": [{"decode_tps": 4.0}] * 2,
        "peer mtp 1": [{**drafted, "decode_tps": 2.0}] * 2,
        "peer mtp 2": [drafted] * 2,
    }
    found = serve.summarize(samples, (0.8, 0.7))
    assert found["server / driver"]["low"] == 0.95
    assert found["all clients / one"]["value"] == 2.5
    two = "server / llama-cpp-python at depth 2"
    typical = math.sqrt(19.0 * 9.9)
    assert found[two]["value"] == pytest.approx(typical / 5)
    equal = found[f"{two}, at equal acceptance"]
    assert equal["value"] == pytest.approx(typical / (2.0 * 2.5))
    assert len(found) == 7
    real = serve.summarize(samples, None)
    assert len(real) == 5, "real acceptance is nobody's to choose"
    result = {"samples": samples, "summary": found, "clients": {"n": 32}}
    text = "\n".join(serve.tables(result))
    assert "32 clients" in text and "0.950 to 0.990" in text and "2.50 |" in text


def test_the_peer_gets_the_plan(tmp_path: Path) -> None:
    settings = Settings(n_ctx=256, n_batch=64, n_ubatch=64, n_threads=3)
    model = servers.peer_model(tmp_path / "m.gguf", settings, 2)
    assert model["n_ctx"] == 256 and model["n_batch"] == 64 and model["threads"] == 3
    assert (model["draft_model"], model["draft_model_num_pred_tokens"]) == ("draft-mtp", 2)
    assert "draft_model" not in servers.peer_model(tmp_path / "m.gguf", settings, 0)


class Fake(BaseHTTPRequestHandler):
    """Answers with what the test has put into `lines`."""

    status = 200
    lines: tuple[str, ...] = ()

    def do_POST(self) -> None:
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write("".join(f"data: {line}\n\n" for line in self.lines).encode())

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write("\n".join(self.lines).encode())

    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    with ThreadingHTTPServer((openai_client.HOST, 0), Fake) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


def chunk(reason: str | None = None) -> str:
    return json.dumps({"choices": [{"text": "x", "finish_reason": reason}]})


def test_what_a_client_makes_of_a_stream(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def complete(*lines: str) -> Stream:
        monkeypatch.setattr(Fake, "lines", lines)
        return openai_client.complete(port, [1], 5)

    usage = '{"choices": [], "usage": {"completion_tokens": 3}}'
    assert complete(chunk(), chunk("stop"), usage, "[DONE]").n_generated == 3
    assert complete(chunk(), chunk("length"), "[DONE]").n_generated == 5
    for lines in ((chunk(), chunk("stop")), (), ('{"error": {"message": "no"}}',)):
        with pytest.raises(ClientError):
            complete(*lines)
    monkeypatch.setattr(Fake, "status", 429)
    with pytest.raises(ClientError, match="status 429"):
        complete(chunk("length"))


def test_rounds_of_the_peer(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = (
        "# HELP batch_server:draft_batches_verified_total n",
        "batch_server:draft_batches_verified_total 7",
        "batch_server:draft_tokens_accepted_total 12",
    )
    monkeypatch.setattr(Fake, "lines", lines)
    assert servers.peer_rounds(port) == (7, 12)


def test_dry_run(demo_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--parts", "overhead,clients", "--threads", "1", "--n-sequences", "2"]
    assert serve.main(["--dry-run", "--model", str(demo_file), *options]) == 0
    out = capsys.readouterr().out
    assert "server / driver" in out and "all clients / one" in out and "3 clients" in out
