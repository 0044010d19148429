"""The thread that generates: the only one that calls the native library's contexts.

Jobs come from the event loop. Their news go back to it, those of a round in one call, so that next
to nothing happens between two decodes.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeAlias

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pyllama_mtp.calibration import open_engine
from pyllama_mtp.errors import (
    ContextClosedError,
    DecodeError,
    InsufficientMemoryError,
    UsageError,
    WorkerLostError,
)
from pyllama_mtp.llama.model import Model
from pyllama_mtp.memory import resolve
from pyllama_mtp.prefixcache import PrefixCache
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


class Job:
    """One answer to generate; :attr:`post` takes its news, on the event loop.

    News are the progress of the prompt in llama-server's form (if `tells_progress`), then steps of
    the answer, from its first token on. The last ones have a finish_reason, or are an ApiError.
    """

    _numbers = itertools.count()

    def __init__(self, request: Request, tells_progress: bool = False) -> None:
        self.request, self.tells_progress = request, tells_progress
        self.number = next(self._numbers)
        self.post: Callable[[News], None] = lambda news: None


News: TypeAlias = Progress | ApiError | dict[str, float]


class Generator(threading.Thread):
    """Generates for several requests at once, until :meth:`end`.

    Attributes:
        total: telemetry of all requests.
        outcomes: numbers of ended requests, by "stop", "length", "cancelled", "error" and others.
        n_ctx: most tokens of each sequence.
        depth: most drafts of a round; 0: none are made.
        broken: why nothing can be generated any more, or None.
    """

    def __init__(self, model: Model, settings: Settings, n_sequences: int, max_queue: int) -> None:
        """Make the contexts. Raises UsageError, InsufficientMemoryError: see :class:`.Engine`.

        Args:
            settings: `n_ctx` is the length of each sequence, `checkpoints` how many each keeps.
            n_sequences: requests that are decoded together.
            max_queue: further requests that may wait.
        """
        super().__init__(name="pyllama-mtp generator", daemon=True)
        self.n_sequences, self.max_queue = n_sequences, max_queue
        resolved = resolve(settings, model, n_sequences)
        self._new_engine = partial(open_engine, model, resolved, chats=True)
        self._engine = self._new_engine()
        self.n_ctx, self.depth = self._engine.n_ctx, resolved.depth
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
        self.check_room(len(jobs))
        room = self.n_sequences + self.max_queue
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

    def check_room(self, n: int) -> None:
        """Raise ApiError: 400: a request asks for more answers than ever fit."""
        room = self.n_sequences + self.max_queue
        if n > room:
            why = f"{n} answers are asked for at once; this server takes at most {room}"
            raise bad_request(why, "n")

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
    def prefixes(self) -> PrefixCache:
        """The processed texts."""
        return self._engine.prefixes

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

    def slots(self) -> list[dict[str, Any]]:
        """What each place does, in llama-server's form; without texts."""
        usual = {"n_ctx": self.n_ctx, "speculative": self.depth > 0, "is_processing": False}
        slots: list[dict[str, Any]] = [{"id": n, **usual} for n in range(self.n_sequences)]
        for sequence in self._loop.running():
            request = sequence.request
            answer, job = request.answer, self._jobs.get(request)
            n, telemetry = len(answer.tokens), answer.telemetry
            n_remain = request.limits.max_tokens - n
            slots[sequence.id] |= {
                "is_processing": True,
                "id_task": job.number if job else -1,
                "n_prompt_tokens": len(request.prompt),
                "n_prompt_tokens_processed": telemetry.n_prefilled,
                "n_prompt_tokens_cache": telemetry.n_cached,
                "next_token": [{"has_next_token": True, "n_remain": n_remain, "n_decoded": n}],
            }
        return slots

    def paying_drafts(self) -> dict[int, int]:
        """Drafts of the head that pay at the present acceptance, by number of sequences; {}: their
        number is fixed, or there is no head."""
        engine, numbers = self._engine, range(1, self.n_sequences + 1)
        depths = engine.drafting.depths if engine.head.context else None
        return {n: depths.depth(n) for n in numbers} if depths else {}

    # -- this thread ---------------------------------------------------------------------------

    def check_images(self) -> None:
        """Raise UsageError unless prompts may have images."""
        self._engine.head.check_images()

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
            if job.tells_progress:
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
        self._post([(job, figures)])

    def _work(self) -> None:
        """Make one step of the scheduler; a failure ends the requests that have a place."""
        try:
            steps = self._loop.step()
        except Exception as error:
            log.exception("a decode has failed")
            self._recover(error)
            return
        self._mark()
        self._post([self._news(progress) for progress in steps if _tells(progress)])

    def _news(self, progress: Progress) -> tuple[Job, News]:
        """A step of the scheduler for the job's client."""
        job, reason = self._jobs[progress.request], progress.finish_reason
        if progress.error:
            failure = _failure(progress.error)
            self._close(job, "invalid" if failure.status == 400 else "error")
            return job, failure
        if reason:
            self._close(job, "length" if reason == "length" else "stop")
        return job, progress

    def _recover(self, error: Exception) -> None:
        """After a failed decode: fail the running requests, and go on with empty contexts.

        Where none is running, those that wait are failed: what has failed would fail again.

        A lost RPC worker takes part of the model with it, so nothing can be generated any more.
        Clients are told last, so that a client that tries again at once meets the new state.
        """
        failure = _failure(error)
        waiting = set(self._loop.waiting())
        running = [one for one in self._jobs if one not in waiting]
        failed = self._fail(running or list(self._jobs), failure, "error")
        try:
            if isinstance(error, WorkerLostError):
                raise error
            self._start_anew()
        except Exception as reason:
            log.exception("the contexts cannot be used any more")
            why = _failure(reason).message
            failed += self._break(f"the server cannot generate any more: {why}; restart it")
        finally:
            self._post(failed)

    def _break(self, why: str) -> list[tuple[Job, News]]:
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
            store = self._engine.prefixes.store
            self._engine.close()
            self._engine = self._new_engine()
            self._engine.prefixes.store = store
            self._loop = Scheduler(self._engine, self.total, take_turns=True)
            for request in waiting:
                self._loop.add(request)

    def _fail(
        self, requests: Sequence[Request], error: ApiError, outcome: str
    ) -> list[tuple[Job, News]]:
        """End these requests; return their last news."""
        jobs = [self._jobs[request] for request in requests]
        for job in jobs:
            self._loop.drop(job.request)
            self._close(job, outcome)
        return [(job, error) for job in jobs]

    def _close(self, job: Job, outcome: str) -> None:
        del self._jobs[job.request]
        self.outcomes[outcome] += 1
        with self._changed:
            self._n_open -= 1

    def _post(self, all_news: list[tuple[Job, News]]) -> None:
        """Hand news to the event loop, in one call."""
        if all_news and self.events:
            try:
                self.events.call_soon_threadsafe(_deliver, all_news)
            except RuntimeError:  # the event loop is closed: nobody waits any more
                log.debug("news of %d jobs have come too late", len(all_news))

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


