"""The report of an acceptance run: rates by class, context length and position, their intervals,
and the speed that they bring at the measured costs. For JSON, Markdown, and a terminal (rich).

A round drafts `depth` tokens. Draft i is *judged* if all before it were accepted; the first that
the target would not have chosen ends the round. Conditional acceptance at position i: accepted
there / judged there. Unconditional: rounds in which drafts 1 to i were all accepted / rounds.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import IO, Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from pyllama_mtp.drafting.depth import Costs, best_depth, break_even, round_time, speed
from pyllama_mtp.measure.acceptance import SCHEMA, AcceptanceRun, Miss, PromptResult
from pyllama_mtp.measure.text import NONE, console, print_whole, terminal_table, to_markdown

# -- rates -----------------------------------------------------------------------------------------


Counts = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
#: Counts of a prompt, and the number of its rounds; see :func:`tally`.
Tally = tuple[Counts, int]

#: The standard normal distribution's 97.5 % point.
Z_95 = 1.959964
#: First positions of the buckets of generated tokens.
BUCKETS = (0, *(64 * 2**n for n in range(12)))

#: With less at the first position everywhere, the head or its input is probably broken.
BROKEN_BELOW = 0.30


def tally(result: PromptResult, depth: int, chosen: Iterable[bool] = ()) -> Tally:
    """Counts of all rounds of a prompt, or of the `chosen` ones, and the number of rounds.

    Returns:
        int64 of [3, depth], by position: rounds in which the draft was accepted; in which all those
        before it were accepted, and it was compared; and of which it is known whether all up to it
        are accepted.
    """
    counts = np.zeros((3, depth), dtype=np.int64)
    held, judged, known = counts
    rounds, last = 0, len(result.accepted) - 1
    taken = chosen or itertools.repeat(True)
    for number, (n, take) in enumerate(zip(result.accepted, taken, strict=False)):
        if take:
            cut = n if result.ended and number == last else depth
            held[:n] += 1
            judged[: min(n + 1, cut)] += 1
            known[:cut] += 1
            rounds += 1
    return counts, rounds


@dataclass(frozen=True)
class Rate:
    """A share with its 95 % interval; `low` and `high` are 0 to 1 like `rate`."""

    held: int
    tried: int
    rate: float
    low: float
    high: float


def shares(held: Counts, tried: Counts) -> list[Rate | None]:
    """The share at each position over all prompts, None where nothing was tried.

    The interval is the score interval of a share (Wilson 1927, "Probable inference, the law of
    succession, and statistical inference"). It is for independent trials, and rounds of one prompt
    resemble each other: the number of trials is divided by the design effect, which is the variance
    of the share by the differences between prompts over that of independent trials, where it is
    above 1 (Korn and Graubard 1998, "Confidence intervals for proportions with small expected
    number of positive counts estimated from survey data").

    Args:
        held, tried: int64 of [prompts, positions].
    """
    return [
        _share(h, t) if t.any() else None
        for h, t in zip(held.T.astype(float), tried.T.astype(float), strict=True)
    ]


def _share(held: Floats, tried: Floats) -> Rate:
    """The share over all prompts; `held`, `tried`: [prompts]."""
    n, prompts = tried.sum(), np.count_nonzero(tried)
    rate = held.sum() / n
    independent, effect = rate * (1 - rate) / n, 1.0
    if prompts > 1 and independent > 0:
        between = ((held - rate * tried) ** 2).sum() / n**2 * prompts / (prompts - 1)
        effect = max(1.0, between / independent)
    trials, z = n / effect, Z_95
    middle = rate + z * z / (2 * trials)
    half = z * math.sqrt(rate * (1 - rate) / trials + z * z / (4 * trials * trials))
    scale = 1 + z * z / trials
    low, high = max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)
    return Rate(int(held.sum()), int(n), float(rate), float(low), float(high))


@dataclass(frozen=True)
class Acceptance:
    """Acceptance of some prompts: one entry per draft position, None where nothing was judged.

    Attributes:
        prompts, rounds: their numbers.
        mean_accepted: accepted drafts per round; None without rounds.
    """

    prompts: int
    rounds: int
    conditional: list[Rate | None]
    unconditional: list[Rate | None]
    mean_accepted: float | None

    @classmethod
    def of(cls, tallies: Sequence[Tally], depth: int) -> Acceptance:
        """Pooled over prompts; prompts without a round do not count."""
        rows = [counts for counts, n in tallies if n]
        held, judged, known = np.array(rows, dtype=np.int64).reshape(-1, 3, depth).swapaxes(0, 1)
        rounds = sum(n for _, n in tallies)
        return cls(
            prompts=len(rows),
            rounds=rounds,
            conditional=shares(held, judged),
            unconditional=shares(held, known),
            mean_accepted=float(held.sum() / rounds) if rounds else None,
        )

    def rates(self) -> list[float]:
        """Conditional acceptance up to the first position where nothing was judged."""
        known = itertools.takewhile(lambda rate: rate is not None, self.conditional)
        return [rate.rate for rate in known if rate]


@dataclass(frozen=True)
class Bucket:
    """Acceptance of the rounds before which `first` to `last` tokens had been generated."""

    first: int
    last: int
    acceptance: Acceptance


def by_position(results: Sequence[PromptResult], depth: int) -> Iterator[Bucket]:
    """Acceptance by how many tokens were generated before a round, the prefill's included."""
    starts = [
        list(itertools.accumulate((n + 1 for n in one.accepted), initial=1)) for one in results
    ]
    for begin, end in itertools.pairwise(BUCKETS):
        tallies = [
            tally(result, depth, [begin <= start < end for start in own])
            for result, own in zip(results, starts, strict=True)
        ]
        acceptance = Acceptance.of(tallies, depth)
        if acceptance.rounds:
            yield Bucket(begin, end - 1, acceptance)


# -- groups ----------------------------------------------------------------------------------------


ALL = "all"
#: Name of the prompts without anything before them, among the context lengths.
AS_IS = "as is"
_WIDEST_TEXT = 24


@dataclass(frozen=True)
class PromptGroup:
    """Acceptance of a group of prompts, and what it is worth.

    Attributes:
        name: the class, or the context length.
        n_prompt: tokens of a prompt, the median.
        speed_up: expected decode speed against no MTP at depth 1, 2, ..., as far as acceptance was
            measured; empty without costs. Computed, not measured: see
            :func:`pyllama_mtp.drafting.depth.speed`.
        best_depth: the fastest of depth 0 (no MTP) and these; None without costs.
    """

    name: str
    n_prompt: float
    acceptance: Acceptance
    speed_up: list[float]
    best_depth: int | None

    @classmethod
    def of(
        cls, name: str, results: Sequence[PromptResult], depth: int, costs: Costs | None
    ) -> PromptGroup:
        """The group of these results."""
        acceptance = Acceptance.of([tally(result, depth) for result in results], depth)
        rates, n_prompt = acceptance.rates(), median(result.n_prompt for result in results)
        if not costs or not rates:
            return cls(name, n_prompt, acceptance, [], None)
        depths = range(1, len(rates) + 1)
        gains = [speed(costs, rates, each) * costs.plain for each in depths]
        return cls(name, n_prompt, acceptance, gains, best_depth(costs, rates))


@dataclass(frozen=True)
class Depth:
    """The costs of a depth.

    Attributes:
        round: drafting and verifying, in plain decode steps.
        break_even: acceptance, the same at every position, from which it pays; None: never.
    """

    depth: int
    round: float
    break_even: float | None


@dataclass(frozen=True)
class Report:
    """A run in figures.

    Attributes:
        classes: in the order of the run; if there are several, all of them together come last.
        verdict: what drafting is worth at these costs, or that the head looks broken; "" where
            neither is known.
        depths: empty without costs.
        lengths: by context length, the same prompts in each, first as they are. Empty if there are
            no context lengths.
        positions: by tokens generated before the round, prompts as they are.
        measured, planned: generations.
    """

    classes: list[PromptGroup]
    verdict: str
    depths: list[Depth]
    lengths: list[PromptGroup]
    positions: list[Bucket]
    measured: int
    planned: int

    @classmethod
    def of(cls, run: AcceptanceRun) -> Report:
        """Compute it from a run, whole or not."""
        depth, plain = run.header.depth, [r for r in run.results if r.context_length is None]
        names = list(dict.fromkeys(result.kind for result in plain))
        costs = run.costs_at(None)
        groups = [
            PromptGroup.of(name, [r for r in plain if r.kind == name], depth, costs)
            for name in names
        ]
        first = [rates[0] for group in groups if (rates := group.acceptance.rates())]
        if len(groups) > 1:
            groups.append(PromptGroup.of(ALL, plain, depth, costs))
        return cls(
            classes=groups,
            verdict=_verdict(groups, first),
            depths=[_depth(costs, each + 1) for each in range(costs.limit)] if costs else [],
            lengths=_lengths(run),
            positions=list(by_position(plain, depth)),
            measured=len(run.results),
            planned=run.header.planned,
        )


def _verdict(groups: Sequence[PromptGroup], first: Sequence[float]) -> str:
    """What drafting is worth. Greedy text is right either way, so nothing but low acceptance shows
    a broken head.

    Args:
        groups: the classes, or all of them together at the end.
        first: acceptance at the first draft position, by class.
    """
    if first and max(first) < BROKEN_BELOW:
        return (
            f"no class reaches {BROKEN_BELOW:.0%} at the first position: the head, or what it is "
            "fed, is broken"
        )
    if not groups or groups[-1].best_depth is None:
        return ""
    best = groups[-1].best_depth
    if not best:
        return "at the costs measured here no depth is faster than no MTP"
    gain = groups[-1].speed_up[best - 1]
    return f"at the costs measured here depth {best} is the best: {gain:.2f}x"


def _depth(costs: Costs, depth: int) -> Depth:
    return Depth(depth, round_time(costs, depth) / costs.plain, break_even(costs, depth))


def _lengths(run: AcceptanceRun) -> list[PromptGroup]:
    lengths = sorted({r.context_length for r in run.results if r.context_length is not None})
    if not lengths:
        return []
    used = {(r.kind, r.prompt) for r in run.results if r.context_length == lengths[0]}
    groups = []
    for length in (None, *lengths):
        own = [r for r in run.results if r.context_length == length and (r.kind, r.prompt) in used]
        name = AS_IS if length is None else str(length)
        groups.append(PromptGroup.of(name, own, run.header.depth, run.costs_at(length)))
    return groups


def frequent_misses(misses: Iterable[Miss], most: int) -> list[dict[str, Any]]:
    """The most frequent misses, the first of equals first: how many "times" they came, the texts
    "drafted" and "actual", and their "classes"."""
    classes: dict[tuple[str, str], list[str]] = {}
    for miss in misses:
        classes.setdefault((miss.drafted_text, miss.actual_text), []).append(miss.kind)
    ranked = sorted(classes.items(), key=lambda item: -len(item[1]))
    return [
        {
            "times": len(kinds),
            "drafted": drafted,
            "actual": actual,
            "classes": [*dict.fromkeys(kinds)],
        }
        for (drafted, actual), kinds in ranked[:most]
    ]


# -- tables ----------------------------------------------------------------------------------------


class Grid(NamedTuple):
    """One table. `words`: as of :func:`to_markdown`."""

    title: str
    headings: list[str]
    rows: list[list[str]]
    words: tuple[bool, ...] = (True,)


def _grids(run: AcceptanceRun, report: Report, misses: int) -> Iterator[Grid]:
    """All tables that have a row, in the order in which they are read."""
    drafts = [f"draft {position + 1}" for position in range(run.header.depth)]
    yield Grid(
        "Conditional acceptance %: of drafts judged, all before them accepted",
        ["class", "prompts", "rounds", *drafts],
        [[g.name, str(g.acceptance.prompts), *_rates(g.acceptance)] for g in report.classes],
    )
    yield Grid(
        "Unconditional acceptance %: of rounds, this draft and all before it accepted",
        ["class", *drafts, "accepted/round"],
        [
            [g.name, *map(_rate, g.acceptance.unconditional), _mean(g.acceptance)]
            for g in report.classes
        ],
    )
    if report.depths:
        yield _worth(report)
    if report.lengths:
        rows = [[g.name, *_rates(g.acceptance), _best(g)] for g in report.lengths]
        rows[0][0] += f", {report.lengths[0].n_prompt:.0f}"
        title = "Conditional acceptance % by tokens in the context, the same prompts"
        yield Grid(title, ["context", "rounds", *drafts, "best depth"], rows)
    if len(report.positions) > 1:
        rows = [[f"{b.first}-{b.last}", *_rates(b.acceptance)] for b in report.positions]
        title = "Conditional acceptance % by tokens generated before the round"
        yield Grid(title, ["generated", "rounds", *drafts], rows)
    if frequent := frequent_misses(run.misses, misses):
        rows = [
            [str(n), _quoted(drafted), _quoted(actual), ", ".join(classes)]
            for n, drafted, actual, classes in map(dict.values, frequent)
        ]
        headings = ["times", "drafted", "the model chose", "classes"]
        yield Grid("Most frequent misses", headings, rows, (True,) * 4)


def _worth(report: Report) -> Grid:
    """Expected speed per class, and below it what each depth costs."""
    depths = report.depths
    rows = [
        [
            group.name,
            *(f"{ratio:.2f}x" for ratio in group.speed_up),
            *[NONE] * (len(depths) - len(group.speed_up)),
            _best(group),
        ]
        for group in report.classes
    ]
    needed = [NONE if d.break_even is None else f"{100 * d.break_even:.0f}" for d in depths]
    rows += [
        ["round, in plain steps", *(f"{each.round:.2f}" for each in depths), ""],
        ["break-even acceptance %", *needed, ""],
    ]
    headings = ["class", *(f"depth {each.depth}" for each in depths), "best depth"]
    return Grid("Expected decode speed against no MTP, at the costs measured here", headings, rows)


def _rates(acceptance: Acceptance) -> list[str]:
    """Rounds, and conditional acceptance at each position."""
    return [str(acceptance.rounds), *map(_rate, acceptance.conditional)]


def _rate(rate: Rate | None) -> str:
    if rate is None:
        return NONE
    return f"{100 * rate.rate:.0f} ({100 * rate.low:.0f}-{100 * rate.high:.0f})"


def _mean(acceptance: Acceptance) -> str:
    return NONE if acceptance.mean_accepted is None else f"{acceptance.mean_accepted:.2f}"


def _best(group: PromptGroup) -> str:
    return NONE if group.best_depth is None else str(group.best_depth or "no MTP")


def _quoted(text: str) -> str:
    shown = repr(text)
    return shown if len(shown) <= _WIDEST_TEXT else shown[: _WIDEST_TEXT - 3] + "..."


def _notes(run: AcceptanceRun, report: Report) -> list[str]:
    """The verdict first, then what the figures are."""
    head = run.header
    notes = []
    if report.verdict:
        notes.append(f"verdict: {report.verdict}")
    if not report.classes:
        notes.append("nothing was measured")
    if report.measured < report.planned:
        notes.append(f"not complete: {report.measured} of {report.planned} generations")
    heat = head.settings.get("sampling", {}).get("temperature", 0)
    notes += [
        f"prompts: {head.prompts}; at most {head.max_tokens} tokens each, "
        f"{f'temperature {heat:g}' if heat else 'greedy'}; {head.depth} drafts a round",
        "in brackets the 95 % interval (Wilson's, of as many independent rounds as the differences "
        "between prompts leave)",
    ]
    if report.classes and min(group.acceptance.prompts for group in report.classes) < 2:
        notes.append("with a single prompt the interval does not know how much prompts differ")
    if report.depths:
        notes.append(
            "expected speed is computed, not measured: tokens per round at the acceptance above, "
            "over the time of a round, measured after a prompt of median length; a plain step is "
            "one without MTP. With every draft accepted as often as break-even says, a depth is "
            "as fast as no MTP"
        )
    elif report.classes:
        notes.append("costs were not measured: no break-even")
    notes.append(
        f"model {head.model}; {head.variant} build of llama.cpp {head.upstream_commit[:9]}, "
        f"patches {head.series[:12] or NONE}, {head.backend}; {head.machine.get('cpu')}, "
        f"{head.machine.get('cores')} cores"
    )
    return notes


def markdown_report(run: AcceptanceRun, report: Report, misses: int = 0) -> str:
    """Tables and notes as Markdown. `misses`: how many of the most frequent misses to list."""
    parts = [
        f"### {title}\n\n{to_markdown(headings, rows, words)}"
        for title, headings, rows, words in _grids(run, report, misses)
    ]
    return "\n\n".join([*parts, "\n".join(f"- {note}" for note in _notes(run, report))])


def print_report(run: AcceptanceRun, report: Report, file: IO[str], misses: int = 0) -> None:
    """Tables and notes for a terminal. Nothing is cut: long lines run over the edge."""
    output = console(file)
    look: dict[str, Any] = {"title_justify": "left", "title_style": "bold", "padding": (0, 1, 0, 0)}
    for title, headings, rows, words in _grids(run, report, misses):
        print_whole(output, terminal_table(headings, rows, words, title=title, **look))
    for note in _notes(run, report):
        output.print(note)


def json_report(run: AcceptanceRun, report: Report, misses: int = 0) -> dict[str, object]:
    """One object for JSON, the run's header included; with misses, the most frequent of them."""
    figures: dict[str, object] = {"schema": SCHEMA, "kind": "acceptance-report"}
    figures |= {"run": msgspec.structs.asdict(run.header), **dataclasses.asdict(report)}
    if misses:
        figures["misses"] = frequent_misses(run.misses, misses)
    return figures
