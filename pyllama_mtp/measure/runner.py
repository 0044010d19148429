"""Sessions of one library that are measured side by side, each a step at a time.

The steps of a session: open it, warm it up and reset it; process the prompt; generate, some tokens
at a time; take its figures and close it. Between two steps other sessions get their turns, here or
in another process; their time does not count. A process can load one library only, so every further
library has a process of its own, which waits at a pipe between two requests and computes nothing.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partialmethod
from multiprocessing.connection import Connection
from typing import IO, TYPE_CHECKING, Any, Protocol

from pyllama_mtp import errors
from pyllama_mtp.child import end_with_parent, last_words
from pyllama_mtp.errors import PyllamaMtpError, UsageError
from pyllama_mtp.llama.native import CPU_SWITCHES
from pyllama_mtp.llama.vision import ImagePrompt
from pyllama_mtp.machine import waited_for_core
from pyllama_mtp.measure.figures import Sample
from pyllama_mtp.measure.prompts import ImageText, Imaging, Picture

if TYPE_CHECKING:
    from pyllama_mtp.answer import Answer
    from pyllama_mtp.llama.model import Model
    from pyllama_mtp.llama.native import Library
    from pyllama_mtp.measure.records import Build
    from pyllama_mtp.promptfile import ProcessedPrompt
    from pyllama_mtp.session import BatchGeneration, BatchSession, Generation, Session
    from pyllama_mtp.settings import Sampling, Settings

#: Tokens that a warm-up generates.
WARM_UP_TOKENS = 8


class InterruptedSample(Exception):
    """The user interrupted a generation."""


@dataclass(frozen=True)
class Task:
    """One sample to be measured.

    Attributes:
        prompts: of each sequence, token ids, or an image and text; all sequences are generated at
            once.
        max_tokens: tokens to generate, the first token included.
        warm_up: tokens of each prompt that the warm-up processes.
        n_context: tokens at the beginning of the only prompt that are in the context already, and
            are no part of the sample.
        filled: settings of the session that these tokens are filled into, for this task and those
            after it; see :func:`filling`.
        stop_at_end: see :class:`.Plan`.
    """

    settings: Settings
    sampling: Sampling
    prompts: Sequence[list[int] | ImageText]
    max_tokens: int
    warm_up: int
    n_context: int = 0
    filled: Settings | None = None
    stop_at_end: bool = False


@dataclass
class _Run:
    session: Session | BatchSession
    generation: Generation | BatchGeneration
    n_context: int = 0
    pieces: Iterator[Any] = field(init=False)
    ended: bool = False
    waited_s: dict[str, float] = field(default_factory=lambda: {"prefill": 0.0, "decode": 0.0})

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
        """Add all threads' waiting for a core in this block to that of prefill or decode."""
        phase, before = "decode" if self.n_tokens else "prefill", waited_for_core()
        yield
        self.waited_s[phase] += waited_for_core() - before


class SideBySide(Protocol):
    """A :class:`Runner`, here or in another process; what is not overridden does nothing."""

    def begin(self, key: Hashable, task: Task) -> None: ...
    def advance(self, key: Hashable, goal: int) -> int: ...
    def finish(self, key: Hashable) -> tuple[Sample, dict[str, int]]: ...

    def check(
        self, settings: Settings, n_sequences: int = 1, filled: Settings | None = None
    ) -> None:
        return

    def drop(self) -> None:
        return


