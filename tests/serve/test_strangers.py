"""Clients that nobody knows: their requests cost little, and cost others nothing."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from pyllama_mtp import Model, child, grammar
from pyllama_mtp.llama import native
from pyllama_mtp.sampling.sampler import Constraint
from pyllama_mtp.serve import limits, reading
from pyllama_mtp.serve.app import Printable

from .conftest import LIMIT_S, Running, Start
from .support import alone, chat

JSON = {"content-type": "application/json"}
MANY = 1_000_000
CHAT, TEXT = "v1/chat/completions", "v1/completions"
FORM = {"type": "json_schema", "json_schema": {"schema": {"type": "integer", "maximum": 7}}}


def body(before: str, one: str, after: str, n: int = MANY) -> bytes:
    return f"{before}{','.join([one] * n)}{after}".encode()


#: What takes long to look at, and the path that it is sent to.
BOMBS: dict[str, tuple[str, bytes]] = {
    "nothing": (TEXT, body('{"prompt":[', "null", "]}")),
    "numbers": (CHAT, body('{"messages":[', "1", "]}")),
    "parts": (CHAT, body('{"messages":[{"role":"user","content":[', "1", "]}]}")),
    "objects": (CHAT, body('{"messages":[', "{}", "]}")),
    "lists": (TEXT, body('{"prompt":[', "[5]", "]}")),
    "names": (TEXT, body("{", '"a":1', "}")),
    "breakers": (TEXT, body('{"prompt":"x","dry_sequence_breakers":[', "0", "]}")),
    "values": (TEXT, body('{"prompt":"x","metadata":[', "0", "]}", 2 * MANY)),
    "biases": (TEXT, body('{"prompt":"x","logit_bias":{', '"5":"x"', "}}", 60_000)),
    "items": ("v1/responses", body('{"input":[', "{}", "]}", 60_000)),
    "text": (TEXT, b'{"prompt":"' + b"x" * (4 * MANY) + b'"}'),
    "letters": (TEXT, '{"prompt":"é'.encode() + b"x" * (9 * MANY) + b'"}'),
    "escapes": (TEXT, b'{"prompt":"' + b"\\n" * (2 * MANY) + b'"}'),
    "prompts": (TEXT, body('{"n":128,"prompt":[', '"x"', "]}", 1000)),
    "tokens": ("detokenize", body('{"tokens":[', "5", "]}", MANY + 100_000)),
    "name": (TEXT, b'{"prompt":"x","' + b"y" * MANY + b'":1}'),
}


@contextlib.contextmanager
def watched(server: Running) -> Iterator[list[float]]:
    """CPU seconds of the process that each /health has taken, again and again during the block."""
    seconds, done = list[float](), threading.Event()

    def watch() -> None:
        with httpx.Client() as client:
            while not done.wait(0.02):
                began = time.process_time()
                client.get(f"{server.url}/health")
                seconds.append(time.process_time() - began)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seconds
    finally:
        done.set()
        thread.join()


@pytest.mark.parametrize("name", BOMBS)
def test_bombs(shared: Running, name: str) -> None:
    """Refused, and in an answer of usual length; others are answered meanwhile."""
    path, data = BOMBS[name]
    with watched(shared) as seconds:
        got = httpx.post(f"{shared.url}/{path}", content=data, headers=JSON)
    assert got.status_code == 400 and len(got.content) < 5000, got.content[:500]
    assert max(seconds, default=0) < 5, "0.2 s in a process of its own, on idle cores"


def test_large_bodies_are_served(shared: Running) -> None:
    """What is long and right is no bomb."""
    n_ctx = shared.generator.n_ctx
    quoted = {"prompt": "x", "max_tokens": 1, "metadata": {"a": '\\"[{,:' * 100_000}}
    assert shared.post(f"/{TEXT}", quoted).status_code == 200
    got = shared.post("/detokenize", {"tokens": [5] * 100_000})
    assert got.status_code == 200
    biased = {"prompt": [5] * (n_ctx - 2), "max_tokens": 1, "logit_bias": {"7": 1, "8": -1.5}}
    assert shared.post(f"/{TEXT}", biased).status_code == 200


def test_refused_bodies_give_back_their_room(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before they were read, or when they are no JSON; and to the system, what reading took."""
    monkeypatch.setattr(limits, "BODIES", 3 << 20)
    returned = threading.Semaphore(0)
    monkeypatch.setattr(reading, "give_back_memory", returned.release)
    server, key = start(api_key="right"), {**JSON, "Authorization": "Bearer right"}
    data = b'{"prompt": "x", "max_tokens": 1, "metadata": {"a": "%s"}}' % (b"x" * (3 << 19))
    for content, headers, status in (
        (data, JSON, 401),
        (data[:-1], key, 400),
        (data, key, 200),
    ) * 3:
        got = httpx.post(f"{server.url}/{TEXT}", content=content, headers=headers)
        assert got.status_code == status
        assert status == 401 or returned.acquire(timeout=LIMIT_S)


