"""Runs of an acceptance measurement, made by hand."""

from __future__ import annotations

from typing import Any

from pyllama_mtp.drafting.depth import Costs
from pyllama_mtp.measure.acceptance import (
    AcceptanceHeader,
    AcceptanceRun,
    CostResult,
    Miss,
    PromptResult,
)

#: In plain steps: depth 1 takes 1.5, depth 2 takes 2.
COSTS = Costs(verify=(0.0, 1.0, 1.25, 1.5), draft=(0.0, 0.25, 0.5))


HEADER = AcceptanceHeader(
    model="m.gguf",
    variant="patched",
    upstream_commit="0123456789abcdef",
    series="feedc0dedeadbeef",
    backend="CPU",
    depth=2,
    max_tokens=64,
    prompts="mine.jsonl",
    planned=3,
    settings={"draft_n_max": 2, "sampling": {"temperature": 0.0}},
    machine={"cpu": "a CPU", "cores": 2},
    time="2026-01-02T03:04:05+00:00",
)


def result(kind: str, number: int, *accepted: int, **changes: Any) -> PromptResult:
    given: dict[str, Any] = {
        "context_length": None,
        "n_prompt": 20,
        "n_generated": 64,
        "finish_reason": "length",
        "ended": False,
        "decode_s": 0.5,
    }
    return PromptResult(kind=kind, prompt=number, accepted=accepted, **{**given, **changes})


def miss(kind: str, drafted: str, actual: str) -> Miss:
    return Miss(kind, 1, None, 7, 1, 3, 4, drafted, actual, "before it")


def a_run() -> AcceptanceRun:
    """Two classes: 3 of 4 and 2 of 4 first drafts accepted, 2 of 3 and 1 of 2 second ones."""
    code, text = result("code", 1, 2, 2, 1, 0), result("text", 1, 2, 1, 0, 0)
    longer = result("code", 1, 1, 1, context_length=512, n_prompt=512)
    misses = [miss("code", " a", "|b"), miss("code", "x", "y"), miss("text", " a", "|b")]
    costs = [CostResult(None, 20, COSTS.verify, COSTS.draft)]
    return AcceptanceRun(HEADER, [code, text, longer], costs, misses)