class Runner:
    """Sessions of one library in this process, by the keys of their cells.

    Where a task has tokens in the context, a session for all tasks with the same `filled` holds
    these, and goes on from there for longer ones. The measured sessions get a copy, which is kept
    until one of them goes on: those that are measured side by side get the same.

    Args:
        imaging: for prompts with an image.
    """

    def __init__(self, model: Model, imaging: Imaging | None = None) -> None:
        self._model, self._imaging = model, imaging
        self._runs: dict[Hashable, _Run] = {}
        self._filled: dict[str, Session] = {}
        self._copy: tuple[str, int, ProcessedPrompt] | None = None

    def check(
        self, settings: Settings, n_sequences: int = 1, filled: Settings | None = None
    ) -> None:
        """Open and close a session. `filled`: of the one that fills its context, open meanwhile.

        Raises:
            UsageError: settings that this library or model cannot do, or not with images.
            InsufficientMemoryError: the sessions do not fit into memory.
        """
        filling = self._open(filled, 1) if filled else nullcontext()
        with filling, self._open(settings, n_sequences) as session:
            if self._imaging:
                prompt: Any = self._imaging.alone
                session.generate([prompt] if n_sequences > 1 else prompt, max_tokens=1)

    def _open(self, settings: Settings, n_sequences: int) -> Session | BatchSession:
        from pyllama_mtp.session import BatchSession, Session

        if n_sequences > 1:
            return BatchSession(self._model, settings, n_sequences)
        return Session(self._model, settings)

    def begin(self, key: Hashable, task: Task) -> None:
        """Open a session, encode images, warm it up, and give it what is to be in its context.
        Raises as :meth:`check`."""
        copy = self._fill(task) if task.n_context else None
        session = self._open(task.settings, len(task.prompts))

        def start(prompts: list[list[int] | ImagePrompt], max_tokens: int) -> _Run:
            text: Any = prompts if len(prompts) > 1 else prompts[0]
            ignore_eos, sampling = not task.stop_at_end, task.sampling
            generation = session.generate(
                text, max_tokens=max_tokens, sampling=sampling, ignore_eos=ignore_eos
            )
            return _Run(session, generation, task.n_context)

        try:
            prompts = [self._encoded(prompt) for prompt in task.prompts]
            beginnings = [_warm_up(prompt, task.warm_up) for prompt in prompts]
            warm = start(beginnings, WARM_UP_TOKENS)
            warm.generation.run()
            if warm.interrupted:
                raise InterruptedSample
            session.reset()
            if copy:
                session.copy_from(copy)
            self._runs[key] = start(prompts, task.max_tokens)
        except BaseException:
            session.close()
            raise

    def _fill(self, task: Task) -> ProcessedPrompt:
        """The first tokens of the task's prompt, processed."""
        from pyllama_mtp.session import Session

        way = repr(task.filled)
        if self._copy and self._copy[:2] == (way, task.n_context):
            return self._copy[2]
        self._copy = None
        (prompt,) = task.prompts
        assert isinstance(prompt, list)
        if way not in self._filled:
            self._filled[way] = Session(self._model, task.filled)
        self._filled[way].process(prompt[: task.n_context + 1])  # which leaves the last token
        copy = self._filled[way].copy()
        self._copy = way, task.n_context, copy
        return copy

    def _encoded(self, prompt: list[int] | ImageText) -> list[int] | ImagePrompt:
        if not isinstance(prompt, ImageText):
            return prompt
        if self._imaging is None:
            raise UsageError("no encoder for prompts with an image")
        return self._imaging.encode(prompt)

    def advance(self, key: Hashable, goal: int) -> int:
        """Generate until each sequence has `goal` tokens (1: the prefill), or a few more. Return
        how many there are. The last tokens come with the end of the generation."""
        run, self._copy = self._runs[key], None
        with run.counting():
            while not run.ended and run.n_tokens < goal:
                run.ended = next(run.pieces, None) is None
        if run.ended and run.interrupted:
            raise InterruptedSample
        return run.n_tokens

    def finish(self, key: Hashable) -> tuple[Sample, dict[str, int]]:
        """Generate to the end, close the session; the figures, and the bytes in use by what for."""
        run = self._runs[key]
        with run.counting():
            for _ in run.pieces:
                pass
        if run.interrupted:
            raise InterruptedSample
        telemetry = run.generation.telemetry
        sample = Sample.from_telemetry(telemetry)
        sample.waited_s = run.waited_s
        sample.elapsed_s += sample.encode_s
        if telemetry.n_cached < run.n_context:
            raise PyllamaMtpError(
                f"only {telemetry.n_cached} of {run.n_context} tokens stayed in the context"
            )
        sample.n_prompt -= run.n_context
        memory = dict(run.session.memory())
        del self._runs[key]
        run.session.close()
        return sample, memory

    def drop(self) -> None:
        """Close all sessions."""
        self._copy = None
        while self._runs:
            _, run = self._runs.popitem()
            with suppress(Exception):  # an earlier error is on its way already
                run.session.close()

    def close(self) -> None:
        """Close all sessions, those with filled contexts, too."""
        self.drop()
        while self._filled:
            self._filled.popitem()[1].close()


def filling(settings: Settings, n_ctx: int, model: Model) -> Settings:
    """Those of the session that fills contexts for samples with these settings: one for all depths
    above 0."""
    heads = (model.info.most_drafts or 1) if model.has_mtp else 0
    return replace(
        settings,
        n_ctx=n_ctx,
        draft_n_max=min(settings.depth_limit, heads),
        synthetic_acceptance=None,
        checkpoints=0,
        ngram=False,
    )


def _warm_up(prompt: list[int] | ImagePrompt, n_tokens: int) -> list[int] | ImagePrompt:
    """The part of a prompt for a warm-up: of an image the whole, and a token after it."""
    if isinstance(prompt, ImagePrompt):  # which is not encoded again
        end = max(n_tokens, prompt.images[-1].end + 1)
        return replace(prompt, entries=prompt.entries[:end], encode_s=0.0)
    return prompt[:n_tokens]


# -- another library, in a process of its own ------------------------------------------------------


_CLOSING_S = 3.0


