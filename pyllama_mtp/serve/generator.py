"""The thread that generates: the only one that calls the native library's contexts.

Requests come from the event loop and go back to it as events, all events of a round in one call, so
that between two decodes next to nothing is done here.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from pyllama_mtp.chats.toolcalls import CallPiece
from pyllama_mtp.engine import Engine
from pyllama_mtp.errors import ContextClosedError, WorkerLostError
from pyllama_mtp.generate import Request
from pyllama_mtp.llama.model import Model
from pyllama_mtp.llama.toplogprobs import TopLogprobs
from pyllama_mtp.scheduler import Progress, Scheduler
from pyllama_mtp.settings import Settings
from pyllama_mtp.telemetry import BatchTelemetry

from .apierror import ApiError, bad_request, shutting_down

log = logging.getLogger(__name__)

#: A client whose request finds the queue full is asked to come back after so many seconds.
RETRY_AFTER_S = 2
#: Speeds are those of the last so many seconds in which something was computed.
SPEED_WINDOW_S = 60


@dataclass(frozen=True)
class Event:
    """What has become of a job. The last one of a job has a finish_reason or an error.

    Those with `progress` come first. The next one comes with the first token, and may have no text.

    Attributes:
        text, reasoning: to be emitted, answer and thought; may be empty.
        calls: parts of calls of tools.
        n_taken: characters of both so far, tags included.
        logprobs: of the tokens that came, if they are kept.
        finish_reason: "eos", "stop" or "length".
        progress: of the prompt, as llama-server says it.
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
    """One answer that is wanted: a choice of a client's request.

    Attributes:
        index: of the choice.
        post: takes an event; called on the event loop.
        progress: tell how far the prompt is.
    """

    index: int
    request: Request
    post: Callable[[Job, Event], None] = lambda job, event: None
    done: bool = False
    progress: bool = False


@dataclass(frozen=True)
class Speeds:
    """Tokens and seconds so far, of prefill and decode."""

    prefill_tokens: int = 0
    prefill_s: float = 0.0
    decode_tokens: int = 0
    decode_s: float = 0.0


@dataclass
class Outcomes:
    """How many jobs have ended in which way."""

    counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("stop", "length", "cancelled", "error"), 0)
    )

    def count(self, outcome: str) -> None:
        """One more."""
        self.counts[outcome] = self.counts.get(outcome, 0) + 1


