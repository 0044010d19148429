"""Draft-MTP decode as llama-server does it, with the settings of a plan."""

from __future__ import annotations

from collections.abc import Sequence

from peers import Peers

from benchkit.llama_bench import options
from benchkit.plan import Plan
from benchkit.sample import Sample
from pyllama_mtp.measure.peers import llama_server


def server_options(plan: Plan) -> list[str]:
    """What the server is started with."""
    n_ctx = plan.n_ctx(plan.n_prompt + plan.n_decode + 1)
    return llama_server.server_options(options(plan), n_ctx, plan.depth, rates=plan.rates)


def measure(peers: Peers, plan: Plan, prompt: Sequence[int], seed: int) -> Sample:
    """One completion by a fresh server, after a short one that warms it up.

    Raises:
        PeerError: it failed, or answered nothing that can be read.
    """
    program, n_predict = str(peers.program("llama-server")), plan.n_decode + 1
    return llama_server.measure(
        *(program, server_options(plan), prompt, n_predict),
        warm_up=(len(prompt), min(8, plan.n_decode)),
        seed=seed,
    )
