"""How far a command is, on stderr: a bar on a terminal, a line per result in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import Progress

    from pyllama_mtp.measure.run import Matrix, MatrixEvent

#: Prompts with fewer tokens left to process get no bar.
LONG_PROMPT = 512


def _bar(*columns: str, **options: Any) -> Progress:
    """A progress bar of rich. A column is the name of one of rich's classes, or a text to format.

    rich is imported here, because `--help` must come at once.
    """
    from rich import progress
    from rich.console import Console

    made = (getattr(progress, c)() if c.endswith("Column") else c for c in columns)
    return progress.Progress(*made, console=Console(stderr=True), **options)


@contextmanager
def loading() -> Iterator[Callable[[float], None]]:
    """A bar until the model is loaded; give it the fraction. Without a terminal: nothing."""
    if not sys.stderr.isatty():
        yield lambda fraction: None
        return
    columns = ("BarColumn", "TaskProgressColumn", "TimeRemainingColumn")
    with _bar("loading the model", *columns, transient=True) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda fraction: bar.update(task, completed=fraction)


@contextmanager
def prompt() -> Iterator[Callable[[int, int], None] | None]:
    """A bar while a long prompt is processed; give it (tokens done, tokens in all).

    None where stderr is not a terminal.
    """
    if not sys.stderr.isatty():
        yield None
        return
    counted = "{task.completed:.0f} of {task.total:.0f} tokens"
    bar = _bar("reading the prompt", "BarColumn", counted, "TimeRemainingColumn", transient=True)
    task = bar.add_task("")

    def tell(done: int, total: int) -> None:
        if not bar.live.is_started and total - done >= LONG_PROMPT:
            bar.start()
        bar.update(task, completed=done, total=total)
        if done >= total:
            bar.live.stop()

    try:
        yield tell
    finally:
        bar.live.stop()


@contextmanager
def file(name: str, **options: Any) -> Iterator[Callable[[int, int | None], None]]:
    """A bar while a file is written or read; give it (bytes done, bytes in all)."""
    columns = ("{task.description}", "BarColumn", "DownloadColumn", "TimeRemainingColumn")
    with _bar(*columns, **options) as bar:
        task = bar.add_task(name, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


# -- measurements ----------------------------------------------------------------------------------


@contextmanager
def matrix(matrix: Matrix) -> Iterator[Callable[[MatrixEvent], None]]:
    """Progress of ``matrix``: a function that takes its events."""
    plan = matrix.plan
    if not sys.stderr.isatty():
        began, to_do = time.monotonic(), matrix.n_to_do
        yield lambda event: _print_event(matrix, event, began, to_do)
        return
    counted = "sample {task.completed}/{task.total}"
    columns = ("{task.description}", "BarColumn", counted, "TimeElapsedColumn")
    with _bar(*columns, "TimeRemainingColumn", transient=True) as bar:
        done = plan.n_samples - matrix.n_to_do
        task = bar.add_task("", total=plan.n_samples, completed=done)

        def on_event(event: MatrixEvent) -> None:
            label = f"{event.key.n_prompt} tokens, {plan.label(event.key)}"
            doing = "decoding" if event.kind == "prefilled" else label
            bar.update(task, description=doing, completed=plan.n_samples - matrix.n_to_do)

        yield on_event


def _print_event(matrix: Matrix, event: MatrixEvent, began: float, to_do: int) -> None:
    """One line per finished sample and per skipped cell."""
    from pyllama_mtp.measure.text import size_name

    plan, key, left = matrix.plan, event.key, matrix.n_to_do
    if event.kind == "skipped":
        result = "skipped"
    elif (sample := event.sample) is not None:
        result = f"prefill {sample.prefill_tps:.1f} tok/s, decode {sample.decode_tps:.1f} tok/s"
    else:
        return
    prompt = f"prompt {size_name(key.n_prompt)}"
    prompt += f" {key.prompt_class}" if len(plan.classes) > 1 else ""
    where = f"{prompt}, {plan.label(key)}, repeat {event.repeat + 1}"
    done, result = plan.n_samples - left, result + _left(began, to_do, left)
    line = f"[{done}/{plan.n_samples}] {where}: {result}"
    print(line, file=sys.stderr, flush=True)


def _left(began: float, to_do: int, left: int) -> str:
    """ "; about 2 min 05 s left", at the pace so far; "" at the end."""
    from pyllama_mtp.measure.plan import duration

    if not 0 < left < to_do:
        return ""
    return f"; about {duration((time.monotonic() - began) / (to_do - left) * left)} left"
