"""Requests wait for a sequence of the engine; those that have one are prefilled, and decoded in
rounds."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass, field

from .answer import TopLogprobs
from .chats.thinking import Piece
from .engine import Engine
from .errors import UsageError
from .request import Request
from .round import accept, speculate
from .sequence import Sequence
from .telemetry import BatchTelemetry, Pair, timed

#: While others are decoded, a part of a prompt takes as long as so many of their rounds; but see
#: :meth:`.Engine.prefill` for the least part, which the first one is, whose time nobody knows.
#: Rounds and parts read the weights once each, so that is at most a quarter of a part's time.
PART_ROUNDS = 4
#: A round's share in the mean time of rounds.
NEWEST_ROUND = 1 / 8


@dataclass(frozen=True)
class Progress:
    """A step of a request: text that can be emitted now, and the new tokens.

    Attributes:
        n_taken: characters of the answer's text and thought so far, tags included.
        counts: of the answer after this step; see :attr:`.Answer.counts`.
        logprobs: those of the new tokens, if they are kept.
        finish_reason: of the answer; with the last step only.
        error: why the request has failed, if it has.
    """

    request: Request
    pieces: list[Piece] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    n_taken: int = 0
    counts: tuple[int, int, int] = (0, 0, 0)
    logprobs: list[TopLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    error: Exception | None = None


class Scheduler:
    """Takes requests through an engine, step by step. Requests may come and go between steps.

    Args:
        take_turns: True: parts of prompts and rounds take turns, see :data:`PART_ROUNDS`. False:
            prompts first, so that as many sequences as possible are decoded together.
    """

    def __init__(self, engine: Engine, total: BatchTelemetry, take_turns: bool = False) -> None:
        self._engine, self._total, self._take_turns = engine, total, take_turns
        self._waiting: deque[Request] = deque()
        self._filling: Sequence | None = None  # its prompt is being processed
        self._live: list[Sequence] = []  # by number: states that are in order need not move
        self._free = list(engine.sequences)
        self._round_is_next = False
        self._round_s = self._token_s = 0.0  # of a round, and of a prompt's token in the last part
        with engine.alone:
            self._turn = engine.begin()

    @property
    def n_running(self) -> int:
        """Requests that have a sequence."""
        return len(self.running())

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.running() or self._waiting)

    def running(self) -> list[Sequence]:
        """The sequences of requests that are being processed."""
        return [*self._live, *([self._filling] if self._filling else [])]

    def add(self, request: Request) -> None:
        """Let a request wait for a sequence."""
        self._waiting.append(request)

    def drop(self, request: Request) -> bool:
        """Take a request out, running or waiting; its answer is then "interrupted". False: the
        request is not here any more."""
        running = [one for one in self.running() if one.request is request]
        if running:
            self._retire(running[0])
        elif request in self._waiting:
            self._waiting.remove(request)
            request.sampler.close()
        else:
            return False
        request.answer.finish_reason = "interrupted"
        return True

    def waiting(self) -> list[Request]:
        """Requests without a sequence."""
        return list(self._waiting)

    def restart(self) -> None:
        """Empty the contexts after a failed step; requests that wait stay."""
        for sequence in self.running():
            self.drop(sequence.request)
        self._free = list(self._engine.sequences)  # also that of a request that failed to enter
        with self._engine.alone:
            self._engine.reset()
            self._turn = self._engine.begin()

    def step(self) -> list[Progress]:
        """One decode of a prompt, or one round of the sequences whose prompts are done. Raises
        UsageError: another generation has begun in the engine, or another thread is in it."""
        with self._engine.alone:
            if self._engine.turn != self._turn:
                raise UsageError("the session has been used for something else since; start again")
            can_fill = self._filling or (self._waiting and self._free)
            fill = bool(can_fill) and not (self._round_is_next and self._live)
            self._round_is_next = fill and self._take_turns
            if fill:
                done = self._fill(self._filling or self._enter(self._waiting.popleft()))
            else:
                done = self._round() if self._live else []
            return [self._hand_over(sequence) for sequence in done]

    def _enter(self, request: Request) -> Sequence:
        """Give the request a sequence: now, when prompts before it can be copied."""
        with timed("prefill_s", vars(request.answer.telemetry), vars(self._total)):
            place = self._engine.prefixes.find(self._free, request)
            self._filling = sequence = place.sequence
            self._free.remove(sequence)
            self._engine.enter(place, self._total)
        _tell(request)
        return sequence

    def _fill(self, sequence: Sequence) -> list[Sequence]:
        """The next part of the prompt; at its end, choose the first token."""
        request, total = sequence.request, self._total
        telemetry = request.answer.telemetry
        at_most = self._part()
        with timed("prefill_s", *map(vars, sequence.counts)):
            began, n_before = time.perf_counter(), len(sequence.tokens)
            row = self._engine.prefill(sequence, at_most)
            if at_most is not None and (n := len(sequence.tokens) - n_before):
                self._engine.synchronize()
                self._token_s = (time.perf_counter() - began) / n
            if row is not None:
                accept(self._engine, sequence, row)
                self._engine.drafting.begin(sequence)
        _tell(request)
        if row is None:
            return []
        self._filling = None
        self._live.append(sequence)
        self._live.sort(key=lambda one: one.id)
        total.n_started += 1
        total.n_prompt += telemetry.n_prompt
        total.n_cached += telemetry.n_cached
        total.n_image_tokens += telemetry.n_image_tokens
        total.encode_s += telemetry.encode_s
        return [sequence]

    def _part(self) -> int | None:
        """Most tokens of a prompt's next part; None: no other sequence waits for it."""
        if not (self._take_turns and self._live):
            return None
        return int(PART_ROUNDS * self._round_s / self._token_s) if self._token_s else 0

    def _round(self) -> list[Sequence]:
        """A round of all sequences whose prompts are done, and its figures."""
        sequences, total = [*self._live], self._total
        times = speculate(self._engine, sequences)
        self._round_s += (times["round"] - self._round_s) * (NEWEST_ROUND if self._round_s else 1)
        depth = max(len(one.drafts.tokens) for one in sequences)
        for telemetry in (total, *(one.request.answer.telemetry for one in sequences)):
            telemetry.count_pass(len(sequences), depth)
            telemetry.count_times(times)
        for one in sequences:
            own, drafts = one.request.answer.telemetry, one.drafts
            n_offered = min(one.n_usable, len(drafts.tokens))
            for telemetry in one.counts:
                looked_up = max(0, n_offered - drafts.n_head) if drafts.looked_up else 0
                telemetry.count_round(n_offered, len(one.chosen) - 1, looked_up, drafts.forced)
            if own.pairs is not None:
                self._log_pairs(own.pairs, one)
        return sequences

    def _log_pairs(self, pairs: list[Pair], one: Sequence) -> None:
        text = self._engine.model.detokenize
        drafts = one.drafts.tokens[: min(one.n_usable, one.drafts.n_head)]
        for i, (drafted, actual) in enumerate(zip(drafts, one.chosen, strict=False)):
            pairs.append(Pair(i + 1, drafted, actual, text([drafted], True), text([actual], True)))

    def _hand_over(self, sequence: Sequence) -> Progress:
        """Give tokens to the answer; retire a request that is done."""
        request, pieces = sequence.request, list[Piece]()
        answer = request.answer
        if error := request.sampler.error:
            answer.finish_reason = "interrupted"
            self._retire(sequence)
            return Progress(request, error=error)
        n_before = len(answer.tokens)
        for token in sequence.chosen:
            pieces += answer.take(token)
            if answer.ended:
                break
        new = answer.tokens[n_before:]
        logprobs = sequence.logprobs[: len(new)]
        answer.logprobs += logprobs
        for telemetry in sequence.counts:
            telemetry.n_generated += len(new)
        if answer.ended or sequence.wanted < 1 or sequence.room < 1:
            pieces += answer.rest()
            answer.finish_reason = answer.ended or "length"
            self._retire(sequence)
        taken = answer.n_taken, answer.counts
        return Progress(request, pieces, new, *taken, logprobs, answer.finish_reason)

    def _retire(self, sequence: Sequence) -> None:
        """Free the sequence of a request that is done or given up."""
        self._engine.drafting.describe(sequence.request.answer.telemetry)
        sequence.request.sampler.close()
        if sequence is self._filling:
            self._filling = None
        else:
            self._live.remove(sequence)
        self._free.append(sequence)


def _tell(request: Request) -> None:
    """Report the progress of the prompt."""
    if request.on_progress:
        telemetry = request.answer.telemetry
        request.on_progress(telemetry.n_prompt - telemetry.n_left, telemetry.n_prompt)


def run_all(
    engine: Engine, requests: list[Request], total: BatchTelemetry
) -> Generator[Progress, None, None]:
    """Take `requests` to their ends, step by step. Raises the error of a request that fails."""
    try:
        scheduler = Scheduler(engine, total)
        for request in requests:
            scheduler.add(request)
        while scheduler.busy:
            # Nothing of the step is left to do after a yield: another generation may have the
            # sequences when the consumer comes back.
            for progress in scheduler.step():
                if progress.error:
                    raise progress.error
                yield progress
    finally:
        for request in requests:
            request.sampler.close()
            if request.answer.finish_reason is None:
                request.answer.finish_reason = "interrupted"
                engine.drafting.describe(request.answer.telemetry)
        engine.drafting.describe(total)
