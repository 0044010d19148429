"""What ``pyllama-mtp matrix`` does once its options are checked: load, measure, keep."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from pyllama_mtp.cli import PROGRAM, SIGNALS, loading, note_signal, on_signal
from pyllama_mtp.errors import DiskFullError, UsageError
from pyllama_mtp.measure.recordfile import last_run

if TYPE_CHECKING:
    from pyllama_mtp import Model
    from pyllama_mtp.measure.header import Build
    from pyllama_mtp.measure.matrix import Matrix, SideBySide
    from pyllama_mtp.measure.plan import Plan
    from pyllama_mtp.measure.recordfile import Record, Records, Run
    from pyllama_mtp.measure.runner import Runner
    from pyllama_mtp.measure.worker import WorkerRunner
    from pyllama_mtp.settings import Sampling, Settings


#: Memory that the synthetic model of the first look needs, with its sessions side by side.
EXAMPLE_MEMORY = 2 * 2**30
#: Its part of the time.
EXAMPLE_SHARE = 0.8


@dataclass
class Request:
    """The options, checked.

    Attributes:
        libraries: as given, one for each label of the plan.
        texts: of --prompt-file.
        prompts: says where the text comes from.
        output: the file; None: write none.
        resume: go on with the last run in it.
    """

    plan: Plan
    settings: Settings
    sampling: Sampling
    libraries: tuple[str, ...]
    texts: list[str] | None
    prompts: str
    budget_s: float | None
    output: str | None
    resume: bool = False


def first_look(args: argparse.Namespace, request: Request) -> Iterator[tuple[Any, Request]]:
    """What is measured where nobody named a model: one of the size that people use, with a head
    that drafts well, then real text on the demo model; the options and request of each.

    Where disk or memory is short, the demo model alone.
    """
    from pyllama_mtp.models.demo import demo_path

    budget_s = request.budget_s
    if example := _example(request):
        share = EXAMPLE_SHARE
        named = argparse.Namespace(**{**vars(args), "model": str(example)})
        yield named, replace(request, budget_s=budget_s and share * budget_s)
        budget_s = budget_s and (1 - share) * budget_s
    resume = request.resume
    if resume and request.output:
        run = last_run(request.output, demo_path().name)
        resume = run is not None and run.header["model"]["name"] == demo_path().name
    named = argparse.Namespace(**{**vars(args), "model": str(demo_path())})
    yield named, replace(request, budget_s=budget_s, resume=resume)


def _example(request: Request) -> Path | None:
    """The synthetic model, written if it is not there; None: said why it is not measured."""
    from pyllama_mtp.cli.synth import writing
    from pyllama_mtp.llama import native
    from pyllama_mtp.models import synth
    from pyllama_mtp.models.memory import available_memory, gigabytes

    path = synth.example_path()
    if (free := available_memory()) < EXAMPLE_MEMORY:
        why = f"{gigabytes(free)} of memory are free, and it takes {gigabytes(EXAMPLE_MEMORY)}"
    elif synth.example_is_there():
        why = ""
    else:
        native.load(request.libraries[0] or None)  # it knows the mixtures of types
        print(
            f"{PROGRAM}: no --model given: writing one of the Qwen3.5-0.8B shape, once: random "
            f"weights, a head that drafts well, 0.5 GB; {path}",
            file=sys.stderr,
        )
        try:
            with writing(path.name) as progress:
                synth.write_example(progress)
            why = ""
        except (DiskFullError, UsageError) as error:
            why = str(error)
    if why:
        print(
            f"{PROGRAM}: only the demo model is measured, which is too small to gain much; the "
            f"synthetic one of 0.5 GB is left out: {why}",
            file=sys.stderr,
        )
        return None
    return path


def measure(args: argparse.Namespace, request: Request, found: Records) -> None:
    """Load and measure; every record goes to the file, then to `found`.

    Raises:
        KeyboardInterrupt: at the end, if the user interrupted.
    """
    from pyllama_mtp.cli.matrix_progress import progress
    from pyllama_mtp.llama import native
    from pyllama_mtp.measure.classprompts import Prompts
    from pyllama_mtp.measure.header import Build
    from pyllama_mtp.measure.matrix import Matrix
    from pyllama_mtp.measure.recordfile import Writer

    library = native.load(request.libraries[0] or None)
    mtp = any(request.plan.depths)
    with contextlib.ExitStack() as stack:
        model = stack.enter_context(loading.open_model(args, mtp=mtp, without="--depths 0"))
        choose_threads(args, request)  # before workers are there
        labels = request.plan.libraries
        build = Build.of(library, args.n_gpu_layers, labels[0], args.rpc)
        if not labels[0]:  # one library: what its stamp says
            request.plan = replace(request.plan, libraries=(build.variant,))
        own, builds = _runners(args, request, model, build, stack)
        runners: dict[str, SideBySide] = {**own}
        add_peers(args, request, model, runners, builds)
        header, before = _begin_run(args, request, model, builds, found)
        prompts = Prompts(model, request.texts, request.plan.output_mode)
        matrix = Matrix(
            model,
            request.plan,
            settings=request.settings,
            sampling=request.sampling,
            runners=runners,
            profilers={name: one.profile for name, one in own.items()} if args.profile else {},
            prompts=prompts,
            run=header["run"],
            budget_s=request.budget_s,
            measured=before.measured if before else (),
            skipped=_still_skipped(before) if before else (),
            profiled=[key for key, cell in before.cells.items() if cell.profile] if before else (),
        )
        matrix.check()
        matrix.on_event = stack.enter_context(progress(matrix))
        write = None
        if request.output:
            new = None if before else header
            write = stack.enter_context(Writer(request.output, new)).write
        with finished_samples_first(matrix):
            for record in matrix.run():
                if write:
                    write(record)
                found.add(record)
    _say_what_was_dropped(matrix, request)
    if matrix.interrupted:
        raise KeyboardInterrupt


def choose_threads(args: argparse.Namespace, request: Request) -> None:
    """Without --threads: one thread less for every core that other programs keep busy."""
    from pyllama_mtp.measure import machine
    from pyllama_mtp.settings import available_threads

    cores = available_threads()
    if args.n_threads is not None or cores == 1:
        return
    name = Path(loading.model_path(args)).name
    if request.resume and request.output and (run := last_run(request.output, name)):
        threads = run.header["settings"].get("n_threads")  # chosen when it began
        request.settings = replace(request.settings, n_threads=threads)
        return
    free = max(1, cores - round(machine.busy_cores()))
    if free < cores:
        request.settings = replace(request.settings, n_threads=free)
        print(
            f"{PROGRAM}: other programs keep {cores - free} of {cores} cores busy; measuring with "
            f"{free} thread{'' if free == 1 else 's'} (--threads {cores} uses all)",
            file=sys.stderr,
        )


def _runners(
    args: argparse.Namespace,
    request: Request,
    model: Model,
    build: Build,
    stack: contextlib.ExitStack,
) -> tuple[dict[str, Runner | WorkerRunner], dict[str, Build]]:
    """What measures with each library, and what those are: the first here, others in processes."""
    from pyllama_mtp import Session
    from pyllama_mtp.measure.runner import Runner
    from pyllama_mtp.measure.worker import Load, WorkerRunner

    labels = request.plan.libraries
    runners: dict[str, Runner | WorkerRunner] = {labels[0]: Runner(partial(Session, model))}
    builds = {labels[0]: build}
    for label, name in zip(labels[1:], request.libraries[1:], strict=True):
        mtp = any(request.plan.depths)
        load = Load(name, label, str(model.path), loading.placement(args), mtp)
        worker = stack.enter_context(contextlib.closing(WorkerRunner(load)))
        runners[label], builds[label] = worker, worker.loaded()
    return runners, builds


def add_peers(
    args: argparse.Namespace,
    request: Request,
    model: Model,
    runners: dict[str, SideBySide],
    builds: dict[str, Build],
) -> None:
    """Look for the programs of --peers; those that are missing are named now, and in the table."""
    from pyllama_mtp.measure.header import Build
    from pyllama_mtp.measure.peers import PeerError
    from pyllama_mtp.measure.peers.find import find
    from pyllama_mtp.measure.peers.runner import PeerRunner

    files = str(model.path), args.n_gpu_layers, model.info.head
    for name in request.plan.peers:
        build = Build("", "", "", "", {}, name)
        try:
            peer = find(name, args.peer_dir, args.peer_python, gpu=args.n_gpu_layers != 0)
        except PeerError as error:
            print(f"{PROGRAM}: {error}; the others are measured", file=sys.stderr)
            runners[name] = PeerRunner(error, *files)
        else:
            runners[name] = PeerRunner(peer, *files)
            stamp = (peer.version, peer.upstream_commit, peer.series, peer.backend)
            build = Build(*stamp, {}, name)
        builds[name] = build


def _still_skipped(run: Run) -> set[str]:
    """Cells that a run which goes on cannot measure either; another program may work by now."""
    return {
        key
        for key in run.skipped
        if run.cells[key].program not in run.header["plan"].get("peers", ())
    }


def _begin_run(
    args: argparse.Namespace,
    request: Request,
    model: Model,
    builds: dict[str, Build],
    found: Records,
) -> tuple[Record, Run | None]:
    """The header of the run, and the run of the file that goes on (None: a new one begins)."""
    from pyllama_mtp.cli import version
    from pyllama_mtp.measure.header import make_header
    from pyllama_mtp.measure.recordfile import run_to_resume

    header = make_header(
        uuid.uuid4().hex[:12],
        model,
        request.plan,
        settings=request.settings,
        sampling=request.sampling,
        builds=builds,
        prompts=request.prompts,
        command=[PROGRAM, *sys.argv[1:]],
        version=version(),
    )
    output = request.output if request.resume else None
    earlier = run_to_resume(output, header) if output else None
    if earlier is None:
        found.add(header)
        return header, None
    found.runs[earlier.id] = earlier
    print(
        f"{PROGRAM}: going on with run {earlier.id}: {len(earlier.measured)} of "
        f"{request.plan.n_samples} samples are there",
        file=sys.stderr,
    )
    return earlier.header, earlier


def _say_what_was_dropped(matrix: Matrix, request: Request) -> None:
    """What the time budget left out: repeats per size, and sizes that were not measured at all."""
    from pyllama_mtp.measure.budget import duration

    if not matrix.dropped or request.budget_s is None:
        return
    kinds = list(dict.fromkeys(group.kind for group in matrix.dropped))
    several = len(matrix.plan.classes) > 1
    parts = []
    for size, prompt_class in kinds:
        n = sum(group.kind == (size, prompt_class) for group in matrix.dropped)
        what = f"{size}{f' {prompt_class}' if several else ''}"
        parts.append(f"{what} ({n} of {matrix.plan.repeat} repeats)")
    print(
        f"{PROGRAM}: left out for the budget of {duration(request.budget_s)}: prompt "
        f"{', '.join(parts)}; --resume with more time measures them",
        file=sys.stderr,
    )


@contextmanager
def finished_samples_first(matrix: Matrix) -> Iterator[None]:
    """Let Ctrl-C cut a sample short, but never the writing of one that is finished.

    So do the other signals that end a command, as otherwise nothing that was started would be
    ended.
    """
    usual = {number: signal.getsignal(number) for number in SIGNALS}
    # Others are ignored, or somebody else's.
    known = (on_signal, signal.default_int_handler, signal.SIG_DFL)
    ours = [number for number, handler in usual.items() if handler in known]

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        if matrix.measuring:
            on_signal(number, frame)
        note_signal(number)
        matrix.interrupted = True

    for number in ours:
        signal.signal(number, on_interrupt)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, usual[number])
