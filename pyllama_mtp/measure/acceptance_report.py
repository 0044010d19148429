"""The report of an acceptance run: acceptance by class, context length and position, and the speed
that it brings at the measured costs. For JSON, as Markdown, and for a terminal (rich)."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import IO, Any, NamedTuple

import msgspec

from pyllama_mtp.drafting.depth import Costs, best_depth, break_even, round_time, speed
from pyllama_mtp.measure.acceptance_rates import (
    BROKEN_BELOW,
    PAYS_FROM,
    Acceptance,
    Bucket,
    Rate,
    Verdict,
    by_position,
    tally,
    verdict,
)
from pyllama_mtp.measure.acceptance_record import PromptResult, Run
from pyllama_mtp.measure.text import NONE, console, print_whole, terminal_table, to_markdown

#: Version of the report as JSON.
SCHEMA = 1
ALL = "all"
#: Name of the prompts without anything before them, among the context lengths.
AS_IS = "as is"
_WIDEST_TEXT = 24


@dataclass(frozen=True)
class Group:
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
    ) -> Group:
        """The group of these results."""
        found = Acceptance.of([tally(result, depth) for result in results], depth)
        rates, n_prompt = found.rates(), median(result.n_prompt for result in results)
        if not costs or not rates:
            return cls(name, n_prompt, found, [], None)
        depths = range(1, len(rates) + 1)
        gains = [speed(costs, rates, each) * costs.plain for each in depths]
        return cls(name, n_prompt, found, gains, best_depth(costs, rates))


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
        verdict: on the head, from `classes`; None without a judged draft.
        depths: empty without costs.
        lengths: by context length, the same prompts in each, first as they are. Empty if there are
            no context lengths.
        positions: by tokens generated before the round, prompts as they are.
        measured, planned: generations.
    """

    classes: list[Group]
    verdict: Verdict | None
    depths: list[Depth]
    lengths: list[Group]
    positions: list[Bucket]
    measured: int
    planned: int

    @classmethod
    def of(cls, run: Run) -> Report:
        """Compute it from a run, whole or not."""
        depth, plain = run.header.depth, [r for r in run.results if r.context_length is None]
        names = list(dict.fromkeys(result.kind for result in plain))
        costs = run.costs_at(None)
        groups = [
            Group.of(name, [r for r in plain if r.kind == name], depth, costs) for name in names
        ]
        first = {group.name: rates[0] for group in groups if (rates := group.acceptance.rates())}
        if len(groups) > 1:
            groups.append(Group.of(ALL, plain, depth, costs))
        return cls(
            classes=groups,
            verdict=verdict(first),
            depths=[_depth(costs, each + 1) for each in range(costs.limit)] if costs else [],
            lengths=_lengths(run),
            positions=list(by_position(plain, depth)),
            measured=len(run.results),
            planned=run.header.planned,
        )


def _depth(costs: Costs, depth: int) -> Depth:
    return Depth(depth, round_time(costs, depth) / costs.plain, break_even(costs, depth))


def _lengths(run: Run) -> list[Group]:
    lengths = sorted({r.context_length for r in run.results if r.context_length is not None})
    if not lengths:
        return []
    used = {(r.kind, r.prompt) for r in run.results if r.context_length == lengths[0]}
    groups = []
    for length in (None, *lengths):
        own = [r for r in run.results if r.context_length == length and (r.kind, r.prompt) in used]
        name = AS_IS if length is None else str(length)
        groups.append(Group.of(name, own, run.header.depth, run.costs_at(length)))
    return groups


def frequent_misses(results: Iterable[PromptResult], most: int) -> list[dict[str, Any]]:
    """The most frequent misses, the first of equals first: how many "times" they came, the texts
    "drafted" and "actual", and their "classes"."""
    counts: Counter[tuple[str, str]] = Counter()
    classes: dict[tuple[str, str], dict[str, None]] = {}
    for result in results:
        for miss in result.misses:
            key = (miss.drafted_text, miss.actual_text)
            counts[key] += 1
            classes.setdefault(key, {})[result.kind] = None
    return [
        {"times": n, "drafted": key[0], "actual": key[1], "classes": list(classes[key])}
        for key, n in counts.most_common(most)
    ]


# -- tables ----------------------------------------------------------------------------------------


class Grid(NamedTuple):
    """One table. `words`: as of :func:`to_markdown`."""

    title: str
    headings: list[str]
    rows: list[list[str]]
    words: tuple[bool, ...] = (True,)


