"""Hostile chat templates end with an error, soon; what Jinja does with others is Jinja's."""

from __future__ import annotations

import logging
import os
import re
import resource
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyllama_mtp import Sampling, child
from pyllama_mtp.child import Workers
from pyllama_mtp.errors import UsageError
from pyllama_mtp.llama import chat

from ..marks import usual
from ..processes import RunPython

HELLO = [{"role": "user", "content": "Hello"}]
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
GROWING = (
    "{% set ns = namespace(x=START) %}{% for i in range(60) %}{% set ns.x = STEP %}{% endfor %}"
)


def growing(start: str, step: str) -> str:
    return GROWING.replace("START", start).replace("STEP", step)


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch) -> Iterator[Workers]:
    """Renderings may take 0.3 s and 256 MiB."""
    workers = Workers("pyllama_mtp.llama.chat:render_here", 0.3, 256 << 20)
    monkeypatch.setattr(chat, "workers", workers)
    yield workers
    workers.close()


TWICE = "{% macro f(n) %}{% if n %}{{ f(n-1) ~ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}"
SECONDS, MEMORY = "computes for more than 0.3 s", "takes more than 256 MiB of memory"


@pytest.mark.parametrize(
    ("template", "said"),
    usual(
        (ENDLESS, SECONDS),
        (growing("3", "ns.x * ns.x"), SECONDS),
        (growing("'a'", "ns.x ~ ns.x"), MEMORY),
        ("{{ 'x' * 17000000 }}", "text has more than 16,777,216"),
        long=[
            (TWICE, SECONDS),
            ("{{ [1]|batch(300000000, 'x')|list }}", MEMORY),
            ("{{ messages|tojson(indent=400000000) }}", MEMORY),
        ],
    ),
    ids=range(7),
)
def test_a_template_that_takes_too_much(template: str, said: str, little: Workers) -> None:
    """And the next one is rendered."""
    little.seconds = 0.3 if said == SECONDS else 30.0  # memory takes longer on a busy machine
    with pytest.raises(UsageError, match=said):
        chat.render(template, HELLO)
    assert chat.render("{{ messages[0].role }}", HELLO) == "user"


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ raise_exception.__globals__['__builtins__'] }}{{ strftime_now.__code__ }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{% include '/etc/passwd' %}",
        "{{ messages.append(1) }}",
    ],
)
def test_a_template_that_looks_for_a_way_out(template: str) -> None:
    """An error, or nothing of Python's."""
    try:
        text = chat.render(template, HELLO)
    except UsageError:
        return
    assert not re.search("<|class|module|object|root:", text), text


def test_workers_end_with_their_parent(run_python: RunPython) -> None:
    """However it ends, and whatever they compute: nothing is left."""
    code = (
        f"ENDLESS = {ENDLESS!r}"
        + """
import os, threading, time
from pyllama_mtp.llama import chat
chat.workers.seconds = 1000.0
assert chat.render("{{ messages[0] }}", ["a"]) == "a"
print(chat.workers._idle[0].pid, flush=True)
if not os.fork():  # a fork has workers of its own
    assert not chat.workers._idle
    assert chat.render("{{ messages[0] }}", ["b"]) == "b"
    os._exit(0)
assert os.wait()[1] == 0 and chat.render("{{ messages[0] }}", ["c"]) == "c"
threading.Thread(target=chat.render, args=(ENDLESS, ["d"]), daemon=True).start()
while chat.workers._idle:
    time.sleep(0.01)
time.sleep(0.2)
os.kill(os.getpid(), 9)
"""
    )
    done = run_python(code)
    assert done.stderr == ""
    for _ in range(1200):
        if not Path(f"/proc/{int(done.stdout)}").exists():
            return
        time.sleep(0.05)
    raise AssertionError("a worker is still there")


def test_a_worker_that_somebody_else_has_ended() -> None:
    chat.render("a", HELLO)
    os.kill(chat.workers._idle[-1].pid, signal.SIGKILL)
    chat.workers._idle[-1].wait()
    assert chat.render("b", HELLO) == "b"