# -- browsers --------------------------------------------------------------------------------------


def test_hosts_and_origins(start: Start) -> None:
    origins = ["http://app.example:3000", "chrome-extension://known"]
    server = start(hosts=["good.example"], origins=origins)
    for host, origin, status in (
        ("127.0.0.1:5", None, 200),
        ("localhost", None, 200),
        ("[::1]:8080", "http://[::1]:8080", 200),
        ("192.168.0.7", "http://192.168.0.7", 200),
        ("good.example", "https://good.example", 200),
        ("GOOD.example.:8080", None, 200),
        ("host.docker.internal:8080", None, 200),
        ("mybox.local", None, 200),
        ("10.0.0.1", "https://good.example:444", 200),
        ("localhost:1", "http://app.example:3000", 200),
        ("localhost:1", "chrome-extension://known", 200),
        ("localhost:1", "chrome-extension://other", 403),
        ("evil.example:8080", None, 403),
        ("evil.example", "http://evil.example", 403),
        ("127.0.0.1.evil.example", None, 403),
        ("local", None, 403),
        ("[", None, 403),
        ("localhost:1", "http://localhost:3000", 403),
        ("localhost:1", "http://evil.example", 403),
        ("localhost:1", "null", 403),
    ):
        headers = {"Host": host} | ({"Origin": origin} if origin else {})
        got = httpx.get(f"{server.url}/v1/models", headers=headers)
        assert got.status_code == status, (host, origin)
        assert status == 200 or "--" in got.json()["error"]["message"], "it says what to do"


def test_all_hosts_and_origins(start: Start) -> None:
    server = start(hosts=["*"], origins=["*"])
    headers = {"Host": "any.example", "Origin": "http://other.example"}
    assert httpx.get(f"{server.url}/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("right", "code"), [("sécret", "utf-8"), ("sécret", "latin-1"), ("ключ", "utf-8")]
)
def test_a_key_of_any_letters(start: Start, right: str, code: str) -> None:
    server = start(api_key=right)
    for key, status in ((right, 200), (right[:-1], 401), ("?" * len(right), 401)):
        headers = {"Authorization": f"Bearer {key}".encode(code)}
        for path in ("v1/models", "openapi.json"):
            assert httpx.get(f"{server.url}/{path}", headers=headers).status_code == status


def test_control_characters_stay_out_of_the_log(
    shared: Running, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="pyllama_mtp")
    wild = "x\x1b[2J\x9b\x7f\u202e\ny"
    shared.post(f"/{TEXT}", {"prompt": "x", "max_tokens": 1, "model": wild, "stop": [wild]})
    shared.post(f"/{TEXT}", {"prompt": "x", wild: 1})
    httpx.get(f"{shared.url}/v1/models/%1b%5b2J")
    httpx.get(f"{shared.url}/%1b%5b2J", headers={"Host": "evil.example"})
    logging.getLogger("pyllama_mtp.serve").error("quoted: %s", wild)
    lines = [Printable().format(record) for record in caplog.records]
    own = [r.getMessage() for r in caplog.records if r.name == "pyllama_mtp.serve.requests"]
    assert len(own) >= 5 and any(r"\x1b[2J\x9b\x7f" in line for line in own)
    assert all(line.isprintable() for line in own)
    assert all(part.isprintable() for line in lines for part in line.split("\n"))


@pytest.mark.parametrize("asks", [{"grammar": 'root ::= "b"'}, {"response_format": FORM}])
def test_busy_workers_are_not_the_requests_fault(
    shared: Running, monkeypatch: pytest.MonkeyPatch, asks: dict[str, Any]
) -> None:
    monkeypatch.setattr(child, "WAIT_S", 0.0)
    for workers in (grammar.workers, grammar.gbnf_workers):
        monkeypatch.setattr(workers, "_room", threading.Semaphore(0))
    got = shared.post(f"/{TEXT}", {"prompt": "x", "max_tokens": 1, **asks})
    assert got.status_code == 503 and got.headers["Retry-After"]


# -- one request's fault ---------------------------------------------------------------------------


