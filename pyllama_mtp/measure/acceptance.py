"""Acceptance of drafts: measured at a fixed depth on the model's own text, kept in a file, and
shown by class, context length and position.

A round drafts `depth` tokens. Draft i is *judged* if all before it were accepted; the first that
the target would not have chosen ends the round. Conditional acceptance at position i: accepted
there / judged there. Unconditional: rounds in which drafts 1 to i were all accepted / rounds.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import IO, TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from pyllama_mtp.drafting.depth import Costs, best_depth, break_even, round_time, speed
from pyllama_mtp.errors import DecodeAborted, UsageError
from pyllama_mtp.measure.plan import padded_context
from pyllama_mtp.measure.prompts import Prompt, padded_tokens, read_text
from pyllama_mtp.measure.records import Count, Positive, checked, now
from pyllama_mtp.measure.text import NONE, console, print_whole, terminal_table, to_markdown
from pyllama_mtp.measure.tune import costs_against_no_mtp, tokens_after

if TYPE_CHECKING:
    from pyllama_mtp import Model, Sampling, Session, Settings
    from pyllama_mtp.measure.prompts import Workload
    from pyllama_mtp.measure.records import Build
    from pyllama_mtp.telemetry import Pair

#: Version of the file, and of the report as JSON; raised when the meaning of a field changes.
SCHEMA: Literal[1] = 1
#: Tokens before a miss whose text is kept with it.
MISS_CONTEXT = 8


# -- the file --------------------------------------------------------------------------------------


class AcceptanceHeader(Struct, frozen=True, kw_only=True, tag_field="kind", tag="acceptance"):
    """The first line of a file, which is JSON lines, each written as soon as it is measured: the
    plan of a run, its library and machine.

    Attributes:
        model: file name without its folder.
        variant, upstream_commit, series, backend, machine: as in a cell of a matrix.
        depth: drafts per round.
        max_tokens: most tokens generated per prompt.
        prompts: where the prompts come from, in words.
        planned: generations in the whole run.
        settings: fields of `Settings`, those of `Sampling` under "sampling".
        time: when the run began, UTC, ISO 8601.
    """

    schema: Literal[1] = SCHEMA
    model: str
    variant: str
    upstream_commit: str
    series: str
    backend: str
    depth: Positive
    max_tokens: Positive
    prompts: str
    planned: Count
    settings: dict[str, Any]
    machine: dict[str, Any]
    time: str


class PromptResult(Struct, frozen=True, rename={"kind": "class"}, tag_field="kind", tag="prompt"):
    """One generation.

    Attributes:
        kind: class of the prompt.
        prompt: its number within its class, from 1.
        context_length: tokens that the prompt was padded to with other text; None: no padding.
        n_prompt, n_generated: tokens, padding included.
        finish_reason: "eos", "length", or "interrupted".
        accepted: accepted drafts of every round that was offered all drafts. The last rounds, which
            were offered fewer for lack of tokens left to generate, are left out. Before round r,
            1 + the sum of (accepted + 1) over the rounds before it tokens had been generated.
        ended: an accepted end token cut the last round; the drafts after it were not judged.
        decode_s: seconds of all rounds.
    """

    kind: str
    prompt: Positive
    context_length: Positive | None
    n_prompt: Count
    n_generated: Count
    finish_reason: str
    accepted: tuple[Count, ...]
    ended: bool
    decode_s: Annotated[float, Meta(ge=0, lt=1e12)]


class CostResult(Struct, frozen=True, tag_field="kind", tag="costs"):
    """Measured costs in seconds after `n_prompt` tokens; a plain step is without MTP.
    `context_length` is None for the prompts as they are; `verify`, `draft`: as of :class:`.Costs`.
    """

    context_length: Positive | None
    n_prompt: Count
    verify: tuple[float, ...]
    draft: tuple[float, ...]

    def __post_init__(self) -> None:
        """Raises UsageError as :class:`.Costs`."""
        _ = self.costs

    @property
    def costs(self) -> Costs:
        """The costs."""
        return Costs(self.verify, self.draft)


class Miss(Struct, frozen=True, rename={"kind": "class"}):
    """A draft that the target would not have chosen: a line of the log of misses.

    Attributes:
        kind, prompt, context_length: of the :class:`PromptResult`.
        generated: tokens generated before it in its text.
        position: in its round, from 1.
        drafted, actual: token ids, the head's and the target's.
        context: the text of a few tokens before it.
    """

    kind: str
    prompt: int
    context_length: int | None
    generated: int
    position: int
    drafted: int
    actual: int
    drafted_text: str
    actual_text: str
    context: str


@dataclass
class AcceptanceRun:
    """A header and the results so far. `misses` are not in the file."""

    header: AcceptanceHeader
    results: list[PromptResult] = field(default_factory=list)
    costs: list[CostResult] = field(default_factory=list)
    misses: list[Miss] = field(default_factory=list)

    def add(self, result: PromptResult | CostResult | Miss) -> None:
        """Take the next result. Raises UsageError: it does not fit the depth of the run."""
        depth = self.header.depth
        if isinstance(result, Miss):
            self.misses.append(result)
        elif isinstance(result, CostResult):
            if result.costs.limit != depth:
                raise UsageError(f"costs of {result.costs.limit} drafts in a run with {depth}")
            self.costs.append(result)
        else:
            if max(result.accepted, default=0) > depth:
                raise UsageError(f"{max(result.accepted)} accepted of {depth} drafts")
            self.results.append(result)

    def costs_at(self, context_length: int | None) -> Costs | None:
        """Costs at a context length, if they were measured."""
        return next((c.costs for c in self.costs if c.context_length == context_length), None)


def read_run(path: str | os.PathLike[str]) -> AcceptanceRun:
    """Read a file of an acceptance run.

    Raises:
        UsageError: unreadable, of an unknown version, or a damaged line; names file and line.
    """
    run: AcceptanceRun | None = None
    for number, line in enumerate(read_text(path, "acceptance").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            what = "the header of an acceptance run" if run is None else "a result of acceptance"
            kinds = AcceptanceHeader if run is None else PromptResult | CostResult
            item = checked(kinds, line.encode(), what)
            if run is None:
                run = AcceptanceRun(item)
            else:
                run.add(item)
        except UsageError as error:
            raise UsageError(f"{path}, line {number}: {error}") from None
        except (msgspec.DecodeError, RecursionError):
            damaged = "damaged, not a whole JSON object; remove it"
            raise UsageError(f"{path}, line {number}: {damaged}") from None
    assert run is not None, "read_text refuses an empty file"
    return run


# -- measuring -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AcceptancePlan:
    """What to measure.

    Attributes:
        prompts: in the order of their classes.
        source: where the prompts come from, in words.
        depth: drafts per round, 1 or more.
        max_tokens: most tokens generated per prompt.
        context_lengths: tokens, padding included; each with the first `context_prompts` prompts of
            every class. Empty: no padded prompts.
        cost_repeats: rounds per depth when costs are measured; 0: costs are not measured.

    Raises:
        UsageError: a context length twice.
    """

    prompts: tuple[Prompt, ...]
    source: str
    depth: int
    max_tokens: int
    context_lengths: tuple[int, ...]
    context_prompts: int
    cost_repeats: int

    def __post_init__(self) -> None:
        lengths = self.context_lengths
        if len(set(lengths)) < len(lengths):
            raise UsageError(f"context lengths {lengths}: give each once, 1 or more")

    def chosen(self, context_length: int | None) -> list[tuple[int, Prompt]]:
        """(number within its class, prompt) of those that are measured at a context length."""
        counts: Counter[str] = Counter()
        prompts = []
        for prompt in self.prompts:
            counts[prompt.kind] += 1
            if context_length is None or counts[prompt.kind] <= self.context_prompts:
                prompts.append((counts[prompt.kind], prompt))
        return prompts

    @property
    def lengths(self) -> tuple[int | None, ...]:
        """None for the prompts as they are, then the context lengths in ascending order."""
        return (None, *sorted(self.context_lengths))

    @property
    def size(self) -> int:
        """Generations in all."""
        return sum(len(self.chosen(length)) for length in self.lengths)


class Measurement:
    """Measures a plan, one result at a time.

    Args:
        settings: of every session; the draft depth, and an `n_ctx` of 0, are replaced.
        text: padding for context lengths.
        on_prompt: called before every generation with its class, number within the class, and
            context length.
    """

    def __init__(
        self,
        model: Model,
        plan: AcceptancePlan,
        settings: Settings,
        sampling: Sampling,
        text: Workload,
        on_prompt: Callable[[str, int, int | None], None],
    ) -> None:
        self.plan, self._model, self._settings, self._sampling = plan, model, settings, sampling
        self._on_prompt = on_prompt
        self._tokens = {
            length: [
                (number, prompt, padded_tokens(model, prompt, length, text))
                if length
                else (number, prompt, prompt.tokens(model))
                for number, prompt in plan.chosen(length)
            ]
            for length in plan.lengths
        }
        allowed = settings.n_ctx or model.n_ctx_train
        for longest in map(self._longest, plan.lengths):
            if longest >= allowed:
                whose = "--n-ctx" if settings.n_ctx else "the model's context"
                raise UsageError(
                    f"a prompt of {longest} tokens leaves no room to generate in {whose}, {allowed}"
                )

    def _longest(self, length: int | None) -> int:
        return max(len(tokens) for _, _, tokens in self._tokens[length])

    def _session_settings(self, length: int | None) -> Settings:
        """Room for the longest prompt, what is generated after it, and the costs."""
        plan = self.plan
        after = max(plan.max_tokens, tokens_after(plan.depth, plan.cost_repeats))
        needed = self._longest(length) + after + plan.depth + 1
        n_ctx = self._settings.n_ctx or padded_context(needed, self._model.n_ctx_train)
        return dataclasses.replace(self._settings, n_ctx=n_ctx, draft_n_max=plan.depth)

    def run(self) -> Iterator[PromptResult | CostResult | Miss]:
        """Results as they come: prompts as they are with their costs, then the context lengths. The
        misses of a generation come before its result.

        Raises:
            KeyboardInterrupt: by Ctrl-C, after a last result: the whole rounds of the generation in
                progress.
        """
        from pyllama_mtp import Session

        for length in self.plan.lengths:
            with Session(self._model, self._session_settings(length)) as session:
                for number, prompt, tokens in self._tokens[length]:
                    self._on_prompt(prompt.kind, number, length)
                    if length is None:
                        session.reset()
                    result, misses = self._generate(session, prompt.kind, number, length, tokens)
                    yield from misses
                    yield result
                    if result.finish_reason == "interrupted":
                        raise KeyboardInterrupt
                if self.plan.cost_repeats:
                    yield self._measure_costs(session, length)

    def _measure_costs(self, session: Session, length: int | None) -> CostResult:
        """The costs of every depth, after the prompt of median length."""
        by_length = sorted((tokens for _, _, tokens in self._tokens[length]), key=len)
        tokens = by_length[len(by_length) // 2]
        costs = costs_against_no_mtp(session, tokens, self.plan.cost_repeats)
        return CostResult(length, len(tokens), costs.verify, costs.draft)

    def _generate(
        self, session: Session, kind: str, number: int, length: int | None, tokens: list[int]
    ) -> tuple[PromptResult, list[Miss]]:
        generation = session.generate(
            tokens, max_tokens=self.plan.max_tokens, sampling=self._sampling, log_pairs=True
        )
        try:
            generation.run()
        except (KeyboardInterrupt, DecodeAborted):
            reason = "interrupted"
        else:
            reason = generation.finish_reason or "interrupted"
        telemetry, depth = generation.telemetry, self.plan.depth
        rounds: list[list[Pair]] = []
        for pair in telemetry.pairs or ():
            if pair.position == 1:
                rounds.append([])
            rounds[-1].append(pair)
        if reason == "interrupted":
            rounds = rounds[:-1]  # the last one may not be complete
        # Rounds with fewer drafts come last, when few tokens are left to generate.
        rounds = rounds[: telemetry.drafted[depth - 1] if len(telemetry.drafted) >= depth else 0]
        accepted = tuple(sum(pair.drafted == pair.actual for pair in own) for own in rounds)
        result = PromptResult(
            kind=kind,
            prompt=number,
            context_length=length,
            n_prompt=len(tokens),
            n_generated=telemetry.n_generated,
            finish_reason=reason,
            accepted=accepted,
            ended=bool(rounds) and accepted[-1] == len(rounds[-1]) < depth,
            decode_s=telemetry.decode_s,
        )
        return result, [*self._misses(result, rounds, tokens + generation.tokens)]

    def _misses(
        self, result: PromptResult, rounds: list[list[Pair]], text: list[int]
    ) -> Iterator[Miss]:
        """The rejected draft of every round that has one; `text`: tokens of prompt and answer."""
        where = (result.kind, result.prompt, result.context_length)
        generated = 1  # the prefill's token comes before the first round
        for own, n_accepted in zip(rounds, result.accepted, strict=True):
            pair, before = own[-1], generated + n_accepted
            if pair.drafted != pair.actual:
                end = result.n_prompt + before
                context = self._model.detokenize(text[max(0, end - MISS_CONTEXT) : end], True)
                what = (pair.drafted, pair.actual, pair.drafted_text, pair.actual_text)
                yield Miss(*where, before, pair.position, *what, context)  # type: ignore[arg-type]
            generated = before + 1


def refuse_meaningless(settings: Settings) -> None:
    """Raises UsageError for settings that replace or select the head's acceptance."""
    if settings.synthetic_acceptance is not None:
        raise UsageError(
            "imposed acceptance cannot be measured: leave --synthetic-acceptance out; 'pyllama-mtp "
            "matrix' measures speed with it"
        )
    if settings.p_min:
        raise UsageError(
            "acceptance per position means something only if every draft is made: leave --p-min "
            "out, which stops drafting at improbable ones"
        )


