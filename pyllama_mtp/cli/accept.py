"""``pyllama-mtp accept``: how often drafts are accepted, by class of prompt, and what follows."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pyllama_mtp.cli import FAILED, PROGRAM, interrupted, loading, options, parsing, stopped
from pyllama_mtp.cli.accept_progress import Progress, progress
from pyllama_mtp.errors import PyllamaMtpError, UsageError

if TYPE_CHECKING:
    from pyllama_mtp import Model
    from pyllama_mtp.measure.accept import Measurement, Plan
    from pyllama_mtp.measure.acceptance_record import Lines, Run
    from pyllama_mtp.measure.promptset import Prompt
    from pyllama_mtp.settings import Sampling, Settings

#: Context lengths where none are asked for, as far as the model has them.
LENGTHS, DEMO_LENGTHS = (1024, 4096, 16384), (512, 2048)

_EPILOG = """\
Every prompt is answered at a fixed number of drafts per round, and every draft
compared with what the model chose. Conditional acceptance at position i: how
often draft i was right when all before it were. Unconditional: how often drafts
1 to i were all right. What a round of every depth costs, and a step without
MTP, is measured too; from both follows the speed to expect, and the best depth.

Prompts: 24 of each class (factual, thinking, code, instruction) come with the
package; the bundled demo model, which knows no others, gets its own. Your own
go into a file of JSON lines, in which only "prompt" is needed:

  {"class": "mine", "prompt": "Why?", "chat": true, "thinking": false}

"chat" puts it into the model's chat template, "thinking" is the template's
enable_thinking. Long contexts: text is put before the prompts; give your own
with --context-file.

Tables go to stdout, progress to stderr. --output gets a header, then one JSON
object per generation and table of costs, as they come; --read shows such a file
again. Ctrl-C keeps what was measured, the generation it cut short included, and
exits with 130.

examples:
  pyllama-mtp accept
  pyllama-mtp accept --model Qwen3.5-4B-Q8_0.gguf --output acceptance.jsonl
  pyllama-mtp accept --model FILE --classes code --prompts-per-class 6
  pyllama-mtp accept --model FILE --prompts mine.jsonl --pairs misses.jsonl
  pyllama-mtp accept --model FILE --prompt-file letter.txt --chat
  pyllama-mtp accept --model FILE --context-lengths 1k,16k,64k --cost-repeats 3
  pyllama-mtp accept --read acceptance.jsonl --format markdown
"""


def length(text: str) -> int:
    """An argparse type: tokens, with k for 1024."""
    number = text[:-1] if text[-1:] in "kK" else text
    if not number.isdecimal() or int(number) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a length in tokens, as in 4096 or 4k")
    return int(number) * (1 if number == text else 1024)


def lengths(text: str) -> tuple[int, ...]:
    """An argparse type: lengths separated by commas, or the word none."""
    return () if text == "none" else parsing.comma_list(length)(text)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the ``accept`` command."""
    parser = subparsers.add_parser(
        "accept",
        help="measure how often drafts are accepted, by class of prompt and context length",
        description="Measure how often the MTP head's drafts are accepted, per draft position, for "
        "several classes of prompts and context lengths; and what that is worth on this machine.",
        epilog=_EPILOG,
        formatter_class=parsing.HelpFormatter,
    )
    _add_prompt_options(parser)
    parser.add_argument(
        "--draft-n-max", type=parsing.whole(1), default=4, metavar="K", help="drafts per round"
    )
    parser.add_argument(
        *("-n", "--max-tokens"),
        type=parsing.whole(1),
        default=256,
        metavar="N",
        help="most tokens generated per prompt",
    )
    parser.add_argument(
        "--context-lengths",
        type=lengths,
        metavar="TOKENS,...|none",
        help="measure the first prompts of every class again with text before them, up to these "
        "many tokens in all (default: 1k,4k,16k, as far as the model has them; 512,2k for the demo "
        "model)",
    )
    parser.add_argument(
        "--context-prompts",
        type=parsing.whole(1),
        default=2,
        metavar="N",
        help="how many prompts of every class at each of these lengths",
    )
    parser.add_argument(
        "--context-file",
        metavar="FILE",
        help="UTF-8 text to put there (default: sources of Python's standard library)",
    )
    parser.add_argument(
        "--cost-repeats",
        type=parsing.whole(0),
        default=9,
        metavar="R",
        help="rounds per depth when costs are measured; 0: no costs, no break-even",
    )
    _add_output_options(parser)
    loading.add_model_options(parser)
    options.add_settings_options(parser)
    options.add_sampling_options(parser)
    parser.set_defaults(run=run)


