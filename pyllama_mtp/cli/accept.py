"""Measure how often the MTP head's drafts are accepted, by draft position, class of
prompt and context length; and what that is worth on this machine.

This is a matrix of questions: each is answered without MTP and with a fixed
number of drafts per round, which takes hours where a model is slow: --budget
bounds it. Prompts: 24 of each class (factual, thinking, code,
instruction) come with the package; the demo model has its own. Your own are
JSON lines, in which only "prompt" is needed:

  {"class": "mine", "prompt": "Why?", "chat": true, "thinking": false}

examples:
  pyllama-mtp accept
  pyllama-mtp accept --model FILE --classes code --prompts-per-class 6
  pyllama-mtp accept --model FILE --prompts mine.jsonl --pairs misses.jsonl
  pyllama-mtp accept --model FILE --context-lengths 1k,16k --output FILE.jsonl
  pyllama-mtp accept --read FILE.jsonl --format markdown
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from pyllama_mtp.cli import PROGRAM, matrix, options, parsing
from pyllama_mtp.errors import UsageError
from pyllama_mtp.files import read_text
from pyllama_mtp.measure.plan import Plan, switches_of

if TYPE_CHECKING:
    from pyllama_mtp.measure.prompts import Prompt
    from pyllama_mtp.measure.run import MatrixRequest

#: The default context lengths, as far as the model's own.
LENGTHS, DEMO_LENGTHS = (1024, 4096, 16384), (512, 2048)


def lengths(text: str) -> tuple[int, ...]:
    """An argparse type: lengths in tokens separated by commas, or the word none."""
    return () if text == "none" else parsing.comma_list(parsing.tokens)(text)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.usage = "%(prog)s [options]"
    group = parser.add_argument_group("prompts")
    own = group.add_mutually_exclusive_group()
    own.add_argument("--prompts", metavar="FILE.jsonl", help="prompts of your own, see above")
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
        help="UTF-8 text to put before them (default: text of Python's standard library)",
    )
    parsing.add_whole(parser, "--draft-n-max", default=4, metavar="K", help="drafts per round")
    parsing.add_whole(
        parser, "-n", "--max-tokens", default=256, help="most tokens generated per prompt"
    )
    matrix.add_budget_option(parser)
    group = parser.add_argument_group("output")
    group.add_argument("--output", metavar="FILE.jsonl", help="append the samples to this file")
    group.add_argument(
        "--pairs",
        metavar="FILE.jsonl",
        help="write every rejected draft here: class, prompt, position, the drafted and the "
        "model's token as ids and text, and the text before it; the file must not exist",
    )
    parsing.add_format_option(group)
    group.add_argument(
        "--read", metavar="FILE.jsonl", help="measure nothing; show what a file of a matrix has"
    )
    options.add_model_options(parser)
    options.add_settings_options(parser)
    options.add_sampling_options(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, keep every finished sample, print the tables."""
    from pyllama_mtp.measure.records import Records, check_output, read_cells
    from pyllama_mtp.measure.worth import acceptance_rows, rejected

    if args.read is not None and args.output:
        raise UsageError("--read measures nothing; leave --output out")
    request = None if args.read is not None else _request(args)
    if args.output:
        check_output(args.output)
    code, records = 0, Records()
    with parsing.new_file(args.pairs) as pairs:
        if request:
            code = matrix.collect(
                lambda: matrix.measure(args, request, records, "--draft-n-max 0 to generate"),
                records,
            )
        cells = records.cells if request else read_cells(args.read)
        if pairs:
            pairs.write(*rejected(cells))
    if args.format == "json":
        print(json.dumps(acceptance_rows(cells)))
    elif cells:
        matrix.show(cells, args.format, acceptance=True)
    if args.pairs:
        print(f"written to {args.pairs}", file=sys.stderr)
    return code


def _request(args: argparse.Namespace) -> MatrixRequest:
    """Check every option before anything is loaded."""
    from pyllama_mtp.measure import prompts
    from pyllama_mtp.measure.run import MatrixRequest
    from pyllama_mtp.models import demo

    settings = options.settings_from(args, args.draft_n_max)
    if settings.synthetic_acceptance is not None:
        raise UsageError(
            "imposed acceptance cannot be measured: leave --synthetic-acceptance out; 'pyllama-mtp "
            "matrix' measures speed with it"
        )
    if settings.p_min:
        raise UsageError(
            "acceptance per position means something only if every draft is made: leave --p-min "
            "out, which stops drafting at improbable ones"
        )
    own, sources = _own_prompts(args)
    packaged: tuple[str, ...] = args.classes or (() if own else prompts.CLASSES)
    counts = Counter(one.kind for one in own)
    if packaged:
        prompts.check_classes(packaged)  # before the model may be downloaded
        path = options.model_path(args)
        counts.update(one.kind for one in prompts.prompts_for(path, packaged))
        is_demo = demo.is_demo(path)
        sources.append("the demo model's own" if is_demo else "the package's own")
    else:
        is_demo = args.model is None
    most = args.prompts_per_class or max(counts.values())
    chosen = args.context_lengths
    usual: tuple[int, ...] = DEMO_LENGTHS if is_demo else LENGTHS
    texts = None
    if args.context_file is not None:
        texts = [read_text(args.context_file, "context")]
    plan = Plan(
        (0, *sorted(usual if chosen is None else chosen)),
        (0, args.draft_n_max),
        args.max_tokens,
        args.context_prompts,
        switches_of(settings),
        classes=tuple(counts),
        prompts=" and ".join(sources),
        stop_at_end=True,
        repeats={name: min(n, most) for name, n in counts.items()},
    )
    return MatrixRequest(
        plan,
        settings,
        options.sampling_from(args),
        [PROGRAM, *sys.argv[1:]],
        ("" if args.lib is None else args.lib,),
        options.placement(args),
        texts,
        questions=own,
        log_misses=args.pairs is not None,
        budget_s=matrix.budget(args),
        output=args.output,
        usual_sizes=chosen is None,
    )


def _own_prompts(args: argparse.Namespace) -> tuple[list[Prompt], list[str]]:
    """The user's prompts, and where they come from."""
    from pyllama_mtp.measure import prompts

    if args.chat and args.prompt_file is None:
        raise UsageError('--chat is for --prompt-file; a line of --prompts has "chat": true')
    if args.prompts is not None:
        return prompts.read_prompts(args.prompts), [Path(args.prompts).name]
    if args.prompt_file is not None:
        text = read_text(args.prompt_file)
        own = [prompts.Prompt(prompts.OWN_CLASS, text, args.chat)]
        return own, [Path(args.prompt_file).name]
    return [], []
