"""Draft-MTP decode as llama-server does it: start, warm up, measure one completion, stop."""

from __future__ import annotations

import json
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from peers import PeerError, Peers

from benchkit.llama_bench import common_options
from benchkit.paths import child_environment
from benchkit.plan import Plan
from benchkit.sample import Sample
from benchkit.upstream_output import OutputError, parse_timings

HOST = "127.0.0.1"
START_TIMEOUT_S = 300.0
ANSWER_TIMEOUT_S = 3600.0
#: A proxy set for this machine is not meant for the loopback interface.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def server_options(plan: Plan) -> list[str]:
    """Options for one slot, equal to ours; what costs upstream time and is not measured is off.

    Off are the prompt cache in RAM, context checkpoints and the adjustment of sizes to memory.
    Drafts are sampled in the graph (`--spec-draft-backend-sampling`), upstream's default.
    """
    n_ctx = plan.n_ctx(plan.n_prompt + plan.n_decode + 1)
    return [
        *common_options(plan),
        *("-tb", str(plan.threads)),
        *("-c", str(n_ctx)),
        *("-np", "1"),
        *("--cache-ram", "0"),
        *("--ctx-checkpoints", "0"),
        *("--fit", "off"),
        "--no-cache-prompt",
        *("--spec-type", "draft-mtp"),
        *("--spec-draft-n-max", str(plan.depth)),
        *("--spec-draft-p-min", "0"),
        *("--spec-synth-rates", ",".join(map(str, plan.rates))),
        *("--spec-draft-threads", str(plan.threads)),
        *("--spec-draft-threads-batch", str(plan.threads)),
        *("--spec-draft-type-k", plan.cache_type_k),
        *("--spec-draft-type-v", plan.cache_type_v),
    ]


def completion_request(prompt: Sequence[int], n_predict: int, seed: int) -> dict[str, Any]:
    """Greedy by the cheapest sampler chain that upstream has: the best candidate and nothing else.

    Args:
        seed: of the draw that imposes acceptance.
    """
    return {
        "prompt": list(prompt),
        "n_predict": n_predict,
        "samplers": ["top_k"],
        "top_k": 1,
        "ignore_eos": True,
        "cache_prompt": False,
        "seed": seed,
        "stream": False,
    }


class Server:
    """A llama-server on a free port of the loopback interface. A context manager that stops it."""

    def __init__(self, peers: Peers, options: Sequence[str]) -> None:
        self._log = tempfile.NamedTemporaryFile()  # noqa: SIM115 - closed by stop()
        self._url = f"http://{HOST}:{(port := free_port())}"
        command = [str(peers.program("llama-server")), *options]
        command += ["--host", HOST, "--port", str(port)]
        self._process = subprocess.Popen(
            command, env=child_environment(), stdout=self._log, stderr=subprocess.STDOUT
        )

    def __enter__(self) -> Server:
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.stop()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise PeerError(f"llama-server ended at once:\n{self.log()[-2000:]}")
            try:
                with _opener.open(f"{self._url}/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)  # 503 while it loads, refused before it listens
        raise PeerError(f"llama-server was not ready in {START_TIMEOUT_S:.0f} s:\n{self.log()}")

    def complete(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The response to a completion. Raises PeerError when the server refuses or dies."""
        data = json.dumps(request).encode()
        headers = {"Content-Type": "application/json"}
        call = urllib.request.Request(f"{self._url}/completion", data, headers)
        try:
            with _opener.open(call, timeout=ANSWER_TIMEOUT_S) as answer:
                response: dict[str, Any] = json.load(answer)
                return response
        except urllib.error.HTTPError as error:
            raise PeerError(f"llama-server answered {error.code}: {error.read()!r}") from error
        except (urllib.error.URLError, OSError) as error:
            raise PeerError(f"llama-server: {error}\n{self.log()[-2000:]}") from error

    def log(self) -> str:
        """What it printed so far."""
        return Path(self._log.name).read_text(errors="replace")

    def stop(self) -> None:
        """End the process, by force if it does not go."""
        self._process.terminate()
        try:
            self._process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


def free_port() -> int:
    """A port of the loopback interface that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def measure(peers: Peers, plan: Plan, prompt: Sequence[int], seed: int) -> Sample:
    """One completion by a fresh server, after a short one that warms it up."""
    with Server(peers, server_options(plan)) as server:
        server.complete(completion_request(prompt, min(8, plan.n_decode), seed))
        response = server.complete(completion_request(prompt, plan.n_decode + 1, seed))
    try:
        return parse_timings(response)
    except OutputError as error:
        raise PeerError(str(error)) from error
