"""Sessions of one library that are measured side by side, each a step at a time.

The steps of a session: open it, warm it up and reset it; process the prompt; generate, some tokens
at a time; take its figures and close it. Between two steps other sessions get their turns, here or
in another process; their time does not count.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from pyllama_mtp.measure.cells import Sample
from pyllama_mtp.measure.machine import waited_for_core
from pyllama_mtp.measure.profile import WARM_UP_TOKENS, InterruptedSample, Profile, profile_prompt

if TYPE_CHECKING:
    from pyllama_mtp import (
        BatchGeneration,
        BatchSession,
        Generation,
        Model,
        Sampling,
        Session,
        Settings,
    )
    from pyllama_mtp.answer import Answer


@dataclass(frozen=True)
class Task:
    """One sample to be measured.

    Attributes:
        prompts: token ids of each sequence; all sequences are generated at once.
        max_tokens: tokens to generate, the first token included.
        warm_up: tokens of each prompt that the warm-up processes.
    """

    settings: Settings
    sampling: Sampling
    prompts: list[list[int]]
    max_tokens: int
    warm_up: int


@dataclass(frozen=True)
class Measured:
    """A finished sample, and the memory in use: bytes by what they are for."""

    sample: Sample
    memory: dict[str, int]


@dataclass
class _Run:
    session: Session | BatchSession
    generation: Generation | BatchGeneration
    prompt: list[int]
    pieces: Iterator[Any] = field(init=False)
    ended: bool = False
    read_s: float = 0.0
    waited_s: dict[str, float] = field(default_factory=lambda: {"prefill": 0.0, "decode": 0.0})
    cpu_s: dict[str, float] = field(default_factory=lambda: {"prefill": 0.0, "decode": 0.0})

    def __post_init__(self) -> None:
        self.pieces = iter(self.generation)

    @property
    def answers(self) -> Sequence[Answer]:
        """One per sequence."""
        return getattr(self.generation, "results", [self.generation])

    @property
    def n_tokens(self) -> int:
        """Tokens of the sequence that has the fewest."""
        return min(len(answer.tokens) for answer in self.answers)

    @property
    def interrupted(self) -> bool:
        """Whether the user has interrupted it."""
        return any(answer.finish_reason == "interrupted" for answer in self.answers)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Add this block's CPU time of this thread, and all threads' waiting for a core, to those
        of prefill or decode."""
        phase = "decode" if self.n_tokens else "prefill"
        waited, cpu = waited_for_core(), time.thread_time()
        yield
        self.cpu_s[phase] += time.thread_time() - cpu
        self.waited_s[phase] += waited_for_core() - waited


class SideBySide(Protocol):
    """A :class:`Runner`, here or in another process; what is not overridden does nothing."""

    def begin(self, number: int, task: Task) -> None: ...
    def advance(self, number: int, goal: int) -> int: ...
    def finish(self, number: int) -> Measured: ...

    def check(self, settings: Settings, n_sequences: int = 1) -> None:
        return

    def read(self, number: int, end: int) -> None:
        return

    def drop(self) -> None:
        return


class Runner:
    """Sessions of one library in this process, by numbers of the caller's choice."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._runs: dict[int, _Run] = {}

    def check(self, settings: Settings, n_sequences: int = 1) -> None:
        """Open and close a session.

        Raises:
            UsageError: settings that this library or model cannot do.
            InsufficientMemoryError: the session does not fit into memory.
        """
        self._open(settings, n_sequences).close()

    def _open(self, settings: Settings, n_sequences: int) -> Session | BatchSession:
        from pyllama_mtp import BatchSession, Session

        if n_sequences > 1:
            return BatchSession(self._model, settings, n_sequences)
        return Session(self._model, settings)

    def profile(self, settings: Settings, prompt: list[int]) -> Profile:
        """See :func:`.profile_prompt`."""
        return profile_prompt(self._model, settings, prompt)

    def begin(self, number: int, task: Task) -> None:
        """Open a session and warm it up. Raises as :meth:`check`."""
        session = self._open(task.settings, len(task.prompts))
        try:
            beginnings = [prompt[: task.warm_up] for prompt in task.prompts]
            warm = _Run(session, _start(session, task, beginnings, WARM_UP_TOKENS), beginnings[0])
            warm.generation.run()
            if warm.interrupted:
                raise InterruptedSample
            session.reset()
            generation = _start(session, task, task.prompts, task.max_tokens)
            self._runs[number] = _Run(session, generation, task.prompts[0])
        except BaseException:
            session.close()
            raise

    def read(self, number: int, end: int) -> None:
        """Process the prompt of a single sequence up to its token `end`, which is not the last."""
        run = self._runs[number]
        with run.counting():  # process() leaves the last token: these are exactly `end`
            run.read_s += run.session.process(run.prompt[: end + 1]).prefill_s

    def advance(self, number: int, goal: int) -> int:
        """Generate until each sequence has `goal` tokens (1: the prefill), or a few more. Return
        how many there are. The last tokens come with the end of the generation."""
        run = self._runs[number]
        with run.counting():
            while not run.ended and run.n_tokens < goal:
                run.ended = next(run.pieces, None) is None
        if run.ended and run.interrupted:
            raise InterruptedSample
        return run.n_tokens

    def finish(self, number: int) -> Measured:
        """Generate to the end, close the session, and return its figures."""
        run = self._runs[number]
        with run.counting():
            for _ in run.pieces:
                pass
        if run.interrupted:
            raise InterruptedSample
        sample = Sample.from_telemetry(run.generation.telemetry)
        sample.waited_s, sample.cpu_s = run.waited_s, run.cpu_s
        sample.prefill_s += run.read_s
        sample.elapsed_s += run.read_s
        if run.read_s:
            sample.prefill_tps = sample.n_prompt / sample.prefill_s
        memory = dict(run.session.memory())
        del self._runs[number]
        run.session.close()
        return Measured(sample, memory)

    def drop(self) -> None:
        """Close all sessions."""
        while self._runs:
            _, run = self._runs.popitem()
            with suppress(Exception):  # an earlier error is on its way already
                run.session.close()


def _start(
    session: Session | BatchSession, task: Task, prompts: list[list[int]], max_tokens: int
) -> Generation | BatchGeneration:
    given: Any = prompts if len(prompts) > 1 else prompts[0]
    return session.generate(given, max_tokens=max_tokens, sampling=task.sampling, ignore_eos=True)
