"""Hostile chat templates end with an error, soon; ordinary ones are rendered as Jinja does it."""

from __future__ import annotations

import logging
import os
import signal
import threading
from typing import Any

import jinja2
import pytest

from pyllama_mtp import Sampling
from pyllama_mtp.errors import UsageError
from pyllama_mtp.llama import chat

HELLO = [{"role": "user", "content": "Hello"}]
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
GROWING = (
    "{% set ns = namespace(x=START) %}{% for i in range(60) %}{% set ns.x = STEP %}{% endfor %}"
)


def growing(start: str, step: str) -> str:
    return GROWING.replace("START", start).replace("STEP", step)


@pytest.mark.parametrize(
    "template",
    [
        ENDLESS,
        "{% set r = range(99999)|list %}{% for i in r %}{% for j in r %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for i in range(99999) %}{% set q = range(99999)|map('string')|join %}{% endfor %}",
        "{% for i in range(99999) %}{% set q = range(99999)|list %}{% endfor %}",
    ],
)
def test_a_template_that_does_not_end(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "MOST_SECONDS", 0.2)
    with pytest.raises(UsageError, match=r"computes for more than 0\.2 s"):
        chat.render(template, HELLO)


@pytest.mark.parametrize(
    ("template", "what"),
    [
        (growing("'a'", "ns.x ~ ns.x"), "characters or items"),
        (growing("'a'", "ns.x + ns.x"), "characters or items"),
        (growing("[1]", "ns.x * 2"), "characters or items"),
        (growing("[1]", "3 * ns.x"), "characters or items"),
        (growing("3", "ns.x * ns.x"), "bits"),
        ("{{ 'x' * 10 ** 12 }}", "characters or items"),
        ("{{ 10 ** (10 ** 12) }}", "bits"),
        ("{% for i in range(99999) %}{{ 'x' * 10000 }}{% endfor %}", "its text has more than"),
    ],
)
def test_a_template_that_makes_too_much(template: str, what: str) -> None:
    with pytest.raises(UsageError, match=what):
        chat.render(template, HELLO)


@pytest.mark.parametrize(
    "template",
    [
        "{{ 1 ~ 'a' ~ 2.5 ~ none ~ [1, 'b'] }}",
        "{{ 'a' ~ 1 + 2 }}{{ absent ~ 'x' }}",
        "{{ 2 ** 10 + 3 * 4 - -1 }}{{ 'ab' * 3 }}{{ [1] * 2 + [3] }}{{ 0.5 * 3 }}{{ 2 ** -1 }}",
        "{% for m in messages %}{{ loop.index ~ m.role }}{{ '!' if loop.last }}{% endfor %}",
        "{% set x %}a{{ 'b' ~ 1 }}{% endset %}{{ x ~ x }}{{ messages | tojson }}",
        "{{ -3 * 'a' }}{{ true + 1 }}{{ 10 ** 40 }}",
    ],
)
def test_ordinary_templates_are_as_in_jinja(template: str) -> None:
    plain = jinja2.sandbox.ImmutableSandboxedEnvironment()
    plain.policies["json.dumps_kwargs"] = {}

    def result(render: Any) -> str:
        try:
            return str(render())
        except (jinja2.TemplateError, TypeError, UsageError) as error:
            return f"error: {type(error) is not UsageError and error}"

    wanted = result(lambda: plain.from_string(template).render(messages=HELLO))
    found = result(lambda: chat.render(template, HELLO))
    assert found.startswith("error") == wanted.startswith("error")
    assert found == wanted or found.startswith("error")


def test_ctrl_c_ends_a_template(monkeypatch: pytest.MonkeyPatch) -> None:
    """And leaves no thread that goes on."""
    monkeypatch.setattr(chat, "MOST_SECONDS", 60)
    others = {*threading.enumerate()}
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            chat.render(ENDLESS, HELLO)
        timer.join()
    finally:
        signal.signal(signal.SIGINT, before)
    for thread in {*threading.enumerate()} - others:
        thread.join(5)
        assert not thread.is_alive()


def test_long_chats_are_no_problem() -> None:
    template = "{% for m in messages %}{{ '<|' ~ m.role ~ '|>' + m.content }}\n{% endfor %}"
    text = chat.render(template, HELLO * 10_000)
    assert text == "<|user|>Hello\n" * 10_000


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


def test_template_variables() -> None:
    assert chat.render("{{ bos_token }}{{ think }}", ASKED, bos_token="<s>", think=1) == "<s>1"
    assert chat.render("{{ absent }}", ASKED) == ""


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for %}", "cannot render"),
        ("{{ messages[0].content.missing.name }}", "cannot render"),
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "cannot render"),
        ("{{ 1 / 0 }}", "cannot render"),
        ("{{ messages[0].role + 1 }}", "cannot render"),
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
