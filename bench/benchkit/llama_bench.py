"""Plain prefill and decode as llama-bench measures them, with the settings of a plan."""

from __future__ import annotations

from benchkit.plan import Plan
from benchkit.sample import Sample
from pyllama_mtp.measure.peers import llama_bench
from pyllama_mtp.measure.peers.options import Options


def options(plan: Plan) -> Options:
    """What llama-bench and llama-server are given alike."""
    return Options(
        model=str(plan.model),
        n_batch=plan.n_batch,
        n_ubatch=plan.n_ubatch,
        threads=plan.threads,
        flash_attn=plan.flash_attn,
        cache_type_k=plan.cache_type_k,
        cache_type_v=plan.cache_type_v,
    )


def prefill(program: str, plan: Plan, *more: str) -> Sample:
    """`pp`: the prompt in one go, one row of logits per batch; `more`: options of its own."""
    return llama_bench.prefill(program, options(plan), plan.n_prefill, *more)


def decode(program: str, plan: Plan) -> Sample:
    """`tg` at depth: decode steps after n_prompt tokens; the tokens are random, none is sampled."""
    return llama_bench.decode(program, options(plan), plan.n_prompt, plan.n_decode)