def _add_prompt_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prompts")
    own = group.add_mutually_exclusive_group()
    own.add_argument("--prompts", metavar="FILE.jsonl", help="prompts of your own, see below")
    own.add_argument("--prompt-file", metavar="FILE", help="one prompt of your own, UTF-8 text")
    group.add_argument(
        "--chat", action="store_true", help="put --prompt-file into the model's chat template"
    )
    group.add_argument(
        "--classes",
        type=parsing.comma_list(str),
        metavar="NAME,...",
        help="classes of the package's prompts to measure (default: all four; with prompts of your "
        "own: none)",
    )
    group.add_argument(
        "--prompts-per-class",
        type=parsing.whole(1),
        metavar="N",
        help="only the first N prompts of every class (default: all)",
    )


def _add_output_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument(
        "--output", metavar="FILE.jsonl", help="write the run to this file, which must not exist"
    )
    group.add_argument(
        "--pairs",
        metavar="FILE.jsonl",
        help="write every miss here: class, prompt, position, the drafted and the model's token as "
        "ids and text, and the text before it; the file must not exist",
    )
    group.add_argument(
        "--misses",
        type=parsing.whole(0),
        default=0,
        metavar="N",
        help="list the N commonest misses",
    )
    group.add_argument(
        "--format",
        default="table",
        choices=("table", "markdown", "json"),
        help="what to print at the end",
    )
    group.add_argument(
        "--read", metavar="FILE.jsonl", help="measure nothing; show what --output wrote"
    )


def run(args: argparse.Namespace) -> int:
    """Measure, keep every finished result, print the tables."""
    if args.read is not None:
        return _show_again(args)
    from pyllama_mtp.measure.accept import refuse_meaningless

    settings, sampling = options.settings_from(args, args.draft_n_max), options.sampling_from(args)
    refuse_meaningless(settings)
    prompts, source = choose_prompts(args)
    with _new_file(args.output) as output, _new_file(args.pairs) as pairs:
        return _run(args, prompts, source, settings, sampling, output, pairs)


def _show_again(args: argparse.Namespace) -> int:
    from pyllama_mtp.measure.acceptance_record import read_run

    if args.output or args.pairs or args.misses:
        raise UsageError(
            "--read measures nothing: --output, --pairs and --misses do not go with it"
        )
    show(read_run(args.read), args.format, 0)
    return 0


@contextmanager
def _new_file(name: str | None) -> Iterator[Lines | None]:
    from pyllama_mtp.measure.acceptance_record import Lines

    with contextlib.nullcontext() if name is None else Lines(name) as lines:
        yield lines


def is_demo(args: argparse.Namespace) -> bool:
    """Whether the model is the bundled one."""
    from pyllama_mtp.models import demo

    return demo.is_demo(loading.model_path(args))


def choose_prompts(args: argparse.Namespace) -> tuple[tuple[Prompt, ...], str]:
    """The prompts of the options, and where they come from.

    Raises:
        UsageError: a file that does not hold prompts, or a class that there is none of.
    """
    from pyllama_mtp.measure import promptset
    from pyllama_mtp.measure.accept import limited
    from pyllama_mtp.measure.workload import read_text

    if args.chat and args.prompt_file is None:
        raise UsageError('--chat is for --prompt-file; a line of --prompts has "chat": true')
    found: list[Prompt] = []
    sources = []
    if args.prompts is not None:
        found += promptset.read_prompts(args.prompts)
        sources.append(Path(args.prompts).name)
    elif args.prompt_file is not None:
        text = read_text(args.prompt_file)
        found.append(promptset.Prompt(promptset.OWN_CLASS, text, args.chat))
        sources.append(Path(args.prompt_file).name)
    if args.classes or not found:
        classes = args.classes or promptset.CLASSES
        for name in classes:
            promptset.check_class(name)
        found += promptset.prompts_for(loading.model_path(args), classes)
        own = "the demo model's own, held out of its training"
        sources.append(own if is_demo(args) else "the package's own")
    return limited(found, args.prompts_per_class), " and ".join(sources)


