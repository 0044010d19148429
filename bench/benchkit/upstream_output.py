"""Reading what upstream's programs print: llama-bench's JSON, llama-server's responses. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from benchkit.sample import Sample


class OutputError(ValueError):
    """The output is not what this version of the program is known to print."""


def parse_llama_bench(text: str) -> Sample:
    """The sample of ``llama-bench -o json -r 1`` with one test.

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
        rate, n_prompt, n_gen = float(test["samples_ts"][0]), test["n_prompt"], test["n_gen"]
        depth = int(test["n_depth"])
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise OutputError(
            f"llama-bench's JSON has no usable field ({error!r}): {text[:200]!r}"
        ) from error
    if n_prompt and n_gen:
        raise OutputError("llama-bench mixed prompt and generation in one test")
    if n_prompt:
        return Sample(prefill_tps=rate, decode_tps=None, n_prompt=int(n_prompt), n_decoded=0)
    return Sample(prefill_tps=None, decode_tps=rate, n_prompt=depth, n_decoded=int(n_gen))


def parse_timings(response: Mapping[str, Any]) -> Sample:
    """The sample in the `timings` of llama-server's response to a completion.

    `predicted_n` counts the first token, `predicted_per_second` does not (it divides the tokens
    after it by the time after it), so the rate is comparable with ours as it stands.

    Raises:
        OutputError: no timings, or a prompt that was partly taken from the server's cache.
    """
    try:
        timings = response["timings"]
        n_decoded = int(timings["predicted_n"]) - 1
        drafted = int(timings.get("draft_n", 0))
        accepted = int(timings.get("draft_n_accepted", 0))
        cached = int(timings["cache_n"])
        prefill, decode = timings["prompt_per_second"], timings["predicted_per_second"]
        n_prompt = int(timings["prompt_n"])
    except (KeyError, TypeError) as error:
        raise OutputError(f"llama-server's response lacks {error}") from error
    if cached:
        raise OutputError(f"llama-server took {cached} prompt tokens from its cache")
    return Sample(
        prefill_tps=float(prefill),
        decode_tps=float(decode),
        n_prompt=n_prompt,
        n_decoded=n_decoded,
        drafted=drafted,
        accepted=accepted,
        rounds=n_decoded - accepted if drafted else 0,
    )


def parse_system_info(text: str) -> dict[str, str]:
    """llama.cpp's line about the CPU backend as {feature: value}; empty where there is none."""
    found = re.search(r"CPU : (.*)", text)
    pairs = re.findall(r"(\w+) = (\S+)", found.group(1)) if found else []
    return dict(pairs)
