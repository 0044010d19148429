"""Progress of ``pyllama-mtp matrix`` on stderr: a live bar, or a line per sample in a log."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyllama_mtp.measure.matrix import Event, Matrix
    from pyllama_mtp.measure.plan import Plan


@contextmanager
def progress(matrix: Matrix) -> Iterator[Callable[[Event], None]]:
    """What is to be told of events: a live bar where stderr is a terminal, else plain lines."""
    if not sys.stderr.isatty():
        yield plain_progress(matrix)
        return
    from rich import progress as bars
    from rich.console import Console

    samples = matrix.plan.n_samples
    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.TextColumn("sample {task.completed}/" + str(samples)),
        bars.TimeElapsedColumn(),
        bars.TextColumn("{task.fields[left]}"),
    )
    with bars.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        done = samples - matrix.n_to_do
        task = bar.add_task("", total=samples, completed=done, left="")

        def on_event(event: Event) -> None:
            doing = "decoding" if event.kind == "prefilled" else short_label(event, matrix.plan)
            bar.update(
                task,
                description=doing,
                completed=samples - matrix.n_to_do,
                left=left(event.left_s),
            )

        yield on_event


def plain_progress(matrix: Matrix) -> Callable[[Event], None]:
    """One line per finished sample and per skipped cell."""
    plan = matrix.plan

    def on_event(event: Event) -> None:
        if event.kind == "skipped":
            result = "skipped"
        elif event.measured is not None:
            sample = event.measured.sample
            result = f"prefill {sample.prefill_tps:.1f} tok/s, decode {sample.decode_tps:.1f} tok/s"
        else:
            return
        done = plan.n_samples - matrix.n_to_do
        rest = left(event.left_s)
        print(
            f"[{done}/{plan.n_samples}] {label(event, plan)}: {result}{rest and '; ' + rest}",
            file=sys.stderr,
            flush=True,
        )

    return on_event


def left(seconds: float | None) -> str:
    """ "about 2 min 05 s left"; "" while nothing is known, and at the end."""
    from pyllama_mtp.measure.budget import duration

    return f"about {duration(seconds)} left" if seconds else ""


def label(event: Event, plan: Plan) -> str:
    """ "prompt 512, depth 3, repeat 1"."""
    return ", ".join(
        [_prompt(event, plan), plan.label(event.variant), f"repeat {event.group.repeat + 1}"]
    )


def short_label(event: Event, plan: Plan) -> str:
    """For the bar, which needs room beside it."""
    return f"{event.group.size} tokens, {plan.label(event.variant, short=True)}"


def _prompt(event: Event, plan: Plan) -> str:
    several = len(plan.classes) > 1
    return f"prompt {event.group.size}" + (f" {event.group.prompt_class}" if several else "")
