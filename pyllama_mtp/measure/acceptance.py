"""Acceptance of drafts: measured at a fixed depth on the model's own text, and kept in a file."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from pyllama_mtp.drafting.depth import Costs
from pyllama_mtp.errors import DecodeAborted, UsageError
from pyllama_mtp.measure.plan import padded_context
from pyllama_mtp.measure.prompts import Prompt, padded_tokens, read_text
from pyllama_mtp.measure.records import Count, Positive, checked, now
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
