"""Commands that measure what drafting is worth: how often drafts are accepted, what they cost."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from pyllama_mtp.cli import PROGRAM, matrix, options, parsing
from pyllama_mtp.errors import UsageError

if TYPE_CHECKING:
    from pyllama_mtp.measure.request import MatrixRequest


class Accept:
    """Measure how often the MTP head's drafts are accepted, by draft position, class of
    prompt and context length; and what that is worth on this machine.

    This is a matrix of questions: each is answered without MTP and with a fixed
    number of drafts per round, which takes hours where a model is slow: --budget
    bounds it. Prompts: 24 of each class (factual, thinking, code,
    instruction; copy: a program to write again) come with the package; the demo
    model has its own. humaneval and mtbench (first turns) are published sets, which
    come with other packages. Your own are JSON lines, in which only "prompt" is
    needed; SPEED-Bench's lines are taken, too:

      {"class": "mine", "prompt": "Why?", "chat": true, "thinking": false}

    Without an MTP head, drafts from the text are measured.

    examples:
      pyllama-mtp accept
      pyllama-mtp accept --model FILE --classes code --prompts-per-class 6
      pyllama-mtp accept --model FILE --prompts mine.jsonl
      pyllama-mtp accept --model FILE --context-lengths 1k,16k --output FILE.jsonl
      pyllama-mtp accept --read FILE.jsonl --format markdown
    """

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        """Add the options."""
        parser.usage = "%(prog)s [options]"
        group = parser.add_argument_group("prompts")
        group.add_argument("--prompts", metavar="FILE.jsonl", help="prompts of your own, see above")
        group.add_argument(
            "--classes",
            type=parsing.comma_list(str),
            metavar="NAME,...",
            help="classes of prompts, see above (default: factual, thinking, code, instruction; "
            "none beside your own prompts)",
        )
        parsing.add_whole(
            group,
            "--prompts-per-class",
            help="only the first N prompts of every class (default: all)",
        )
        parser.add_argument(
            "--context-lengths",
            type=lengths,
            metavar="TOKENS,...|none",
            help="measure the first prompts of every class again with text before them, so many "
            "tokens in all (default: 1k,4k,16k, up to the model's context length; 512,2k for the "
            "demo model)",
        )
        parsing.add_whole(
            parser,
            "--context-prompts",
            default=2,
            help="prompts of every class at each of these lengths",
        )
        parsing.add_whole(parser, "--draft-n-max", default=4, metavar="K", help="drafts per round")
        parsing.add_whole(
            parser, "-n", "--max-tokens", default=256, help="most tokens generated per prompt"
        )
        matrix.add_budget_option(parser)
        group = parser.add_argument_group("output")
        group.add_argument("--output", metavar="FILE.jsonl", help="append the samples to this file")
        parsing.add_format_option(group)
        group.add_argument(
            "--read", metavar="FILE.jsonl", help="measure nothing; show what a file of a matrix has"
        )
        options.add_model_options(parser)
        options.add_settings_options(parser)
        options.add_sampling_options(parser)

    @staticmethod
    def run(args: argparse.Namespace) -> int:
        """Measure, keep every finished sample, print the tables."""
        from pyllama_mtp.measure.records import Records, read_cells
        from pyllama_mtp.measure.worth import acceptance_rows

        if args.read is not None and args.output:
            raise UsageError("--read measures nothing; leave --output out")
        request = None if args.read is not None else _questions_request(args)
        code, records = 0, Records()
        if request:
            code = matrix.collect(lambda: matrix.measure(args, request, records), records)
        cells = records.cells if request else read_cells(args.read)
        if args.format == "json":
            print(json.dumps(acceptance_rows(cells)))
        elif cells:
            matrix.show(cells, args.format, acceptance=True)
        return code


#: The default context lengths, as far as the model's own.
LENGTHS, DEMO_LENGTHS = (1024, 4096, 16384), (512, 2048)


def lengths(text: str) -> tuple[int, ...]:
    """An argparse type: lengths in tokens separated by commas, or the word none."""
    return () if text == "none" else parsing.comma_list(parsing.tokens)(text)


def _questions_request(args: argparse.Namespace) -> MatrixRequest:
    """Check every option before anything is loaded."""
    from pyllama_mtp.measure import prompts
    from pyllama_mtp.measure.request import MatrixRequest
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
    asked = [] if args.prompts is None else prompts.read_prompts(args.prompts)
    packaged: tuple[str, ...] = args.classes or (() if asked else prompts.CLASSES)
    prompts.check_classes(packaged)  # before the model may be downloaded
    path = options.model_path(args)
    asked += prompts.prompts_for(path, packaged)
    counts = Counter(one.kind for one in asked)
    most = args.prompts_per_class or max(counts.values())
    chosen = args.context_lengths
    usual: tuple[int, ...] = DEMO_LENGTHS if demo.is_demo(path) else LENGTHS
    return MatrixRequest(
        sizes=(0, *sorted(usual if chosen is None else chosen)),
        fewer_sizes=chosen is None,
        depths=(0, args.draft_n_max),
        else_text=True,
        max_tokens=args.max_tokens,
        repeat=args.context_prompts,
        repeats={name: min(n, most) for name, n in counts.items()},
        classes=tuple(counts),
        prompts=", ".join([*([Path(args.prompts).name] if args.prompts else []), *packaged]),
        stop_at_end=True,
        settings=settings,
        sampling=options.sampling_from(args),
        command=[PROGRAM, *sys.argv[1:]],
        libraries=("" if args.lib is None else args.lib,),
        placement=options.placement(args),
        questions=asked,
        budget_s=args.budget,
        output=args.output,
    )


# -- costs -----------------------------------------------------------------------------------------


class Tune:
    """Measure what drafting and verifying cost for a model on this machine; print the
    acceptance from which each draft depth pays, and recommend a depth.

    This is a matrix of the depths 0 to --limit after one prompt. Which depth is the
    fastest depends on how often drafts are accepted: see 'pyllama-mtp accept'.
    Without an MTP head, drafts from the text are measured, which have no depth.

    examples:
      pyllama-mtp tune
      pyllama-mtp tune --model Qwen3.5-4B-Q8_0.gguf --prompt-size 4096
      pyllama-mtp tune --model FILE --draft-vocab full --limit 4
    """

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        """Add the options."""
        parser.usage = "%(prog)s [options]"
        parsing.add_whole(parser, "--limit", default=6, help="greatest depth to measure")
        parsing.add_whole(
            parser,
            "--prompt-size",
            default=512,
            metavar="TOKENS",
            help="tokens in the context when the measurement begins",
        )
        parsing.add_whole(parser, "--repeat", default=5, metavar="R", help="samples per depth")
        parser.add_argument(
            "--json", action="store_true", help="print the costs in seconds, as JSON"
        )
        options.add_model_options(parser)
        options.add_settings_options(parser)

    @staticmethod
    def run(args: argparse.Namespace) -> int:
        """Measure and print."""
        from pyllama_mtp.measure.records import Records
        from pyllama_mtp.measure.request import MatrixRequest
        from pyllama_mtp.measure.table import waiting_note
        from pyllama_mtp.measure.worth import costs_of, doubt, tune_markdown

        request = MatrixRequest(
            sizes=args.prompt_size,
            depths=tuple(range(args.limit + 1)),
            else_text=True,
            max_tokens=TOKENS,
            repeat=args.repeat,
            settings=options.settings_from(args, args.limit),
            command=[PROGRAM, *sys.argv[1:]],
            libraries=("" if args.lib is None else args.lib,),
            placement=options.placement(args),
        )
        records = Records()
        matrix.measure(args, request, records)
        cells = records.cells
        if any(cell.from_text for cell in cells):
            matrix.show(cells, "json" if args.json else "markdown")
            matrix.say("there is no depth to tune: drafts from the text cost no pass of their own")
            return 0
        costs = costs_of(cells)
        if costs is None:
            raise UsageError("; ".join(str(cell.skipped) for cell in cells if cell.skipped))
        for note in waiting_note(cells):
            matrix.say(note)
        if args.json:
            print(json.dumps({**dataclasses.asdict(costs), "contradiction": doubt(costs)}))
        else:
            print(tune_markdown(costs, cells[0].slow_types))
        return 0


#: Tokens generated per sample.
TOKENS = 48