def _failure(error: Exception) -> ApiError:
    """An exception as an answer's error. Clients get the package's own words only: others may
    name files."""
    if isinstance(error, UsageError):
        return bad_request(str(error))
    own = isinstance(error, DecodeError | InsufficientMemoryError | WorkerLostError)
    why = str(error) if own else type(error).__name__
    return ApiError(500, f"the computation failed: {why}", code="decode_failed")


def _tells(progress: Progress) -> bool:
    """Whether the client gets an event of this progress."""
    first = len(progress.request.answer.tokens) == len(progress.tokens)
    said = progress.pieces or progress.logprobs or progress.finish_reason
    return bool(said or progress.error or first)


def _deliver(all_news: list[tuple[Job, News]]) -> None:
    for job, news in all_news:
        job.post(news)


# -- metrics for Prometheus ------------------------------------------------------------------------


#: Name, description, and the value; or values by their labels, and the labels' names.
_Row: TypeAlias = "tuple[str, str, float] | tuple[Any, ...]"


class Metrics(Collector):
    """All metrics of a generator, in a registry of their own."""

    def __init__(self, generator: Generator, name: str) -> None:
        """`name`: the model's, for vLLM's counters."""
        self._generator, self._name, self.registry = generator, name, CollectorRegistry()
        self.registry.register(self)

    def collect(self) -> Iterable[Metric]:
        """The metrics as they are now."""
        generator, total = self._generator, self._generator.total
        store = generator.prefixes.store
        prefill_tps, decode_tps = generator.speeds()
        drafted, accepted = (
            {(str(position),): n for position, n in enumerate(counts, start=1)}
            for counts in (total.drafted, total.accepted)
        )
        rates = {position: accepted[position] / n if n else 0.0 for position, n in drafted.items()}
        paying = {(str(n),): depth for n, depth in generator.paying_drafts().items()}
        passes = {
            (str(n), str(depth)): count
            for n, by_depth in list(total.passes.items())
            for depth, count in list(by_depth.items())
        }
        ended = {(how,): n for how, n in sorted(generator.outcomes.items())}
        gauges: tuple[_Row, ...] = (
            ("requests_running", "Requests that are being processed.", generator.n_running),
            ("requests_waiting", "Requests in the queue.", generator.n_waiting),
            ("prefill_tokens_per_second", "Speed of prefill, lately.", prefill_tps),
            ("decode_tokens_per_second", "Speed of decode, lately, of all sequences.", decode_tps),
            ("mean_accepted_length", "Drafts accepted per round.", total.mean_accepted_length),
            ("stored_prompts", "Processed texts that have left their places.", len(store)),
            ("stored_prompts_bytes", "Memory that they take.", store.n_bytes),
            ("acceptance", "Share of the drafts that were accepted.", rates, "position"),
            ("paying_drafts", "Drafts that pay; 0: drafts do not pay.", paying, "sequences"),
        )
        counters: tuple[_Row, ...] = (
            ("prompt_tokens", "Tokens of prompts.", total.n_prompt),
            ("image_tokens", "Of these, rows of images.", total.n_image_tokens),
            ("image_encode_seconds", "Time spent on images before prompts.", total.encode_s),
            ("prompt_tokens_cached", "Of prompts, not processed again.", total.n_cached),
            ("generated_tokens", "Tokens generated.", total.n_generated),
            ("prefill_seconds", "Time spent on prompts.", total.prefill_s),
            ("decode_seconds", "Time spent on rounds.", total.decode_s),
            ("rounds", "Verification passes, added up over the sequences.", total.rounds),
            ("stored_prompts_hits", "Prompts that went on from one of them.", store.hits),
            ("stored_prompts_tokens", "Tokens not processed again by that.", store.n_saved),
            ("drafted_tokens", "Drafts verified, by position from 1.", drafted, "position"),
            ("accepted_tokens", "Drafts accepted, by position from 1.", accepted, "position"),
            ("passes", "Verification passes.", passes, "sequences", "drafts"),
            ("requests", "Answers that have ended, by how.", ended, "outcome"),
        )
        held, vllm = list(total.held), "vllm:spec_decode_num"  # names that its dashboards read
        by_position = {(self._name, str(n)): sum(held[n + 1 :]) for n in range(len(held) - 1)}
        sums = {"drafts": sum(held), "draft_tokens": total.n_drafted}
        sums["accepted_tokens"] = total.n_accepted
        for name, n in sums.items():
            counters += ((f"{vllm}_{name}", "As vLLM counts.", {(self._name,): n}, "model_name"),)
        name, keys = f"{vllm}_accepted_tokens_per_pos", ("model_name", "position")
        counters += ((name, "By position from 0.", by_position, *keys),)
        for kind, rows in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, text, value, *labels in rows:
                name = name if ":" in name else f"pyllama_mtp_{name}"
                metric = kind(name, text, labels=labels)
                for of, one in (value if isinstance(value, dict) else {(): value}).items():
                    metric.add_metric(of, one)
                yield metric
