"""Measure how often the MTP head's drafts are accepted, per draft position, for
several classes of prompts and context lengths; and what that is worth on this
machine.

Every prompt is answered with a fixed number of drafts per round, and every
draft is compared with the model's own token. Conditional acceptance at position
i: how often draft i was right when all before it were. Unconditional: how often
drafts 1 to i were all right. The costs of a round of every depth, and of a step
without MTP, are measured too. Acceptance and costs give the speed to expect,
and the best depth.

Prompts: 24 of each class (factual, thinking, code, instruction) come with the
package; the bundled demo model, which knows no others, has its own. Put your
own into a file of JSON lines, in which only "prompt" is needed:

  {"class": "mine", "prompt": "Why?", "chat": true, "thinking": false}

"chat" puts the prompt into the model's chat template, "thinking" is the
template's enable_thinking. For long contexts, text is put before the prompts;
give your own with --context-file.

Tables go to stdout, progress to stderr. --output gets a header, then one JSON
object per generation and table of costs, as they come; --read shows such a file
again. Ctrl-C keeps all results, that of the interrupted generation included,
and exits with 130.

examples:
  pyllama-mtp accept
  pyllama-mtp accept --model Qwen3.5-4B-Q8_0.gguf --output acceptance.jsonl
  pyllama-mtp accept --model FILE --classes code --prompts-per-class 6
  pyllama-mtp accept --model FILE --prompts mine.jsonl --pairs misses.jsonl
  pyllama-mtp accept --model FILE --prompt-file letter.txt --chat
  pyllama-mtp accept --model FILE --context-lengths 1k,16k,64k --cost-repeats 3
  pyllama-mtp accept --read acceptance.jsonl --format markdown
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pyllama_mtp.cli import ended_by, options, parsing, progress
from pyllama_mtp.errors import PyllamaMtpError, UsageError

if TYPE_CHECKING:
    from pyllama_mtp import Model
    from pyllama_mtp.cli.progress import Ended
    from pyllama_mtp.measure.acceptance import AcceptancePlan, AcceptanceRun, Measurement
    from pyllama_mtp.measure.prompts import Prompt
    from pyllama_mtp.measure.records import Lines

#: The default context lengths, up to the model's own.
LENGTHS, DEMO_LENGTHS = (1024, 4096, 16384), (512, 2048)


def lengths(text: str) -> tuple[int, ...]:
    """An argparse type: lengths in tokens separated by commas, or the word none."""
    return () if text == "none" else parsing.comma_list(parsing.tokens)(text)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    _add_prompt_options(parser)
    parsing.add_whole(parser, "--draft-n-max", default=4, metavar="K", help="drafts per round")
    parsing.add_whole(
        parser, "-n", "--max-tokens", default=256, help="most tokens generated per prompt"
    )
    parser.add_argument(
        "--context-lengths",
        type=lengths,
        metavar="TOKENS,...|none",
        help="measure the first prompts of every class again with text before them, so many tokens "
        "in all (default: 1k,4k,16k, up to the model's context length; 512,2k for the demo model)",
    )
    parsing.add_whole(
        parser,
        "--context-prompts",
        default=2,
        help="prompts of every class at each of these lengths",
    )
    parser.add_argument(
        "--context-file",
        metavar="FILE",
        help="UTF-8 text to put before them (default: sources of Python's standard library)",
    )
    parsing.add_whole(
        parser,
        "--cost-repeats",
        default=9,
        least=0,
        metavar="R",
        help="rounds per depth to measure costs; 0: no costs, no break-even",
    )
    _add_output_options(parser)
    options.add_model_options(parser)
    options.add_settings_options(parser)
    options.add_sampling_options(parser)


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
        help="classes of the package's prompts (default: all four; none beside your own prompts)",
    )
    parsing.add_whole(
        group, "--prompts-per-class", help="only the first N prompts of every class (default: all)"
    )


def _add_output_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument(
        "--output", metavar="FILE.jsonl", help="write the run to this file, which must not exist"
    )
    group.add_argument(
        "--pairs",
        metavar="FILE.jsonl",
        help="write every rejected draft here: class, prompt, position, the drafted and the "
        "model's token as ids and text, and the text before it; the file must not exist",
    )
    parsing.add_whole(
        group, "--misses", default=0, least=0, help="list the N commonest rejected drafts"
    )
    parsing.add_format_option(group)
    group.add_argument(
        "--read", metavar="FILE.jsonl", help="measure nothing; show what --output wrote"
    )


def run(args: argparse.Namespace) -> int:
    """Measure, keep every finished result, print the tables."""
    from pyllama_mtp.llama import native
    from pyllama_mtp.measure.acceptance import (
        AcceptanceRun,
        Measurement,
        header,
        read_run,
        refuse_meaningless,
    )
    from pyllama_mtp.measure.machine import describe_machine
    from pyllama_mtp.measure.prompts import Workload, read_text
    from pyllama_mtp.measure.records import Build, accelerators

    if args.read is not None:
        if args.output or args.pairs or args.misses:
            raise UsageError(
                "--read measures nothing: --output, --pairs and --misses do not go with it"
            )
        show(read_run(args.read), args.format, 0)
        return 0
    settings, sampling = options.settings_from(args, args.draft_n_max), options.sampling_from(args)
    refuse_meaningless(settings)
    prompts, source = choose_prompts(args)
    with parsing.new_file(args.output) as output, parsing.new_file(args.pairs) as pairs:
        texts = None if args.context_file is None else [read_text(args.context_file, "context")]
        library = native.load(args.lib)
        with options.open_model(args, mtp=True, without="--draft-n-max 0 to generate") as model:
            plan = make_plan(args, model, prompts, source)
            build = Build.of(library, args.n_gpu_layers, workers=args.rpc_servers)
            devices = accelerators(library, args.n_gpu_layers)
            machine = describe_machine([device.description for device in devices])
            run = AcceptanceRun(header(model, plan, settings, sampling, build, machine))
            with progress.acceptance(plan) as (begins, ended):
                text = Workload(model, texts)
                measurement = Measurement(model, plan, settings, sampling, text, begins)
                if output:
                    output.write(run.header)
                code = _collect(measurement, run, output, pairs, ended)
        if run.results or not code:
            show(run, args.format, args.misses)
        for name, lines in ((args.output, output), (args.pairs, pairs)):
            if lines:
                print(f"written to {name}", file=sys.stderr)
        return code


def is_demo(args: argparse.Namespace) -> bool:
    """Whether the model is the bundled one."""
    from pyllama_mtp.models import demo

    return demo.is_demo(options.model_path(args))


def choose_prompts(args: argparse.Namespace) -> tuple[tuple[Prompt, ...], str]:
    """The prompts of the options, and their source in words.

    Raises:
        UsageError: a file that does not hold prompts, or an unknown class.
    """
    from pyllama_mtp.measure import prompts
    from pyllama_mtp.measure.acceptance import limited
    from pyllama_mtp.measure.prompts import read_text

    if args.chat and args.prompt_file is None:
        raise UsageError('--chat is for --prompt-file; a line of --prompts has "chat": true')
    chosen: list[Prompt] = []
    sources = []
    if args.prompts is not None:
        chosen += prompts.read_prompts(args.prompts)
        sources.append(Path(args.prompts).name)
    elif args.prompt_file is not None:
        text = read_text(args.prompt_file)
        chosen.append(prompts.Prompt(prompts.OWN_CLASS, text, args.chat))
        sources.append(Path(args.prompt_file).name)
    if args.classes or not chosen:
        classes = args.classes or prompts.CLASSES
        prompts.check_classes(classes)  # before the model may be downloaded
        chosen += prompts.prompts_for(options.model_path(args), classes)
        own = "the demo model's own, held out of its training"
        sources.append(own if is_demo(args) else "the package's own")
    return limited(chosen, args.prompts_per_class), " and ".join(sources)


def make_plan(
    args: argparse.Namespace, model: Model, prompts: tuple[Prompt, ...], source: str
) -> AcceptancePlan:
    """The plan of the options; default context lengths fit the model's."""
    from pyllama_mtp.measure.acceptance import AcceptancePlan

    chosen = args.context_lengths
    if chosen is None:
        limit = min(model.n_ctx_train, args.n_ctx or model.n_ctx_train)
        default = DEMO_LENGTHS if is_demo(args) else LENGTHS
        chosen = tuple(each for each in default if each + args.max_tokens <= limit)
    return AcceptancePlan(
        prompts=prompts,
        source=source,
        depth=options.depth_for(model, args.draft_n_max),
        max_tokens=args.max_tokens,
        context_lengths=chosen,
        context_prompts=args.context_prompts,
        cost_repeats=args.cost_repeats,
    )


def _collect(
    measurement: Measurement,
    run: AcceptanceRun,
    output: Lines | None,
    pairs: Lines | None,
    ended: Ended,
) -> int:
    """Take results until the end, Ctrl-C, or a failure; return the exit code."""
    from pyllama_mtp.measure.acceptance import Miss, PromptResult

    try:
        for result in measurement.run():
            run.add(result)
            file = pairs if isinstance(result, Miss) else output
            if file:
                file.write(result)
            if isinstance(result, PromptResult):
                ended(result)
    except (KeyboardInterrupt, PyllamaMtpError) as error:
        return ended_by(error)
    return 0


def show(run: AcceptanceRun, how: str, misses: int) -> None:
    """Print the run's report to stdout: tables, Markdown, or one JSON object."""
    from pyllama_mtp.measure import acceptance_report

    report = acceptance_report.Report.of(run)
    if how == "json":
        print(json.dumps(acceptance_report.json_report(run, report, misses), ensure_ascii=False))
    elif how == "markdown":
        print(acceptance_report.markdown_report(run, report, misses))
    else:
        acceptance_report.print_report(run, report, sys.stdout, misses)
