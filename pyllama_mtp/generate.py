"""THE loop: prefill; then draft, verify, accept, roll back, sync; emit."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from .arguments import flag, whole
from .engine import Engine
from .errors import UsageError
from .sampling import Sampler, prepare
from .speculative.acceptance import SyntheticAcceptance, Verdict, accept
from .speculative.drafter import Drafts, Propose
from .speculative.rejection import Distribution, accept_sampled
from .telemetry import Pair, Telemetry


@dataclass(frozen=True)
class Limits:
    """When to stop, and whether to draft. `ignore_eos`: generate on after an end token.

    Raises UsageError for a bad value.
    """

    max_tokens: int
    ignore_eos: bool = False
    draft: bool = True

    def __post_init__(self) -> None:
        most = whole("max_tokens", self.max_tokens, 1, math.inf, "at least 1")
        object.__setattr__(self, "max_tokens", most)
        for name in ("ignore_eos", "draft"):
            object.__setattr__(self, name, flag(name, getattr(self, name)))


def generate(
    engine: Engine, prompt: Sequence[int], sampler: Sampler, limits: Limits, telemetry: Telemetry
) -> Iterator[int]:
    """Yield the tokens that the target chooses after `prompt`, the end token included."""
    began = time.perf_counter()
    with engine.alone:
        prepare(engine.target, [sampler])
        row = engine.prefill(prompt, telemetry, limits.draft)
        turn, judge = engine.turn, make_judge(engine, sampler, limits)
        propose = proposer(engine, sampler)
        token = sampler.sample(engine.target, row)
    telemetry.prefill_s = time.perf_counter() - began
    telemetry.n_generated = 1
    yield token

    while not finished(engine, limits, telemetry, token):
        began = time.perf_counter()  # the consumer's time between rounds does not count
        with engine.alone:
            if engine.turn != turn:
                raise UsageError("the session has been used for something else since; start again")
            with telemetry.timed("draft"):
                drafts = engine.draft(token, _most_drafts(engine, limits, telemetry), propose)
            drafted_s = time.perf_counter() - began
            with telemetry.timed("verify"):
                engine.verify(token, drafts.tokens)
            with telemetry.timed("sampling"):
                verdict = judge(drafts, 0)
            engine.keep(verdict.n_accepted, telemetry)
            with telemetry.timed("sync"):
                engine.follow(verdict.tokens, telemetry)

        telemetry.count_round(len(drafts.tokens), verdict.n_accepted, drafts.looked_up)
        _log_pairs(engine, telemetry, drafts, verdict.tokens)
        elapsed_s = time.perf_counter() - began
        telemetry.decode_s += elapsed_s
        engine.learn(drafts, verdict.tokens, drafted_s, elapsed_s)
        for token in verdict.tokens:
            telemetry.n_generated += 1
            yield token

    began = time.perf_counter()
    with engine.alone, telemetry.timed("sync"):
        if engine.turn == turn:
            engine.catch_up()
    telemetry.decode_s += time.perf_counter() - began


def finished(engine: Engine, limits: Limits, telemetry: Telemetry, token: int) -> bool:
    """Whether `token`, the newest one, is the last."""
    return (
        telemetry.n_generated >= limits.max_tokens
        or engine.room() < 1
        or (not limits.ignore_eos and engine.model.is_end(token))
    )


def _most_drafts(engine: Engine, limits: Limits, telemetry: Telemetry) -> int:
    """Drafts that can be of use: a round emits one token more than it accepts."""
    wanted = limits.max_tokens - telemetry.n_generated - 1
    return min(engine.settings.depth_limit, wanted, engine.room() - 1)


def proposer(engine: Engine, sampler: Sampler) -> Propose | None:
    """What draws the drafts of a sequence; None: they are the head's best tokens."""
    return sampler.propose if engine.settings.draft_sampling and not sampler.greedy else None


def make_judge(
    engine: Engine, sampler: Sampler, limits: Limits
) -> Callable[[Drafts, int], Verdict]:
    """The rule by which verified drafts of one sequence are accepted: of (drafts, batch entry of
    the target's last decode that has its first row)."""
    rates = engine.settings.synthetic_acceptance
    synthetic = SyntheticAcceptance(rates) if rates and engine.drafter else None

    def ends(token: int) -> bool:
        return not limits.ignore_eos and engine.model.is_end(token)

    def judge(drafts: Drafts, first: int) -> Verdict:
        def sample_row(row: int) -> int:
            return sampler.sample(engine.target, first + row)

        def distribution(row: int) -> Distribution:
            return sampler.distribution(engine.target, first + row)

        if synthetic:
            return synthetic.accept(drafts.tokens, sample_row)
        if drafts.distributions:
            given = drafts.tokens, drafts.distributions
            return accept_sampled(*given, distribution, sampler.rng, ends, sampler.accept)
        return accept(drafts.tokens, sample_row, ends)

    return judge


def _log_pairs(engine: Engine, telemetry: Telemetry, drafts: Drafts, tokens: Sequence[int]) -> None:
    if telemetry.pairs is None or drafts.looked_up:
        return
    text = engine.model.detokenize
    for i, (drafted, actual) in enumerate(zip(drafts.tokens, tokens, strict=False)):
        pair = Pair(i + 1, drafted, actual, text([drafted], True), text([actual], True))
        telemetry.pairs.append(pair)
