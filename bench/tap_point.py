#!/usr/bin/env python3
"""Which hidden state should the MTP block be given: after the trunk's final norm, or before it?

    python bench/tap_point.py                              # the demo model and its prompts
    python bench/tap_point.py --model FILE --prompts FILE.jsonl

Generates from every prompt with both, sampling with the same seeds, and counts drafts and accepted
drafts per position and class. The target chooses the text either way; only the drafts differ. A
prompts file has one JSON object per line: class, prompt, chat (true: put into the chat template).
Writes results/tap-point.json and .md.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from benchkit import results
from benchkit.paths import ensure_driver

POINTS = ("post-norm", "pre-norm")
#: [class][point] -> drafted and accepted per position
Counts = dict[str, dict[str, tuple[list[int], list[int]]]]


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Acceptance by where the hidden state is taken.")
    add = parser.add_argument
    add("--model", type=Path, metavar="FILE", help="GGUF with an MTP head (default: demo)")
    add("--prompts", type=Path, metavar="FILE", help="JSON lines (default: those of the demo)")
    add("--depth", type=int, default=3, metavar="K", help="drafts per round (default: %(default)s)")
    add("--max-tokens", type=int, default=128, metavar="N", help="default: %(default)s")
    add("--temperature", type=float, default=0.8, metavar="T", help="default: %(default)s")
    add("--seeds", type=int, default=8, metavar="N", help="texts per prompt (default: %(default)s)")
    add("--name", default="tap-point", help="of the result files")
    add("--dry-run", action="store_true", help="a few tokens, nothing is written")
    args = parser.parse_args(argv)
    if args.dry_run:
        args.max_tokens, args.seeds = 8, 1
    return args


def add_up(sums: list[int], given: list[int]) -> None:
    """Add position by position."""
    for position, n in enumerate(given):
        sums[position] += n


def count(args: argparse.Namespace) -> tuple[Counts, str]:
    """Drafted and accepted by class, point and position; and the model's name."""
    from pyllama_mtp import Model, Sampling, Session, Settings
    from pyllama_mtp.measure.promptset import demo_prompts, read_prompts
    from pyllama_mtp.models.demo import demo_path

    path = args.model or demo_path()
    counts: Counts = {}
    with Model(path) as model:
        for prompt in read_prompts(args.prompts) if args.prompts else demo_prompts():
            tokens = prompt.tokens(model)
            n_ctx = len(tokens) + args.max_tokens + args.depth + 1
            for point in POINTS:
                settings = Settings(n_ctx=n_ctx, draft_n_max=args.depth, hidden=point)
                with Session(model, settings) as session:
                    for seed in range(args.seeds):
                        sampling = Sampling(temperature=args.temperature, seed=seed)
                        run = session.generate(
                            tokens, max_tokens=args.max_tokens, sampling=sampling
                        )
                        found = run.run().telemetry
                        for name in (prompt.kind, "all"):
                            zeros = ([0] * args.depth, [0] * args.depth)
                            sums = counts.setdefault(name, {}).setdefault(point, zeros)
                            add_up(sums[0], found.drafted)
                            add_up(sums[1], found.accepted)
            print(f"{prompt.kind}: {prompt.text[:40]!r}", file=sys.stderr, flush=True)
    return counts, Path(path).name


def markdown(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    from pyllama_mtp.measure.acceptance_rates import wilson

    depth = result["depth"]
    lines = ["# Where the hidden state is taken: after or before the final norm", ""]
    lines += results.header_lines(result)
    lines += [
        f"- model: {result['model']}; depth {depth}, temperature {result['temperature']}, "
        f"{result['seeds']} texts of at most {result['max_tokens']} tokens per prompt",
        "",
        "Share of drafts at each position that were accepted, with all before them in the round;",
        "in brackets the 95 % interval, drafts taken as independent.",
        "",
    ]
    heads = " | ".join(f"draft {i + 1}" for i in range(depth))
    lines += [f"| class | hidden | {heads} |", "|---|---|" + "---|" * depth]
    for name, points in sorted(result["counts"].items(), key=lambda item: item[0] == "all"):
        for point, (drafted, accepted) in points.items():
            cells = []
            for a, d in zip(accepted, drafted, strict=True):
                low, high = wilson(a, d)
                cells.append(f"{a / d if d else 0:.3f} ({low:.3f}-{high:.3f})")
            lines.append(f"| {name} | {point} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    """Count, print, write."""
    args = parse_arguments(argv)
    ensure_driver()
    from pyllama_mtp import PyllamaMtpError
    from pyllama_mtp.llama import native
    from pyllama_mtp.measure.machine import describe_machine

    try:
        counts, model = count(args)
    except PyllamaMtpError as error:
        print(f"tap_point: {error}", file=sys.stderr)
        return 1
    stamp = native.load().stamp
    result = {
        **results.header(describe_machine(), stamp),
        "model": model,
        "depth": args.depth,
        "max_tokens": args.max_tokens,
        "temperature": args.temperature,
        "seeds": args.seeds,
        "counts": counts,
    }
    text = markdown(result)
    print(text)
    if not args.dry_run:
        results.write(result, text, args.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