def header(
    model: Model,
    plan: AcceptancePlan,
    settings: Settings,
    sampling: Sampling,
    build: Build,
    machine: dict[str, Any],
) -> AcceptanceHeader:
    """The first line of the run's file; paths are cut down to file names."""
    from pyllama_mtp.measure.run import sampling_record

    options = dataclasses.asdict(dataclasses.replace(settings, draft_n_max=plan.depth))
    if isinstance(settings.draft_vocab, str):
        options["draft_vocab"] = Path(settings.draft_vocab).name
    shared = ("variant", "upstream_commit", "series", "backend")
    return AcceptanceHeader(
        model=Path(model.path).name,
        **{name: getattr(build, name) for name in shared},
        machine=machine,
        depth=plan.depth,
        max_tokens=plan.max_tokens,
        prompts=plan.source,
        planned=plan.size,
        settings={**options, "sampling": sampling_record(sampling)},
        time=now(),
    )


def limited(prompts: Sequence[Prompt], per_class: int | None) -> tuple[Prompt, ...]:
    """Prompts grouped by class, at most `per_class` of each; None: all."""
    groups: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.kind, []).append(prompt)
    return tuple(prompt for own in groups.values() for prompt in own[:per_class])


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


# -- tables ----------------------------------------------------------------------------------------


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
