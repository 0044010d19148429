"""An acceptance report as tables: for a terminal (rich) and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import IO

from pyllama_mtp.measure.acceptance_rates import Acceptance, Rate
from pyllama_mtp.measure.acceptance_record import Run
from pyllama_mtp.measure.acceptance_report import ALL, AS_IS, Group, Report, frequent_misses
from pyllama_mtp.measure.markdown import to_markdown

_NONE = "-"
_WIDEST_TEXT = 24
_UNLIMITED = 1000


@dataclass(frozen=True)
class Grid:
    """One table. The first `words` columns are words, the others figures."""

    title: str
    headings: list[str]
    rows: list[list[str]]
    words: int = 1


def grids(run: Run, report: Report, misses: int = 0) -> list[Grid]:
    """Every table that there is something for, in the order they are read.

    Args:
        misses: how many of the most frequent misses to list.
    """
    depth = run.header.depth
    drafts = [f"draft {position + 1}" for position in range(depth)]
    found = [
        Grid(
            "Conditional acceptance %: of drafts judged, all before them accepted",
            ["class", "prompts", "rounds", *drafts],
            [
                [g.name, *_sizes(g.acceptance), *map(_rate, g.acceptance.conditional)]
                for g in report.classes
            ],
        ),
        Grid(
            "Unconditional acceptance %: of rounds, this draft and all before it accepted",
            ["class", *drafts, "accepted/round"],
            [
                [g.name, *map(_rate, g.acceptance.unconditional), _mean(g.acceptance)]
                for g in report.classes
            ],
        ),
    ]
    if report.depths:
        found.append(_worth(report, depth))
    if report.lengths:
        found.append(_by_length(report, drafts))
    if len(report.positions) > 1:
        rows = [
            [
                f"{bucket.first}-{bucket.last}",
                str(bucket.acceptance.rounds),
                *map(_rate, bucket.acceptance.conditional),
            ]
            for bucket in report.positions
        ]
        title = "Conditional acceptance % by tokens generated before the round"
        found.append(Grid(title, ["generated", "rounds", *drafts], rows))
    if misses and any(result.misses for result in run.results):
        title = "Most frequent misses"
        rows = [
            [str(n), _quoted(drafted), _quoted(actual), ", ".join(classes)]
            for n, drafted, actual, classes in frequent_misses(run.results, misses)
        ]
        found.append(Grid(title, ["times", "drafted", "the model chose", "classes"], rows, words=4))
    return found


def _worth(report: Report, depth: int) -> Grid:
    """Expected speed per class, and below it what each depth costs."""
    headings = ["class", *(f"depth {each + 1}" for each in range(depth)), "best depth"]
    rows = [
        [group.name, *_padded([f"{ratio:.2f}x" for ratio in group.speed_up], depth), _best(group)]
        for group in report.classes
    ]
    rows += [
        ["round, in plain steps", *(f"{each.round:.2f}" for each in report.depths), ""],
        [
            "break-even acceptance %",
            *(
                _NONE if each.break_even is None else f"{100 * each.break_even:.0f}"
                for each in report.depths
            ),
            "",
        ],
    ]
    return Grid("Expected decode speed against no MTP, at the costs measured here", headings, rows)


def _by_length(report: Report, drafts: list[str]) -> Grid:
    rows = [
        [
            f"as is, {group.n_prompt:.0f}" if group.name == AS_IS else group.name,
            str(group.acceptance.rounds),
            *map(_rate, group.acceptance.conditional),
            _best(group),
        ]
        for group in report.lengths
    ]
    title = "Conditional acceptance % by tokens in the context, the same prompts"
    return Grid(title, ["context", "rounds", *drafts, "best depth"], rows)


def _sizes(acceptance: Acceptance) -> list[str]:
    return [str(acceptance.prompts), str(acceptance.rounds)]


def _rate(rate: Rate | None) -> str:
    if rate is None:
        return _NONE
    return f"{100 * rate.rate:.0f} ({100 * rate.low:.0f}-{100 * rate.high:.0f})"


def _mean(acceptance: Acceptance) -> str:
    return _NONE if acceptance.mean_accepted is None else f"{acceptance.mean_accepted:.2f}"


def _best(group: Group) -> str:
    return _NONE if group.best_depth is None else str(group.best_depth or "no MTP")


def _padded(cells: list[str], n: int) -> list[str]:
    return cells + [_NONE] * (n - len(cells))


def _quoted(text: str) -> str:
    """One line of visible text."""
    shown = repr(text)
    return shown if len(shown) <= _WIDEST_TEXT else shown[: _WIDEST_TEXT - 3] + "..."


def notes(run: Run, report: Report) -> list[str]:
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
        f"patches {head.series[:12] or _NONE}, {head.backend}; {head.machine.get('cpu')}, "
        f"{head.machine.get('cores')} cores"
    )
    return found


def _unsure(report: Report) -> list[str]:
    """Says so where an interval reaches over the bar of the rule."""
    from pyllama_mtp.measure.acceptance_rates import BROKEN_BELOW, PAYS_FROM

    def straddles(group: Group) -> bool:
        rate = group.acceptance.conditional[0]
        return rate is not None and any(
            rate.low < bar <= rate.high for bar in (PAYS_FROM, BROKEN_BELOW)
        )

    names = [group.name for group in report.classes if straddles(group)]
    own = [name for name in names if name != ALL or len(report.classes) == 1]
    if not own:
        return []
    return [
        f"not sure for {', '.join(own)}: the interval holds a bar of the rule "
        f"({PAYS_FROM:.0%} or {BROKEN_BELOW:.0%}); more prompts or --max-tokens would tell"
    ]


def _at_these_costs(report: Report) -> list[str]:
    """The rule knows no costs: what they say of all prompts together."""
    group = report.classes[-1]
    if group.best_depth is None:
        return []
    if not group.best_depth:
        return ["at the costs measured here no depth is faster than no MTP"]
    gain = group.speed_up[group.best_depth - 1]
    return [f"at the costs measured here depth {group.best_depth} is the best: {gain:.2f}x"]


def markdown_report(run: Run, report: Report, misses: int = 0) -> str:
    """Everything as Markdown."""
    parts = []
    for grid in grids(run, report, misses):
        words = (n < grid.words for n in range(len(grid.headings)))
        table = to_markdown(grid.headings, grid.rows, words)
        parts.append(f"### {grid.title}\n\n{table}")
    parts.append("\n".join(f"- {note}" for note in notes(run, report)))
    return "\n\n".join(parts)


def print_report(run: Run, report: Report, file: IO[str], misses: int = 0) -> None:
    """Tables and notes for a terminal. Nothing is cut: what is too long runs over the edge."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    plain = partial(Console, highlight=False, markup=False, emoji=False)
    console = plain(file=file)
    for grid in grids(run, report, misses):
        table = Table(
            title=grid.title,
            title_justify="left",
            title_style="bold",
            box=box.SIMPLE_HEAD,
            pad_edge=False,
            padding=(0, 1, 0, 0),
        )
        for number, heading in enumerate(grid.headings):
            words = number < grid.words
            table.add_column(heading, justify="left" if words else "right", no_wrap=True)
        for row in grid.rows:
            table.add_row(*row)
        width = plain(width=_UNLIMITED).measure(table).maximum
        plain(file=file, width=max(console.width, width)).print(table)
    for note in notes(run, report):
        console.print(note)


def json_report(run: Run, report: Report, misses: int = 0) -> dict[str, object]:
    """One object; with misses, the most frequent ones."""
    found = report.to_record(run)
    if misses:
        names = ("times", "drafted", "actual", "classes")
        common: Sequence[tuple[int, str, str, list[str]]] = frequent_misses(run.results, misses)
        found["misses"] = [dict(zip(names, each, strict=True)) for each in common]
    return found
