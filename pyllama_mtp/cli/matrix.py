"""``pyllama-mtp matrix``: measure speed over prompt sizes and draft depths."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from pyllama_mtp.cli import FAILED, INTERRUPTED, PROGRAM, common
from pyllama_mtp.errors import PyllamaMtpError, UsageError

if TYPE_CHECKING:
    from pyllama_mtp.measure.cells import Cell
    from pyllama_mtp.measure.matrix import Event, Matrix, Plan
    from pyllama_mtp.settings import Sampling, Settings

DEPTHS = (0, 2, 3, 4)

_EPILOG = """\
Every sample is a fresh session: a short warm-up, then one prompt (prefill) and
--max-tokens tokens of continuation (decode), the end-of-text token ignored.
The depths take turns, so that a machine growing slower slows all alike; figures
are medians over the repeats. Each repeat has a text of its own, the same for
all depths. Times are in seconds, speeds in tokens per second. Depth 0 is
measured once per size, with the defaults of --rows, --sync and the like; what
they vary has a column of its own.

The table goes to stdout, progress to stderr, and every finished cell as one
JSON object to --output, which is appended to, never overwritten. Ctrl-C keeps
what was measured and exits with 130.

examples:
  pyllama-mtp matrix
  pyllama-mtp matrix --model Qwen3.5-4B-Q8_0.gguf --prompt-sizes 1024,8192
  pyllama-mtp matrix --depths 0,3 --repeat 5 --format markdown
  pyllama-mtp matrix --depths 0,3 --rows all,last --sync full,kv
  pyllama-mtp matrix --lib upstream --output upstream.jsonl
  pyllama-mtp matrix --model random.gguf --synthetic-acceptance 0.8,0.7,0.6
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the ``matrix`` command."""
    parser = subparsers.add_parser(
        "matrix",
        help="measure speed: prompt sizes x draft depths, with and without MTP",
        description="Measure prefill and decode speed without MTP and with MTP at several draft "
        "depths, over several prompt sizes.",
        epilog=_EPILOG,
        formatter_class=common.HelpFormatter,
    )
    parser.add_argument(
        "--depths",
        type=common.comma_list(common.whole(0)),
        metavar="N,...",
        help="drafts per round; 0 is no MTP, against which the others are compared (default: "
        f"{','.join(map(str, DEPTHS))}, as far as --synthetic-acceptance has rates for them)",
    )
    parser.add_argument(
        "--prompt-sizes",
        type=common.comma_list(common.whole(1)),
        default="512,1024,2048",
        metavar="TOKENS,...",
        help="prompt sizes in tokens",
    )
    parser.add_argument(
        "--max-tokens",
        type=common.whole(1),
        default=128,
        metavar="N",
        help="tokens generated per sample",
    )
    parser.add_argument(
        "--repeat", type=common.whole(1), default=3, metavar="R", help="samples per cell"
    )
    parser.add_argument(
        "--prompt-file",
        metavar="FILE",
        help="UTF-8 text to cut prompts from (default: sources of Python's standard library)",
    )
    output = parser.add_argument_group("output")
    destination = output.add_mutually_exclusive_group()
    destination.add_argument(
        "--output", default="matrix.jsonl", metavar="FILE.jsonl", help="append the cells here"
    )
    destination.add_argument("--no-output", action="store_true", help="write no file")
    output.add_argument(
        "--format",
        default="table",
        choices=("table", "markdown", "json"),
        help="what to print at the end",
    )
    common.add_model_options(parser)
    common.add_settings_options(parser, compare=True)
    common.add_sampling_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure, keep every finished cell, print the table."""
    from pyllama_mtp.measure.cells import append_cell, check_output

    measured = _prepare(args)
    output = None if args.no_output else args.output
    if output:
        check_output(output)
    finished: list[Cell] = []
    try:
        for cell in measured:
            if output:
                append_cell(output, cell)
            finished.append(cell)
    except (KeyboardInterrupt, PyllamaMtpError) as error:
        if isinstance(error, KeyboardInterrupt):
            print(f"{PROGRAM}: interrupted", file=sys.stderr)
            code = INTERRUPTED
        else:
            print(f"{PROGRAM}: error: {error}", file=sys.stderr)
            code = FAILED
        if finished:
            print("what was measured before:", file=sys.stderr)
    else:
        code = 0
    if finished or not code:
        show(finished, args.format)
    if output and finished:
        print(f"cells appended to {output}: {len(finished)}", file=sys.stderr)
    return code


def _prepare(args: argparse.Namespace) -> Iterator[Cell]:
    """Check every option before anything is loaded; the cells then come as they are measured."""
    from pyllama_mtp.measure.matrix import SWITCHES
    from pyllama_mtp.measure.workload import read_text

    plan = make_plan(args)
    settings = common.settings_from(args, max(plan.depths), **SWITCHES)
    sampling = common.sampling_from(args)
    texts = None if args.prompt_file is None else [read_text(args.prompt_file)]
    return _measure(args, plan, settings, sampling, texts)


