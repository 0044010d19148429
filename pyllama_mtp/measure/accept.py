"""Runs the generations of an acceptance measurement: fixed draft depth, the model's own text.

Every prompt is generated from with nothing left over from the one before. Where a context length is
asked for, real text is put before the prompt (in a chat, into the same message) up to that many
tokens; those prompts share the text, so it is processed once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyllama_mtp.errors import DecodeAborted, UsageError
from pyllama_mtp.measure.acceptance_costs import costs_against_no_mtp, tokens_after
from pyllama_mtp.measure.acceptance_record import CostResult, Header, Miss, PromptResult
from pyllama_mtp.measure.classprompts import padded_tokens
from pyllama_mtp.measure.promptset import Prompt

if TYPE_CHECKING:
    from pyllama_mtp import Model, Sampling, Session, Settings
    from pyllama_mtp.measure.header import Build
    from pyllama_mtp.measure.workload import Workload
    from pyllama_mtp.telemetry import Pair

#: Tokens before a miss whose text is kept with it.
MISS_CONTEXT = 8
_CONTEXT_STEP = 256  # llama.cpp pads contexts to this many tokens
#: Stands where padding goes while a chat template is rendered.

OpenSession = Callable[["Settings"], "Session"]
MeasureCosts = Callable[["Session", Sequence[int], int], Any]


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes:
        prompts: in the order of their classes.
        source: where they come from, in words.
        depth: drafts per round, 1 or more.
        max_tokens: most tokens generated per prompt.
        context_lengths: tokens, padding included; each with the first `context_prompts` prompts of
            every class. Empty: prompts as they are, only.
        cost_repeats: rounds per depth when costs are measured; 0: they are not.

    Raises:
        UsageError: nothing to measure, or a number out of range.
    """

    prompts: tuple[Prompt, ...]
    source: str
    depth: int
    max_tokens: int
    context_lengths: tuple[int, ...] = ()
    context_prompts: int = 2
    cost_repeats: int = 9

    def __post_init__(self) -> None:
        if not self.prompts:
            raise UsageError("no prompts to measure")
        least = (("depth", 1), ("max_tokens", 1), ("context_prompts", 1), ("cost_repeats", 0))
        for name, allowed in least:
            value = getattr(self, name)
            if value < allowed:
                raise UsageError(f"{name} is {value}; it must be {allowed} or more")
        lengths = self.context_lengths
        if len(set(lengths)) < len(lengths) or min(lengths, default=1) < 1:
            raise UsageError(f"context lengths {lengths}: give each once, 1 or more")

    @property
    def numbered(self) -> list[tuple[int, Prompt]]:
        """(number within its class, prompt), in order."""
        counts: dict[str, int] = {}
        found = []
        for prompt in self.prompts:
            counts[prompt.kind] = counts.get(prompt.kind, 0) + 1
            found.append((counts[prompt.kind], prompt))
        return found

    def chosen(self, context_length: int | None) -> list[tuple[int, Prompt]]:
        """The prompts that are measured at a context length, numbered."""
        most = math.inf if context_length is None else self.context_prompts
        return [(number, prompt) for number, prompt in self.numbered if number <= most]

    @property
    def lengths(self) -> tuple[int | None, ...]:
        """None, for the prompts as they are, then the context lengths in ascending order."""
        return (None, *sorted(self.context_lengths))

    @property
    def size(self) -> int:
        """Generations in all."""
        return sum(len(self.chosen(length)) for length in self.lengths)


def split_rounds(pairs: Sequence[Pair]) -> list[list[Pair]]:
    """Judged drafts by round: each begins at position 1."""
    rounds: list[list[Pair]] = []
    for pair in pairs:
        if pair.position == 1:
            rounds.append([])
        rounds[-1].append(pair)
    return rounds


