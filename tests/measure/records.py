"""Records of schema 2 for tests."""

from __future__ import annotations

from typing import Any

FIGURES: dict[str, Any] = {
    "n_prompt": 10,
    "n_generated": 8,
    "prefill_s": 1.0,
    "decode_s": 2.0,
    "elapsed_s": 3.0,
    "prefill_tps": 10.0,
    "decode_tps": 4.0,
    "drafted": [4, 4],
    "accepted": [3, 1],
    "rounds": 4,
    "mean_acceptance_length": 2.0,
    "time_s": {"draft": 0.5},
    "waited_s": {"prefill": 0.0, "decode": 0.25},
}


def run(name: str = "a", **changes: Any) -> dict[str, Any]:
    """A header."""
    record: dict[str, Any] = {
        "kind": "run",
        "schema": 2,
        "run": name,
        "time": "2026-01-01T00:00:00+00:00",
        "version": "1",
        "command": ["pyllama-mtp", "matrix"],
        "model": {"name": "m.gguf", "bytes": 5, "sha256_ends": "ab"},
        "builds": {
            "patched": {
                "program": "pyllama-mtp",
                "variant": "patched",
                "upstream_commit": "c",
                "series": "s",
                "backend": "CPU",
            }
        },
        "machine": {"cpu": "a CPU", "cores": 2, "devices": [], "arch": "x86_64"},
        "plan": {
            "sizes": [10],
            "classes": ["text"],
            "depths": [0, 2],
            "max_tokens": 8,
            "repeat": 3,
        },
        "settings": {"n_batch": 64},
        "sampling": {"temperature": 0.0},
    }
    return {**record, **changes}


def sample(repeat: int = 0, depth: int = 2, run: str = "a", **figures: Any) -> dict[str, Any]:
    """A sample of the cell of this depth."""
    return {
        "kind": "sample",
        "schema": 2,
        "run": run,
        "cell": cell(depth),
        "settings": {"n_ctx": 256, "draft_n_max": depth},
        "repeat": repeat,
        "time": f"2026-01-01T00:00:0{repeat + 1}+00:00",
        "memory": {"weights": 7},
        "sample": {**FIGURES, **figures},
    }


def cell(depth: int = 2) -> dict[str, Any]:
    """The key of a cell."""
    name = {"build": "patched", "n_prompt": 10, "prompt_class": "text"}
    return {**name, "n_max": depth, "max_tokens": 8}


def skipped(depth: int = 2, run: str = "a") -> dict[str, Any]:
    """A cell that was skipped for lack of memory."""
    made = sample(depth=depth, run=run)
    for name in ("repeat", "memory", "sample"):
        del made[name]
    return {**made, "kind": "skipped", "reason": "no memory"}


def older(kind: str, **more: Any) -> dict[str, Any]:
    """A line that only older files have."""
    return {"kind": kind, "schema": 2, "run": "a", "time": "2026-01-01T00:00:00+00:00", **more}
