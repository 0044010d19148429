"""Runs the generations of an acceptance measurement: fixed draft depth, the model's own text.

Every generation begins with an empty context. To reach a context length, real text is put before
the prompt (in a chat, into the same message); these prompts share the text, which is processed
once.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pyllama_mtp.errors import DecodeAborted, UsageError
from pyllama_mtp.measure.acceptance_record import CostResult, Header, Miss, PromptResult
from pyllama_mtp.measure.classprompts import padded_tokens
from pyllama_mtp.measure.costs import costs_against_no_mtp, tokens_after
from pyllama_mtp.measure.header import now, sampling_record
from pyllama_mtp.measure.plan import padded_context
from pyllama_mtp.measure.promptset import Prompt

if TYPE_CHECKING:
    from pyllama_mtp import Model, Sampling, Session, Settings
    from pyllama_mtp.measure.header import Build
    from pyllama_mtp.measure.workload import Workload
    from pyllama_mtp.telemetry import Pair

#: Tokens before a miss whose text is kept with it.
MISS_CONTEXT = 8


@dataclass(frozen=True)
class Plan:
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
        found = []
        for prompt in self.prompts:
            counts[prompt.kind] += 1
            if context_length is None or counts[prompt.kind] <= self.context_prompts:
                found.append((counts[prompt.kind], prompt))
        return found

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
        plan: Plan,
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

    def run(self) -> Iterator[PromptResult | CostResult]:
        """Results as they come: prompts as they are with their costs, then the context lengths.

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
                    result = self._generate(session, prompt.kind, number, length, tokens)
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
        return CostResult(length, len(tokens), costs)

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
        """The rejected draft of every round that has one; `text`: tokens of prompt and answer."""
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
    model: Model, plan: Plan, settings: Settings, sampling: Sampling, build: Build
) -> Header:
    """The first line of the run's file; paths are cut down to file names."""
    options = dataclasses.asdict(dataclasses.replace(settings, draft_n_max=plan.depth))
    if isinstance(settings.draft_vocab, str):
        options["draft_vocab"] = Path(settings.draft_vocab).name
    shared = ("variant", "upstream_commit", "series", "backend", "machine")
    return Header(
        model=Path(model.path).name,
        **{name: getattr(build, name) for name in shared},
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
