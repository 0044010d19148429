"""Cells and samples of a matrix, made up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyllama_mtp.measure.figures import OURS, Cell, Sample
from pyllama_mtp.measure.plan import Key


def made_sample(
    n_prompt: int, n_generated: int, prefill_tps: float, decode_tps: float, **changes: Any
) -> Sample:
    """A sample of these speeds; its times follow from them."""
    prefill_s, decode_s = n_prompt / prefill_tps, n_generated / decode_tps
    values: dict[str, Any] = {
        **{"n_prompt": n_prompt, "n_generated": n_generated},
        **{"prefill_s": prefill_s, "decode_s": decode_s, "elapsed_s": prefill_s + decode_s},
        **{"prefill_tps": prefill_tps, "decode_tps": decode_tps},
        **{"drafted": [], "accepted": [], "rounds": 0, "mean_acceptance_length": 1.0},
    }
    return Sample(**{**values, **changes})


def made_cell(depth: int, samples: Sequence[Sample], **changes: Any) -> Cell:
    """A cell of repeats 0, 1, ..., with the figures of these samples. `changes`: fields of the cell
    and of its key."""
    key: dict[str, Any] = {"n_prompt": 512, "prompt_class": "text", "n_max": depth}
    key |= {"max_tokens": 64, "adaptive": False, "axes": {}}
    values: dict[str, Any] = {
        **{"model": "m.gguf", "variant": "patched", "backend": "CPU"},
        **{"upstream_commit": "0123456789abcdef", "series": "feedc0dedeadbeef"},
        **{"repeat": len(samples), "repeats": [*range(len(samples))], "samples": [*samples]},
    }
    key |= {name: changes.pop(name) for name in key if name in changes}
    values |= changes
    if depth and values.get("program", OURS) == OURS:
        for sample in samples:
            sample.prompt_sync = sample.prompt_sync or "kv"
    return Cell(**values, key=Key(build=values["variant"], **key))
