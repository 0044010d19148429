"""Measure prefill and decode speed without MTP and with MTP at several draft
depths, over several prompt sizes.

Every sample is a fresh session: a warm-up, one prompt (prefill) and
--max-tokens tokens of continuation (decode). A repeat measures all variants
side by side on one text; speeds are medians over the repeats, and a ratio is
taken within each repeat. The table goes to stdout, every finished sample to
--output, which is appended to. Ctrl-C keeps the finished samples; --resume goes
on from there.

Without --model, --prompt-sizes, --depths and --image, the command is a first
look: a model of the Qwen3.5-0.8B shape with random weights, written once to
~/.cache (half a gigabyte), then the demo model. At least 3 repeats of 512
tokens of prompt and 128 of answer; no further one begins after 75 seconds of
measuring. docs/measuring.md has the rest.

examples:
  pyllama-mtp matrix --report page
  pyllama-mtp matrix --depths 0,2,3,4,auto --report page
  pyllama-mtp matrix --model Qwen3.5-4B-Q8_0.gguf --prompt-sizes 1k,8k,192k
  pyllama-mtp matrix -m Qwen3.5-4B-Q8_0.gguf --at 1k,8k,64k,192k --repeat 3
  pyllama-mtp matrix --depths 0,3 --repeat 9 --budget 10m --format markdown
  pyllama-mtp matrix --depths 0,3 --rows all,last --sync full,kv
  pyllama-mtp matrix --variants upstream,patched --output libraries.jsonl
  pyllama-mtp matrix --depths 0,3 --peers llama-server,llama-bench
  pyllama-mtp matrix -m model.gguf --image photo.jpg -p 1k --depths 0,3
  pyllama-mtp matrix --model random.gguf --synthetic-acceptance 0.8,0.7,0.6
  pyllama-mtp matrix -m model.gguf --depths 0,3 --format llama-bench
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyllama_mtp.cli import FAILED, PROGRAM, ended_by, options, parsing, progress
from pyllama_mtp.errors import DiskFullError, PyllamaMtpError, UsageError
from pyllama_mtp.files import read_text
from pyllama_mtp.measure.plan import (
    DEPTHS,
    DRAFT_AXES,
    FILLED_SIZES,
    MAX_TOKENS,
    PEERS,
    REPEAT,
    SIZES,
    SWITCHES,
    TEXTS,
    duration,
    parse_duration,
)

if TYPE_CHECKING:
    from pyllama_mtp.measure.figures import Cell
    from pyllama_mtp.measure.prompts import Picture
    from pyllama_mtp.measure.records import Records
    from pyllama_mtp.measure.request import MatrixRequest

#: The demo model's samples are short, so their noise is large and repeats cost little.
DEMO_REPEAT, DEMO_BUDGET = 15, 270.0
#: Without --model, --prompt-sizes, --depths and --image: see `first_look`.
FIRST_SIZES, FIRST_TOKENS, FIRST_BUDGET, FIRST_REPEATS = (512,), 128, 75.0, 3
#: Memory, in bytes, that the synthetic model of a first look needs with its sessions side by side.
EXAMPLE_MEMORY = 2 * 2**30
#: Its share of the time.
EXAMPLE_SHARE = 0.8


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.usage = "%(prog)s [options]"
    group = parser.add_argument_group("what is measured")
    group.add_argument(
        "--depths",
        type=parsing.comma_list(parsing.whole_or_auto(0)),
        metavar="N|auto,...",
        help="drafts per round. 0 is no MTP, with which the others are compared; 'auto' is the "
        "driver's default: as many as pay; every sample learns acceptance anew (default: "
        f"{','.join(map(str, DEPTHS))}, as far as --synthetic-acceptance has rates for them; for a "
        "model without an MTP head 0,auto, with drafts from the text)",
    )
    options.add_parts(group, "ngram")
    group.add_argument(
        *("-p", "--prompt-sizes"),
        type=parsing.comma_list(parsing.tokens),
        metavar="TOKENS,...",
        help="prompt sizes in tokens, those of an image among them; 1k is 1024 (default: "
        f"{','.join(map(str, SIZES))})",
    )
    group.add_argument(
        "--at",
        type=parsing.comma_list(partial(parsing.tokens, least=0)),
        metavar="TOKENS,...",
        help="measure the prompt and the answer with so many tokens in the context before them "
        "(llama-bench's -d), which is filled once per repeat, from one length to the next; "
        f"--prompt-sizes is then one size (default: {FILLED_SIZES[0]}), and classes are source or "
        "text (default: source)",
    )
    parsing.add_whole(
        group,
        "-n",
        "--max-tokens",
        help=f"tokens generated per sample (default: {MAX_TOKENS})",
    )
    parsing.add_whole(
        group,
        "--repeat",
        metavar="R",
        help=f"samples per cell (default: {REPEAT}; for the demo model up to {DEMO_REPEAT}, as "
        "many as fit into 4 min 30 s; in a first look at least 3, and as many as fit into 75 s)",
    )
    add_budget_option(group)
    group.add_argument(
        "--classes",
        type=parsing.comma_list(str),
        metavar="CLASS,...",
        help="kinds of prompts: text (documentation to continue; the default), source (programs to "
        "continue), image (text after --image, whose default it is; text,image measures both); "
        "questions in a chat, after a text of the size: factual, thinking, code, instruction, "
        "humaneval, mtbench; copy (a program to write again, in a row of its own)",
    )
    group.add_argument(
        "--image",
        metavar="FILE",
        help="an image with which the prompts begin. It is encoded anew for each sample, and the "
        "time for that is shown apart from the prefill",
    )
    options.add_vision_option(group)
    group.add_argument(
        "--prompt-file",
        metavar="FILE",
        help="UTF-8 text to cut prompts from (default: text of Python's standard library)",
    )
    output = parser.add_argument_group("output")
    destination = output.add_mutually_exclusive_group()
    destination.add_argument(
        "--output", default="matrix.jsonl", metavar="FILE.jsonl", help="append the samples here"
    )
    destination.add_argument("--no-output", action="store_true", help="write no file")
    output.add_argument(
        "--report",
        metavar="DIR",
        help="at the end, write a page with plots, and tables, into this folder, as 'pyllama-mtp "
        "report' does (pip install 'pyllama-mtp[report]')",
    )
    output.add_argument(
        "--resume",
        action="store_true",
        help="go on with the last run in --output: measure its missing samples. Refused if that "
        "run has another plan",
    )
    parsing.add_format_option(output, "llama-bench")
    options.add_model_options(parser, several=True)
    group = parser.add_argument_group("what is compared, beside depths")
    group.add_argument(
        "--variants",
        type=parsing.comma_list(str),
        metavar="upstream|patched|DIR[:NAME=VALUE...],...",
        help="native libraries to compare, in place of --lib. Each but the first runs in a process "
        "of its own, which loads the model as well; it can have environment variables "
        "(patched,patched:GOMP_SPINCOUNT=300000) and switches of the CPU patches (small_batch, "
        "large_batch, few_rows_attention: patched:small_batch=off)",
    )
    group.add_argument(
        "--axis",
        type=parsing.axis,
        action="append",
        default=[],
        dest="axes",
        metavar="NAME=VALUE,...",
        help="measure with each of these values of a field of Settings, as in ngram=on,off or "
        "cache-type-k=f16,q8_0; may be given several times, for every combination. "
        "n-sequences=1,2,4,8: so many sequences at once. synthetic-acceptance=0.5^6,0.8/0.7/0.6,"
        "none: 0.5 to the power of the position, for 6 positions; these rates; no imposed rates; "
        "golden:qwen3.5: published ones. Fields that concern only drafts vary at depths above 0, "
        "ngram at 'auto'",
    )
    group.add_argument(
        "--peers",
        type=parsing.comma_list(parsing.one_of(tuple(PEERS))),
        default=(),
        metavar="PROGRAM,...",
        help=f"other programs to measure beside this one: {', '.join(PEERS)}, from the folder that "
        "PYLLAMA_MTP_PEERS names, the build of bench/peers.py, or PATH",
    )
    options.add_settings_options(parser, compare=True)
    options.add_sampling_options(parser)
    output.add_argument(
        "--per-round",
        action="store_true",
        help="more columns: drafts, and milliseconds to draft, per round; the share of tokens from "
        "n-gram drafts",
    )


def add_budget_option(parser: argparse._ActionsContainer) -> None:
    """Add --budget."""
    parser.add_argument(
        "--budget",
        type=parsing.told(parse_duration),
        metavar="TIME",
        help="when to stop, as in 90s, 10m, 1h: after it no further repeat begins, nor a longer "
        "context of --at. First repeats come first; what is left out is reported",
    )


def run(args: argparse.Namespace) -> int:
    """Measure, keep every finished sample, print the table."""
    from pyllama_mtp.measure.page import check_report, write_report
    from pyllama_mtp.measure.records import Records
    from pyllama_mtp.models.ggufinfo import read_gguf

    chosen = (args.model, args.prompt_sizes, args.depths, args.image, args.at)
    first = all(one is None for one in chosen)
    request = _request(args, first)
    if args.report:  # last, because it makes the folder
        check_report(args.report)
    for model in args.model or ():  # before the first of them is measured
        own = argparse.Namespace(**{**vars(args), "model": model})
        request.fitting_sizes(read_gguf(options.model_path(own), args.head).context_length)
    found = Records()

    def measure_all() -> None:
        models = args.model or (None,)
        for model, part in first_look(request) if first else ((one, request) for one in models):
            measure(argparse.Namespace(**{**vars(args), "model": model}), part, found)

    code = collect(measure_all, found)
    if found.cells or not code:
        show(found.cells, args.format, per_round=args.per_round)
    if not code and not any(cell.samples for cell in found.cells):
        print(f"{PROGRAM}: error: nothing was measured; see above for the reasons", file=sys.stderr)
        code = FAILED
    if args.report and found.cells:
        page, *_ = write_report(found.cells, args.report, commands=found.commands)
        print(f"report: {page}", file=sys.stderr)
    if request.output and found.cells:
        n_samples = sum(len(one.measured) for one in found.runs.values())
        more = "; --resume goes on" if code else ""
        print(f"samples in {request.output}: {n_samples}{more}", file=sys.stderr)
    return code


def collect(measuring: Callable[[], None], found: Records) -> int:
    """Measure until the end, Ctrl-C or a failure; the exit code."""
    try:
        measuring()
    except (KeyboardInterrupt, PyllamaMtpError) as error:
        if found.cells:
            print("what was measured before:", file=sys.stderr)
        return ended_by(error)
    return 0


def _request(args: argparse.Namespace, first: bool) -> MatrixRequest:
    """The request of the options; `first`: this is a first look."""
    from pyllama_mtp.measure.request import MatrixRequest

    if args.lib is not None and args.variants is not None:
        raise UsageError("--lib is for one library and --variants for several; give one of them")
    named = [*args.axes, *([("n_context", args.at)] if args.at else [])]
    axes: dict[str, Any] = dict(named)
    if len(axes) < len(named):
        raise UsageError("--axis names one axis twice; give all of its values at once")
    switches = {name: DRAFT_AXES[name] for name in SWITCHES}
    for name, usual in switches.items():
        if (values := getattr(args, name)) != (usual,):
            axes[name] = values
    repeat, limit, least = args.repeat, args.budget, 0
    if repeat is None and args.model is None:
        limit = limit or (FIRST_BUDGET if first else DEMO_BUDGET)
        repeat, least = DEMO_REPEAT, FIRST_REPEATS if first and args.budget is None else 0
    return MatrixRequest(
        sizes=FIRST_SIZES if first else args.prompt_sizes,
        depths=args.depths,
        max_tokens=args.max_tokens or (FIRST_TOKENS if first else MAX_TOKENS),
        repeat=repeat or REPEAT,
        classes=args.classes,
        axes=axes,
        settings=options.settings_from(args, "auto", **switches),
        sampling=options.sampling_from(args),
        command=[PROGRAM, *sys.argv[1:]],
        libraries=args.variants or ("" if args.lib is None else args.lib,),
        peers=args.peers,
        placement=options.placement(args),
        text=None if args.prompt_file is None else read_text(args.prompt_file),
        text_name=args.prompt_file or "",
        picture=_picture(args),
        budget_s=limit,
        least_repeats=least,
        output=None if args.no_output else args.output,
        resume=args.resume,
    )


def _picture(args: argparse.Namespace) -> Picture | None:
    """The image of --image."""
    from pyllama_mtp.measure.prompts import Picture

    if args.image is None:
        if args.mmproj is not None:
            raise UsageError("--mmproj is the encoder of --image; give an image, or leave it out")
        return None
    if args.mmproj == "none":
        raise UsageError("--image needs an encoder, which --mmproj none leaves out")
    return Picture.read(Path(args.image), args.mmproj)


# -- measuring -------------------------------------------------------------------------------------


def first_look(request: MatrixRequest) -> Iterator[tuple[str, MatrixRequest]]:
    """The models and requests of a first look: a synthetic model of a usual size, unless disk or
    memory is short, then real text on the demo model."""
    from pyllama_mtp.models.demo import demo_path

    budget_s = request.budget_s
    if example := _example(request):
        yield str(example), replace(request, budget_s=budget_s and EXAMPLE_SHARE * budget_s)
        budget_s = budget_s and (1 - EXAMPLE_SHARE) * budget_s
    yield str(demo_path()), replace(request, budget_s=budget_s)


def _example(request: MatrixRequest) -> Path | None:
    """The synthetic model, written if it is not there; None: it cannot be, and the user is told."""
    from pyllama_mtp.llama import native
    from pyllama_mtp.machine import available_memory
    from pyllama_mtp.memory import gigabytes
    from pyllama_mtp.models import synth

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
    """Load and measure; every record goes to the file, then to `found`. The user is told how much
    the time budget left out.

    Raises:
        KeyboardInterrupt: at the end, if the user interrupted.
    """
    from pyllama_mtp.llama import native
    from pyllama_mtp.measure.run import run_matrix

    native.load(request.libraries[0] or None)
    with options.open_model(args, mtp=request.mtp, without="--depths 0") as model:
        matrix = run_matrix(model, request, found, progress.matrix, say)
    if matrix.interrupted:
        raise KeyboardInterrupt
    if request.budget_s is not None and matrix.n_to_do:
        # Questions, whose answers end by themselves, are of accept, which cannot go on with a run.
        resumes = request.output and not matrix.plan.stop_at_end
        say(
            f"the budget of {duration(request.budget_s)} left out {matrix.n_to_do} of "
            f"{matrix.plan.n_samples} samples; "
            f"{'--resume with more time' if resumes else 'more time'} measures them"
        )


def say(text: str) -> None:
    """Tell the user, on stderr."""
    print(f"{PROGRAM}: {text}", file=sys.stderr)


def show(cells: list[Cell], how: str, *, per_round: bool = False, acceptance: bool = False) -> None:
    """Print the cells to stdout as `how` of --format says. `acceptance`: show
    what it is worth even where no questions were asked."""
    from pyllama_mtp.measure import table

    if how == "json":
        print("[" + ",\n".join(cell.to_json() for cell in table.ordered(cells)) + "]")
        for note in table.waiting_note(cells):
            say(note)
        return
    if how == "llama-bench":
        print(table.llama_bench(cells))
        return
    if how == "markdown":
        print(table.markdown_table(cells, per_round=per_round))
    else:
        table.print_matrix(cells, sys.stdout, per_round=per_round)
    if acceptance or any(cell.prompt_class not in TEXTS for cell in cells):
        from pyllama_mtp.measure.worth import acceptance_markdown

        if more := acceptance_markdown(cells):
            print(f"\n{more}")
