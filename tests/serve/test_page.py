"""The page to chat with, in a real browser."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import pytest

from pyllama_mtp import Model, Sampling

from ..marks import usual
from .conftest import LIMIT_S, NAME, Running, Start

QUESTION, KEY = "What is a list?", "secret"


def wait(true: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + LIMIT_S
    while not (found := true()):
        assert time.monotonic() < deadline, "it does not come true"
        time.sleep(0.02)
    return found


def texts(browser: Any, css: str) -> list[str]:
    """In one call, or a page that grows keeps it busy."""
    script = "return [...document.querySelectorAll(arguments[0])].map(one => one.textContent)"
    found: list[str] = browser.execute_script(script, css)
    return found


def show(browser: Any, server: Running, width: int = 1000) -> None:
    metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 700}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.get_log("browser")  # what earlier pages said
    browser.get(server.url)


def say(browser: Any, text: str) -> str:
    """Send a message; the figures of its answer, when it is complete."""
    said = browser.find_element("id", "said")
    n = len(texts(browser, ".answer"))
    said.send_keys(text, "\ue007")
    wait(lambda: len(texts(browser, ".answer")) > n and texts(browser, "#send") == ["Send"])
    return texts(browser, ".figures")[-1]


@pytest.mark.parametrize("width", usual(360, long=[1000]))
def test_a_conversation(
    browser: Any, start: Start, demo: Model, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    """Text, tokens, drafts and the cache are the server's own; nothing else is fetched."""
    monkeypatch.setattr(demo, "sampling", Sampling())  # the same answer each time
    server = start(max_tokens=40)
    total = server.generator.total
    show(browser, server, width)
    wait(lambda: texts(browser, "#model") == [NAME])
    figures = say(browser, QUESTION)
    accepted, drafted = sum(total.accepted), sum(total.drafted)
    assert f"{total.n_generated} tokens · " in figures and accepted > 0
    assert f"{accepted} of {drafted} drafts held" in figures
    assert re.search(r"\d\.\d tokens/s .* first token after \d", figures)
    parts = browser.find_elements("css selector", ".answer span")
    held = [int(part.get_property("dataset")["drafts"]) for part in parts]
    assert len(held) > 5 and 0 < sum(held) <= accepted
    (answer,) = texts(browser, ".answer .text")
    answer += "".join(texts(browser, ".answer .thought"))
    assert len(answer) > 20
    cached = re.search(r"(\d+) from the cache", say(browser, "And a dictionary?"))
    assert cached and int(cached[1]) > 0
    assert texts(browser, ".user") == [QUESTION, "And a dictionary?"]
    sizes = "const e = document.documentElement; return e.scrollWidth - e.clientWidth"
    assert browser.execute_script(sizes) == 0
    fetched = browser.execute_script("return performance.getEntriesByType('resource')")
    assert {one["name"].removeprefix(server.url) for one in fetched} <= {
        "/v1/models",
        "/v1/chat/completions",
    }
    assert browser.get_log("browser") == []
    browser.find_element("id", "anew").click()
    assert texts(browser, ".answer") == []


MARKDOWN = """# A *list*
Some **bold** `x < y` <img src=x onerror=alert(1)> [site](https://a.b/c) [no](javascript:alert(1))
more
- one
- two **2**

| a | b |
| --- | --- |
| 1 | 2 |
```py
def f(): **no**
```
3. three"""
ELEMENTS = (
    "<h2>A <em>list</em></h2><p>Some <strong>bold</strong> <code>x &lt; y</code> &lt;img src=x "
    'onerror=alert(1)&gt; <a href="https://a.b/c" target="_blank" rel="noreferrer">site</a> '
    "[no](javascript:alert(1))\nmore</p><ul><li>one</li><li>two <strong>2</strong></li></ul>"
    "<table><tr><td> a </td><td> b </td></tr><tr><td> 1 </td><td> 2 </td></tr></table>"
    '<pre>def f(): **no**\n</pre><ol start="3"><li>three</li></ol>'
)


def test_markdown_is_shown_and_html_is_not(browser: Any, start: Start) -> None:
    show(browser, start())
    script = """
    const answer = new Answer(), [text] = arguments;
    for (let at = 0; at < text.length; at += 3)
      answer.parts.push({from: at, text: text.slice(at, at + 3), drafts: 1});
    answer.content = text;
    answer.finish();
    const html = answer.text.innerHTML.replaceAll(/<.?span[^>]*>/g, "").replaceAll(' class=""', "");
    const held = [...answer.text.querySelectorAll("span")].map(one => Number(one.dataset.drafts));
    return [html, held.reduce((a, b) => a + b), answer.parts.length];
    """
    html, held, n_parts = browser.execute_script(script, MARKDOWN)
    assert html == ELEMENTS and 0 < held <= n_parts


def test_a_key_is_asked_for(browser: Any, start: Start) -> None:
    server = start(api_key=KEY, max_tokens=8)
    show(browser, server)
    key = browser.find_element("id", "key")
    wait(key.is_displayed)
    assert "tokens" not in say(browser, QUESTION)
    assert "This server needs a key. Type it" in texts(browser, ".error")[0]
    assert browser.find_element("id", "said").get_property("value") == QUESTION
    key.send_keys(KEY)
    assert "tokens" in say(browser, "")


def test_an_answer_is_stopped(
    browser: Any, start: Start, demo: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server gives it up, and its beginning stays."""
    endless = {token: -1000.0 for token in range(demo.n_vocab) if demo.is_end(token)}
    monkeypatch.setattr(demo, "sampling", Sampling(logit_bias=endless))
    server = start(n_ctx=8192, synthetic_acceptance=(0.0, 0.0, 0.0))
    show(browser, server)
    browser.find_element("id", "said").send_keys("def", "\ue007")
    wait(lambda: len(texts(browser, ".answer span")) > 3)
    browser.find_element("id", "send").click()
    wait(lambda: texts(browser, "#send") == ["Send"])
    server.wait_until_idle()
    assert server.generator.outcomes["cancelled"] == 1
    assert texts(browser, ".error") == [] and texts(browser, ".answer span")
