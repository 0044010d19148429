"""Draft-MTP decode as llama-server does it, with the settings of a plan."""

from __future__ import annotations

from collections.abc import Sequence

from peers import Peers

from benchkit.llama_bench import options
from benchkit.plan import Plan
from benchkit.sample import Sample
from pyllama_mtp.measure.peers import llama_server


def measure(peers: Peers, plan: Plan, prompt: Sequence[int], seed: int) -> Sample:
    """One completion by a fresh server, after a short one that warms it up.

    Raises:
        PeerError: it failed, or answered nothing that can be read.
    """
    n_ctx = plan.n_ctx(plan.n_prompt + plan.n_decode + 1)
    given = llama_server.server_options(options(plan), n_ctx, plan.depth, rates=plan.rates)
    return llama_server.measure(
        *(str(peers.program("llama-server")), given, prompt, plan.n_decode + 1),
        warm_up=(len(prompt), min(8, plan.n_decode)),
        seed=seed,
    )
