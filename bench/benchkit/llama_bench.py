"""Plain prefill and decode as llama-bench measures them, one process per measurement."""

from __future__ import annotations

import subprocess

from peers import PeerError, Peers

from benchkit.paths import child_environment
from benchkit.plan import Plan
from benchkit.sample import Sample
from benchkit.upstream_output import OutputError, parse_llama_bench


def common_options(plan: Plan) -> list[str]:
    """Options that llama-bench and llama-server spell alike."""
    return [
        *("-m", str(plan.model)),
        *("-b", str(plan.n_batch)),
        *("-ub", str(plan.n_ubatch)),
        *("-t", str(plan.threads)),
        *("-fa", plan.flash_attn),
        *("-ctk", plan.cache_type_k),
        *("-ctv", plan.cache_type_v),
    ]


def prefill(peers: Peers, plan: Plan) -> Sample:
    """`pp`: the prompt in one go, one row of logits per batch."""
    return _run(peers, plan, ["-p", str(plan.n_prefill), "-n", "0"])


def decode(peers: Peers, plan: Plan) -> Sample:
    """`tg` at depth: decode steps after n_prompt tokens; the tokens are random, none is sampled."""
    depth, n_gen = str(plan.n_prompt), str(plan.n_decode)
    return _run(peers, plan, ["-p", "0", "-n", n_gen, "-d", depth])


def _run(peers: Peers, plan: Plan, test: list[str]) -> Sample:
    command = [str(peers.program("llama-bench")), *common_options(plan), *test]
    command += ["-r", "1", "-o", "json"]
    done = subprocess.run(command, env=child_environment(), capture_output=True, text=True)
    if done.returncode:
        raise PeerError(f"llama-bench failed ({done.returncode}): {done.stderr.strip()[-2000:]}")
    try:
        return parse_llama_bench(done.stdout)
    except OutputError as error:
        raise PeerError(f"{error}\n{done.stderr.strip()[-1000:]}") from error