class Generator(threading.Thread):
    """Generates for several requests at once, until it is told to end.

    Attributes:
        total: figures of all requests.
        outcomes: how they have ended.
        n_ctx: tokens that each sequence has room for.
        broken: why nothing can be generated any more, or None.
    """

    def __init__(self, model: Model, settings: Settings, n_sequences: int, max_queue: int) -> None:
        """Make the contexts. Raises UsageError, InsufficientMemoryError: see :class:`Engine`.

        Args:
            settings: `n_ctx` is the length of each sequence, `checkpoints` how many each keeps.
            n_sequences: requests that are decoded together.
            max_queue: further ones that may wait.
        """
        super().__init__(name="pyllama-mtp generator", daemon=True)
        self.n_sequences, self.max_queue = n_sequences, max_queue
        self._new_engine = partial(Engine, model, settings, n_sequences, chats=True)
        self._engine = self._new_engine()
        self.n_ctx = self._engine.n_ctx
        self.total = BatchTelemetry(synthetic_acceptance=settings.synthetic_acceptance)
        self.outcomes = Outcomes()
        self.broken: str | None = None
        self._loop = Scheduler(self._engine, self.total, take_turns=True)
        self._changed = threading.Condition()
        self._inbox: list[Job] = []
        self._drops: list[Job] = []
        self._jobs: dict[Request, Job] = {}  # of this thread
        self._n_open = 0
        self._end_at: float | None = None
        self._marks: deque[tuple[float, Speeds]] = deque([(time.monotonic(), Speeds())])
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
                self.outcomes.count("rejected")
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
        """Nobody waits for these jobs any more; those that are done are left alone."""
        with self._changed:
            self._drops += jobs
            self._changed.notify()

    def end(self, grace_s: float) -> None:
        """Take nothing more, drop what waits, and end `grace_s` seconds later at the latest."""
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
        """Tokens per second of prefill and of decode, of all sequences together, lately."""
        before, now = self._marks[0][1], self._speeds()

        def per_second(tokens: int, seconds: float) -> float:
            return tokens / seconds if seconds > 0 else 0.0

        return (
            per_second(
                now.prefill_tokens - before.prefill_tokens, now.prefill_s - before.prefill_s
            ),
            per_second(now.decode_tokens - before.decode_tokens, now.decode_s - before.decode_s),
        )

    # -- this thread ---------------------------------------------------------------------------

    def run(self) -> None:
        """Work until :meth:`end`, then free the contexts."""
        try:
            while self._wait():
                if self._loop.busy:
                    self._work()
        finally:
            if self._end_at is None:  # nobody asked for it
                self._post(self._break("the thread that generates has ended; restart the server"))
            self._admit()
            self._post(self._fail(list(self._jobs), shutting_down(), "shutdown"))
            self._engine.close()

    def _wait(self) -> bool:
        """Take what has come; block while there is nothing to do. False: it is time to end."""
        with self._changed:
            while not (self._inbox or self._drops or self._loop.busy or self._end_at is not None):
                self._changed.wait()
            drops, self._drops = self._drops, []
            end_at = self._end_at
        self._admit()
        for job in drops:
            if not job.done and self._loop.drop(job.request):
                self._close(job, "cancelled")
        if end_at is None:
            return True
        self._post(self._fail(self._loop.waiting(), shutting_down(), "shutdown"))
        return self._loop.busy and time.monotonic() < end_at

    def _admit(self) -> None:
        """Give the loop what has come."""
        with self._changed:
            jobs, self._inbox = self._inbox, []
        for job in jobs:
            self._jobs[job.request] = job
            if job.progress:
                job.request.on_progress = partial(self._tell_progress, job, time.monotonic())
            self._loop.add(job.request)

    def _tell_progress(self, job: Job, began: float, done: int, total: int) -> None:
        """A part of a prompt is processed."""
        figures: dict[str, float] = {
            "total": total,
            "cache": job.request.answer.telemetry.n_cached,
            "processed": done,
            "time_ms": int(1000 * (time.monotonic() - began)),
        }
        self._post([(job, Event(progress=figures))])

    def _work(self) -> None:
        """One step of the loop; a failure ends the requests that have a place."""
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
        """The contexts' contents are in doubt: start from empty ones, with what still waits.

        A lost worker of ggml's takes part of the model with it: nothing can be generated then.
        Clients are told last: who asks again at once meets the state that follows.
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
        """Take nothing more; what is here or has just come fails with `why`."""
        with self._changed:
            self.broken = why
        self._admit()
        return self._fail(list(self._jobs), ApiError(503, why, code="broken"), "error")

    def _start_anew(self) -> None:
        """Empty the contexts, or make new ones where the failure has cost them."""
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
        """End these requests: what is to be posted."""
        failed = []
        for request in requests:
            self._loop.drop(request)
            job = self._jobs[request]
            self._close(job, outcome)
            failed.append((job, Event(error=error)))
        return failed

    def _close(self, job: Job, outcome: str) -> None:
        job.done = True
        del self._jobs[job.request]
        self.outcomes.count(outcome)
        with self._changed:
            self._n_open -= 1

    def _post(self, found: list[tuple[Job, Event]]) -> None:
        """Hand events over to the event loop, in one call."""
        if found and self.events:
            try:
                self.events.call_soon_threadsafe(_deliver, found)
            except RuntimeError:  # it is closed: nobody waits any more
                log.debug("%d events have come too late", len(found))

    def _speeds(self) -> Speeds:
        total = self.total
        n_prefill = total.n_prompt - total.n_cached
        n_decode = total.n_generated - total.n_started
        return Speeds(n_prefill, total.prefill_s, n_decode, total.decode_s)

    def _mark(self) -> None:
        """Remember once a second how much was done."""
        now = time.monotonic()
        if now - self._marks[-1][0] >= 1.0:
            self._marks.append((now, self._speeds()))
            if len(self._marks) > SPEED_WINDOW_S:
                self._marks.popleft()


def _tells(progress: Progress) -> bool:
    """Whether there is anything in it for the client."""
    answer = progress.request.answer
    first = len(answer.tokens) == len(progress.tokens)
    wanted = answer.n_logprobs is not None
    return bool(progress.pieces or answer.finish_reason or first or wanted)


def _deliver(events: list[tuple[Job, Event]]) -> None:
    for job, event in events:
        job.post(job, event)
