"""The loop for several sequences: fill free places; draft, verify, accept, keep; emit."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from .batchengine import BatchEngine, Place
from .errors import UsageError
from .generate import Limits, make_judge, proposer
from .sampling import Sampler, prepare
from .session import Answer
from .speculative.acceptance import Verdict
from .speculative.choice import DraftChoice
from .speculative.drafter import Drafts, Propose
from .speculative.rejection import point
from .telemetry import PHASES, Telemetry
from .toplogprobs import TopLogprobs, top_logprobs


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


@dataclass(eq=False)
class Request:
    """One prompt and what is to come of it: token ids, what chooses the next one, when to stop.

    The sampler belongs to it, and is closed when it is done.

    Attributes:
        n_logprobs: keep the log probability of each token, and of so many of the best ones; None:
            of none.
        logprobs: as many as the answer has tokens, if they are kept.
    """

    prompt: list[int]
    sampler: Sampler
    limits: Limits
    answer: Answer
    n_logprobs: int | None = None
    logprobs: list[TopLogprobs] = field(default_factory=list)


@dataclass(frozen=True)
class Progress:
    """What a step has made of a request: text that can be emitted, tokens that came with it. The
    last one has the answer's finish_reason."""

    request: Request
    pieces: list[str]
    tokens: list[int]


@dataclass(eq=False)
class _Live:
    """A request that has a place.

    Attributes:
        judge, propose: how its drafts are accepted and made; see generate.py.
        choice: what it drafts in rounds that it has to itself; None: as in those of several.
        token: the newest one, in neither cache; -1: its prompt is being processed.
    """

    request: Request
    place: Place
    judge: Callable[[Drafts, int], Verdict]
    propose: Propose | None
    choice: DraftChoice | None
    token: int = -1

    def wanted(self) -> int:
        """Tokens that may still come."""
        return self.request.limits.max_tokens - self.request.answer.telemetry.n_generated