def make_plan(
    args: argparse.Namespace, model: Model, prompts: tuple[Prompt, ...], source: str
) -> Plan:
    """The plan of the options; default context lengths are those that the model has."""
    from pyllama_mtp.measure.accept import Plan

    chosen = args.context_lengths
    if chosen is None:
        limit = min(model.n_ctx_train, args.n_ctx or model.n_ctx_train)
        default = DEMO_LENGTHS if is_demo(args) else LENGTHS
        chosen = tuple(each for each in default if each + args.max_tokens <= limit)
    return Plan(
        prompts=prompts,
        source=source,
        depth=loading.depth_for(model, args.draft_n_max),
        max_tokens=args.max_tokens,
        context_lengths=chosen,
        context_prompts=args.context_prompts,
        cost_repeats=args.cost_repeats,
    )


def _run(
    args: argparse.Namespace,
    prompts: tuple[Prompt, ...],
    source: str,
    settings: Settings,
    sampling: Sampling,
    output: Lines | None,
    pairs: Lines | None,
) -> int:
    from pyllama_mtp import Session
    from pyllama_mtp.llama import native
    from pyllama_mtp.measure.accept import Measurement, header
    from pyllama_mtp.measure.acceptance_record import Run, record
    from pyllama_mtp.measure.header import Build
    from pyllama_mtp.measure.workload import Workload, read_text

    texts = None if args.context_file is None else [read_text(args.context_file, "context")]
    library = native.load(args.lib)
    with loading.open_model(args, mtp=True, without="--draft-n-max 0 to generate") as model:
        plan = make_plan(args, model, prompts, source)
        build = Build.of(library, args.n_gpu_layers, workers=args.rpc)
        found = Run(header(model, plan, settings, sampling, build))
        with progress(plan) as bar:
            measurement = Measurement(
                model,
                plan,
                settings,
                sampling,
                lambda settings: Session(model, settings),
                Workload(model, texts),
                on_prompt=bar.begins,
            )
            if output:
                output.write(record(found.header))
            code = _collect(measurement, found, output, pairs, bar)
    if found.results or not code:
        show(found, args.format, args.misses)
    for name, lines in ((args.output, output), (args.pairs, pairs)):
        if lines:
            print(f"written to {name}", file=sys.stderr)
    return code


def _collect(
    measurement: Measurement, found: Run, output: Lines | None, pairs: Lines | None, bar: Progress
) -> int:
    """Take results until the end, Ctrl-C, or a failure; the exit code."""
    from pyllama_mtp.measure.acceptance_record import PromptResult, miss_record, record

    try:
        for result in measurement.run():
            found.add(result)
            if output:
                output.write(record(result))
            if isinstance(result, PromptResult):
                if pairs:
                    pairs.write(*(miss_record(result, miss) for miss in result.misses))
                bar.ended(result)
        if measurement.interrupted:
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        return interrupted()
    except PyllamaMtpError as error:
        if stopped():
            return interrupted()  # a process of ours that got the signal too
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return FAILED
    return 0


def show(found: Run, how: str, misses: int) -> None:
    """Print the run's report to stdout: tables, Markdown, or one JSON object."""
    from pyllama_mtp.measure import acceptance_table
    from pyllama_mtp.measure.acceptance_report import Report

    report = Report.of(found)
    if how == "json":
        print(json.dumps(acceptance_table.json_report(found, report, misses), ensure_ascii=False))
    elif how == "markdown":
        print(acceptance_table.markdown_report(found, report, misses))
    else:
        acceptance_table.print_report(found, report, sys.stdout, misses)
