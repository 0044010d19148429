"""What an acceptance run says: per class and length, and what it is worth at its costs. Pure."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import msgspec

from pyllama_mtp.measure.acceptance_rates import Acceptance, Verdict, by_position, verdict
from pyllama_mtp.measure.acceptance_record import PromptResult, Run
from pyllama_mtp.speculative.costs import Costs, best_depth, break_even, round_time, speed

#: Version of the report as JSON.
SCHEMA = 1
ALL = "all"
#: Name of the prompts without anything before them, among the context lengths.
AS_IS = "as is"


@dataclass(frozen=True)
class Group:
    """Acceptance of a group of prompts, and what it is worth.

    Attributes:
        name: the class, or what they have in common.
        n_prompt: tokens of a prompt, the median.
        speed_up: expected decode speed against no MTP at depth 1, 2, ..., as far as acceptance was
            measured; empty without costs. Computed, not measured: see
            :func:`pyllama_mtp.speculative.costs.speed`.
        best_depth: the fastest of depth 0 (no MTP) and these; None without costs.
    """

    name: str
    n_prompt: float
    acceptance: Acceptance
    speed_up: list[float]
    best_depth: int | None


@dataclass(frozen=True)
class Depth:
    """What a depth costs here.

    Attributes:
        round: drafting and verifying, in plain decode steps.
        break_even: acceptance, the same at every position, from which it pays; None: never.
    """

    depth: int
    round: float
    break_even: float | None


@dataclass(frozen=True)
class Bucket:
    """Acceptance of the rounds before which `first` to `last` tokens had been generated."""

    first: int
    last: int
    acceptance: Acceptance


@dataclass(frozen=True)
class Report:
    """A run in figures.

    Attributes:
        classes: in the order of the run, then all of them together if they are several.
        verdict: on the head, from `classes`; None without a judged draft.
        depths: without costs, empty.
        lengths: by context length, the same prompts in each, first as they are. Empty if only that
            was measured.
        positions: by how much had been generated, prompts as they are.
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
            _group(name, [r for r in plain if r.kind == name], depth, costs) for name in names
        ]
        first = {group.name: rates[0] for group in groups if (rates := group.acceptance.rates())}
        if len(groups) > 1:
            groups.append(_group(ALL, plain, depth, costs))
        buckets = by_position([result.rounds(depth) for result in plain], depth)
        return cls(
            classes=groups,
            verdict=verdict(first) if first else None,
            depths=_depths(costs) if costs else [],
            lengths=_lengths(run),
            positions=[Bucket(*bucket) for bucket in buckets],
            measured=len(run.results),
            planned=run.header.planned,
        )

    def to_record(self, run: Run) -> dict[str, Any]:
        """One object for JSON, the run's header included."""
        about = {"schema": SCHEMA, "kind": "acceptance-report"}
        return {**about, "run": msgspec.structs.asdict(run.header), **dataclasses.asdict(self)}


def _group(name: str, results: Sequence[PromptResult], depth: int, costs: Costs | None) -> Group:
    found = Acceptance.of([result.rounds(depth).tally() for result in results], depth)
    rates = found.rates()
    depths = range(1, len(rates) + 1) if costs else ()
    return Group(
        name=name,
        n_prompt=median(result.n_prompt for result in results),
        acceptance=found,
        speed_up=[speed(costs, rates, each) * costs.plain for each in depths] if costs else [],
        best_depth=best_depth(costs, rates, len(rates)) if costs and rates else None,
    )


def _depths(costs: Costs) -> list[Depth]:
    return [
        Depth(depth, round_time(costs, depth) / costs.plain, break_even(costs, depth))
        for depth in range(1, costs.limit + 1)
    ]


def _lengths(run: Run) -> list[Group]:
    lengths = sorted({r.context_length for r in run.results if r.context_length is not None})
    if not lengths:
        return []
    used = {(r.kind, r.prompt) for r in run.results if r.context_length == lengths[0]}
    groups = []
    for length in (None, *lengths):
        own = [r for r in run.results if r.context_length == length and (r.kind, r.prompt) in used]
        name = AS_IS if length is None else str(length)
        groups.append(_group(name, own, run.header.depth, run.costs_at(length)))
    return groups


def frequent_misses(
    results: Iterable[PromptResult], most: int
) -> list[tuple[int, str, str, list[str]]]:
    """(count, drafted text, actual text, classes) of the most frequent misses, the first of equals
    first."""
    counts: Counter[tuple[str, str]] = Counter()
    classes: dict[tuple[str, str], dict[str, None]] = {}
    for result in results:
        for miss in result.misses:
            key = (miss.drafted_text, miss.actual_text)
            counts[key] += 1
            classes.setdefault(key, {})[result.kind] = None
    return [(n, *key, list(classes[key])) for key, n in counts.most_common(most)]