def split_library(text: str) -> tuple[str, dict[str, str]]:
    """Split "patched:small_batch=off:GOMP_SPINCOUNT=9" into the library and what its process is
    given: CPU_SWITCHES, and environment variables in capitals.

    Raises:
        UsageError: a part that is neither.
    """
    library, *words = text.split(":")
    settings = {}
    for word in words:
        name, _, value = word.partition("=")
        if not (name.isupper() and value) and not (name in CPU_SWITCHES and value in ("on", "off")):
            raise UsageError(
                f"{word!r} is nothing that a process can be given: a VARIABLE=VALUE of the "
                f"environment, or on or off for {', '.join(CPU_SWITCHES)}, as in small_batch=off"
            )
        settings[name] = value
    return library, settings


def load_library(text: str) -> Library:
    """Load a library into this process, with its switches and environment variables."""
    from pyllama_mtp.llama import native

    name, variables = split_library(text)
    switches = {name: variables.pop(name) for name in CPU_SWITCHES if name in variables}
    os.environ.update(variables)
    library = native.load(name)
    for switch, value in switches.items():
        if not library.set_cpu_switch(switch, value == "on"):
            raise UsageError(f"the CPU backend of this library has no {switch}")
    return library


class LibraryProcess:
    """A :class:`~pyllama_mtp.measure.runner.Runner` in a process of its own, with its methods.

    Every method raises what the runner raises, and PyllamaMtpError if the process has died, with
    the last lines that it wrote to stderr.

    Args:
        library: "upstream", "patched" or a folder, with switches: see :func:`split_library`.
        label: name of the library in messages and records.
        model: path of the model file.
        picture, n_threads: for prompts with an image; see :class:`.Imaging`.
        options: arguments of `Model`: n_gpu_layers, whether to load the MTP head, ...
    """

    def __init__(
        self,
        library: str,
        label: str,
        model: str,
        picture: Picture | None = None,
        n_threads: int | None = None,
        **options: Any,
    ) -> None:
        self._label = label
        self._errors: IO[bytes] = tempfile.NamedTemporaryFile()  # noqa: SIM115 - closed with it
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        given = (theirs, self._errors.name, library, label, model, picture, n_threads, options)
        self._process = context.Process(target=serve, args=given)
        self._process.start()
        theirs.close()
        self._waiting = True  # for the answer to the loading

    def loaded(self) -> Build:
        """Wait until library and model are loaded: the build of the library."""
        build: Build = self._answer()
        return build

    def _ask(self, method: str, *arguments: Any) -> Any:
        self._waiting = True
        with suppress(BrokenPipeError):  # _answer() will raise
            self._pipe.send((method, arguments))
        return self._answer()

    check = partialmethod(_ask, "check")
    begin = partialmethod(_ask, "begin")
    advance = partialmethod(_ask, "advance")
    finish = partialmethod(_ask, "finish")

    def drop(self) -> None:
        """Close the open sessions; a process that was interrupted in a request is ended."""
        if self._waiting or not self._process.is_alive():
            self._process.kill()
        else:
            self._ask("drop")

    def close(self) -> None:
        """End the process, at once if it has not answered the last request."""
        self._pipe.close()
        if self._waiting:
            self._process.kill()
        self._process.join(_CLOSING_S)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
        self._errors.close()

    def _answer(self) -> Any:
        try:
            kind, value = self._pipe.recv()
        except (EOFError, ConnectionError):
            self._process.join(_CLOSING_S)
            with open(self._errors.name, "rb") as file:  # noqa: PTH123 - it has a name of its own
                said = last_words(file.read().decode(errors="replace"))
            raise PyllamaMtpError(
                f"the process with the {self._label} library has ended "
                f"({self._process.exitcode}): {said}"
            ) from None
        self._waiting = False
        if kind == "done":
            return value
        # An error that takes more than a message becomes its base class.
        kinds = {one.__name__: one for one in (errors.UsageError, errors.InsufficientMemoryError)}
        raise kinds.get(kind, PyllamaMtpError)(f"{self._label}: {value}")


# -- the process itself ----------------------------------------------------------------------------


def serve(
    pipe: Connection,
    stderr: str,
    library: str,
    label: str,
    path: str,
    picture: Picture | None,
    n_threads: int | None,
    options: dict[str, Any],
) -> None:
    """The target of the process: load, then answer requests until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent takes Ctrl-C, and ends this process
    end_with_parent()
    with open(stderr, "ab", buffering=0) as file:  # noqa: PTH123
        os.dup2(file.fileno(), 2)
        os.dup2(file.fileno(), 1)

    from pyllama_mtp.llama.model import Model
    from pyllama_mtp.measure.records import Build

    try:
        loaded = load_library(library)
        with Model(path, **options) as model:
            runner = Runner(model, Imaging(model, picture, n_threads) if picture else None)
            build = Build.of(loaded, options.get("n_gpu_layers", -1), label, model.rpc_servers)
            pipe.send(("done", build))
            while True:
                try:
                    method, arguments = pipe.recv()
                except EOFError:
                    return runner.close()
                try:
                    pipe.send(("done", getattr(runner, method)(*arguments)))
                except PyllamaMtpError as error:
                    pipe.send((type(error).__name__, str(error)))
    except PyllamaMtpError as error:
        pipe.send((type(error).__name__, str(error)))