def test_one_requests_fault_costs_itself(
    start: Start, demo: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two streams run through it, and have the texts that they have alone."""
    server = start(n_sequences=4)
    prompts = ["import os\n\ndef", "The list of"]
    wanted = [alone(demo, demo.tokenize(text), 200, ignore_eos=True).text for text in prompts]
    allowed = Constraint.allowed
    fails = False

    def fail(self: Constraint) -> Any:
        if fails:
            raise RuntimeError("made up")
        return allowed(self)

    monkeypatch.setattr(Constraint, "allowed", fail)

    def stream(prompt: str) -> str:
        more: Any = {"max_tokens": 200, "stream": True, "extra_body": {"ignore_eos": True}}
        return "".join(chunk.choices[0].text for chunk in server.complete(prompt, **more))

    schema = {"json_schema": {"type": "object"}, "max_tokens": 40}
    everything = {str(token): -1e308 for token in range(demo.n_vocab)}
    call = {"name": "f", "arguments": '{"a": "\\ud800"}'}
    calls = [{"id": "1", "type": "function", "function": call}]
    surrogate = [*chat("x"), {"role": "assistant", "tool_calls": calls}, *chat("y")]
    with ThreadPoolExecutor(2) as pool:
        texts = [pool.submit(stream, prompt) for prompt in prompts]
        server.wait_until_busy(2, unless=lambda: any(one.done() for one in texts))
        monkeypatch.setattr(Constraint, "only", property(lambda self: None))
        with monkeypatch.context() as patch:
            patch.setattr(Constraint, "allowed", lambda self: allowed(self) & False)
            got = server.post(f"/{TEXT}", {"prompt": "x", **schema})
            assert got.status_code == 400 and "exclude every token" in got.text
        if native.load().has_tap:
            slow = "root ::= " + '" "? ' * 40 + '"x"'
            got = server.post(f"/{TEXT}", {"prompt": "x", "grammar": slow})
            assert got.status_code == 400 and "for more than 1 s for a token" in got.text
        fails = True
        got = server.post(f"/{TEXT}", {"prompt": "x", **schema})
        assert got.status_code == 500 and "RuntimeError" in got.text and "made up" not in got.text
        got = httpx.post(f"{server.url}/{TEXT}", content=b'{"prompt": "\\ud800"}', headers=JSON)
        assert got.status_code == 400 and "not valid JSON" in got.text
        got = server.post(f"/{CHAT}", {"messages": surrogate})
        assert got.status_code == 400 and "is half a letter" in got.text
        for more in ({}, {"temperature": 0}):
            got = server.post(f"/{TEXT}", {"prompt": "x", "logit_bias": everything, **more})
            assert got.status_code == 400 and "exclude every token" in got.text
        assert [one.result(LIMIT_S) for one in texts] == wanted
    assert server.generator.broken is None
    counts = server.generator.outcomes
    assert (counts["error"], counts["invalid"]) == (1, 5 + native.load().has_tap)


# -- slow clients ----------------------------------------------------------------------------------

HEAD = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def is_closed(client: socket.socket) -> bool:
    client.settimeout(0.01)
    try:
        return client.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def test_slow_clients(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that send nothing, or half a head, are closed; not one whose body still comes."""
    monkeypatch.setattr(limits, "HEADERS_S", 0.5)
    monkeypatch.setattr(limits, "BYTES_PER_S", 8)
    server = start()
    data = b'{"prompt": "x", "max_tokens": 1, "metadata": {"a": "' + b"x" * 30 + b'"}}'
    length = f"Content-Length: {len(data)}\r\n\r\n"
    with contextlib.ExitStack() as stack:

        def connect(text: str) -> socket.socket:
            client = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            client.sendall(text.encode())
            return client

        silent = [connect(""), connect("GET /heal")]
        slow = connect(HEAD + length)
        for byte in data:
            slow.sendall(bytes([byte]))
            time.sleep(0.02)
        deadline = time.monotonic() + LIMIT_S
        while not all(map(is_closed, silent)):
            assert time.monotonic() < deadline, "a silent client is not closed"
        slow.settimeout(LIMIT_S)
        assert slow.recv(100).startswith(b"HTTP/1.1 200")


def test_half_sent_requests_keep_nobody_out(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are too many, the oldest go."""
    monkeypatch.setattr(limits, "UNFINISHED", 20)
    monkeypatch.setattr(limits, "HEADERS_S", 1000.0)
    server = start()
    with contextlib.ExitStack() as stack:
        clients = []
        for _ in range(60):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            client.sendall(HEAD.encode() + b"Content-Length: 100\r\n\r\n{")
            clients.append(client)
        deadline = time.monotonic() + LIMIT_S
        while not all(map(is_closed, clients[:40])):
            assert time.monotonic() < deadline, "nothing was closed"
            assert server.text("x")
        assert not any(map(is_closed, clients[45:])), "honest ones count, too"