def make_plan(args: argparse.Namespace) -> Plan:
    """The plan of the options.

    Raises:
        UsageError: a size, depth or switch named twice, a depth without a synthetic rate, or
            something to compare but no depth above 0.
    """
    from pyllama_mtp.measure.matrix import SWITCHES, Plan

    rates = args.synthetic_acceptance
    depths = args.depths
    if depths is None:
        depths = tuple(depth for depth in DEPTHS if not rates or depth <= len(rates))
    elif rates and max(depths) > len(rates):
        raise UsageError(
            f"--synthetic-acceptance gives {len(rates)} rates, but depth {max(depths)} needs one "
            "for each draft"
        )
    if rates and not any(depths):
        raise UsageError("--synthetic-acceptance needs a depth above 0")
    switches = {name: getattr(args, name) for name in SWITCHES}
    if not any(depths) and switches != {name: (value,) for name, value in SWITCHES.items()}:
        raise UsageError(
            "--rows, --sync, --hidden, --drafting and --draft-vocab need a depth above 0; no MTP "
            "is measured with their defaults only"
        )
    return Plan(args.prompt_sizes, depths, args.max_tokens, args.repeat, **switches)


def _measure(
    args: argparse.Namespace,
    plan: Plan,
    settings: Settings,
    sampling: Sampling,
    texts: list[str] | None,
) -> Iterator[Cell]:
    """Load, measure, yield the cells; KeyboardInterrupt at the end if the user interrupted."""
    from pyllama_mtp import Session, native
    from pyllama_mtp.measure.matrix import Build, Matrix
    from pyllama_mtp.measure.workload import Workload

    library = native.load(args.lib)
    with (
        common.open_model(args, mtp=any(plan.depths), without="--depths 0") as model,
        progress(plan) as on_event,
    ):
        matrix = Matrix(
            model,
            plan,
            settings=settings,
            sampling=sampling,
            open_session=lambda settings: Session(model, settings),
            prompts=Workload(model, texts),
            build=Build.of(library, args.n_gpu_layers),
            on_event=on_event,
        )
        matrix.check()
        with finished_cells_first(matrix):
            yield from matrix.run()
    if matrix.interrupted:
        raise KeyboardInterrupt


@contextmanager
def finished_cells_first(matrix: Matrix) -> Iterator[None]:
    """Let Ctrl-C cut a sample short, but never the writing of the cells that are finished."""
    previous = signal.getsignal(signal.SIGINT)
    if previous is not signal.default_int_handler:  # ignored, or somebody else's
        yield
        return

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        if matrix.measuring:
            raise KeyboardInterrupt
        matrix.interrupted = True

    signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


@contextmanager
def progress(plan: Plan) -> Iterator[Callable[[Event], None]]:
    """A live bar on stderr; where stderr is not a terminal, one line per finished sample."""
    samples = len(plan.sizes) * len(plan.variants) * plan.repeat
    if not sys.stderr.isatty():
        yield _plain_progress(samples, plan)
        return
    from rich import progress as bars
    from rich.console import Console

    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.TextColumn("sample {task.fields[number]}/" + str(samples)),
        bars.TimeElapsedColumn(),
        bars.TextColumn("left"),
        bars.TimeRemainingColumn(),
    )
    total = sum(plan.work(size) for size in plan.sizes) * len(plan.variants) * plan.repeat
    with bars.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("warming up", total=total, number=0)

        def on_event(event: Event) -> None:
            if event.kind == "start":
                number = bar.tasks[0].fields["number"] + 1
                bar.update(task, description=_short_label(event, plan), number=number)
            elif event.kind == "done":
                bar.advance(task, plan.work(event.size))

        yield on_event


def _plain_progress(samples: int, plan: Plan) -> Callable[[Event], None]:
    done = 0

    def on_event(event: Event) -> None:
        nonlocal done
        if event.kind != "done" or event.cell is None:
            return
        done += 1
        cell = event.cell
        if cell.skipped:
            result = "skipped"
        else:
            last = cell.samples[-1]
            result = f"prefill {last.prefill_tps:.1f} tok/s, decode {last.decode_tps:.1f} tok/s"
        print(f"[{done}/{samples}] {_label(event, plan)}: {result}", file=sys.stderr, flush=True)

    return on_event


def _label(event: Event, plan: Plan) -> str:
    mode = plan.label(event.variant) if event.variant else ""
    return f"prompt {event.size}, {mode}, repeat {event.repeat + 1}"


def _short_label(event: Event, plan: Plan) -> str:
    """For the bar, which needs room beside it."""
    mode = plan.label(event.variant, short=True) if event.variant else ""
    return f"{event.size} tokens, {mode}"


def show(cells: list[Cell], how: str) -> None:
    """Print the cells to stdout as a table, as Markdown, or as one JSON array."""
    from pyllama_mtp.measure import table

    if how == "json":
        print("[" + ",\n".join(cell.to_json() for cell in cells) + "]")
    elif how == "markdown":
        print(table.markdown_table(cells))
    else:
        table.print_matrix(cells, sys.stdout)
