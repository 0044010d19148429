"""Several servers behind HAProxy, by the configuration in docs/serving.md."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from pyllama_mtp import Model

from ..conftest import ROOT
from ..marks import usual
from .conftest import LIMIT_S, Running, running
from .support import QUESTIONS, chat

PROGRAM = shutil.which("haproxy", path=f"{os.environ['PATH']}:/usr/sbin")
NAMES, PORTS = ("first", "second", "third"), (8081, 8082, 8083)

pytestmark = pytest.mark.skipif(
    PROGRAM is None, reason="HAProxy is not installed (Debian: apt-get install haproxy)"
)
Ask = Callable[..., tuple[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def servers(demo: Model) -> Iterator[list[Running]]:
    with ExitStack() as stack:
        yield [stack.enter_context(running(demo, n_sequences=8)) for _ in PORTS]


@pytest.fixture(scope="module")
def ask(servers: list[Running], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    """Sends a chat to the balancer: which server has answered, and its answer."""
    page = (ROOT / "docs" / "serving.md").read_text()
    (config,) = re.findall(r"```haproxy\n(.*?)```", page, re.DOTALL)
    with httpx.Client() as client:
        free = _free_port()
        for port, to in zip((8080, *PORTS), (free, *(one.port for one in servers)), strict=True):
            assert config.count(f"127.0.0.1:{port}\n") == 1
            config = config.replace(f"127.0.0.1:{port}\n", f"127.0.0.1:{to}\n")
        (file := tmp_path_factory.mktemp("balancer") / "haproxy.cfg").write_text(config)
        process = subprocess.Popen([str(PROGRAM), "-db", "-f", file])
        url = f"http://127.0.0.1:{free}"

        def send(messages: object, headers: dict[str, str] | None = None, **more: object) -> Any:
            body = {"messages": messages, "max_tokens": 4, "temperature": 0, **more}
            got = client.post(f"{url}/v1/chat/completions", json=body, headers=headers)
            assert got.status_code == 200, got.text
            return got.headers["x-served-by"], got.json()

        try:
            deadline = time.monotonic() + LIMIT_S
            while not _answers(client, url):
                assert process.poll() is None and time.monotonic() < deadline, "it does not start"
                time.sleep(0.02)
            yield send
        finally:
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


def _answers(client: httpx.Client, url: str) -> bool:
    try:
        return client.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.parametrize(
    "system", usual([{"role": "system", "content": "Be brief."}], long=[[]]), ids=len
)
def test_a_conversation_meets_its_cache(ask: Ask, system: list[dict[str, str]]) -> None:
    """All turns go to one server, whose cache has the turns before; conversations are spread."""
    homes = Counter[str]()
    for question in QUESTIONS:
        messages = [*system, *chat(question)]
        before, home = 0, ""
        for turn in range(3):
            server, answer = ask(messages)
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            if turn:
                assert server == home and cached >= before > 0
            home, before = server, answer["usage"]["prompt_tokens"]
            said = answer["choices"][0]["message"]["content"] or "-"
            messages += [{"role": "assistant", "content": said}, *chat("Go on.")]
        homes[home] += 1
    assert len(homes) > 1, homes


def test_names_of_conversations(ask: Ask) -> None:
    """The header counts more than prompt_cache_key, and that more than the first message, which may
    have parts."""

    def spread(*requests: tuple[str, dict[str, str], dict[str, str]]) -> int:
        return len({ask(chat(text), headers, **more)[0] for text, headers, more in requests})

    some = [str(i) for i in range(8)]
    assert spread(*((text, {}, {}) for text in some)) > 1
    assert spread(*((text, {}, {"prompt_cache_key": "k"}) for text in some)) == 1
    named = {"X-Conversation": "c"}
    assert spread(*((text, named, {"prompt_cache_key": text}) for text in some)) == 1
    parts = [[{"type": "text", "text": text}] for text in some]

    homes = [ask([{"role": "user", "content": part}])[0] for part in parts]
    assert homes == [ask(chat(text))[0] for text in some]


@pytest.mark.long
def test_a_server_that_answers_late_keeps_its_conversations(
    ask: Ask, servers: list[Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is busy may take a second to say that it is well."""
    home, _ = ask(chat(QUESTIONS[0]))
    asked = threading.Semaphore(0)

    def late() -> bool:
        asked.release()
        time.sleep(1)
        return True

    generator = servers[NAMES.index(home)].generator
    monkeypatch.setattr(generator, "is_alive", late)
    for _ in range(2):  # the first has then been answered
        assert asked.acquire(timeout=LIMIT_S)
    assert ask(chat(QUESTIONS[0]))[0] == home


def test_a_server_that_ends_takes_only_its_conversations_along(
    ask: Ask, servers: list[Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    homes = {question: ask(chat(question))[0] for question in QUESTIONS}
    gone = homes[QUESTIONS[0]]
    monkeypatch.setattr(servers[NAMES.index(gone)].generator, "broken", "it is broken")
    assert ask(chat(QUESTIONS[0]))[0] != gone, "it is asked again, and elsewhere"
    now = {question: ask(chat(question))[0] for question in QUESTIONS}
    moved = {question for question in QUESTIONS if now[question] != homes[question]}
    assert moved == {question for question in QUESTIONS if homes[question] == gone}