class Measurement:
    """Measures a plan, one result at a time.

    Args:
        settings: of every session but for `n_ctx`, where it is 0, and the draft depth.
        open_session: opens one; it is closed before the next one is opened.
        text: padding for context lengths; None: there are none.
        on_prompt: told of every generation before it begins: its class, number within the class,
            and context length.

    Attributes:
        interrupted: the user ended it; what was measured until then has come out.
    """

    def __init__(
        self,
        model: Model,
        plan: Plan,
        settings: Settings,
        sampling: Sampling,
        open_session: OpenSession,
        text: Workload | None = None,
        *,
        on_prompt: Callable[[str, int, int | None], None] = lambda *_: None,
        costs: MeasureCosts = costs_against_no_mtp,
    ) -> None:
        refuse_meaningless(settings)
        self.plan, self.interrupted = plan, False
        self._model, self._settings, self._sampling = model, settings, sampling
        self._open, self._on_prompt, self._costs = open_session, on_prompt, costs
        self._tokens = {
            length: [(number, prompt, self._encode(prompt, length, text)) for number, prompt in own]
            for length, own in ((each, plan.chosen(each)) for each in plan.lengths)
        }
        for length in plan.lengths:
            self._check_length(length)

    def _encode(self, prompt: Prompt, length: int | None, text: Workload | None) -> list[int]:
        if length is None:
            return prompt.tokens(self._model)
        if text is None:
            raise UsageError("context lengths need a text to pad prompts with")
        return padded_tokens(self._model, prompt, length, text)

    def _check_length(self, length: int | None) -> None:
        needed, allowed = self._longest(length) + 1, self._settings.n_ctx or self._model.n_ctx_train
        if needed > allowed:
            whose = "--n-ctx" if self._settings.n_ctx else "the model's context"
            raise UsageError(
                f"a prompt of {needed - 1} tokens leaves no room to generate in {whose}, {allowed}"
            )

    def _longest(self, length: int | None) -> int:
        return max(len(tokens) for _, _, tokens in self._tokens[length])

    def _session_settings(self, length: int | None) -> Settings:
        """Room for the longest prompt, what is generated after it, and the costs."""
        plan = self.plan
        after = max(plan.max_tokens, tokens_after(plan.depth, plan.cost_repeats))
        needed = self._longest(length) + after + plan.depth + 1
        n_ctx = min(-(-needed // _CONTEXT_STEP) * _CONTEXT_STEP, self._model.n_ctx_train)
        return dataclasses.replace(
            self._settings, n_ctx=self._settings.n_ctx or n_ctx, draft_n_max=self.plan.depth
        )

    def run(self) -> Iterator[PromptResult | CostResult]:
        """Results as they come: prompts as they are and costs there, then the context lengths.

        Ctrl-C ends it: the generation it meets comes out with the rounds it has had.
        """
        for length in self.plan.lengths:
            with self._open(self._session_settings(length)) as session:
                for number, prompt, tokens in self._tokens[length]:
                    self._on_prompt(prompt.kind, number, length)
                    if length is None:
                        session.reset()
                    result = self._generate(session, prompt.kind, number, length, tokens)
                    yield result
                    if result.finish_reason == "interrupted":
                        self.interrupted = True
                        return
                if self.plan.cost_repeats:
                    yield self._measure_costs(session, length)

    def _measure_costs(self, session: Session, length: int | None) -> CostResult:
        """After the prompt of median length, at every depth."""
        by_length = sorted((tokens for _, _, tokens in self._tokens[length]), key=len)
        tokens = by_length[len(by_length) // 2]
        found = self._costs(session, tokens, self.plan.cost_repeats)
        return CostResult(length, len(tokens), found)

    def _generate(
        self, session: Session, kind: str, number: int, length: int | None, tokens: list[int]
    ) -> PromptResult:
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
        rounds = split_rounds(telemetry.pairs or ())
        if reason == "interrupted":
            rounds = rounds[:-1]  # it may not be complete
        # Rounds with fewer drafts come last, when few tokens are left to generate.
        rounds = rounds[: telemetry.drafted[depth - 1] if len(telemetry.drafted) >= depth else 0]
        accepted = tuple(sum(pair.drafted == pair.actual for pair in own) for own in rounds)
        return PromptResult(
            kind=kind,
            prompt=number,
            context_length=length,
            n_prompt=len(tokens),
            n_generated=telemetry.n_generated,
            finish_reason=reason,
            accepted=accepted,
            ended=bool(rounds) and accepted[-1] == len(rounds[-1]) < depth,
            decode_s=telemetry.decode_s,
            misses=self._misses(rounds, accepted, tokens + generation.tokens, len(tokens)),
        )

    def _misses(
        self, rounds: list[list[Pair]], accepted: Sequence[int], text: list[int], n_prompt: int
    ) -> tuple[Miss, ...]:
        """The failed draft of every round that has one; `text` is prompt and answer."""
        found, generated = [], 1  # the prefill's token comes before the first round
        for own, n_accepted in zip(rounds, accepted, strict=True):
            pair, before = own[-1], generated + n_accepted
            if pair.drafted != pair.actual:
                end = n_prompt + before
                context = self._model.detokenize(text[max(0, end - MISS_CONTEXT) : end], True)
                what = (pair.drafted, pair.actual, pair.drafted_text, pair.actual_text)
                found.append(Miss(before, pair.position, *what, context))
            generated = before + 1
        return tuple(found)


def refuse_meaningless(settings: Settings) -> None:
    """Raises UsageError for settings under which acceptance is not the head's."""
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
    model: Model, plan: Plan, settings: Settings, sampling: Sampling, build: Build
) -> Header:
    """What the run's file begins with; paths are cut down to file names."""
    options: dict[str, Any] = dataclasses.asdict(
        dataclasses.replace(settings, draft_n_max=plan.depth)
    )
    if isinstance(settings.draft_vocab, str):
        options["draft_vocab"] = Path(settings.draft_vocab).name
    chosen = dataclasses.asdict(sampling)
    biases = sampling.logit_bias or {}
    chosen["logit_bias"] = {  # JSON has no infinity
        str(token): bias if math.isfinite(bias) else str(bias) for token, bias in biases.items()
    } or None
    return Header(
        model=Path(model.path).name,
        variant=build.variant,
        upstream_commit=build.upstream_commit,
        series=build.series,
        backend=build.backend,
        depth=plan.depth,
        max_tokens=plan.max_tokens,
        prompts=plan.source,
        planned=plan.size,
        settings={**options, "sampling": chosen},
        machine=build.machine,
        time=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


def limited(prompts: Sequence[Prompt], per_class: int | None) -> tuple[Prompt, ...]:
    """Prompts grouped by class, at most `per_class` of each; None: all."""
    order = list(dict.fromkeys(prompt.kind for prompt in prompts))
    grouped = sorted(prompts, key=lambda prompt: order.index(prompt.kind))
    groups = groupby(grouped, key=lambda prompt: prompt.kind)
    return tuple(prompt for _, own in groups for prompt in list(own)[:per_class])
