"""A run of the speed matrix: its libraries and other programs, the header of its records, and the
samples of its plan, written as they come.

All cells of a group get the same text and are measured side by side, each sample in a fresh
session: their sessions are open together, as many as memory holds, process the prompt one after the
other, and decode by turns, some tokens each. So a machine that grows slower or busier slows all of
them alike, and their ratios stay. Other programs get the same text before or after, one at a time.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from msgspec.structs import replace

from pyllama_mtp import machine
from pyllama_mtp import settings as settings_module
from pyllama_mtp.errors import DecodeAborted, InsufficientMemoryError, UsageError
from pyllama_mtp.llama.contextoptions import padded
from pyllama_mtp.measure.figures import Sample
from pyllama_mtp.measure.peers import PeerError, PeerRunner
from pyllama_mtp.measure.plan import DRAFT_AXES, Key, Kind, Plan
from pyllama_mtp.measure.prompts import ImageText, Imaging, Prompts
from pyllama_mtp.measure.records import (
    Build,
    Line,
    Measured,
    ModelFile,
    Records,
    Run,
    RunHeader,
    Skipped,
    Writer,
    accelerators,
    as_read,
    last_run,
    now,
    refuse_another_run,
)
from pyllama_mtp.measure.request import MatrixRequest, without_folders
from pyllama_mtp.measure.runner import (
    InterruptedSample,
    LibraryProcess,
    Runner,
    SideBySide,
    Task,
    filling,
)
from pyllama_mtp.measure.text import counted
from pyllama_mtp.measure.verdict import slow_types
from pyllama_mtp.settings import STORE, Sampling, Settings

if TYPE_CHECKING:
    from pyllama_mtp.llama.model import Model
    from pyllama_mtp.llama.native import Library

#: The fields of `Settings` for which every cell has its own value.
OWN_SETTINGS = ("n_ctx", "draft_n_max", "synthetic_acceptance")
_FINGERPRINT = 2**20  # bytes at either end of a model file


def sampling_record(sampling: Sampling) -> dict[str, Any]:
    """The fields of `Sampling` for JSON, which has no infinity."""
    drawn = dataclasses.asdict(sampling)
    if sampling.logit_bias:
        biases = sampling.logit_bias.items()
        drawn["logit_bias"] = {str(k): v if math.isfinite(v) else str(v) for k, v in biases}
    return drawn


def make_header(
    model: Model,
    library: Library,
    request: MatrixRequest,
    plan: Plan,
    settings: Settings,
    builds: Mapping[str, Build],
) -> RunHeader:
    """The line that begins a new run.

    Args:
        library: that of this process.
        plan, settings: as of :class:`.Matrix`.
        builds: by the plan's names of libraries and peers.
    """
    from pyllama_mtp import __version__

    shared = {**dataclasses.asdict(settings), **DRAFT_AXES}
    for name in (*OWN_SETTINGS, *STORE):
        shared.pop(name)
    if not settings.rope.given:
        del shared["rope"]
    options = dict(model.options.given)
    for name in ("n_gpu_layers", "rpc_timeout"):
        options.pop(name, None)
    workers, split = (list(options.pop(name, ())) for name in ("rpc_servers", "tensor_split"))
    if "lora" in options:
        options["lora"] = model.adapters.names
    if "head" in options:
        options["head"] = Path(options["head"]).name
    slow = {} if model.on_gpu else slow_types(model.info, library)
    devices = accelerators(library, request.placement.get("n_gpu_layers", -1))
    return RunHeader(
        run=uuid.uuid4().hex[:12],
        time=now(),
        version=__version__,
        command=[without_folders(word) for word in request.command],
        model=describe_model(model.path),
        builds=dict(builds),
        machine=machine.describe_machine([device.description for device in devices]),
        plan=plan,
        settings=as_read(shared),
        sampling=as_read(sampling_record(request.sampling)),
        slow_types={kind: round(share, 4) for kind, share in slow.items()},
        workers=workers,
        tensor_split=split,
        options=as_read(options),
        loaded={
            "description": model.description,
            "bytes": model.info.weight_bytes,
            "n_params": model.n_params,
        },
    )


def describe_model(path: str | os.PathLike[str]) -> ModelFile:
    """The name, the size and the hash of a model file."""
    path = Path(path)
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            digest = hashlib.sha256(file.read(_FINGERPRINT))
            file.seek(max(size - _FINGERPRINT, 0))
            digest.update(file.read())
    except OSError:
        return ModelFile(path.name)
    return ModelFile(path.name, size, digest.hexdigest())


# -- the order of the samples ----------------------------------------------------------------------


#: Tokens of a turn. A turn begins with the CPU's caches full of the other sessions' data, so short
#: turns raise the ratios (the demo model's by 0.1 with 4 tokens against 16); in long turns, noise
#: of the machine does not slow all variants alike.
TURN_TOKENS = 32
#: Rest before another process gets its turn: OpenMP's threads spin that long after their last work.
SETTLE_S = 0.02


@dataclass(frozen=True)
class MatrixEvent:
    """Progress: a sample begins, its prompt is processed, it is done, or its cell is skipped."""

    kind: Literal["start", "prefilled", "done", "skipped"]
    key: Key
    repeat: int
    sample: Sample | None = None


class Matrix:
    """Runs a plan.

    Args:
        model: for the prompts, and its context length.
        request: what was asked for.
        plan, settings: what the model can do of it, and the settings of all cells; see
            :class:`.MatrixRequest` for the fields that each cell replaces.
        run: the run so far; its samples are not measured again, nor are its skipped cells, but for
            those of other programs, which may work by now.
        runners: by the plan's names of libraries and peers.
        imaging: for the class "image".
    """

    def __init__(
        self,
        model: Model,
        request: MatrixRequest,
        plan: Plan,
        settings: Settings,
        run: Run,
        runners: Mapping[str, SideBySide],
        imaging: Imaging | None = None,
    ) -> None:
        self.plan = plan
        #: Called at every step; must not raise.
        self.on_event: Callable[[MatrixEvent], None] = lambda event: None
        #: True once the run was interrupted.
        self.interrupted = False
        self._end = math.inf
        self._model, self._request, self._settings, self._run = model, request, settings, run.id
        self._runners = runners
        texts = None if request.text is None else [request.text]
        self._prompts = Prompts(model, texts, request.questions, imaging)
        self._groups = plan.groups()
        kinds = [(repeat, keys[0].kind) for repeat, keys in self._groups]
        questions = (self._prompt(kind, repeat) for repeat, kind in kinds if not kind[0])
        self._longest = max(map(len, questions), default=0)
        cells = run.cells.items()
        self._measured = set(run.measured)
        self._skipped = {key for key, c in cells if c.skipped and c.program not in plan.peers}

    def check(self) -> None:
        """Make the shortest prompts and open a session of every way to measure, beside the one that
        fills its context, so that a run fails before it begins, not half-way.

        Raises:
            UsageError: settings that this library or model cannot do; the message names them. A
                class of prompts that needs more tokens than the smallest size.
            InsufficientMemoryError: the longest context cannot be filled.
        """
        shortest = min(filter(None, self.plan.sizes), default=0)
        for repeat, keys in self._groups:
            if keys[0].n_prompt == shortest:
                self._prompt(keys[0].kind, repeat)
        todo = [key for group in self._groups for key in self.to_do(*group)]
        longest, least = max((key.n_context for key in todo), default=0), min(self.plan.sizes)
        for key in dict.fromkeys(replace(one, n_prompt=least, prompt_class="") for one in todo):
            if key.n_context < longest:
                continue
            filled = self._filling(self.plan.filler(key)) if longest else None
            try:
                check = self._runners[key.build].check
                check(self._cell_settings(key), key.n_sequences, filled)
            except UsageError as error:
                raise UsageError(f"{self.plan.label(key)}: {error}") from None
            except InsufficientMemoryError as error:
                if longest:  # else the cell says so, and the others are measured
                    raise InsufficientMemoryError(
                        f"a context of {longest:,} tokens cannot be filled: {error}; use shorter "
                        "ones (--at), a smaller cache type (q8_0, q4_0) or fewer axes"
                    ) from None

    # -- order -------------------------------------------------------------------------------------

    def run(self) -> Iterator[Line]:
        """Yield a record of every sample as soon as it is finished, and of every skipped cell.

        After the time budget no further group begins, nor a longer context of a group. Ctrl-C ends
        the run, and sets `interrupted`.
        """
        if self._request.budget_s is not None:
            self._end = time.monotonic() + self._request.budget_s
        try:
            for repeat, keys in self._groups:
                if self._is_late(repeat):
                    return
                if self.to_do(repeat, keys):
                    yield from self._measure_group(repeat, keys)
        except (KeyboardInterrupt, DecodeAborted, InterruptedSample):
            self.interrupted = True

    def _is_late(self, repeat: int) -> bool:
        """Whether the budget is spent, and something was measured for it."""
        began = bool(self._measured or self._skipped)
        return began and repeat >= self._request.least_repeats and time.monotonic() > self._end

    def _prompt(self, kind: Kind, repeat: int, number: int = 0) -> list[int] | ImageText:
        """The prompt of a group, or of the sequence of this number."""
        size, prompt_class = kind
        text = repeat + number * self.plan.repeat
        return self._prompts.prompt(prompt_class, size + self.plan.contexts[-1], text)

    def to_do(self, repeat: int, keys: Sequence[Key]) -> list[Key]:
        """The cells of a group that are still to be measured, in the order of their turns."""
        return [
            key for key in keys if key not in self._skipped and (key, repeat) not in self._measured
        ]

    @property
    def n_to_do(self) -> int:
        """Samples that are still to be measured, those that the budget leaves out included."""
        return sum(len(self.to_do(*group)) for group in self._groups)

    # -- measuring a group -------------------------------------------------------------------------

    def _measure_group(self, repeat: int, keys: Sequence[Key]) -> Iterator[Line]:
        """Every cell that is still to be measured, as many at once as memory holds."""
        waiting = self.to_do(repeat, keys)
        n_sequences = max(key.n_sequences for key in waiting)
        prompts = [self._prompt(keys[0].kind, repeat, number) for number in range(n_sequences)]
        try:
            while waiting:
                together, refused = self._begin(waiting, repeat, prompts)
                waiting = waiting[len(together) + len(refused) :]
                for key, why in refused.items():
                    yield self._skip(key, repeat, why)
                yield from self._finish(together, repeat)
                if self.plan.contexts[-1] and self._is_late(repeat):
                    return
        finally:
            for runner in self._runners.values():
                runner.drop()

    def _begin(
        self, keys: Sequence[Key], repeat: int, prompts: Sequence[list[int] | ImageText]
    ) -> tuple[list[Key], dict[Key, str]]:
        """Open and warm up sessions in the order of `keys` until memory is full, or what is in the
        context changes. The cells whose sessions are open, and those that do not fit by themselves,
        with the reason."""
        together: list[Key] = []
        refused: dict[Key, str] = {}
        for key in keys:
            if together and {key.build, together[0].build} & {*self.plan.peers}:
                break  # another program is measured alone
            at, longest = key.n_context, self.plan.contexts[-1]
            if together and at != together[0].n_context:
                break
            settings, own = self._cell_settings(key), prompts[: key.n_sequences]
            if longest:
                own = [prompt[: at + key.n_prompt] for prompt in own if isinstance(prompt, list)]
            warm_up = min(len(own[0]) - at, settings.n_batch)
            task = Task(
                *(settings, self._request.sampling, own, key.max_tokens, warm_up),
                n_context=at,
                filled=self._filling(self.plan.filler(key)) if at else None,
                stop_at_end=self.plan.stop_at_end,
            )
            self.on_event(MatrixEvent("start", key, repeat))
            if key.build in self.plan.peers:
                time.sleep(SETTLE_S)
            try:
                self._runners[key.build].begin(key, task)
            except (InsufficientMemoryError, PeerError) as error:
                if together:
                    break  # it may fit when the others are closed
                refused[key] = str(error)
            else:
                together.append(key)
        return together, refused

    def _finish(self, keys: Sequence[Key], repeat: int) -> Iterator[Line]:
        """Process the prompts one after the other, then decode by turns; yield records as
        generations end."""
        last = ""

        def turn(key: Key, goal: int) -> int:
            nonlocal last
            if key.build != last and len(self._runners) > 1:
                time.sleep(SETTLE_S)
            last = key.build
            return self._runners[last].advance(key, goal)

        tokens = {}
        for key in keys:
            tokens[key] = turn(key, 1)
            self.on_event(MatrixEvent("prefilled", key, repeat))
        while tokens:
            key = min(tokens, key=lambda one: tokens[one])
            goal = min(tokens[key] + TURN_TOKENS, key.max_tokens)
            tokens[key] = turn(key, goal)
            if tokens[key] >= key.max_tokens or tokens[key] < goal:
                del tokens[key]
                sample, memory = self._runners[key.build].finish(key)
                self._measured.add((key, repeat))
                yield Measured(**self._of_cell(key), repeat=repeat, sample=sample, memory=memory)
                self.on_event(MatrixEvent("done", key, repeat, sample))

    # -- records -----------------------------------------------------------------------------------

    def _of_cell(self, key: Key) -> dict[str, Any]:
        """What all lines of a cell have."""
        settings = self._cell_settings(key)
        names = dict.fromkeys((*OWN_SETTINGS, *key.settings))
        own = {name: getattr(settings, name) for name in names}
        own["synthetic_acceptance"] = own["synthetic_acceptance"] or None
        if "draft_vocab" in own:
            own["draft_vocab"] = key.axis("draft_vocab")
        return {"run": self._run, "time": now(), "cell": key, "settings": as_read(own)}

    def _skip(self, key: Key, repeat: int, reason: str) -> Skipped:
        self._skipped.add(key)
        self.on_event(MatrixEvent("skipped", key, repeat))
        return Skipped(**self._of_cell(key), reason=brief(reason))

    def _cell_settings(self, key: Key) -> Settings:
        """The settings of one cell; :class:`.MatrixRequest` says which fields are replaced."""
        own: dict[str, Any] = {"synthetic_acceptance": self._settings.synthetic_acceptance}
        own |= {**DRAFT_AXES, **key.settings}
        if own["synthetic_acceptance"] and not key.adaptive:
            own["synthetic_acceptance"] = own["synthetic_acceptance"][: key.n_max] or None
        vocabulary = own["draft_vocab"]
        own["draft_vocab"] = self._request.vocabularies.get(vocabulary, vocabulary)
        n_ctx = self._n_ctx(key.n_prompt, key.n_context)
        return dataclasses.replace(self._settings, n_ctx=n_ctx, draft_n_max=key.depth, **own)

    def _filling(self, filler: Key) -> Settings:
        """Of the session that fills contexts in the way of a cell."""
        n_ctx = self._n_ctx(filler.n_prompt, self.plan.contexts[-1])
        return filling(self._cell_settings(filler), n_ctx, self._model)

    def _n_ctx(self, size: int, n_context: int) -> int:
        """The context of the cells of a size after so many tokens."""
        needed = n_context + self.plan.context_needed(size or self._longest)
        return self._settings.n_ctx or min(padded(needed), self._model.n_ctx_train)


def brief(reason: str) -> str:
    """A reason for the records: of a traceback the last line, of paths the last part."""
    head, traceback, rest = reason.partition("Traceback (most recent call last):")
    if traceback and rest.strip():
        reason = head + rest.strip().splitlines()[-1]
    return re.sub(r"(?:/[^\s/:;,'\"()]+)+/(?=[^\s/:;,'\"()])", "", reason)


# -- one run ---------------------------------------------------------------------------------------


#: Makes a context manager around the run of a matrix; it yields the function to call with events.
Watch = Callable[[Matrix], AbstractContextManager[Callable[[MatrixEvent], None]]]


def run_matrix(
    model: Model, request: MatrixRequest, records: Records, watch: Watch, say: Callable[[str], None]
) -> Matrix:
    """Measure a request with a loaded model; every record goes to the file, then to `records`.
    `say` is called with messages for the user.

    Returns:
        the matrix: whether it was interrupted, and how much is left to do.

    Raises:
        UsageError: settings that the library or the model cannot do, or a run that cannot go on.
    """
    from pyllama_mtp.llama import native

    n_gpu_layers = request.placement.get("n_gpu_layers", -1)
    library = native.load()
    build = Build.of(library, n_gpu_layers, request.plan.libraries[0], model.rpc_servers)
    plan = request.plan_for(model, build.variant, say)
    earlier = None
    if request.resume and request.output:
        earlier = last_run(request.output, Path(model.path).name)
    settings = _choose_threads(request, earlier, say)
    with ExitStack() as stack:
        imaging = None
        if request.picture:
            imaging = stack.enter_context(Imaging(model, request.picture, settings.threads))
            plan = replace(plan, image=imaging.file)
        runners = _runners(request, plan, settings, model, imaging, stack)
        builds = {plan.libraries[0]: build}
        for name, runner in runners.items():
            if isinstance(runner, PeerRunner):
                builds[name] = runner.build
                if runner.missing:
                    say(f"{runner.missing}; the others are measured")
            elif isinstance(runner, LibraryProcess):
                builds[name] = runner.loaded()
        header = make_header(model, library, request, plan, settings, builds)
        if earlier:
            refuse_another_run(earlier, header)
            records.runs[earlier.id] = earlier
            said = f"{len(earlier.measured)} of {plan.n_samples} samples are there"
            say(f"going on with run {earlier.id}: {said}")
        else:
            records.add(header)
        run = earlier or records.runs[header.run]
        matrix = Matrix(model, request, plan, settings, run, runners, imaging)
        matrix.check()
        keep = [records.add]
        if request.output:
            writer = stack.enter_context(Writer(request.output, None if earlier else header))
            keep.insert(0, writer.write)
        matrix.on_event = stack.enter_context(watch(matrix))
        for record in matrix.run():
            for take in keep:
                take(record)
    return matrix


def _choose_threads(
    request: MatrixRequest, earlier: Run | None, say: Callable[[str], None]
) -> Settings:
    """The settings with a fixed number of threads, so that samples can be compared: in place of
    "auto", one less than there are cores for each that other programs keep busy. A run that goes on
    keeps its number."""
    cores = settings_module.available_threads()
    if request.settings.n_threads != "auto" or "n_threads" in request.plan.axes:
        return request.settings
    if earlier:
        threads = earlier.header.settings.get("n_threads") or cores  # chosen when it began
    else:
        threads = machine.threads_beside(cores, machine.busy_cores()) if cores > 1 else 1
        if threads < cores:
            say(
                f"other programs keep {cores - threads} of {cores} cores busy; measuring with "
                f"{counted(threads, 'thread')} (--threads {cores} uses all)"
            )
    return dataclasses.replace(request.settings, n_threads=threads)


def _runners(
    request: MatrixRequest,
    plan: Plan,
    settings: Settings,
    model: Model,
    imaging: Imaging | None,
    stack: ExitStack,
) -> dict[str, Runner | LibraryProcess | PeerRunner]:
    """By the plan's names: the first library in this process, others and other programs in their
    own."""
    path, picture = str(model.path), request.picture
    runners: dict[str, Runner | LibraryProcess | PeerRunner]
    runners = {plan.libraries[0]: stack.enter_context(closing(Runner(model, imaging)))}
    for label, name in zip(plan.libraries[1:], request.libraries[1:], strict=True):
        options = {**request.placement, "mtp": any(plan.depths)}
        process = LibraryProcess(name, label, path, picture, settings.threads, **options)
        runners[label] = stack.enter_context(closing(process))
    n_gpu_layers = request.placement.get("n_gpu_layers", -1)
    files = path, n_gpu_layers, model.info.head, str(imaging.mmproj) if imaging else "", picture
    for name in plan.peers:
        runners[name] = PeerRunner(name, *files)
    return runners
