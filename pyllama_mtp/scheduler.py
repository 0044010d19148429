"""Requests wait for places; sequences in places are prefilled and decoded in rounds."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from .answer import Answer
from .chats.thinking import Piece
from .engine import Engine, Place
from .errors import UsageError
from .generate import Live, Request, prepare_rows, speculate, start, take
from .telemetry import PHASES, BatchTelemetry, Pair, Telemetry

Item = TypeVar("Item")
Self = TypeVar("Self", bound="_Running[Any]")  # typing's from Python 3.11 on


@dataclass(frozen=True)
class Progress:
    """A step of a request: text that can be emitted now, and the new tokens. With the last step the
    answer has its finish_reason; `error` says why the request has failed, if it has."""

    request: Request
    pieces: list[Piece]
    tokens: list[int]
    error: UsageError | None = None


class Scheduler:
    """Takes requests through an engine, step by step. Requests may come and go between steps.

    A place keeps its tokens when its request is done, for a prompt that continues them.

    Args:
        take_turns: True: parts of prompts and rounds take turns. False: prompts first, so that as
            many sequences as possible are decoded together.
    """

    def __init__(self, engine: Engine, total: BatchTelemetry, take_turns: bool = False) -> None:
        self._engine, self._total, self._take_turns = engine, total, take_turns
        self._waiting: deque[Request] = deque()
        self._live: list[Live] = []  # by place: states that are in order need not move
        self._filling: deque[Live] = deque()  # their prompts are being processed
        self._free = list(engine.places)
        self._round_is_next = False
        with engine.alone:
            self._turn = engine.begin()

    @property
    def n_running(self) -> int:
        """Requests with a place."""
        return len(self._live) + len(self._filling)

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        return bool(self._live or self._filling or self._waiting)

    def add(self, request: Request) -> None:
        """Let a request wait for a place."""
        self._waiting.append(request)

    def drop(self, request: Request) -> bool:
        """Take a request out, in place or waiting; its answer is then "interrupted". False: the
        request is not here any more."""
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

    def restart(self) -> None:
        """Empty the contexts after a failed step; requests without a place stay."""
        for live in [*self._live, *self._filling]:
            self.drop(live.request)
        self._free = list(self._engine.places)  # also the place of a request that failed to enter
        with self._engine.alone:
            self._engine.reset()
            self._turn = self._engine.begin()

    def step(self) -> list[Progress]:
        """One decode of a prompt, or one round of the sequences whose prompts are done. Raises
        UsageError: another generation has begun in the engine, or another thread is in it."""
        with self._engine.alone:
            if self._engine.turn != self._turn:
                raise UsageError("the session has been used for something else since; start again")
            while self._waiting and self._free:
                self._enter(self._waiting.popleft())
            fill = bool(self._filling) and not (self._round_is_next and self._live)
            self._round_is_next = fill and self._take_turns
            if fill:
                found = self._fill(self._filling[0])
            else:
                found = self._round() if self._live else []
        return [self._hand_over(live) for live in found]

    # -- prompts -------------------------------------------------------------------------------

    def _enter(self, request: Request) -> None:
        """Give the request a place."""
        engine, drafting, telemetry = self._engine, request.limits.draft, request.answer.telemetry
        place = choose_place(engine, self._free, request.prompt, drafting)
        self._free.remove(place)
        self._filling.append(start(engine, place, request))
        with _clocked(telemetry, self._total):
            engine.enter(place, request.prompt, telemetry, drafting)
        _tell(request)

    def _fill(self, live: Live) -> list[Live]:
        """The next part of the prompt; at its end, choose the first token."""
        engine, request, total = self._engine, live.request, self._total
        telemetry = request.answer.telemetry
        before = telemetry.time_s["prompt_sync"]
        with _clocked(telemetry, total):
            prepare_rows(engine, [live])
            entry = engine.prefill(live.place, request.prompt, telemetry)
            if entry is not None:
                engine.begin_drafting(live.place, request.prompt, total, telemetry)
                take(engine, live, [request.sampler.sample(engine.target, entry)], entry)
        _tell(request)
        total.time_s["prompt_sync"] += telemetry.time_s["prompt_sync"] - before
        if entry is None:
            return []
        self._filling.remove(live)
        self._live.append(live)
        self._live.sort(key=lambda one: one.place.seq)
        total.n_started += 1
        total.n_prompt += telemetry.n_prompt
        total.n_cached += telemetry.n_cached
        return [live]

    # -- rounds --------------------------------------------------------------------------------

    def _round(self) -> list[Live]:
        """A round of all sequences whose prompts are done, and its figures."""
        engine, live, total, began = self._engine, [*self._live], self._total, time.perf_counter()
        times = engine.times = dict.fromkeys(PHASES, 0.0)
        speculate(engine, live)
        for one in live:
            engine.see(one.place, one.chosen, total, one.request.answer.telemetry)
        seconds = time.perf_counter() - began
        drafts = max((one.drafts for one in live), key=lambda made: len(made.tokens))
        total.count_pass(len(live), len(drafts.tokens))
        total.count_times(times, seconds)
        for one in live:
            own, made = one.request.answer.telemetry, one.drafts
            n_drafted, n_accepted = len(made.tokens), len(one.chosen) - 1
            for telemetry in (total, own):
                n_offered = min(one.n_usable, n_drafted)
                telemetry.count_round(n_offered, n_accepted, made.looked_up, made.forced)
            own.count_times(times, seconds)
            if own.pairs is not None and not (made.looked_up or made.forced):
                _log_pairs(engine, own.pairs, one)
        drafted = [
            (one.place.seq, 0 if one.drafts.forced else one.n_usable, one.chosen)
            for one in live
            if one.place.drafting
        ]
        if drafted:
            engine.choice.learn(drafts, drafted, times["draft"], seconds)
        return live

    def _hand_over(self, live: Live) -> Progress:
        """Give tokens to the answer; retire a request that is done."""
        answer, pieces = live.request.answer, list[Piece]()
        if error := live.request.sampler.error:
            answer.finish_reason = "interrupted"
            self._retire(live)
            return Progress(live.request, [], [], error)
        n_before = len(answer.tokens)
        for token in live.chosen:
            pieces += answer.take(token)
            if answer.ended:
                break
        new = answer.tokens[n_before:]
        answer.logprobs += live.logprobs[: len(new)]
        answer.telemetry.n_generated += len(new)
        self._total.n_generated += len(new)
        if answer.ended or live.wanted < 1 or self._engine.room(live.place) < 1:
            pieces += answer.rest()
            answer.finish_reason = answer.ended or "length"
            self._retire(live)
        return Progress(live.request, pieces, new)

    def _retire(self, live: Live) -> None:
        """Free the place of a request that is done or given up."""
        live.request.sampler.close()
        (self._live if live in self._live else self._filling).remove(live)
        self._free.append(live.place)


def _tell(request: Request) -> None:
    """Report the progress of the prompt."""
    if request.on_progress:
        telemetry = request.answer.telemetry
        request.on_progress(telemetry.n_prompt - telemetry.n_left, telemetry.n_prompt)


def choose_place(
    engine: Engine, free: Sequence[Place], prompt: Sequence[int], drafting: bool
) -> Place:
    """The place that holds most of `prompt`; of equals, an empty place, else the place unused for
    longest."""

    def price(place: Place) -> tuple[int, float]:
        return -engine.reusable(place, prompt, drafting), place.used if place.cached else -1.0

    return min(free, key=price) if len(free) > 1 else free[0]


def _log_pairs(engine: Engine, pairs: list[Pair], one: Live) -> None:
    text = engine.model.detokenize
    drafts = one.drafts.tokens[: one.n_usable]
    for i, (drafted, actual) in enumerate(zip(drafts, one.chosen, strict=False)):
        pairs.append(Pair(i + 1, drafted, actual, text([drafted], True), text([actual], True)))


@contextmanager
def _clocked(*telemetries: Telemetry) -> Iterator[None]:
    """Adds the time of its block to `prefill_s` of each."""
    began = time.perf_counter()
    try:
        yield
    finally:  # time that ends in an interruption counts, too
        seconds = time.perf_counter() - began
        for telemetry in telemetries:
            telemetry.prefill_s += seconds


def run_all(
    engine: Engine, requests: Sequence[Request], total: BatchTelemetry
) -> Generator[tuple[int, Piece], None, None]:
    """Take `requests` to their ends; yields (index of the request, piece of its text)."""
    index = {request: i for i, request in enumerate(requests)}
    try:
        scheduler = Scheduler(engine, total)
        for request in requests:
            scheduler.add(request)
        while scheduler.busy:
            # Nothing of the step is left to do after a yield: another generation may have the
            # places when the consumer comes back.
            for progress in scheduler.step():
                if progress.error:
                    raise progress.error
                number = index[progress.request]
                yield from ((number, piece) for piece in progress.pieces)
    finally:
        for request in requests:
            request.sampler.close()
            request.answer.finish_reason = request.answer.finish_reason or "interrupted"
        engine.count_traffic(total)


async def _from_thread(pieces: Iterator[Item], stop: Callable[[], None]) -> AsyncIterator[Item]:
    """The items as they come, computed in a thread of their own beside the event loop.

    Args:
        stop: called in the thread when the consumer has stopped; then the session is free again.
    """
    loop, end = asyncio.get_running_loop(), object()
    with ThreadPoolExecutor(1, "pyllama-mtp generation") as thread:
        try:
            while (item := await loop.run_in_executor(thread, next, pieces, end)) is not end:
                yield item  # type: ignore[misc]
        finally:
            await asyncio.shield(loop.run_in_executor(thread, stop))


class _Running(Generic[Item]):
    """A generation that gives items: iterate over it (`for`, `async for`), or :meth:`run` it."""

    _pieces: Generator[Item, None, None]

    def __iter__(self) -> Iterator[Item]:
        return self._pieces

    def __aiter__(self) -> AsyncIterator[Item]:
        return _from_thread(self._pieces, self.stop)

    def run(self: Self) -> Self:
        """Generate to the end."""
        for _ in self:
            pass
        return self

    def stop(self) -> None:
        """End the generation between two pieces; the session can go on from here. Incomplete
        answers are "interrupted"."""
        self._pieces.close()


class Generation(_Running[Piece], Answer):
    """One generation; iterate over it for text as it comes (`for` or `async for`), or run it."""

    def stop(self) -> None:
        """See :meth:`_Running.stop`."""
        if self.finish_reason is None:
            super().stop()
            self.finish_reason = "interrupted"

    def _generate(self, engine: Engine, request: Request) -> Generator[Piece, None, None]:
        try:
            for _, piece in run_all(engine, [request], BatchTelemetry()):
                yield piece
        finally:
            engine.count_traffic(self.telemetry)
            self.telemetry.plain_s = engine.choice.plain_s


class BatchGeneration(_Running[tuple[int, Piece]]):
    """One generation for several prompts; iterate over it (`for`, `async for`), or :meth:`run` it.

    Iterating gives (index of the prompt, piece of its text) as text comes.

    Attributes:
        results: an :class:`Answer` for each prompt: text, tokens, finish_reason, telemetry. The
            telemetry's times are of the prompt's prefill, and of the rounds that the sequence was
            in.
        telemetry: of all prompts together.
    """

    def __init__(self, engine: Engine, requests: Sequence[Request]) -> None:
        self.results = [request.answer for request in requests]
        self.telemetry = BatchTelemetry(synthetic_acceptance=engine.settings.synthetic_acceptance)
        self._pieces = run_all(engine, requests, self.telemetry)
