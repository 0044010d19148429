"""``pyllama-mtp serve`` as a process: it prints its address, and ends at signals."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import pytest

from pyllama_mtp.serve import app, limits

from ..marks import usual
from ..processes import Cli, environment, start
from .conftest import LIMIT_S

#: Code that leaves a thread which is waited for when the process ends.
ENDLESS = "import threading, time; threading.Thread(target=time.sleep, args=(300,)).start()"
Process = subprocess.Popen[str]
Launch = Callable[..., tuple[Process, str]]


@pytest.fixture
def launch() -> Iterator[Launch]:
    """Starts the command: the process, and the address that it says."""
    started: list[Process] = []

    def run(*options: str, before: str = "", **more: str) -> tuple[Process, str]:
        words, env = ("serve", "--port", "0", *options), environment(**more)
        program = ["-c", f"{before}\nfrom pyllama_mtp.cli import entry; raise SystemExit(entry())"]
        process = start(*words, program=program, text=True, env=env)
        started.append(process)
        assert process.stdout
        line = process.stdout.readline()
        assert "http://127.0.0.1:" in line, line + (process.stderr.read() if process.stderr else "")
        return process, line.split()[-1]

    yield run
    for process in started:
        process.kill()
        process.wait()


def a_long_stream(url: str, key: str = "any") -> openai.Stream[openai.types.Completion]:
    client = openai.OpenAI(base_url=url, api_key=key, max_retries=0)
    stream = client.completions.create(
        model=client.models.list().data[0].id,
        prompt="def",
        max_tokens=4000,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    next(stream)
    return stream


@pytest.mark.parametrize("number", usual(signal.SIGTERM, long=[signal.SIGINT]))
def test_a_signal_ends_it_in_order(launch: Launch, number: signal.Signals) -> None:
    """A running stream gets an end that says why; nothing is accepted any more."""
    process, url = launch(
        *("--grace", "0.5", "--threads", "1", "--draft-n-max", "0"),
        before="from pyllama_mtp.serve import app; app.END_S = 100.0",
        PYLLAMA_MTP_API_KEY="secret",
    )
    assert (
        process.stdout
        and process.stdout.readline() == f"a page to chat with: {url.removesuffix('/v1')}\n"
    )
    assert httpx.get(f"{url}/models").status_code == 401, "the key comes from the environment"
    stream = a_long_stream(url, "secret")
    process.send_signal(number)
    with pytest.raises(openai.APIError, match="shutting down"):
        list(stream)
    assert process.wait(LIMIT_S) == (0 if number == signal.SIGTERM else 130)
    assert process.stderr
    assert "Traceback" not in process.stderr.read()
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)


def test_the_second_signal_ends_it_at_once(launch: Launch) -> None:
    """A model without a template is told at the start; its name for clients has no spaces."""
    changed = """from pyllama_mtp import Model
Model.chat_template, Model.name = "", property(lambda self: "A b  c", lambda *name: None)"""
    process, url = launch("--threads", "1", before=changed)
    assert httpx.get(f"{url}/models").json()["data"][0]["id"] == "A-b-c"
    stream = a_long_stream(url)
    process.send_signal(signal.SIGINT)
    with pytest.raises(httpx.TransportError):  # it has come: nothing is accepted any more
        while httpx.get(url):
            time.sleep(0.01)
    assert process.poll() is None, "answers may go on for a while"
    process.send_signal(signal.SIGINT)
    assert process.wait(LIMIT_S) == 130
    assert process.stderr
    said = process.stderr.read()
    assert "has no chat template, so it cannot chat" in said
    assert "interrupted" not in said, "it has ended in order"
    stream.close()


def test_a_port_that_is_taken_or_not_there(cli: Cli) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for port, why in ((taken.getsockname()[1], "--port"), (99999, "0-65535")):
            done = cli("serve", "--port", port)
            assert done.code == 2
            assert "cannot listen at 127.0.0.1:" in done.err and why in done.err


def test_it_ends_whatever_computes(launch: Launch) -> None:
    """A thread that does not end, as of a grammar that is too large, keeps the process for no more
    than END_S seconds."""
    soon = "from pyllama_mtp.serve import app; app.END_S = 0.5"
    process, url = launch("--grace", "0", before=f"{ENDLESS}\n{soon}")
    assert httpx.get(f"{url}/models").status_code == 200
    process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT_S) == 143
    assert max(app.END_S, app.PROMPTS_S) + 0.5 < 10


#: Code that has a prompt written in so many seconds, with so many for it at the end, and half a
#: one for all else; there is no further end, in case that the log blocks.
SLOW = """import os, time
from pyllama_mtp import promptfile
from pyllama_mtp.serve import app
write, later, app.END_S, app.PROMPTS_S = promptfile.write, app._later, 0.5, {most}
promptfile.write = lambda *what: (time.sleep({seconds}), write(*what))
app._later = lambda after, call, *of: call is os._exit or later(after, call, *of)"""


@pytest.mark.parametrize(("seconds", "most"), usual((1, 100), long=[(300, 1)]))
def test_prompts_are_written_at_the_end(
    launch: Launch, tmp_path: Path, seconds: float, most: float
) -> None:
    """As long as there is time; the log says what is lost."""
    options = ("--grace", "0", "--cache-dir", str(tmp_path), "--threads", "1")
    process, url = launch(*options, before=SLOW.format(seconds=seconds, most=most))
    body = {"prompt": "def f(x): return x\n" * 20, "max_tokens": 2}
    assert httpx.post(f"{url}/completions", json=body).status_code == 200
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=LIMIT_S)
    assert ("no time to write them: 1" in said) == (seconds > most), said
    assert len(list(tmp_path.glob("*.prompt"))) == (seconds < most)


#: Texts that one letter widens, and short ones; of each, as many as a body may have.
LARGE = (["x" * (limits.TEXT - 99) + "漢"] * 3, ["1" * 12] * 10**6)


@pytest.mark.parametrize("prompts", usual(LARGE[1], long=LARGE[:1]), ids=["short", "long"])
def test_the_largest_bodies_take_ten_times_their_bytes(launch: Launch, prompts: list[str]) -> None:
    """At most, and are refused."""
    process, url = launch("--threads", "1")
    a_long_stream(url).close()
    status = Path(f"/proc/{process.pid}/status")

    def figure(name: str) -> int:
        return int(
            next(line for line in status.read_text().splitlines() if name in line).split()[1]
        )

    data = json.dumps({"prompt": prompts}, ensure_ascii=False).encode()
    headers, before = {"content-type": "application/json"}, figure("VmRSS")
    got = httpx.post(f"{url}/completions", content=data, headers=headers)
    assert got.status_code == 400
    assert figure("VmHWM") - before < 10 * len(data) / 1024
