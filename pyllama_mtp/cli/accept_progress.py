"""How far ``pyllama-mtp accept`` is, on stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyllama_mtp.measure.accept import Plan
    from pyllama_mtp.measure.acceptance_record import PromptResult


class Progress:
    """One line per generation on stderr; see :func:`progress` for terminals."""

    def __init__(self, total: int) -> None:
        self.total, self.done = total, 0

    def begins(self, kind: str, number: int, context_length: int | None) -> None:
        """A generation begins."""

    def ended(self, result: PromptResult) -> None:
        """A generation has come to its end."""
        self.done += 1
        rounds = len(result.accepted)
        hits = sum(n > 0 for n in result.accepted)
        said = f"first draft accepted in {hits} of {rounds} rounds" if rounds else "no rounds"
        where = label(result.kind, result.prompt, result.context_length)
        print(f"[{self.done}/{self.total}] {where}: {said}", file=sys.stderr, flush=True)


def label(kind: str, number: int, context_length: int | None) -> str:
    """A generation in words."""
    return f"{kind} {number}" + (f", context {context_length}" if context_length else "")


@contextmanager
def progress(plan: Plan) -> Iterator[Progress]:
    """A live bar on stderr; where stderr is not a terminal, one line per generation."""
    if not sys.stderr.isatty():
        yield Progress(plan.size)
        return
    from rich import progress as bars
    from rich.console import Console

    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        bars.TimeElapsedColumn(),
    )
    with bars.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=plan.size)

        class Live(Progress):
            def begins(self, kind: str, number: int, context_length: int | None) -> None:
                bar.update(task, description=label(kind, number, context_length))

            def ended(self, result: PromptResult) -> None:
                bar.advance(task)

        yield Live(plan.size)
