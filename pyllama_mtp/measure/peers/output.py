"""Reads the output of other programs: llama-bench's JSON, llama-server's responses. Pure."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from pyllama_mtp.measure.cells import Sample
from pyllama_mtp.measure.peers import PeerError


class OutputError(PeerError):
    """The output is not as known from this version of the program."""


def made_sample(
    n_prompt: int, n_decoded: int, prefill_tps: float, decode_tps: float, accepted: int = 0
) -> Sample:
    """The sample of a matrix; without drafts per position, which are not known.

    Args:
        n_decoded: tokens in `decode_tps`, without the first token, which comes from the prompt's
            logits. Each verification pass gains a token beside the accepted drafts.
        prefill_tps, decode_tps: tokens per second, above 0 where there are tokens.
        accepted: draft tokens.
    """
    prefill_s = n_prompt / prefill_tps
    decode_s = n_decoded / decode_tps if decode_tps else 0.0
    rounds = (n_decoded - accepted) or n_decoded
    return Sample(
        n_prompt=n_prompt,
        n_generated=n_decoded + 1,
        prefill_s=prefill_s,
        decode_s=decode_s,
        elapsed_s=prefill_s + decode_s,
        prefill_tps=prefill_tps,
        decode_tps=decode_tps,
        drafted=[],
        accepted=[],
        rounds=rounds,
        tokens_per_round=n_decoded / rounds if rounds else 0.0,
    )


def parse_llama_bench(text: str) -> tuple[float, int, int]:
    """Tokens per second, tokens of the prompt, and decoded tokens of ``llama-bench -o json -r 1``
    with one test; the number of the other kind of tokens is 0.

    Raises:
        OutputError: not JSON, more or fewer tests than one, or fields missing.
    """
    try:
        tests = json.loads(text)
        if len(tests) != 1 or len(tests[0]["samples_ts"]) != 1:
            raise OutputError(
                f"llama-bench printed {len(tests)} tests; one with one sample is read"
            )
        test = tests[0]
        found = _rate(test["samples_ts"][0]), int(test["n_prompt"]), int(test["n_gen"])
    except (KeyError, TypeError, ValueError) as error:
        raise OutputError(
            f"llama-bench's JSON has no usable field ({error!r}): {text[:200]!r}"
        ) from error
    if found[1] and found[2]:
        raise OutputError("llama-bench mixed prompt and generation in one test")
    return found


def parse_timings(response: Any) -> Sample:
    """The sample in the `timings` of llama-server's response to a completion.

    `predicted_n` counts the first token; `predicted_per_second`, like our speeds, does not.

    Raises:
        OutputError: no timings, or a prompt that was partly taken from the server's cache.
    """
    try:
        timings = response["timings"]
        n_decoded = int(timings["predicted_n"]) - 1
        accepted = int(timings.get("draft_n_accepted", 0))
        cached = int(timings["cache_n"])
        prefill = _rate(timings["prompt_per_second"])
        decode = _rate(timings["predicted_per_second"]) if n_decoded > 0 else 0.0
        n_prompt = int(timings["prompt_n"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise OutputError(
            f"llama-server's response has no usable timings ({error!r}): {response!r:.200}"
        ) from error
    if cached:
        raise OutputError(f"llama-server took {cached} prompt tokens from its cache")
    return made_sample(n_prompt, n_decoded, prefill, decode, accepted)


def _rate(value: Any) -> float:
    """Tokens per second. Raises OutputError, TypeError or ValueError for anything else."""
    rate = float(value)
    if not (math.isfinite(rate) and rate > 0):
        raise OutputError(f"a speed of {rate} tokens per second is none")
    return rate


def parse_system_info(text: str) -> dict[str, str]:
    """llama.cpp's line about the CPU backend as {feature: value}; {} without the line."""
    found = re.search(r"CPU : (.*)", text)
    return dict(re.findall(r"(\w+) = (\S+)", found.group(1) if found else ""))
