"""llama-cpp-python's plain generation, in a process of its own: its libraries are not ours."""

from __future__ import annotations

import json
from collections.abc import Sequence

from pyllama_mtp.measure.peers.options import Options
from pyllama_mtp.measure.peers.output import Figures, OutputError
from pyllama_mtp.measure.peers.process import Program

TIMEOUT_S = 3600.0


def measure(
    command: Sequence[str],
    options: Options,
    n_ctx: int,
    prompt: Sequence[int],
    max_tokens: int,
    *,
    warm_up: tuple[int, int],
) -> Figures:
    """One generation in a fresh process, after a short one that warms it up.

    Args:
        command: starts the worker.
        max_tokens: tokens to generate, the first included.
        warm_up: tokens of the prompt that the warm-up processes, and tokens that it generates.

    Raises:
        PeerError: it failed, or answered nothing that can be read.
    """
    request = {
        "llama": {
            "model_path": options.model,
            "n_gpu_layers": options.n_gpu_layers or 0,
            "n_ctx": n_ctx,
            "n_batch": options.n_batch,
            "n_ubatch": options.n_ubatch,
            "n_threads": options.threads,
            "n_threads_batch": options.threads,
            "flash_attn": options.flash_attn != "off",  # it has no "auto"
            "verbose": False,
        },
        "cache_types": {"type_k": options.cache_type_k, "type_v": options.cache_type_v},
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "warm_up": list(warm_up),
    }
    with Program("llama-cpp-python", command, json.dumps(request)) as program:
        printed = program.wait(TIMEOUT_S)
        try:
            return _figures(json.loads(printed))
        except (ValueError, KeyError, TypeError, ZeroDivisionError) as error:
            raise OutputError(
                f"llama-cpp-python's worker printed {printed[:200]!r} ({error!r}); "
                f"{program.last_words()}"
            ) from error


def _figures(answer: dict[str, float]) -> Figures:
    n_prompt, n_decoded = int(answer["n_prompt"]), int(answer["n_generated"]) - 1
    return Figures(
        prefill_tps=n_prompt / answer["prefill_s"],
        decode_tps=n_decoded / answer["decode_s"] if n_decoded else None,
        n_prompt=n_prompt,
        n_decoded=n_decoded,
    )