def test_ctrl_c_ends_a_template(little: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    """And leaves no process that goes on."""
    little.seconds = 60.0
    chat.render("a", HELLO)
    (process,) = little._idle
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    before, send = signal.signal(signal.SIGINT, signal.default_int_handler), child._send
    try:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(child, "_send", lambda *of: send(*of) or timer.start())
            chat.render(ENDLESS, HELLO)
    finally:
        signal.signal(signal.SIGINT, before)
    assert process.poll() is not None and chat.render("b", HELLO) == "b"


def test_json_is_as_in_hugging_face_s_templates() -> None:
    value = {"role": "user", "content": "<é> & 'x'"}
    assert chat.render("{{ messages[0] | tojson }}", [value]) == (
        '{"role": "user", "content": "<é> & \'x\'"}'
    )
    wanted = '[\n  {\n    "b": 1,\n    "a": 2\n  }\n]'
    assert chat.render("{{ messages | tojson(indent=2) }}", [{"b": 1, "a": 2}]) == wanted


TEMPLATE = """{%- for m in messages -%}
{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endfor %}{% if add_generation_prompt %}<|im_start|>assistant{{ '\n' }}{% endif %}"""
ASKED = [{"role": "user", "content": "Hello {{ 1 }}"}]


def test_template() -> None:
    opened = chat.render(TEMPLATE, ASKED)
    assert opened == "<|im_start|>user\nHello {{ 1 }}<|im_end|>\n<|im_start|>assistant\n"
    assert chat.render(TEMPLATE, ASKED, add_generation_prompt=False) == opened[:-22]
    assert chat.render("{{ bos_token }}{{ think }}{{ absent }}", [], bos_token="a", think=1) == "a1"


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for %}", "cannot render"),
        ("{{ messages[0].content.missing.name }}", "cannot render"),
        ("{{ 1 / 0 }}", "cannot render"),
    ],
)
def test_template_that_refuses(template: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        chat.render(template, ASKED)


def test_what_a_model_file_says(caplog: pytest.LogCaptureFixture) -> None:
    said = {
        "temp": 0.6,
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.0,
        "penalty_repeat": 1.1,
        "penalty_last_n": -1,
        "xtc_probability": 0.1,
        "xtc_threshold": 0.2,
    }
    found = chat.usual_sampling({f"general.sampling.{key}": value for key, value in said.items()})
    assert found == Sampling(
        temperature=0.6,
        top_k=20,
        top_p=0.9,
        min_p=0.0,
        repeat_penalty=1.1,
        repeat_last_n=0,
        xtc_probability=0.1,
        xtc_threshold=0.2,
    )
    assert chat.usual_sampling({}) == Sampling(temperature=0.8)
    with caplog.at_level(logging.WARNING, "pyllama_mtp"):
        assert chat.usual_sampling({"general.sampling.top_p": 7.0}) == Sampling(temperature=0.8)
    assert "top_p" in caplog.text


def test_many_open_files_are_no_matter(little: Workers) -> None:
    """Of a server with a thousand connections: numbers of files are then above 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        assert chat.render("{{ messages[0].content }}", [{"content": "a"}]) == "a"
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_worker_that_kept_too_much_is_replaced(little: Workers) -> None:
    """A call that has too little memory in a worker that has been used gets a new one."""
    assert chat.render("a", []) == "a"
    worker = little._idle[0]
    most = int(Path(f"/proc/{worker.pid}/statm").read_text().split()[0]) * resource.getpagesize()
    resource.prlimit(worker.pid, resource.RLIMIT_AS, (most, most))
    assert chat.render("{% set x = 'a' * 2 ** 23 %}{{ x | length }}", []) == str(2**23)
    assert little._idle[0].pid != worker.pid


def test_calls_that_find_no_worker_end(little: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "WAIT_S", 0.0)
    little._room = threading.Semaphore(0)
    with pytest.raises(UsageError, match="others are computing; try again later"):
        chat.render("a", [])
