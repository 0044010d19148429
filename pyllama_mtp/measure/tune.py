"""From measured costs to advice: which draft depth pays at which acceptance, and which n_ubatch is
the fastest. Computed from the costs (:mod:`pyllama_mtp.drafting.depth`); nothing is measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from pyllama_mtp.drafting.depth import Costs, best_depth, break_even, round_time, speed
from pyllama_mtp.errors import UsageError
from pyllama_mtp.measure.text import NONE, percent, to_markdown
from pyllama_mtp.measure.verdict import Round, verdict

if TYPE_CHECKING:
    from pyllama_mtp.drafting.headrows import HeadOption

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
