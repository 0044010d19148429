"""Reads the output of other programs: llama-bench's JSON, llama-server's responses. Pure."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, dataclass
from typing import Any

from pyllama_mtp.measure.cells import Sample
from pyllama_mtp.measure.peers import PeerError


class OutputError(PeerError, ValueError):
    """The output is not as known from this version of the program."""


@dataclass(frozen=True)
class Figures:
    """The figures of one process; None: not measured.

    Attributes:
        prefill_tps: prompt tokens per second.
        decode_tps: decoded tokens per second, without the first token, which comes from the
            prompt's logits, and its time.
        n_prompt: prompt tokens.
        n_decoded: tokens in `decode_tps`, without the first.
        drafted, accepted: draft tokens.
        rounds: verification passes; 0 without drafting. Each gains a token beside the accepted
            drafts, so there are ``n_decoded - accepted``.
    """

    prefill_tps: float | None
    decode_tps: float | None
    n_prompt: int
    n_decoded: int
    drafted: int = 0
    accepted: int = 0
    rounds: int = 0

    @property
    def tokens_per_round(self) -> float:
        """Tokens gained per verification pass; 1 without drafting."""
        return self.n_decoded / self.rounds if self.rounds else 1.0

    @property
    def rounds_per_second(self) -> float | None:
        """Verification passes per second, or decode steps without drafting."""
        return None if self.decode_tps is None else self.decode_tps / self.tokens_per_round

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON, derived figures included."""
        derived = ("tokens_per_round", "rounds_per_second")
        return {**asdict(self), **{name: getattr(self, name) for name in derived}}

    def sample(self) -> Sample:
        """The sample of a matrix; without drafts per position, which are not known."""
        prefill, decode = self.prefill_tps or 0.0, self.decode_tps or 0.0
        prefill_s = self.n_prompt / prefill if prefill else 0.0
        decode_s = self.n_decoded / decode if decode else 0.0
        return Sample(
            n_prompt=self.n_prompt,
            n_generated=self.n_decoded + 1,
            prefill_s=prefill_s,
            decode_s=decode_s,
            elapsed_s=prefill_s + decode_s,
            prefill_tps=prefill,
            decode_tps=decode,
            drafted=[],
            accepted=[],
            rounds=self.rounds or self.n_decoded,
            tokens_per_round=self.tokens_per_round if self.n_decoded else 0.0,
        )


def parse_llama_bench(text: str) -> Figures:
    """The figures of ``llama-bench -o json -r 1`` with one test.

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
        rate, n_prompt, n_gen = _rate(test["samples_ts"][0]), test["n_prompt"], test["n_gen"]
        depth = int(test.get("n_depth", 0))  # ik_llama.cpp does not print it
    except OutputError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise OutputError(
            f"llama-bench's JSON has no usable field ({error!r}): {text[:200]!r}"
        ) from error
    if n_prompt and n_gen:
        raise OutputError("llama-bench mixed prompt and generation in one test")
    if n_prompt:
        return Figures(prefill_tps=rate, decode_tps=None, n_prompt=int(n_prompt), n_decoded=0)
    return Figures(prefill_tps=None, decode_tps=rate, n_prompt=depth, n_decoded=int(n_gen))


def parse_timings(response: Any) -> Figures:
    """The figures in the `timings` of llama-server's response to a completion.

    `predicted_n` counts the first token; `predicted_per_second`, like our speeds, does not.

    Raises:
        OutputError: no timings, or a prompt that was partly taken from the server's cache.
    """
    try:
        timings = response["timings"]
        n_decoded = int(timings["predicted_n"]) - 1
        drafted = int(timings.get("draft_n", 0))
        accepted = int(timings.get("draft_n_accepted", 0))
        cached = int(timings["cache_n"])
        prefill = _rate(timings["prompt_per_second"])
        decode = _rate(timings["predicted_per_second"]) if n_decoded > 0 else 0.0
        n_prompt = int(timings["prompt_n"])
    except OutputError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise OutputError(
            f"llama-server's response has no usable timings ({error!r}): {response!r:.200}"
        ) from error
    if cached:
        raise OutputError(f"llama-server took {cached} prompt tokens from its cache")
    return Figures(
        prefill_tps=prefill,
        decode_tps=decode,
        n_prompt=n_prompt,
        n_decoded=n_decoded,
        drafted=drafted,
        accepted=accepted,
        rounds=n_decoded - accepted if drafted else 0,
    )


def check_lengths(name: str, figures: Figures, n_prompt: int, max_tokens: int) -> Figures:
    """The figures, if the numbers of tokens are as asked for; else raises OutputError."""
    measured = (figures.n_prompt, figures.n_decoded + 1)
    if measured != (n_prompt, max_tokens):
        raise OutputError(
            f"{name} processed {measured[0]} tokens and generated {measured[1]}, "
            f"where {n_prompt} and {max_tokens} were asked for"
        )
    return figures


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
