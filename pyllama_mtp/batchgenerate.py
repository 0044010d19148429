"""The loop for several sequences: fill free places; then draft, verify, accept, keep; emit."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from .batchengine import BatchEngine, Place
from .errors import UsageError
from .generate import Limits, make_judge, proposer
from .sampling import Sampler, prepare
from .session import Answer
from .speculative.acceptance import Verdict
from .speculative.drafter import Drafts, Propose
from .telemetry import PHASES, Telemetry


@dataclass
class BatchTelemetry(Telemetry):
    """Figures of all sequences of a generation together: sums, and times of the whole.

    `prefill_s` and `decode_s` are wall clock: a round counts once, however many sequences it has.
    `rounds` are added up over the sequences.

    Attributes:
        n_started: sequences whose first token is known.
        passes: rounds of all sequences together, by how many there were and by drafts of each:
            ``passes[4][2]`` is the number of rounds in which 4 sequences had 2 drafts each.
    """

    n_started: int = 0
    passes: dict[int, dict[int, int]] = field(default_factory=dict)

    @property
    def decode_tps(self) -> float:
        """Tokens per second after the first ones, which belong to the prefills."""
        return (self.n_generated - self.n_started) / self.decode_s if self.decode_s > 0 else 0.0

    def count_pass(self, n_sequences: int, depth: int) -> None:
        """One round of so many sequences with so many drafts each."""
        depths = self.passes.setdefault(n_sequences, {})
        depths[depth] = depths.get(depth, 0) + 1


@dataclass
class Request:
    """One prompt and what is to come of it: token ids, what chooses the next one, when to stop.

    The sampler belongs to it, and is closed when it is done.
    """

    prompt: list[int]
    sampler: Sampler
    limits: Limits
    answer: Answer


@dataclass(eq=False)
class _Live:
    """A request that has a place.

    Attributes:
        index: of the request.
        judge, propose: how its drafts are accepted and made; see generate.py.
        token: the newest one, in neither cache.
    """

    index: int
    request: Request
    place: Place
    judge: Callable[[Drafts, int], Verdict]
    propose: Propose | None
    token: int = -1

    def wanted(self) -> int:
        """Tokens that may still come."""
        return self.request.limits.max_tokens - self.request.answer.telemetry.n_generated


class BatchLoop:
    """Takes requests through an engine; :meth:`run` it once."""

    def __init__(
        self, engine: BatchEngine, requests: Sequence[Request], total: BatchTelemetry
    ) -> None:
        self._engine, self._total = engine, total
        self._requests = requests
        self._waiting = deque(enumerate(requests))
        self._live: list[_Live] = []  # by place: states that are in order need not move

    def run(self) -> Iterator[tuple[int, str]]:
        """Yield (index of the request, piece of text) as it comes."""
        engine, turn = self._engine, self._engine.begin()
        free = list(reversed(engine.places))
        try:
            while self._waiting or self._live:
                if engine.engine.turn != turn:
                    raise UsageError("the session has been used for something else since")
                if self._waiting and free:
                    emitted = self._start(*self._waiting.popleft(), free.pop())
                else:
                    emitted = self._round()
                # Nothing is left to do when the consumer has the pieces: another generation may
                # have the places by the time it comes back.
                pieces: list[tuple[int, str]] = []
                for live, tokens in emitted:
                    pieces += self._hand_over(live, tokens)
                    if live.request.answer.finish_reason:
                        self._retire(live)
                        free.append(live.place)
                yield from pieces
        finally:
            for request in self._requests:
                request.sampler.close()

    # -- one sequence --------------------------------------------------------------------------

    def _start(self, index: int, request: Request, place: Place) -> list[tuple[_Live, list[int]]]:
        """Prefill, and choose the first token."""
        engine, telemetry, sampler = self._engine, request.answer.telemetry, request.sampler
        judge = make_judge(engine.engine, sampler, request.limits)
        live = _Live(index, request, place, judge, proposer(engine.engine, sampler))
        self._live.append(live)
        self._live.sort(key=lambda one: one.place.seq)
        began = time.perf_counter()
        prepare(engine.engine.target, [sampler])
        row = engine.prefill(place, request.prompt, telemetry)
        live.token = sampler.sample(engine.engine.target, row)
        telemetry.prefill_s = time.perf_counter() - began
        total = self._total
        total.n_started += 1
        total.n_prompt += telemetry.n_prompt
        total.prefill_s += telemetry.prefill_s
        total.time_s["prompt_sync"] += telemetry.time_s["prompt_sync"]
        return [(live, [live.token])]

    def _hand_over(self, live: _Live, tokens: Sequence[int]) -> list[tuple[int, str]]:
        """Give tokens to the answer, the newest one last. The pieces of text that come of it; sets
        finish_reason when no token may follow."""
        answer, pieces = live.request.answer, []
        for token in tokens:
            answer.telemetry.n_generated += 1
            self._total.n_generated += 1
            pieces.append(answer.take(token))
            if answer.ended:
                break
        live.token = tokens[-1]
        if answer.ended or live.wanted() < 1 or self._engine.room(live.place) < 1:
            pieces.append(answer.rest())
            answer.finish_reason = answer.ended or "length"
        return [(live.index, piece) for piece in pieces if piece]

    def _retire(self, live: _Live) -> None:
        live.request.sampler.close()
        self._live.remove(live)
        self._engine.release(live.place)

    # -- all of them ---------------------------------------------------------------------------

    def _round(self) -> list[tuple[_Live, list[int]]]:
        """Draft, verify, accept and keep: what came of it for each sequence."""
        engine, live = self._engine, list(self._live)
        places, tokens = [one.place for one in live], [one.token for one in live]
        prepare(engine.engine.target, [one.request.sampler for one in live])
        asked, clock, began = self._depth(), Telemetry(), time.perf_counter()
        usable = [min(asked, one.wanted() - 1) for one in live]
        with clock.timed("draft"):
            proposes = [one.propose for one in live]
            drafts = engine.draft(places, tokens, asked, usable, proposes)
        with clock.timed("verify"):
            n_rows = engine.verify(places, tokens, drafts)
        with clock.timed("sampling"):
            verdicts = [
                one.judge(Drafts(made.tokens[:n], made.distributions), i * n_rows)
                for i, (one, made, n) in enumerate(zip(live, drafts, usable, strict=True))
            ]
        accepted = [verdict.n_accepted for verdict in verdicts]
        engine.keep(places, accepted, clock)
        clock.decode_s = time.perf_counter() - began
        self._total.count_pass(len(live), n_rows - 1)
        self._count_time(self._total, clock)
        for one, use, n in zip(live, usable, accepted, strict=True):
            for telemetry in (self._total, one.request.answer.telemetry):
                telemetry.count_round(min(use, n_rows - 1), n)
            self._count_time(one.request.answer.telemetry, clock)
        if engine.depths:
            outcomes = list(zip(usable, accepted, strict=True))
            times = clock.time_s["draft"], clock.decode_s
            engine.depths.update(len(live), n_rows - 1, outcomes, *times)
        return [(one, verdict.tokens) for one, verdict in zip(live, verdicts, strict=True)]

    def _depth(self) -> int:
        """Drafts worth making: as many as the sequence with the most to come can use, and as there
        is room for in every place."""
        engine = self._engine
        most = min(
            engine.engine.settings.depth_limit,
            max(one.wanted() for one in self._live) - 1,
            min(engine.room(one.place) for one in self._live) - 1,
        )
        return engine.depths.choose(len(self._live), most) if engine.depths else most

    @staticmethod
    def _count_time(telemetry: Telemetry, clock: Telemetry) -> None:
        telemetry.decode_s += clock.decode_s
        for phase in PHASES:
            telemetry.time_s[phase] += clock.time_s[phase]