def _grids(run: Run, report: Report, misses: int) -> Iterator[Grid]:
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
    if found := frequent_misses(run.results, misses):
        rows = [
            [str(n), _quoted(drafted), _quoted(actual), ", ".join(classes)]
            for n, drafted, actual, classes in map(dict.values, found)
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


def _best(group: Group) -> str:
    return NONE if group.best_depth is None else str(group.best_depth or "no MTP")


def _quoted(text: str) -> str:
    shown = repr(text)
    return shown if len(shown) <= _WIDEST_TEXT else shown[: _WIDEST_TEXT - 3] + "..."


def _notes(run: Run, report: Report) -> list[str]:
    """The verdict first, then what the figures are."""
    head = run.header
    found = []
    if report.verdict:
        found.append(f"verdict: {report.verdict.outcome}. {report.verdict.reason}")
        found += [*_unsure(report), *_at_these_costs(report)]
    if not report.classes:
        found.append("nothing was measured")
    if report.measured < report.planned:
        found.append(f"not complete: {report.measured} of {report.planned} generations")
    heat = head.settings.get("sampling", {}).get("temperature", 0)
    found += [
        f"prompts: {head.prompts}; at most {head.max_tokens} tokens each, "
        f"{f'temperature {heat:g}' if heat else 'greedy'}; {head.depth} drafts a round",
        "in brackets the 95 % interval: the wider at each end of Wilson's, which takes rounds as "
        "independent, and one by drawing whole prompts (bootstrap)",
    ]
    if report.classes and min(group.acceptance.prompts for group in report.classes) < 2:
        found.append("with a single prompt the interval does not know how much prompts differ")
    if report.depths:
        found.append(
            "expected speed is computed, not measured: tokens per round at the acceptance above, "
            "over the time of a round, measured after a prompt of median length; a plain step is "
            "one without MTP. With every draft accepted as often as break-even says, a depth is "
            "as fast as no MTP"
        )
    elif report.classes:
        found.append("costs were not measured: no break-even")
    found.append(
        f"model {head.model}; {head.variant} build of llama.cpp {head.upstream_commit[:9]}, "
        f"patches {head.series[:12] or NONE}, {head.backend}; {head.machine.get('cpu')}, "
        f"{head.machine.get('cores')} cores"
    )
    return found


def _unsure(report: Report) -> list[str]:
    """A note where an interval reaches over a bar of the rule."""
    unsure = [
        group.name
        for group in report.classes[:-1] or report.classes  # without all of them together
        if (rate := group.acceptance.conditional[0])
        and any(rate.low < bar <= rate.high for bar in (PAYS_FROM, BROKEN_BELOW))
    ]
    if not unsure:
        return []
    return [
        f"not sure for {', '.join(unsure)}: the interval holds a bar of the rule "
        f"({PAYS_FROM:.0%} or {BROKEN_BELOW:.0%}); more prompts or --max-tokens would tell"
    ]


def _at_these_costs(report: Report) -> list[str]:
    """The best depth of all prompts together: the verdict's rule knows no costs."""
    group = report.classes[-1]
    if group.best_depth is None:
        return []
    if not group.best_depth:
        return ["at the costs measured here no depth is faster than no MTP"]
    gain = group.speed_up[group.best_depth - 1]
    return [f"at the costs measured here depth {group.best_depth} is the best: {gain:.2f}x"]


def markdown_report(run: Run, report: Report, misses: int = 0) -> str:
    """Tables and notes as Markdown. `misses`: how many of the most frequent misses to list."""
    parts = [
        f"### {title}\n\n{to_markdown(headings, rows, words)}"
        for title, headings, rows, words in _grids(run, report, misses)
    ]
    return "\n\n".join([*parts, "\n".join(f"- {note}" for note in _notes(run, report))])


def print_report(run: Run, report: Report, file: IO[str], misses: int = 0) -> None:
    """Tables and notes for a terminal. Nothing is cut: long lines run over the edge."""
    output = console(file)
    look: dict[str, Any] = {"title_justify": "left", "title_style": "bold", "padding": (0, 1, 0, 0)}
    for title, headings, rows, words in _grids(run, report, misses):
        print_whole(output, terminal_table(headings, rows, words, title=title, **look))
    for note in _notes(run, report):
        output.print(note)


def json_report(run: Run, report: Report, misses: int = 0) -> dict[str, object]:
    """One object for JSON, the run's header included; with misses, the most frequent of them."""
    found: dict[str, object] = {"schema": SCHEMA, "kind": "acceptance-report"}
    found |= {"run": msgspec.structs.asdict(run.header), **dataclasses.asdict(report)}
    if misses:
        found["misses"] = frequent_misses(run.results, misses)
    return found
