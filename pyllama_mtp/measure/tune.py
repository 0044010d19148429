"""Costs on this machine, and the advice that follows: which draft depth pays at which acceptance,
and which n_ubatch is the fastest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

from pyllama_mtp.drafting.depth import (
    Costs,
    DepthController,
    Outcomes,
    best_depth,
    break_even,
    round_time,
    speed,
)
from pyllama_mtp.errors import InsufficientMemoryError, UsageError
from pyllama_mtp.measure.profile import process_prompt
from pyllama_mtp.measure.text import NONE, percent, to_markdown
from pyllama_mtp.measure.verdict import Round, verdict
from pyllama_mtp.session import Session

if TYPE_CHECKING:
    from pyllama_mtp import Model
    from pyllama_mtp.drafting.headrows import HeadOption
    from pyllama_mtp.settings import Settings

#: Sizes of n_ubatch that are compared with the size that is set.
UBATCHES = (256, 512, 1024)
#: Tokens of the prompt that they are compared on, at most.
UBATCH_PROMPT = 2048
UBATCH_ROUNDS = 3
#: Most seconds of a round, which is the prompt in every size; a longer prompt is shortened.
MOST_ROUND_S = 20.0
#: Plain steps timed for every round that is timed at a depth; half of them before, half after.
_PLAIN_STEPS = 8


class Rotation(DepthController):
    """Takes every depth in turn, in place of the engine's own choice.

    Each depth has two rounds, and the second counts: the first may have to build its graphs. Every
    other turn goes through the depths backwards, so that a machine that grows slower slows all
    depths alike.
    """

    looks_up = False

    def __init__(self, limit: int, repeats: int) -> None:
        super().__init__(limit)
        depths = [*range(limit + 1)]
        turns = [depths[:: 1 if turn % 2 == 0 else -1] for turn in range(repeats)]
        self._plan = [depth for turn in turns for depth in turn for _ in range(2)]
        self._rounds = 0
        self.draft_s: list[list[float]] = [[] for _ in depths]
        self.rest_s: list[list[float]] = [[] for _ in depths]

    @property
    def done(self) -> bool:
        """Whether every depth has had its rounds."""
        return self._rounds >= len(self._plan)

    def choose(self, at_most: int | None = None, n_sequences: int = 1) -> int:
        """The depth of the next round."""
        depth = 0 if self.done else self._plan[self._rounds]
        return depth if at_most is None else min(depth, at_most)

    def update(self, n_drafted: int, outcomes: Outcomes, draft_s: float, total_s: float) -> None:
        """Take the times of a round; a round that was cut short does not count."""
        if self.done:
            return
        if self._rounds % 2 and n_drafted == self._plan[self._rounds]:
            self.draft_s[n_drafted].append(draft_s)
            self.rest_s[n_drafted].append(total_s - draft_s)
        self._rounds += 1

    def medians(self) -> Costs:
        """The costs. Raises UsageError when a depth was never measured."""
        if not all(self.rest_s):
            raise UsageError("too few rounds to measure every depth; use a longer context")
        drafts = [median(times) for times in self.draft_s[1:]]
        rounds = [median(times) for times in self.rest_s]
        return Costs(verify=(0.0, *rounds), draft=(0.0, *drafts))


def tokens_needed(limit: int, repeats: int) -> int:
    """Most tokens that :func:`measure_costs` generates."""
    return 1 + repeats * (limit + 1) * (limit + 2)


def measure_costs(session: Session, prompt: Sequence[int], repeats: int) -> Costs:
    """Generate after `prompt`, greedily, at every depth from 0 to the session's limit in turn.

    Args:
        session: with ``draft_n_max`` above 0 and room for :func:`tokens_needed` tokens.
        repeats: rounds that count, per depth.

    Raises:
        UsageError: the session does not draft, or the context is too short.
    """
    engine = session._engine
    limit = engine.depth  # a model may allow fewer drafts than were asked for
    if limit < 1:
        raise UsageError("costs are measured at depths 0 to draft_n_max; give at least 1")
    n_tokens = tokens_needed(limit, repeats)
    rotation, before = Rotation(limit, repeats), engine.drafting.depths
    engine.drafting.depths = rotation
    try:
        for _ in session.generate(prompt, max_tokens=n_tokens, ignore_eos=True):
            if rotation.done:
                break
    finally:
        engine.drafting.depths = before
    return rotation.medians()


def tokens_after(depth: int, repeats: int) -> int:
    """Most tokens that :func:`costs_against_no_mtp` generates; 0 without repeats."""
    return max(tokens_needed(depth, repeats), _PLAIN_STEPS * repeats) if repeats else 0


def costs_against_no_mtp(session: Session, prompt: Sequence[int], repeats: int) -> Costs:
    """As :func:`measure_costs`, but ``verify[1]`` is a step of the model without MTP.

    In :func:`measure_costs` it is a round without drafts, which also writes the MTP head's keys and
    values: the alternative of an adaptive depth, and dearer than a model without MTP.
    """
    steps = _plain_steps(session, prompt, _PLAIN_STEPS * repeats // 2)
    found = measure_costs(session, prompt, repeats)
    steps += _plain_steps(session, prompt, _PLAIN_STEPS * repeats // 2)
    return Costs(verify=(0.0, median(steps), *found.verify[2:]), draft=found.draft)


def _plain_steps(session: Session, prompt: Sequence[int], n: int) -> list[float]:
    """Seconds of `n` decode steps without MTP. A step without a piece of text of its own shares the
    time of the next."""
    generation = session.generate(prompt, max_tokens=n + 1, ignore_eos=True, draft=False)
    telemetry = generation.telemetry
    steps, seen, spent = [], 1, 0.0
    for _ in generation:
        new = telemetry.n_generated - seen
        if new > 0:
            steps += [(telemetry.decode_s - spent) / new] * new
            seen, spent = telemetry.n_generated, telemetry.decode_s
    return steps


def measure_ubatches(model: Model, settings: Settings, prompt: list[int]) -> UbatchTimes | None:
    """Process `prompt`, or its first part, with every size of UBATCHES in turn.

    Args:
        settings: of the sessions; their n_ubatch is measured, too. `n_ctx` must be 0 or hold the
            prompt.
        prompt: token ids.

    Returns:
        None where there are no two sizes to compare: the prompt is too short, memory too small, or
        the machine too slow for MOST_ROUND_S.

    Raises:
        InterruptedSample: by Ctrl-C.
    """
    usual, n_prompt = min(settings.n_ubatch, settings.n_batch), len(prompt)
    sizes = {n for n in (*UBATCHES, usual) if n <= min(n_prompt, settings.n_batch)}
    if usual not in sizes:
        return None
    sessions: dict[int, Session] = {}
    seconds: dict[int, list[float]] = {}
    with ExitStack() as stack:

        def warm_up(n_ubatch: int) -> float:
            session = stack.enter_context(Session(model, replace(settings, n_ubatch=n_ubatch)))
            took_s = process_prompt(session, prompt[:n_ubatch])
            sessions[n_ubatch] = session
            return took_s

        with suppress(InsufficientMemoryError):
            token_s = warm_up(usual) / usual
            while n_prompt * len(sizes) * token_s > MOST_ROUND_S:
                n_prompt //= 2
                sizes = {n for n in sizes if n <= n_prompt}
                if usual not in sizes:
                    return None
            for n in sorted(sizes - {usual}):
                warm_up(n)
        sizes &= {*sessions}
        if len(sizes) < 2:
            return None
        for turn in range(UBATCH_ROUNDS):
            for n in sorted(sizes, reverse=turn % 2 == 1):
                seconds.setdefault(n, []).append(process_prompt(sessions[n], prompt[:n_prompt]))
    return UbatchTimes(n_prompt, usual, seconds)


# -- advice ----------------------------------------------------------------------------------------


#: Acceptance per draft for which the speed is forecast.
ACCEPTANCE = (0.5, 0.7, 0.8, 0.9)
#: The advice is for this acceptance. Published heads: about 0.73 in long thinking, 0.9 in code.
TYPICAL_ACCEPTANCE = 0.8
#: No published head keeps up a higher acceptance, so the advice ends here.
MOST_ACCEPTANCE = 0.95
#: Another n_ubatch is recommended if it is faster by this factor in every round.
UBATCH_GAIN = 1.03
_STEP = 0.01

EXPLANATION = (
    "draft, verify, round: in plain decode steps. break-even: the acceptance per draft from which "
    "the depth is faster than no MTP. at N %: expected speed against no MTP if each draft is "
    "accepted N % of the time; computed from the costs, not measured."
)


def tune_markdown(costs: Costs, slow: Mapping[str, float] | None = None) -> str:
    """A table with a row per depth, its explanation, and :func:`recommendation`."""
    headings = ["depth", "draft", "verify", "round", "break-even %"]
    headings += [f"at {100 * rate:g} %" for rate in ACCEPTANCE]
    rows = [_row(costs, depth) for depth in range(costs.limit + 1)]
    return "\n\n".join([to_markdown(headings, rows), EXPLANATION, recommendation(costs, slow)])


def _row(costs: Costs, depth: int) -> list[str]:
    """Times in plain decode steps; speeds against no MTP, at each of ACCEPTANCE."""
    seconds = (costs.draft[depth], costs.verify[depth + 1], round_time(costs, depth))
    needed = break_even(costs, depth) if depth else None
    speeds = (speed(costs, [rate] * depth, depth) * costs.plain for rate in ACCEPTANCE)
    return [
        str(depth) if depth else "0 (no MTP)",
        *(f"{s / costs.plain:.2f}" for s in seconds),
        NONE if needed is None else f"{100 * needed:.0f}",
        *(f"{ratio:.2f}x" for ratio in speeds),
    ]


def _fastest_depths(costs: Costs) -> list[tuple[float, int]]:
    """(acceptance from which it is the fastest, depth), from 0 to MOST_ACCEPTANCE in steps of 0.01.

    Acceptance is taken to be the same at every position.
    """
    found: list[tuple[float, int]] = []
    for step in range(round(MOST_ACCEPTANCE / _STEP) + 1):
        rate = step * _STEP
        depth = best_depth(costs, [rate] * costs.limit)
        if not found or found[-1][1] != depth:
            found.append((round(rate, 2), depth))
    return found


def recommendation(costs: Costs, slow: Mapping[str, float] | None = None) -> str:
    """Which depth to set, and why, in a few sentences.

    Args:
        slow: see :func:`pyllama_mtp.measure.verdict.slow_types`.

    Raises:
        UsageError: no depth above 0 was measured.
    """
    if costs.limit < 1:
        raise UsageError("nothing to recommend: only depth 0 was measured; measure 1 at least")
    ranges = _fastest_depths(costs)
    fixed = best_depth(costs, [TYPICAL_ACCEPTANCE] * costs.limit)
    why = ""
    if not fixed:
        rounds = [
            Round(n, costs.verify[n + 1] / costs.plain, round_time(costs, n) / costs.plain)
            for n in range(1, costs.limit + 1)
        ]
        typical = f"{percent(TYPICAL_ACCEPTANCE)} are typical"
        why = verdict(rounds, slow or {}, typical) + " Use draft_n_max=0."
    if not any(depth for _, depth in ranges):
        return why
    depths = ", ".join(
        f"{depth} from {percent(rate)}" if rate else f"{depth} at 0 %" for rate, depth in ranges
    )
    deeper = ""
    if ranges[-1][1] == costs.limit:
        deeper = (
            f" Depths above {costs.limit} were not measured; "
            "where the model can draft so much, they may be faster still."
        )
    advice = f"use draft_n_max={fixed}" if fixed else "no draft is worth it"
    return (
        f"{why + ' ' if why else ''}Fastest depth by acceptance per draft: {depths}.{deeper} At "
        f"{percent(TYPICAL_ACCEPTANCE)}, which is typical, {advice}; where it is "
        'not known or varies, draft_n_max="auto" finds the depth while generating.'
    )


def heads_markdown(options: Sequence[HeadOption], chosen: HeadOption | None) -> str:
    """The draft heads to choose from, the best first, and which one "auto" took; "" where there is
    no choice."""
    if not options or not chosen:
        return ""
    headings = ["draft vocabulary", "type", "MB", "ms per draft", "outside %", "expected speed"]
    lines = []
    for one in options:
        figures = f"{one.n_bytes / 1e6:.1f}", f"{1e3 * one.draft_s:.2f}"
        gain = f"{100 * one.outside:.1f}", f"{one.speed_up:.2f}x"
        lines.append([f"{one.n_rows}", one.kind, *figures, *gain])
    table = to_markdown(headings, lines)
    return (
        f"{table}\n\noutside: tokens of the text so far that the vocabulary would lack (before 256 "
        "are seen, mostly what is usual). expected speed: at the best depth against no MTP, "
        f"at {percent(TYPICAL_ACCEPTANCE)} acceptance of what can be drafted. "
        f'"auto" has taken {chosen.n_rows} tokens, type {chosen.kind}; --draft-vocab and '
        "--draft-head-type take another."
    )


@dataclass(frozen=True)
class UbatchTimes:
    """Times of one prompt by n_ubatch.

    Attributes:
        n_prompt: tokens of the prompt.
        usual: the n_ubatch that is set, which the others must beat.
        seconds: of the prompt in each round, by n_ubatch.
    """

    n_prompt: int
    usual: int
    seconds: Mapping[int, Sequence[float]]

    def speed_up(self, n_ubatch: int) -> float:
        """Against `usual`, by medians."""
        return median(self.seconds[self.usual]) / median(self.seconds[n_ubatch])

    @property
    def best(self) -> int:
        """The fastest n_ubatch that beats `usual` by UBATCH_GAIN in every round; else `usual`."""
        usual = self.seconds[self.usual]
        better = [
            n_ubatch
            for n_ubatch, seconds in self.seconds.items()
            if all(s * UBATCH_GAIN < usual_s for s, usual_s in zip(seconds, usual, strict=True))
        ]
        return max(better, key=self.speed_up, default=self.usual)


def ubatch_markdown(times: UbatchTimes | None) -> str:
    """Tokens per second by n_ubatch, and which one to use. None: not measured."""
    if times is None:
        return "Not compared: --n-ubatch, for want of a longer context, memory or a faster machine."
    speeds = ", ".join(
        f"{n}: {times.n_prompt / median(seconds):.0f} ({times.speed_up(n):.2f}x)"
        for n, seconds in times.seconds.items()
    )
    best, gain = times.best, f"{100 * (UBATCH_GAIN - 1):.0f} %"
    advice = f"None is faster than {best} by {gain} in every round: keep --n-ubatch {best}."
    if best != times.usual:
        speed_up = f"{times.speed_up(best):.2f} times as fast as {times.usual}"
        advice = f"Use --n-ubatch {best} (n_ubatch={best}), which is {speed_up}."
    return f"Tokens per second of {times.n_prompt:,} by --n-ubatch: {speeds}. {advice}"
