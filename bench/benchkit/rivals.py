"""llama-server and ik_llama.cpp's server on one file, each started once and kept for its rounds.

ik_llama.cpp (https://github.com/ikawrakow/ik_llama.cpp) is a fork of llama.cpp whose server differs
in a few options and in its timings. A server that waits for a request computes nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchkit import llama_bench
from benchkit.llama_bench import options
from benchkit.plan import Plan
from benchkit.sample import Sample
from pyllama_mtp.measure.peers import PEERS, PeerError
from pyllama_mtp.measure.peers.find import Installed, find
from pyllama_mtp.measure.peers.llama_server import Server, completion_request, server_options
from pyllama_mtp.measure.peers.output import OutputError, check_lengths, parse_timings

UPSTREAM, IK = "llama-server", "ik_llama.cpp"
#: ik_llama.cpp repacks weights at load where it is told to: it is measured without and with it.
REPACK = ("", " -rtr")
WARM_UP = (64, 8)  # tokens of prompt, generated tokens


@dataclass(frozen=True)
class Rival:
    """A server with its options.

    Attributes:
        side: UPSTREAM or IK.
        case: drafts per round, "0" without MTP; " -rtr" follows where that is on.
    """

    side: str
    case: str
    program: str
    options: tuple[str, ...]


def installed(folder: Path) -> Installed:
    """The llama-server in this folder or its "bin", and nowhere else; llama-bench lies beside it.

    Raises PeerError.
    """
    found = find("llama-server", str(folder), gpu=False)
    if folder.resolve() not in Path(found.command[0]).parents:
        raise PeerError(f"there is no llama-server in {folder}: {PEERS['llama-server'].obtain}")
    return found


def upstream_rivals(program: str, plan: Plan, n_ctx: int, depths: Sequence[int]) -> Iterator[Rival]:
    """Upstream's llama-server at each depth."""
    for depth in depths:
        yield Rival(UPSTREAM, str(depth), program, (*server_options(options(plan), n_ctx, depth),))


def ik_rivals(program: str, plan: Plan, n_ctx: int, depths: Sequence[int]) -> Iterator[Rival]:
    """ik_llama.cpp's server at each depth, without and with repacking."""
    for depth in depths:
        given = (
            *options(plan).arguments(),
            *("-tb", str(plan.threads), "-c", str(n_ctx), "-np", "1"),
            *("--cache-ram", "0", "--ctx-checkpoints", "0", "--log-disable"),
            *(("--spec-type", f"mtp:n_max={depth},p_min=0.0") if depth else ()),
        )
        for repack in REPACK:
            yield Rival(IK, f"{depth}{repack}", program, (*given, *repack.split()))


MAKERS = {UPSTREAM: upstream_rivals, IK: ik_rivals}


def ik_prefill(program: str, plan: Plan) -> dict[str, Sample]:
    """By ik_llama.cpp's llama-bench; it knows no flash attention "auto"."""
    given = replace(plan, flash_attn="0" if plan.flash_attn == "off" else "1")
    more = {repack: ("-rtr", "1") if repack else () for repack in REPACK}
    return {f"0{repack}": llama_bench.prefill(program, given, *more[repack]) for repack in REPACK}


class Servers:
    """Those that run. A context manager that ends them."""

    def __init__(self) -> None:
        self._running: dict[Rival, contextlib.ExitStack] = {}
        self._servers: dict[Rival, Server] = {}

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *raised: object) -> None:
        for rival in list(self._running):
            self.stop(rival)

    def stop(self, rival: Rival) -> None:
        """End it, if it runs."""
        self._servers.pop(rival, None)
        if running := self._running.pop(rival, None):
            running.close()

    def decode(self, rival: Rival, prompt: Sequence[int], plan: Plan) -> Sample:
        """One completion; the first one starts the server and warms it up. Raises PeerError."""
        try:
            if rival not in self._servers:
                self._start(rival, prompt)
            request = completion_request(prompt, plan.n_decode + 1, 0)
            answer = self._servers[rival].complete(
                {**request, "stream": rival.side == IK}  # else it fails on text that is no UTF-8
            )
        except BaseException:
            self.stop(rival)
            raise
        figures = parse_timings(in_upstream_terms(answer) if rival.side == IK else answer)
        return check_lengths(rival.side, figures, len(prompt), plan.n_decode + 1)

    def _start(self, rival: Rival, prompt: Sequence[int]) -> None:
        running = self._running[rival] = contextlib.ExitStack()
        server = running.enter_context(Server(rival.program, rival.options))
        n_prompt, n_first = WARM_UP
        server.complete({**completion_request(prompt[:n_prompt], n_first, 0), "stream": True})
        self._servers[rival] = server


def in_upstream_terms(response: Any) -> Any:
    """A response of ik_llama.cpp's server: its speed counts the first token, which comes from the
    prompt, among the tokens but not in the time; and it does not say what it took from a cache."""
    try:
        timings = response["timings"]
        n, ms = int(timings["predicted_n"]), float(timings["predicted_ms"])
        return {"timings": {**timings, "cache_n": 0, "predicted_per_second": 1e3 * (n - 1) / ms}}
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise OutputError(f"{IK} has no usable timings ({error!r}): {response!r:.200}") from error
