"""What drafting is worth, from the cells of a matrix: acceptance by class, size and position, what
a round of each depth costs, from which acceptance it pays, and the depth to use.

`accept` and `tune` measure a matrix and show these views; any file of a matrix has them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, takewhile
from statistics import median
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from pyllama_mtp.drafting.depth import Costs, best_depth, break_even, round_time, speed
from pyllama_mtp.measure.figures import (
    OURS,
    Cell,
    SeriesKey,
    averaged,
    base_of,
    series_key,
)
from pyllama_mtp.measure.intervals import CONFIDENCE, student, typical_ratio
from pyllama_mtp.measure.plan import COPY
from pyllama_mtp.measure.text import (
    ENOUGH_TOKENS,
    NONE,
    counted,
    percent,
    size_name,
    to_markdown,
)
from pyllama_mtp.measure.verdict import gain_or_doubt, gains, slow_words

if TYPE_CHECKING:
    from pyllama_mtp.measure.figures import Sample

#: Acceptance per draft for which the speed is forecast.
ACCEPTANCE = (0.5, 0.7, 0.8, 0.9)
#: The advice is for this acceptance. Published heads: about 0.73 in long thinking, 0.9 in code.
TYPICAL_ACCEPTANCE = 0.8
#: With less at the first position everywhere, the head or its input is probably broken.
BROKEN_BELOW = 0.30
#: Costs of more rows, as a part of those of fewer rows, that noise explains.
NOISE = 0.9
#: The name of all classes together.
ALL = "all"


# -- costs -----------------------------------------------------------------------------------------


def costs_of(cells: Iterable[Cell]) -> Costs | None:
    """Costs of rounds in seconds: medians over the samples of cells of fixed depth and of no MTP.

    A depth that was not measured is on the line between those around it.

    Args:
        cells: of one model, prompt size and length of the context, measured side by side.

    Returns:
        None without a cell of no MTP and one with drafts.
    """
    drafts, rounds = dict[int, list[float]](), dict[int, list[float]]()
    for cell in cells:
        if cell.adaptive or cell.program != OURS or "n_sequences" in cell.axes:
            continue
        for sample in cell.samples:
            n = sample.rounds if cell.n_max else sample.n_generated - 1
            if n > 0:
                draft_s = sample.time_s.get("draft", 0.0)
                drafts.setdefault(cell.n_max, []).append(draft_s / n)
                rounds.setdefault(cell.n_max, []).append((sample.decode_s - draft_s) / n)
    depths = sorted(rounds)
    if depths[:1] != [0] or len(depths) < 2:
        return None
    drafts[0] = [0.0]
    every = range(depths[-1] + 1)
    draft, verify = (
        np.interp(every, depths, [median(seconds[depth]) for depth in depths]).tolist()
        for seconds in (drafts, rounds)
    )
    return Costs(verify=(0.0, *verify), draft=(0.0, *draft[1:]))


def costs_markdown(costs: Costs, acceptance: Mapping[str, Sequence[float]]) -> str:
    """A table with a row per depth: times in plain decode steps, the acceptance from which it pays,
    and the expected speed against no MTP.

    Args:
        acceptance: columns of expected speeds: conditional acceptance by position, by heading.
    """
    headings = ["depth", "draft", "verify", "round", "break-even %", *acceptance]
    rows = []
    for depth in range(costs.limit + 1):
        seconds = (costs.draft[depth], costs.verify[depth + 1], round_time(costs, depth))
        needed = break_even(costs, depth) if depth else None
        speeds = [
            f"{speed(costs, rates, depth) * costs.plain:.2f}x" if depth <= len(rates) else NONE
            for rates in acceptance.values()
        ]
        rows.append(
            [
                str(depth) if depth else "0 (no MTP)",
                *(f"{s / costs.plain:.2f}" for s in seconds),
                NONE if needed is None else f"{100 * needed:.0f}",
                *speeds,
            ]
        )
    return to_markdown(headings, rows)


def doubt(costs: Costs) -> str:
    """Why no verdict follows from costs that contradict each other; "": they do not."""
    for n in range(2, len(costs.verify)):
        fewer = max(costs.verify[1:n])
        if costs.verify[n] < NOISE * fewer:
            return (
                f"no verdict: {n} rows took {costs.verify[n] / costs.plain:.2f} plain steps, and "
                f"fewer rows {fewer / costs.plain:.2f}, which cannot be: the machine was busy, or "
                "there are too few samples; measure again, with more of them"
            )
    return ""


EXPLANATION = (
    "draft, verify, round: in plain decode steps. break-even: the acceptance per draft from which "
    "the depth is faster than no MTP. Expected speeds are against no MTP, computed from costs and "
    "acceptance, not measured."
)


# -- acceptance ------------------------------------------------------------------------------------


#: A rate of acceptance, and its interval's bounds; None: one sample says nothing of them.
Rate: TypeAlias = tuple[float, float | None, float | None]


def conditional(samples: Sequence[Sample]) -> list[Rate | None]:
    """Conditional acceptance by position: of the drafts whose predecessors were all accepted, the
    accepted ones, with an interval over the samples; None where there were no drafts.

    The interval is Student's, from how much samples differ from the rate of all (W. Cochran,
    "Sampling Techniques", 1977, section 6: a ratio of totals).

    The last round of an answer may have fewer drafts than the others, for lack of tokens to
    generate, so that a rate is too low by at most 1 draft per sample.
    """
    depth = max((len(sample.drafted) for sample in samples), default=0)
    if not depth:
        return []
    accepted, drafted = (
        np.array([[*counts, *[0] * (depth - len(counts))] for counts in side]).reshape(-1, depth)
        for side in ([s.accepted for s in samples], [s.drafted for s in samples])
    )
    before = np.concatenate([drafted[:, :1], accepted[:, :-1]], axis=1)
    tried = np.minimum(before, drafted)
    rates: list[Rate | None] = []
    for held, judged in zip(accepted.T, tried.T, strict=True):
        if not judged.sum():
            rates.append(None)
            continue
        rate, n = float(held.sum() / judged.sum()), len(samples)
        if n == 1:
            rates.append((rate, None, None))
            continue
        error = math.sqrt(n * np.var(held - rate * judged, ddof=1)) / float(judged.sum())
        width = error * student(CONFIDENCE, n - 1)
        rates.append((rate, max(0.0, rate - width), min(1.0, rate + width)))
    return rates


def series_of(cells: Iterable[Cell]) -> dict[str, list[Cell]]:
    """The cells of fixed depth of each model, library and value of the axes, with their cells
    without MTP; by what tells them apart, in words."""
    ours = [cell for cell in cells if cell.program == OURS and cell.samples and not cell.adaptive]
    keys: dict[SeriesKey, list[Cell]] = {}
    for cell in ours:
        if cell.n_max:
            keys.setdefault(series_key(cell, ("mode", "class", "imposed")), []).append(cell)
    varies = [len({*values}) > 1 for values in zip(*keys, strict=True)]
    series = {}
    for key, own in keys.items():
        plain = {id(base): base for cell in own if (base := base_of(cell, ours))}
        words = (value for value, several in zip(key, varies, strict=True) if several and value)
        series[", ".join(words)] = [*plain.values(), *own]
    return series


def acceptance_groups(cells: Iterable[Cell]) -> dict[int, dict[str, list[Sample]]]:
    """By prompt size and class the samples of the greatest fixed depth of a series; with several
    classes, all of them together come last, without those of copying, which come first."""
    drafting = [cell for cell in cells if cell.n_max]
    deepest = max((cell.n_max for cell in drafting), default=0)
    sizes: dict[int, dict[str, list[Sample]]] = {}
    for cell in sorted(drafting, key=lambda cell: (cell.n_prompt, cell.prompt_class != COPY)):
        if cell.n_max == deepest:
            classes = sizes.setdefault(cell.n_prompt, {})
            classes.setdefault(cell.prompt_class, []).extend(cell.samples)
    for classes in sizes.values():
        if len(several := {**classes, COPY: []}) > 2:
            classes[ALL] = [*chain(*several.values())]
    return sizes


def acceptance_rows(cells: Iterable[Cell]) -> list[dict[str, Any]]:
    """Acceptance for JSON: one object per series, prompt size and class. `conditional`: rate, low
    and high of each position; low and high are null for one prompt."""
    return [
        {
            "series": series,
            "n_prompt": size,
            "class": name,
            "prompts": len(samples),
            "rounds": sum(sample.rounds for sample in samples),
            "conditional": conditional(samples),
            "accepted_per_round": _per_round(samples),
        }
        for series, own in series_of(cells).items()
        for size, classes in acceptance_groups(own).items()
        for name, samples in classes.items()
    ]


def _per_round(samples: Sequence[Sample]) -> float:
    rounds = sum(sample.rounds for sample in samples)
    return sum(sum(sample.accepted) for sample in samples) / max(rounds, 1)


def acceptance_markdown(cells: Sequence[Cell]) -> str:
    """Acceptance and its worth as tables, with a verdict for each size; "" without drafts."""
    series = series_of(cells)
    parts = [part for name, own in series.items() for part in (name, _acceptance(own))]
    return "\n\n".join(filter(None, parts))


def _acceptance(cells: Sequence[Cell]) -> str:
    """:func:`acceptance_markdown` of one series."""
    rows = acceptance_rows(cells)
    depth = max(len(row["conditional"]) for row in rows)
    drafts = [f"draft {position + 1}" for position in range(depth)]
    table = to_markdown(
        ["prompt", "class", "prompts", "rounds", *drafts, "accepted/round"],
        [
            [
                *(size_name(row["n_prompt"]), row["class"], str(row["prompts"])),
                *(str(row["rounds"]), *map(_rate, row["conditional"])),
                *[NONE] * (depth - len(row["conditional"])),
                f"{row['accepted_per_round']:.2f}",
            ]
            for row in rows
        ],
        (True, True),
    )
    parts = [
        "Acceptance %, of drafts whose predecessors were all accepted",
        table,
    ]
    if max(row["prompts"] for row in rows) > 1:
        parts.append(f"In brackets the {100 * CONFIDENCE:g} % interval over prompts.")
    measured = sorted({cell.n_max for cell in cells})
    first = [row["conditional"][0][0] for row in rows if any(row["conditional"][:1])]
    if first and max(first) < BROKEN_BELOW:
        parts.append(
            f"verdict: no class reaches {BROKEN_BELOW:.0%} at the first position: the head, or "
            "what it is fed, is broken"
        )
        return "\n\n".join(parts)
    for size, classes in acceptance_groups(cells).items():
        own = averaged(cell for cell in cells if cell.n_prompt == size)
        costs = costs_of(own)
        if costs is None:
            parts.append("costs were not measured: no break-even")
            break
        parts += _worth(size, classes, costs, own)
        if len(measured) <= costs.limit:
            depths = ", ".join(map(str, measured))
            parts.append(f"Measured were depths {depths}; other costs are on a line between them.")
    return "\n\n".join(parts)


def _worth(
    size: int, classes: Mapping[str, Sequence[Sample]], costs: Costs, cells: Sequence[Cell]
) -> list[str]:
    """What the acceptance of each class is worth at these costs, and the best depth."""
    if why := doubt(costs):
        return [f"{why} (prompt {size_name(size)})"]
    rates = {name: _leading(own) for name, own in classes.items()}
    *_, last = rates.values()  # of all classes, if there are several
    *_, samples = classes.values()
    best, n_tokens = best_depth(costs, last), sum(sample.n_generated for sample in samples)
    said = "verdict: at the costs measured here no depth is faster than no MTP"
    if best:
        said = f"verdict: at the costs measured here depth {best} should be the best"
        said += _measured(cells, best)
    if n_tokens < ENOUGH_TOKENS:
        said = f"no verdict: {counted(n_tokens, 'token')} in all say too little"
    return [
        f"Expected decode speed against no MTP by depth, prompt {size_name(size)}",
        costs_markdown(costs, rates),
        EXPLANATION,
        said,
    ]


def _leading(samples: Sequence[Sample]) -> list[float]:
    """Conditional acceptance of the positions from the first one on that have a rate."""
    known = takewhile(lambda rate: rate is not None, conditional(samples))
    return [rate[0] for rate in known if rate]


def _measured(cells: Sequence[Cell], best: int) -> str:
    """How fast `best` was, or the greatest depth where it was not measured, and whether that can be
    told."""
    measured = {cell.n_max for cell in cells}
    shown = best if best in measured else max(measured)
    gain = next((one for one in gains(cells) if one.cells[0].n_max == shown), None)
    if gain is None:
        return ""
    said = gain_or_doubt(gain, typical_ratio(*gain.decode), noun="prompt", more="ask more")
    return f"; {'it' if shown == best else f'depth {shown}'} was {said}"


def _rate(found: Rate | None) -> str:
    if found is None:
        return NONE
    rate, low, high = found
    interval = "" if low is None or high is None else f" ({100 * low:.0f}-{100 * high:.0f})"
    return f"{100 * rate:.0f}{interval}"


# -- advice ----------------------------------------------------------------------------------------


def tune_markdown(costs: Costs, slow: Mapping[str, float] | None = None) -> str:
    """The costs with expected speeds at several rates of acceptance, and :func:`advice`, or why
    there is none."""
    rates = {f"at {100 * rate:g} %": [rate] * costs.limit for rate in ACCEPTANCE}
    said = doubt(costs) or advice(costs, slow)
    return "\n\n".join([costs_markdown(costs, rates), EXPLANATION, said])


def advice(costs: Costs, slow: Mapping[str, float] | None = None) -> str:
    """Which depth to set, and why.

    Args:
        slow: see :func:`pyllama_mtp.measure.verdict.slow_types`.
    """
    typical = percent(TYPICAL_ACCEPTANCE)
    auto = 'where acceptance varies, draft_n_max="auto" finds the depth while generating'
    if best := best_depth(costs, [TYPICAL_ACCEPTANCE] * costs.limit):
        return f"At {typical} acceptance, which is typical, use draft_n_max={best}; {auto}."
    needed = [break_even(costs, depth) for depth in range(1, costs.limit + 1)]
    least = min((rate for rate in needed if rate is not None), default=None)
    why = slow_words(slow or {})
    if least is None:
        cannot = "MTP cannot pay here: no round takes fewer steps than it can give tokens"
        return f"{cannot}.{why} Use draft_n_max=0."
    pays = f"MTP pays here from {percent(least)} acceptance on, and {typical} are typical"
    return f"{pays}.{why} Use draft_n_max=0; {auto}."
