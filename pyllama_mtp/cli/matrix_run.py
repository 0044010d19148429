"""The work of ``pyllama-mtp matrix`` after its options are checked: load, measure, keep, show."""

from __future__ import annotations

import argparse
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from pyllama_mtp.cli import PROGRAM, SIGNALS, loading, note_signal, on_signal, progress
from pyllama_mtp.errors import DiskFullError, UsageError
from pyllama_mtp.measure.records import last_run

if TYPE_CHECKING:
    from pyllama_mtp.measure.figures import Cell
    from pyllama_mtp.measure.records import Records
    from pyllama_mtp.measure.run import Matrix, MatrixEvent, MatrixRequest

#: Memory, in bytes, that the synthetic model of a first look needs with its sessions side by side.
EXAMPLE_MEMORY = 2 * 2**30
#: Its share of the time.
EXAMPLE_SHARE = 0.8


def first_look(args: argparse.Namespace, request: MatrixRequest) -> Iterator[MatrixRequest]:
    """The requests of a first look: a synthetic model of a usual size, unless disk or memory is
    short, then real text on the demo model. `args` has the model of each in turn."""
    from pyllama_mtp.models.demo import demo_path

    budget_s = request.budget_s
    if example := _example(request):
        share, args.model = EXAMPLE_SHARE, str(example)
        yield replace(request, budget_s=budget_s and share * budget_s)
        budget_s = budget_s and (1 - share) * budget_s
    resume = request.resume
    if resume and request.output:
        run = last_run(request.output, demo_path().name)
        resume = run is not None and run.header.model.name == demo_path().name
    args.model = str(demo_path())
    yield replace(request, budget_s=budget_s, resume=resume)


def each_model(args: argparse.Namespace, request: MatrixRequest) -> Iterator[MatrixRequest]:
    """The request for each model in turn, which `args` has."""
    for model in args.model or (None,):
        args.model = model
        yield replace(request)


def _example(request: MatrixRequest) -> Path | None:
    """The synthetic model, written if it is not there; None: it cannot be, and the user is told."""
    from pyllama_mtp.llama import native
    from pyllama_mtp.models import synth
    from pyllama_mtp.models.memory import available_memory, gigabytes

    path = synth.example_path()
    if (free := available_memory()) < EXAMPLE_MEMORY:
        why = f"{gigabytes(free)} of memory are free, and it takes {gigabytes(EXAMPLE_MEMORY)}"
    elif synth.example_is_there():
        why = ""
    else:
        native.load(request.libraries[0] or None)  # which chooses the types of a mixture
        say(
            "no --model given: writing one of the Qwen3.5-0.8B shape, once: random weights, a head "
            f"that drafts well, 0.5 GB; {path}"
        )
        try:
            with progress.file(path.name) as tell:
                synth.write_example(tell)
            why = ""
        except (DiskFullError, UsageError) as error:
            why = str(error)
    if why:
        say(
            "only the demo model is measured, which is too small to gain much; the synthetic one "
            f"of 0.5 GB is left out: {why}"
        )
        return None
    return path


def measure(args: argparse.Namespace, request: MatrixRequest, found: Records) -> None:
    """Load and measure; every record goes to the file, then to `found`.

    Raises:
        KeyboardInterrupt: at the end, if the user interrupted.
    """
    from pyllama_mtp.llama import native
    from pyllama_mtp.measure.run import run_matrix

    @contextmanager
    def watch(matrix: Matrix) -> Iterator[Callable[[MatrixEvent], None]]:
        with progress.matrix(matrix) as on_event, finished_samples_first(matrix):
            yield on_event

    native.load(request.libraries[0] or None)
    mtp = None if request.usual_depths else any(request.plan.depths)
    fallback = "only depth 0 is measured"
    with loading.open_model(args, mtp=mtp, without="--depths 0", fallback=fallback) as model:
        choose_threads(args, request)  # before workers are there
        matrix = run_matrix(model, request, found, watch, say)
    _say_what_was_dropped(matrix, request)
    if matrix.interrupted:
        raise KeyboardInterrupt


def say(text: str) -> None:
    """Tell the user, on stderr."""
    print(f"{PROGRAM}: {text}", file=sys.stderr)


def choose_threads(args: argparse.Namespace, request: MatrixRequest) -> None:
    """Without --threads: one thread less for every core that other programs keep busy."""
    from pyllama_mtp.measure import machine
    from pyllama_mtp.settings import available_threads

    cores = available_threads()
    if args.n_threads is not None or cores == 1 or "n_threads" in request.plan.axes:
        return
    name = Path(loading.model_path(args)).name
    if request.resume and request.output and (run := last_run(request.output, name)):
        threads = run.header.settings.get("n_threads")  # chosen when the run began
        request.settings = replace(request.settings, n_threads=threads)
        return
    free = max(1, cores - round(machine.busy_cores()))
    if free < cores:
        request.settings = replace(request.settings, n_threads=free)
        say(
            f"other programs keep {cores - free} of {cores} cores busy; measuring with {free} "
            f"thread{'' if free == 1 else 's'} (--threads {cores} uses all)"
        )


def show(cells: list[Cell], how: str, *, per_round: bool = False) -> None:
    """Print the cells to stdout as a table, as Markdown, or as one JSON array."""
    from pyllama_mtp.measure import table
    from pyllama_mtp.measure.profile import cell_profiles

    if how == "json":
        print("[" + ",\n".join(cell.to_json() for cell in cells) + "]")
    elif how == "markdown":
        print(table.markdown_table(cells, per_round=per_round))
    else:
        table.print_matrix(cells, sys.stdout, per_round=per_round)
    if how != "json" and (profiles := cell_profiles(cells)):
        print(f"\n{profiles}")


def _say_what_was_dropped(matrix: Matrix, request: MatrixRequest) -> None:
    """Tell the user which repeats the time budget left out, by prompt size."""
    from pyllama_mtp.measure.plan import duration

    if not matrix.dropped or request.budget_s is None:
        return
    several = len(matrix.plan.classes) > 1
    parts = [
        f"{size}{f' {prompt_class}' if several else ''} ({n} of {matrix.plan.repeat} repeats)"
        for (size, prompt_class), n in Counter(group.kind for group in matrix.dropped).items()
    ]
    say(
        f"left out for the budget of {duration(request.budget_s)}: prompt {', '.join(parts)}; "
        "--resume with more time measures them"
    )


@contextmanager
def finished_samples_first(matrix: Matrix) -> Iterator[None]:
    """Let a signal that ends the command cut a sample short, but not the writing of a finished one.
    Processes that were started are ended after it."""
    usual = {number: signal.getsignal(number) for number in SIGNALS}
    # Ignored signals and other handlers stay.
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
