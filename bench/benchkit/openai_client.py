"""A client of an OpenAI-compatible server, by the standard library, which costs next to nothing."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any
from urllib.request import ProxyHandler, build_opener

HOST = "127.0.0.1"
TIMEOUT_S = 1800
#: A proxy set for this machine is not meant for the loopback interface.
_opener = build_opener(ProxyHandler({}))


class ClientError(RuntimeError):
    """The server did not answer as requested."""


@dataclass(frozen=True)
class Stream:
    """One streamed completion, as its client saw it.

    Attributes:
        n_generated: tokens, by the server's usage; without usage the number that was requested, if
            the stream ended for that reason. The first token comes with the first chunk.
        first_s: from the request to the first chunk.
        decode_s: from the first chunk to the end of the stream.
        n_chunks: chunks with a choice.
    """

    n_generated: int
    first_s: float
    decode_s: float
    n_chunks: int

    @property
    def decode_tps(self) -> float:
        """Tokens per second after the first."""
        return (self.n_generated - 1) / self.decode_s

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {**asdict(self), "decode_tps": self.decode_tps}


def complete(port: int, prompt: Sequence[int] | str, n: int, **options: Any) -> Stream:
    """Stream a greedy completion of `n` tokens. Raises ClientError."""
    body = {
        "prompt": prompt,
        "max_tokens": n,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **options,
    }
    connection = http.client.HTTPConnection(HOST, port, timeout=TIMEOUT_S)
    began = time.perf_counter()
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise ClientError(f"status {response.status}: {response.read().decode()[:2000]}")
        first, n_chunks, usage, reason = 0.0, 0, None, None
        for data in _events(response):
            chunk = json.loads(data)
            if chunk.get("error"):
                raise ClientError(str(chunk["error"]))
            if chunk.get("choices"):
                n_chunks += 1
                first = first or time.perf_counter()
                reason = chunk["choices"][0].get("finish_reason") or reason
            usage = chunk.get("usage") or usage
        ended = time.perf_counter()
    finally:
        connection.close()
    if not first or not (usage or reason == "length"):
        raise ClientError(
            f"the stream ended with {reason!r} after {n_chunks} chunks, without usage"
        )
    n_generated = usage["completion_tokens"] if usage else n
    return Stream(n_generated, first - began, ended - first, n_chunks)


def _events(response: http.client.HTTPResponse) -> Iterator[str]:
    for line in response:
        if line.startswith(b"data: "):
            data = line[6:].decode().strip()
            if data == "[DONE]":
                return
            yield data


def all_at_once(
    port: int, prompts: Sequence[Sequence[int]], n: int, **options: Any
) -> tuple[list[Stream], float]:
    """Send all prompts at once, each by a client of its own: the streams, and the seconds taken."""
    began = time.perf_counter()
    with ThreadPoolExecutor(len(prompts)) as pool:
        streams = list(pool.map(lambda prompt: complete(port, prompt, n, **options), prompts))
    return streams, time.perf_counter() - began


def get(port: int, path: str) -> str:
    """The text at a path of the server."""
    with _opener.open(f"http://{HOST}:{port}{path}", timeout=TIMEOUT_S) as response:
        text: str = response.read().decode()
    return text
