"""The thread that generates: the only one that calls the native library's contexts.

Jobs come from the event loop. Their events go back to it, all events of a round in one call, so
that next to nothing happens between two decodes.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pyllama_mtp.answer import TopLogprobs
from pyllama_mtp.chats.toolcalls import CallPiece
from pyllama_mtp.engine import Engine
from pyllama_mtp.errors import ContextClosedError, WorkerLostError
from pyllama_mtp.llama.model import Model
from pyllama_mtp.request import Request
from pyllama_mtp.scheduler import Progress, Scheduler
from pyllama_mtp.settings import Settings
from pyllama_mtp.telemetry import BatchTelemetry

from .bodies import ApiError, bad_request, shutting_down

log = logging.getLogger(__name__)

#: Seconds after which a client may try again when the queue is full.
RETRY_AFTER_S = 2
#: Speeds are means over so many seconds of computing.
SPEED_WINDOW_S = 60


@dataclass(frozen=True)
class Event:
    """News of a job. Its last event has a finish_reason or an error.

    Events with `progress` come first. The next event comes with the first token; its text may be
    empty.

    Attributes:
        text, reasoning: new text of the answer, and of its thought.
        calls: parts of calls of tools.
        n_taken: characters of text and reasoning so far, tags included.
        logprobs: those of the new tokens, if they are kept.
        finish_reason: "eos", "stop" or "length".
        progress: how far the prompt is processed, in llama-server's form.
    """

    text: str = ""
    reasoning: str = ""
    calls: Sequence[CallPiece] = ()
    n_taken: int = 0
    logprobs: Sequence[TopLogprobs] = ()
    finish_reason: str | None = None
    error: ApiError | None = None
    progress: dict[str, float] | None = None


@dataclass(eq=False)
class Job:
    """One answer to generate: a choice of a client's request.

    Attributes:
        index: number of the choice.
        post: takes this job and an event; called on the event loop.
        progress: send events with `progress`.
    """

    index: int
    request: Request
    post: Callable[[tuple[Job, Event]], None] = lambda found: None
    progress: bool = False


class Generator(threading.Thread):
    """Generates for several requests at once, until :meth:`end`.

    Attributes:
        total: telemetry of all requests.
        outcomes: numbers of ended requests, by "stop", "length", "cancelled", "error" and others.
        n_ctx: most tokens of each sequence.
        broken: why nothing can be generated any more, or None.
    """

    def __init__(self, model: Model, settings: Settings, n_sequences: int, max_queue: int) -> None:
        """Make the contexts. Raises UsageError, InsufficientMemoryError: see :class:`Engine`.

        Args:
            settings: `n_ctx` is the length of each sequence, `checkpoints` how many each keeps.
            n_sequences: requests that are decoded together.
            max_queue: further requests that may wait.
        """
        super().__init__(name="pyllama-mtp generator", daemon=True)
        self.n_sequences, self.max_queue = n_sequences, max_queue
        resolved = settings.resolve(model, n_sequences)
        self._new_engine = partial(Engine, model, resolved, chats=True)
        self._engine = self._new_engine()
        self.n_ctx = self._engine.n_ctx
        self.total = BatchTelemetry(synthetic_acceptance=settings.synthetic_acceptance)
        self.outcomes = Counter(stop=0, length=0, cancelled=0, error=0)
        self.broken: str | None = None
        self._loop = Scheduler(self._engine, self.total, take_turns=True)
        self._changed = threading.Condition()
        self._inbox: list[Job] = []
        self._drops: list[Job] = []
        self._jobs: dict[Request, Job] = {}  # of this thread
        self._n_open = 0
        self._end_at: float | None = None
        self._marks = deque([(time.monotonic(), self._sums())], SPEED_WINDOW_S)
        self.events: asyncio.AbstractEventLoop | None = None

    # -- for the event loop --------------------------------------------------------------------

    def submit(self, jobs: Sequence[Job]) -> None:
        """Take all of these jobs, or none.

        Raises:
            ApiError: 429: the queue is full; 503: the server ends, or is broken.
        """
        room = self.n_sequences + self.max_queue
        if len(jobs) > room:
            raise bad_request(
                f"{len(jobs)} answers are asked for at once; this server takes at most {room}", "n"
            )
        with self._changed:
            if self.broken:
                raise ApiError(503, self.broken, code="broken")
            if self._end_at is not None:
                raise shutting_down()
            if self._n_open + len(jobs) > room:
                self.outcomes["rejected"] += 1
                raise ApiError(
                    429,
                    f"the queue is full: {self.n_sequences} requests are running and "
                    f"{self.max_queue} may wait; try again later",
                    code="queue_full",
                    headers={"Retry-After": str(RETRY_AFTER_S)},
                )
            self._n_open += len(jobs)
            self._inbox += jobs
            self._changed.notify()

    def cancel(self, jobs: Sequence[Job]) -> None:
        """Cancel these jobs, if they are not done."""
        with self._changed:
            self._drops += jobs
            self._changed.notify()

    def end(self, grace_s: float) -> None:
        """Take no more jobs, drop the waiting ones, and end in `grace_s` seconds or earlier."""
        with self._changed:
            if self._end_at is None:
                self._end_at = time.monotonic() + grace_s
            self._changed.notify()

    @property
    def n_running(self) -> int:
        """Requests that are being processed."""
        return self._loop.n_running

    @property
    def n_waiting(self) -> int:
        """Requests in the queue."""
        return max(0, self._n_open - self.n_running)

    def speeds(self) -> tuple[float, float]:
        """Recent tokens per second of prefill and of decode, of all sequences together."""
        ends = zip(self._marks[0][1], self._sums(), strict=True)
        prefill, prefill_s, decode, decode_s = (end - begin for begin, end in ends)
        return prefill / (prefill_s or math.inf), decode / (decode_s or math.inf)

    # -- this thread ---------------------------------------------------------------------------

    def run(self) -> None:
        """Work until :meth:`end`, then free the contexts."""
        try:
            while self._wait():
                if self._loop.busy:
                    self._work()
        finally:
            if self._end_at is None:  # :meth:`end` was not called
                self._post(self._break("the thread that generates has ended; restart the server"))
            self._admit()
            self._post(self._fail(list(self._jobs), shutting_down(), "shutdown"))
            self._engine.close()

    def _wait(self) -> bool:
        """Take new jobs and cancellations; block while there is nothing to do. False: end now."""
        with self._changed:
            while not (self._inbox or self._drops or self._loop.busy or self._end_at is not None):
                self._changed.wait()
            drops, self._drops = self._drops, []
            end_at = self._end_at
        self._admit()
        for job in drops:
            if job.request in self._jobs and self._loop.drop(job.request):
                self._close(job, "cancelled")
        if end_at is None:
            return True
        self._post(self._fail(self._loop.waiting(), shutting_down(), "shutdown"))
        return self._loop.busy and time.monotonic() < end_at

    def _admit(self) -> None:
        """Hand new jobs to the scheduler."""
        with self._changed:
            jobs, self._inbox = self._inbox, []
        for job in jobs:
            self._jobs[job.request] = job
            if job.progress:
                job.request.on_progress = partial(self._tell_progress, job, time.monotonic())
            self._loop.add(job.request)

    def _tell_progress(self, job: Job, began: float, done: int, total: int) -> None:
        """Tell a client how far its prompt is processed."""
        figures: dict[str, float] = {
            "total": total,
            "cache": job.request.answer.telemetry.n_cached,
            "processed": done,
            "time_ms": int(1000 * (time.monotonic() - began)),
        }
        self._post([(job, Event(progress=figures))])

    def _work(self) -> None:
        """Make one step of the scheduler; a failure ends the requests that have a place."""
        try:
            found = self._loop.step()
        except Exception as error:
            log.exception("a decode has failed")
            self._recover(error)
            return
        self._mark()
        self._post([self._event(progress) for progress in found if _tells(progress)])

    def _event(self, progress: Progress) -> tuple[Job, Event]:
        request = progress.request
        job, reason = self._jobs[request], request.answer.finish_reason
        if progress.error:
            self._close(job, "error")
            return job, Event(error=bad_request(str(progress.error)))
        kept = request.answer.logprobs[-len(progress.tokens) :] if progress.tokens else []
        if reason:
            self._close(job, "length" if reason == "length" else "stop")
        text, thought = (
            "".join(piece for piece in progress.pieces if piece.thought is which)
            for which in (False, True)
        )
        calls = [piece for piece in progress.pieces if isinstance(piece, CallPiece)]
        return job, Event(text, thought, calls, request.answer.n_taken, kept, reason)

    def _recover(self, error: Exception) -> None:
        """After a failed decode: fail the running requests, and go on with empty contexts.

        A lost RPC worker takes part of the model with it, so nothing can be generated any more.
        Clients are told last, so that a client that tries again at once meets the new state.
        """
        failure = ApiError(500, f"the computation failed: {error}", code="decode_failed")
        waiting = set(self._loop.waiting())
        failed = self._fail([one for one in self._jobs if one not in waiting], failure, "error")
        try:
            if isinstance(error, WorkerLostError):
                raise error
            self._start_anew()
        except Exception as reason:
            log.exception("the contexts cannot be used any more")
            failed += self._break(f"the server cannot generate any more: {reason}; restart it")
        finally:
            self._post(failed)

    def _break(self, why: str) -> list[tuple[Job, Event]]:
        """Take no more jobs, and fail all jobs with `why`."""
        with self._changed:
            self.broken = why
        self._admit()
        return self._fail(list(self._jobs), ApiError(503, why, code="broken"), "error")

    def _start_anew(self) -> None:
        """Empty the contexts, or make new ones if the failure has closed them."""
        try:
            self._loop.restart()
        except ContextClosedError:
            waiting = self._loop.waiting()
            self._engine.close()
            self._engine = self._new_engine()
            self._loop = Scheduler(self._engine, self.total, take_turns=True)
            for request in waiting:
                self._loop.add(request)

    def _fail(
        self, requests: Sequence[Request], error: ApiError, outcome: str
    ) -> list[tuple[Job, Event]]:
        """End these requests; return their last events."""
        failed = []
        for request in requests:
            self._loop.drop(request)
            job = self._jobs[request]
            self._close(job, outcome)
            failed.append((job, Event(error=error)))
        return failed

    def _close(self, job: Job, outcome: str) -> None:
        del self._jobs[job.request]
        self.outcomes[outcome] += 1
        with self._changed:
            self._n_open -= 1

    def _post(self, found: list[tuple[Job, Event]]) -> None:
        """Hand events to the event loop, in one call."""
        if found and self.events:
            try:
                self.events.call_soon_threadsafe(_deliver, found)
            except RuntimeError:  # the event loop is closed: nobody waits any more
                log.debug("%d events have come too late", len(found))

    def _sums(self) -> tuple[float, ...]:
        """Tokens and seconds of prefill, tokens and seconds of decode."""
        total = self.total
        n_prefill = total.n_prompt - total.n_cached
        return n_prefill, total.prefill_s, total.n_generated - total.n_started, total.decode_s

    def _mark(self) -> None:
        """Remember the sums once a second."""
        now = time.monotonic()
        if now - self._marks[-1][0] >= 1.0:
            self._marks.append((now, self._sums()))


def _tells(progress: Progress) -> bool:
    """Whether the client gets an event of this progress."""
    answer = progress.request.answer
    first = len(answer.tokens) == len(progress.tokens)
    wanted = answer.n_logprobs is not None
    return bool(progress.pieces or answer.finish_reason or first or wanted)


def _deliver(events: list[tuple[Job, Event]]) -> None:
    for job, event in events:
        job.post((job, event))


# -- metrics for Prometheus ------------------------------------------------------------------------

PREFIX = "pyllama_mtp_"


class GeneratorCollector(Collector):
    """All metrics of a generator."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator

    def collect(self) -> Iterable[Metric]:
        """The metrics as they are now."""
        generator, total = self._generator, self._generator.total
        prefill_tps, decode_tps = generator.speeds()
        gauges = {
            "requests_running": ("Requests that are being processed.", generator.n_running),
            "requests_waiting": ("Requests in the queue.", generator.n_waiting),
            "prefill_tokens_per_second": ("Speed of prefill, lately.", prefill_tps),
            "decode_tokens_per_second": (
                "Speed of decode, lately, of all sequences together.",
                decode_tps,
            ),
            "mean_accepted_length": ("Drafts accepted per round.", total.mean_accepted_length),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(PREFIX + name, text, value)
        counters = {
            "prompt_tokens": ("Tokens of prompts.", total.n_prompt),
            "prompt_tokens_cached": ("Of these, not processed again.", total.n_cached),
            "generated_tokens": ("Tokens generated.", total.n_generated),
            "prefill_seconds": ("Time spent on prompts.", total.prefill_s),
            "decode_seconds": ("Time spent on rounds.", total.decode_s),
            "rounds": ("Verification passes, added up over the sequences.", total.rounds),
        }
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(PREFIX + name, text, value)
        yield from self._drafts()
        ended = CounterMetricFamily(
            PREFIX + "requests", "Answers that have ended, by how.", labels=["outcome"]
        )
        for outcome, n in sorted(generator.outcomes.items()):
            ended.add_metric([outcome], n)
        yield ended

    def _drafts(self) -> Iterable[Metric]:
        """By position in the round, 1 being the first draft."""
        total, labels = self._generator.total, ["position"]
        texts = ("Drafts verified, by position.", "Drafts accepted, by position.")
        drafted = CounterMetricFamily(PREFIX + "drafted_tokens", texts[0], labels=labels)
        accepted = CounterMetricFamily(PREFIX + "accepted_tokens", texts[1], labels=labels)
        share = "Share of the drafts that were accepted, by position."
        rate = GaugeMetricFamily(PREFIX + "acceptance", share, labels=labels)
        counts = zip(total.drafted, total.accepted, strict=False)
        for position, (n_drafted, n_accepted) in enumerate(counts, start=1):
            drafted.add_metric([str(position)], n_drafted)
            accepted.add_metric([str(position)], n_accepted)
            rate.add_metric([str(position)], n_accepted / n_drafted if n_drafted else 0.0)
        yield from (drafted, accepted, rate)


def registry(generator: Generator) -> CollectorRegistry:
    """A registry with the metrics of this generator only."""
    found = CollectorRegistry()
    found.register(GeneratorCollector(generator))
    return found
