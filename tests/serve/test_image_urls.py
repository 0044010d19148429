"""Images that clients name by http(s) URLs: what is fetched, and what never is.

The other server listens on the loopback, so a test says which addresses count as public.
"""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import openai
import pytest

from pyllama_mtp import Vision
from pyllama_mtp.errors import UsageError
from pyllama_mtp.serve import fetch
from pyllama_mtp.serve.bodies import Message

from .conftest import Running, Start
from .support import question, url

HOME = "127.0.0.1"


class Web(ThreadingHTTPServer):
    """A server of images. A path is what it does.

    Attributes:
        asked: path and Host header of each request.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__((HOME, 0), _Handler)
        self.asked: list[tuple[str, str]] = []
        self.image = base64.b64decode(url(1).partition(",")[2])
        self.ends = threading.Event()
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def at(self, path: str, host: str = HOME) -> str:
        return f"http://{host}:{self.port}/{path}"


class _Handler(BaseHTTPRequestHandler):
    server: Web

    def do_GET(self) -> None:
        self.server.asked.append((self.path, self.headers["Host"]))
        what, _, rest = self.path[1:].partition("/")
        if what == "to":
            self.send_response(302)
            self.send_header("Location", rest)
            self.end_headers()
            return
        self.send_response(404 if what == "none" else 200)
        if what == "headers":
            while not self.server.ends.wait(0.05):
                self.wfile.write(b"X-More: a\r\n")
        self.end_headers()
        while what == "endless":
            self.wfile.write(bytes(1 << 16))
        while what == "slow" and not self.server.ends.wait(0.05):
            self.wfile.write(b"a")
        self.wfile.write(b"words" if what == "text" else self.server.image)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def web() -> Iterator[Web]:
    with Web() as server:
        yield server
        server.ends.set()
        server.shutdown()


@pytest.fixture
def home_is_public(monkeypatch: pytest.MonkeyPatch) -> None:
    real = fetch.is_public
    monkeypatch.setattr(fetch, "is_public", lambda address: address == HOME or real(address))


def fetched(*urls: str) -> list[str]:
    """The URLs after fetching."""
    messages = [Message.model_validate(message) for message in question(*urls)]
    asyncio.run(fetch.fetch_images(messages))
    return [image.url for message in messages for image in message.images]


@pytest.mark.usefixtures("home_is_public")
def test_what_is_fetched(web: Web) -> None:
    """The image, also after redirects; other URLs stay, of which only data URLs are read."""
    data = base64.b64encode(web.image).decode()
    found = fetched(web.at("image"), url(2), web.at("to//to//image"), "file:///etc/passwd")
    assert [one.partition(",")[2] for one in found[::2]] == [data, data]
    assert [found[1], found[3]] == [url(2), "file:///etc/passwd"]


def test_a_name_is_resolved_once(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection goes to the address that was checked, whatever the name means a moment later;
    the other server is told the name."""
    answers, checked = [[HOME], ["10.0.0.1"]], list[str]()

    async def resolve(host: str) -> list[str]:
        assert host == "pictures.test"
        return answers.pop(0)

    monkeypatch.setattr(fetch, "resolve", resolve)
    monkeypatch.setattr(fetch, "is_public", lambda address: checked.append(address) or True)
    fetched(web.at("image", "pictures.test"))
    assert (checked, len(answers)) == ([HOME], 1)
    assert web.asked == [("/image", f"pictures.test:{web.port}")]


@pytest.mark.usefixtures("home_is_public")
@pytest.mark.parametrize("target", ["http://10.0.0.1/a.png", "http://[::1]/", "http://0/"])
def test_a_redirect_leads_to_no_private_address(web: Web, target: str) -> None:
    with pytest.raises(UsageError, match="not at a public address"):
        fetched(web.at(f"to/{target}"))
    with pytest.raises(UsageError, match="not at a public address"):
        fetched(target)


@pytest.mark.usefixtures("home_is_public")
def test_one_private_address_is_enough(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    async def resolve(host: str) -> list[str]:
        return [HOME, "192.168.0.1"]

    monkeypatch.setattr(fetch, "resolve", resolve)
    with pytest.raises(UsageError, match="not at a public address"):
        fetched(web.at("image"))
    assert not web.asked


@pytest.mark.usefixtures("home_is_public")
def test_what_is_not_fetched(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the other server does, an error says what was wrong, after a short time."""
    monkeypatch.setattr(fetch, "MOST_BYTES", 1 << 20)
    cases = {
        web.at("none"): "the status 404",
        web.at("to/file:///etc/passwd"): "only http and https",
        web.at("to//to//to//to//image"): "more than 3 redirects",
        web.at("endless"): "1 MiB together",
        web.at("slow"): "within 0.5 s",
        web.at("headers"): "within 0.5 s",
        f"http://{HOME}:1/": "cannot be fetched: .*connect",
        "http://": "cannot be fetched",
        "http://a b/": "cannot be fetched",
        f"https://{HOME}:{web.port}/": "cannot be fetched",
        "http://nowhere.invalid/": "cannot be fetched",
    }
    for address, reason in cases.items():
        monkeypatch.setattr(fetch, "MOST_SECONDS", 0.5 if reason == "within 0.5 s" else 100)
        with pytest.raises(UsageError, match=reason):
            fetched(address)


def test_addresses_that_are_not_public() -> None:
    for address in (
        *("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1"),
        *("0.0.0.0", "224.0.0.1", "255.255.255.255", "192.0.2.1", "192.0.0.9", "192.88.99.1"),
        *("192.31.196.1", "192.52.193.1", "192.175.48.1", "::", "::1", "fe80::1", "fc00::1"),
        *("ff02::1", "fec0::1", "::ffff:127.0.0.1", "::ffff:8.8.8.8", "64:ff9b::7f00:1"),
        *("2002:7f00:1::", "2001:0:7f00:1::", "fe80::1%1", "3fff::1", "5f00::1", "4000::1"),
        *("2620:4f:8000::1", "100:0:0:1::1", "64:ff9b:1::1"),
    ):
        assert not fetch.is_public(address), address
    assert fetch.is_public("8.8.8.8") and fetch.is_public("2606:4700:4700::1111")


def answer(server: Running, address: str) -> str:
    got = server.answer(question(address), max_tokens=8)
    return str(got.choices[0].message.content)


def test_over_http(start: Start, vision: Vision, web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    """Off, if it was not asked for. The text is that of a data URL."""
    off, on = start(vision=vision), start(vision=vision, image_urls=True)
    for server, reason in ((off, "not fetched"), (on, "not at a public address")):
        with pytest.raises(openai.BadRequestError, match=reason):
            answer(server, web.at("image"))
    assert not web.asked
    monkeypatch.setattr(fetch, "is_public", lambda address: address == HOME)
    assert answer(on, web.at("image")) == answer(on, url(1))
    with pytest.raises(openai.BadRequestError, match="not an image of the formats"):
        answer(on, web.at("text"))