class BatchLoop:
    """Takes requests through an engine, step by step. They may come and go between the steps.

    Args:
        serve: False: prompts first, so that as many as possible are decoded together, and a place
            is emptied when its request is done. True: parts of prompts and rounds take turns, and
            a place keeps what it holds for a prompt that continues it.
    """

    def __init__(self, engine: BatchEngine, total: BatchTelemetry, serve: bool = False) -> None:
        self._engine, self._total, self._serve = engine, total, serve
        self._waiting: deque[Request] = deque()
        self._live: list[_Live] = []  # by place: states that are in order need not move
        self._filling: deque[_Live] = deque()  # their prompts are being processed
        self._free = list(reversed(engine.places))  # the last one is the next to be used
        self._round_is_next = False
        with engine.engine.alone:
            self._turn = engine.begin()

    @property
    def n_waiting(self) -> int:
        """Requests without a place."""
        return len(self._waiting)

    @property
    def n_running(self) -> int:
        """Requests with a place."""
        return len(self._live) + len(self._filling)

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        return bool(self._waiting or self._filling or self._live)

    def add(self, request: Request) -> None:
        """Let a request wait for a place."""
        self._waiting.append(request)

    def drop(self, request: Request) -> bool:
        """Take a request out, wherever it is; its answer is then "interrupted". False: it was not
        here any more."""
        for live in [*self._live, *self._filling]:
            if live.request is request:
                self._retire(live)
                break
        else:
            if request not in self._waiting:
                return False
            self._waiting.remove(request)
            request.sampler.close()
        request.answer.finish_reason = "interrupted"
        return True

    def waiting(self) -> list[Request]:
        """Requests without a place."""
        return list(self._waiting)

    def running(self) -> list[Request]:
        """Requests with a place."""
        return [live.request for live in [*self._live, *self._filling]]

    def restart(self) -> None:
        """Empty the contexts, after a step that has failed; requests without a place stay."""
        for request in self.running():
            self.drop(request)
        self._free = list(reversed(self._engine.places))  # also that of one that failed to enter
        with self._engine.engine.alone:
            self._turn = self._engine.begin()

    def step(self) -> list[Progress]:
        """One decode of a prompt, or one round of the sequences whose prompts are done.

        Raises:
            UsageError: something else has begun in the engine since, or another thread is in it.
        """
        with self._engine.engine.alone:
            emitted = self._decode()
        return [self._hand_over(live, tokens) for live, tokens in emitted]

    def _decode(self) -> list[tuple[_Live, list[int]]]:
        """What a step computes: requests, and the tokens that are theirs."""
        if self._engine.engine.turn != self._turn:
            raise UsageError("the session has been used for something else since")
        while self._waiting and self._free:
            self._enter(self._waiting.popleft())
        if self._filling and not (self._round_is_next and self._live):
            emitted, self._round_is_next = self._fill(self._filling[0]), self._serve
        elif self._live:
            emitted, self._round_is_next = self._round(), False
        else:
            emitted = []
        return emitted

    # -- one sequence --------------------------------------------------------------------------

    def _enter(self, request: Request) -> None:
        """Give the request a place."""
        engine, sampler = self._engine, request.sampler
        place = self._choose_place(request.prompt)
        self._free.remove(place)
        judge = make_judge(engine.engine, sampler, request.limits)
        propose, choice = proposer(engine.engine, sampler), DraftChoice(engine.engine.settings)
        live = _Live(request, place, judge, propose, choice if choice.lookup else None)
        self._filling.append(live)
        with _clocked(request.answer.telemetry, self._total):
            engine.enter(place, request.prompt, request.answer.telemetry)

    def _choose_place(self, prompt: Sequence[int]) -> Place:
        """The free place that has most of `prompt`; of equals, one that is empty or else the one
        that has been free for longest."""
        free = self._free
        if not self._serve:
            return free[-1]
        most = max(self._engine.reusable(place, prompt) for place in free)
        equal = [place for place in free if self._engine.reusable(place, prompt) == most]
        return next((place for place in equal if not place.cached), equal[0])

    def _fill(self, live: _Live) -> list[tuple[_Live, list[int]]]:
        """The next part of the prompt; at its end, choose the first token."""
        engine, request, total = self._engine, live.request, self._total
        telemetry, before = request.answer.telemetry, request.answer.telemetry.time_s["prompt_sync"]
        with _clocked(telemetry, total):
            self._prepare([live])
            row = engine.prefill(live.place, request.prompt, telemetry)
            if row is not None:
                live.token = request.sampler.sample(engine.engine.target, row)
                if live.choice:
                    live.choice.begin(request.prompt)
                engine.engine.follow(request.prompt, total, telemetry, prompt=True)
                self._keep_logprobs(live, [live.token], row)
        total.time_s["prompt_sync"] += telemetry.time_s["prompt_sync"] - before
        if row is None:
            return []
        self._filling.remove(live)
        self._live.append(live)
        self._live.sort(key=lambda one: one.place.seq)
        total.n_started += 1
        total.n_prompt += telemetry.n_prompt
        total.n_cached += telemetry.n_cached
        return [(live, [live.token])]

    def _hand_over(self, live: _Live, tokens: Sequence[int]) -> Progress:
        """Give tokens to the answer, the newest one last; retire what is done."""
        request, answer = live.request, live.request.answer
        pieces, n_before = [], len(answer.tokens)
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
            self._retire(live)
        del request.logprobs[len(answer.tokens) :]  # of tokens after the end
        return Progress(request, [piece for piece in pieces if piece], answer.tokens[n_before:])

    def _retire(self, live: _Live) -> None:
        """The request is done, or given up: its place is free."""
        live.request.sampler.close()
        (self._live if live in self._live else self._filling).remove(live)
        if not self._serve:
            self._engine.release(live.place)
        self._free.append(live.place)

    def _prepare(self, lives: Sequence[_Live]) -> None:
        """Have the next decode leave what samplers need; all logits for log probabilities."""
        target = self._engine.engine.target
        prepare(target, [one.request.sampler for one in lives])
        if any(one.request.n_logprobs is not None for one in lives):
            target.set_greedy(False)
            target.set_candidates(0)

    def _keep_logprobs(self, live: _Live, tokens: Sequence[int], row: int) -> None:
        """Those of `tokens`, chosen at batch entries from `row` on, if the request wants them."""
        n, target = live.request.n_logprobs, self._engine.engine.target
        if n is not None:
            live.request.logprobs += [
                top_logprobs(target.logits(row + i), token, n) for i, token in enumerate(tokens)
            ]

    # -- all of them ---------------------------------------------------------------------------

    def _round(self) -> list[tuple[_Live, list[int]]]:
        """Draft, verify, accept and keep: what came of it for each sequence."""
        engine, live = self._engine, list(self._live)
        places, tokens = [one.place for one in live], [one.token for one in live]
        self._prepare(live)
        clock, began = Telemetry(), time.perf_counter()
        alone = live[0].choice if len(live) == 1 else None
        with clock.timed("draft"):
            found = self._look_up(live[0], alone) if alone else None
            asked = len(found.tokens) if found else self._depth()
            usable = [min(asked, one.wanted() - 1) for one in live]
            proposes = [one.propose for one in live]
            drafts = [found] if found else engine.draft(places, tokens, asked, usable, proposes)
        with clock.timed("verify"):
            n_rows = engine.verify(places, tokens, drafts)
        with clock.timed("sampling"):
            verdicts = [
                one.judge(replace(made, tokens=made.tokens[:n]), i * n_rows)
                for i, (one, made, n) in enumerate(zip(live, drafts, usable, strict=True))
            ]
            for i, (one, verdict) in enumerate(zip(live, verdicts, strict=True)):
                self._keep_logprobs(one, verdict.tokens, i * n_rows)
        accepted = [verdict.n_accepted for verdict in verdicts]
        engine.keep(places, accepted, clock)
        with clock.timed("sync"):
            for one, verdict in zip(live, verdicts, strict=True):
                engine.engine.follow(verdict.tokens, self._total, one.request.answer.telemetry)
        clock.decode_s = time.perf_counter() - began
        self._total.count_pass(len(live), n_rows - 1)
        self._count_time(self._total, clock)
        for one, use, n in zip(live, usable, accepted, strict=True):
            for telemetry in (self._total, one.request.answer.telemetry):
                telemetry.count_round(min(use, n_rows - 1), n, looked_up=found is not None)
            self._count_time(one.request.answer.telemetry, clock)
        chosen = [verdict.tokens for verdict in verdicts]
        times = clock.time_s["draft"], clock.decode_s
        if alone:
            alone.learn(drafts[0], chosen[0], *times)
        elif engine.depths:
            outcomes = list(zip(usable, accepted, strict=True))
            engine.depths.update(len(live), n_rows - 1, outcomes, *times)
            for one, new in zip(live, chosen, strict=True):
                if one.choice and one.choice.lookup:
                    one.choice.lookup.add([one.token, *new[:-1]])
        return list(zip(live, chosen, strict=True))

    def _look_up(self, live: _Live, choice: DraftChoice) -> Drafts | None:
        """Drafts from the text of a sequence that is alone, if they promise more than the head's;
        see :meth:`.engine.Engine.draft`."""
        assert self._engine.depths
        choice.depths = self._engine.depths.controller(1)
        found = choice.look_up(live.token, self._most_drafts())
        q = [point(token) for token in found] if live.propose else []
        return Drafts(found, q, looked_up=True) if found else None

    def _depth(self) -> int:
        """Drafts worth making."""
        most, depths = self._most_drafts(), self._engine.depths
        return depths.choose(len(self._live), most) if depths else most

    def _most_drafts(self) -> int:
        """As many as the sequence with the most to come can use, and as there is room for in every
        place."""
        engine = self._engine
        return min(
            engine.engine.settings.depth_limit,
            max(one.wanted() for one in self._live) - 1,
            min(engine.room(one.place) for one in self._live) - 1,
        )

    @staticmethod
    def _count_time(telemetry: Telemetry, clock: Telemetry) -> None:
        telemetry.decode_s += clock.decode_s
        for phase in PHASES:
            telemetry.time_s[phase] += clock.time_s[phase]


@contextmanager
def _clocked(*telemetries: Telemetry) -> Iterator[None]:
    """Adds the time of its block to `prefill_s` of each."""
    began = time.perf_counter()
    yield
    seconds = time.perf_counter() - began
    for telemetry in telemetries:
        telemetry.prefill_s += seconds


def run_all(
    engine: BatchEngine, requests: Sequence[Request], total: BatchTelemetry
) -> Iterator[tuple[int, str]]:
    """Take `requests` to their ends: (index of the request, piece of text) as it comes."""
    loop = BatchLoop(engine, total)
    index = {id(request): i for i, request in enumerate(requests)}
    try:
        for request in requests:
            loop.add(request)
        while loop.busy:
            # Nothing is left to do when the consumer has the pieces: another generation may have
            # the places by the time it comes back.
            for progress in loop.step():
                number = index[id(progress.request)]
                yield from ((number, piece) for piece in progress.pieces)
    finally:
        for request in requests:
            request.sampler.close()
