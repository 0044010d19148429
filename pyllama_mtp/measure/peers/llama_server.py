"""A completion by llama-server, with or without MTP: start, warm up, measure, stop."""

from __future__ import annotations

import json
import secrets
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from http.client import HTTPException
from typing import Any

from pyllama_mtp.measure.cells import Sample
from pyllama_mtp.measure.peers import PeerError
from pyllama_mtp.measure.peers.options import Options
from pyllama_mtp.measure.peers.output import parse_timings
from pyllama_mtp.measure.peers.process import Program

HOST = "127.0.0.1"
START_TIMEOUT_S = 600.0
ANSWER_TIMEOUT_S = 3600.0
_PORTS = 5  # ports that are tried
_POLL_S = 0.05
_NAME = "llama-server"
#: Without the machine's proxy, which is not meant for the loopback interface.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def server_options(options: Options) -> list[str]:
    """Options for one slot, equal to ours.

    Upstream's extra work is off: the prompt cache in RAM, context checkpoints, the adjustment of
    sizes to memory. Drafts are sampled in the graph (`--spec-draft-backend-sampling`), upstream's
    default. Acceptance that is imposed is drawn at random by the server.
    """
    settings = options.settings
    given = [
        *options.arguments(),
        *("-tb", str(settings.threads)),
        *("-c", str(settings.n_ctx)),
        *("-np", "1"),
        *("--cache-ram", "0"),
        *("--ctx-checkpoints", "0"),
        *("--fit", "off"),
        "--no-cache-prompt",
    ]
    if not settings.depth_limit:
        return given
    if rates := settings.synthetic_acceptance:
        given += ["--spec-synth-rates", ",".join(map(str, rates))]
    return [
        *given,
        *(("-md", options.head) if options.head else ()),
        *("--spec-type", "draft-mtp"),
        *("--spec-draft-n-max", str(settings.depth_limit)),
        *("--spec-draft-p-min", f"{settings.p_min:g}"),
        *("--spec-draft-threads", str(settings.threads)),
        *("--spec-draft-threads-batch", str(settings.threads)),
        *("--spec-draft-type-k", settings.cache_type_k),
        *("--spec-draft-type-v", settings.cache_type_v),
    ]


def completion_request(prompt: Sequence[int], n_predict: int, seed: int) -> dict[str, Any]:
    """A greedy completion by upstream's cheapest sampler chain: the best candidate only.

    Args:
        seed: of the draws that impose acceptance.
    """
    return {
        "prompt": list(prompt),
        "n_predict": n_predict,
        "samplers": ["top_k"],
        "top_k": 1,
        "temperature": 0,
        "ignore_eos": True,
        "cache_prompt": False,
        "seed": seed,
        "stream": False,
    }


class Server:
    """A llama-server on a free port of the loopback interface; `options`: see
    :func:`server_options`. A context manager that stops it."""

    def __init__(self, program: str, options: Sequence[str]) -> None:
        # Another program may take the port; only our server answers with this name.
        self._alias = f"peer-{secrets.token_hex(8)}"
        self._command = [program, *options, "--host", HOST, "--alias", self._alias]

    def __enter__(self) -> Server:
        for attempt in range(_PORTS):
            port = free_port()
            self._url = f"http://{HOST}:{port}"
            self._program = Program(_NAME, [*self._command, "--port", str(port)])
            try:
                if self._wait_until_ready(may_retry=attempt + 1 < _PORTS):
                    return self
            except BaseException:
                self._program.stop()
                raise
            self._program.stop()
        raise AssertionError("the last attempt succeeds or raises")

    def __exit__(self, *raised: object) -> None:
        self._program.stop()

    def _wait_until_ready(self, may_retry: bool) -> bool:
        """Wait until the server answers. False: another program took its port."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if (code := self._program.exit_code) is not None:
                said = self._program.last_words()
                if may_retry and "couldn't bind" in said:
                    return False
                raise PeerError(f"{_NAME} ended at its start ({code}): {said}")
            # 503 while the server loads, refused before it listens
            with suppress(OSError, HTTPException, ValueError):
                if self._get("/health").get("status") == "ok" and self._is_ours():
                    return True
            time.sleep(_POLL_S)
        raise PeerError(
            f"{_NAME} was not ready in {START_TIMEOUT_S:.0f} s: {self._program.last_words()}"
        )

    def _is_ours(self) -> bool:
        models = self._get("/v1/models").get("data")
        return any(isinstance(m, dict) and m.get("id") == self._alias for m in models or ())

    def _get(self, path: str) -> dict[str, Any]:
        with _opener.open(self._url + path, timeout=5) as answer:
            response = json.load(answer)
        return response if isinstance(response, dict) else {}

    def complete(self, request: Mapping[str, Any]) -> Any:
        """The response to a completion; with `stream` the last event. Raises PeerError when the
        server refuses or dies."""
        data = json.dumps(request).encode()
        headers = {"Content-Type": "application/json"}
        call = urllib.request.Request(f"{self._url}/completion", data, headers)
        try:
            with _opener.open(call, timeout=ANSWER_TIMEOUT_S) as answer:
                if not request.get("stream"):
                    return json.load(answer)
                events = [line for line in answer if line.startswith(b"data: {")]
                return json.loads(events[-1][len(b"data: ") :] if events else b"")
        except urllib.error.HTTPError as error:
            said = error.read().decode(errors="replace")[:500]
            raise PeerError(f"{_NAME} answered {error.code}: {said}") from error
        except ValueError as error:
            raise PeerError(f"{_NAME} answered what is no JSON: {error}") from error
        except (OSError, HTTPException) as error:
            raise PeerError(f"{_NAME}: {error}; {self._program.last_words()}") from error


def free_port() -> int:
    """A port of the loopback interface on which nobody listens now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def measure(
    program: str,
    options: Sequence[str],
    prompt: Sequence[int],
    n_predict: int,
    *,
    warm_up: tuple[int, int],
    seed: int,
) -> Sample:
    """One completion by a fresh server, after a short one that warms it up.

    Args:
        n_predict: tokens to generate, the first included.
        warm_up: tokens of the prompt that the warm-up processes, and tokens that it generates.

    Raises:
        PeerError: the server failed, or its answer cannot be read.
    """
    n_warm, n_first = warm_up
    with Server(program, options) as server:
        server.complete(completion_request(prompt[:n_warm], n_first, seed))
        return parse_timings(server.complete(completion_request(prompt, n_predict, seed)))
