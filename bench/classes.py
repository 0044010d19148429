#!/usr/bin/env python3
"""Decode speed and acceptance on real text, by class of prompt.

    python bench/classes.py                                        # the demo model and its prompts
    python bench/classes.py --draft-vocab 512,1024,full            # what a draft vocabulary costs
    python bench/classes.py --model FILE --prompts FILE.jsonl --depths 0,2,3,auto

One session for every depth, or for every draft vocabulary, and one without MTP decode side by side
after every prompt; whichever has the fewest tokens makes the next round. Speeds are all tokens of a
class by their time. "auto" keeps its experience from prompt to prompt. A prompts file has one JSON
object per line: class, prompt, chat (true: put into the chat template). Writes results/NAME.json
and .md.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchkit import lockstep, results
from benchkit.paths import ensure_driver

if TYPE_CHECKING:
    from pyllama_mtp import Session

PLAIN = "no MTP"
#: [class][case]: sums over prompts of n_decoded, decode_s, draft_s, rounds, tried and held (first
#: drafts of the head), looked_up (accepted drafts from the text), by round of the bench.
Sums = dict[str, dict[str, list[dict[str, float]]]]


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Speed and acceptance by class of prompt.")
    add = parser.add_argument
    add("--model", type=Path, metavar="FILE", help="GGUF with an MTP head (default: demo)")
    add("--prompts", type=Path, metavar="FILE", help="JSON lines (default: those of the demo)")
    add("--depths", default="1,2,3,auto", metavar="K,K,...", help="default: %(default)s")
    add("--draft-vocab", metavar="N|FILE|full,...", help="compare these, at the first depth")
    add("--max-tokens", type=int, default=96, metavar="N", help="default: %(default)s")
    add("--rounds", type=int, default=5, metavar="N", help="default: %(default)s")
    add("--threads", type=int, default=1, metavar="N", help="default: %(default)s")
    add("--name", default="classes", help="of the result files")
    add("--dry-run", action="store_true", help="a few tokens, nothing is written")
    args = parser.parse_args(argv)
    if args.dry_run:
        args.max_tokens, args.rounds = 8, 1
    if min(args.max_tokens, args.rounds, args.threads) < 1:
        parser.error("max-tokens, rounds and threads must be at least 1")
    try:
        args.depths = [
            part if part == "auto" else int(part) for part in args.depths.split(",") if part != "0"
        ]
    except ValueError:
        parser.error("--depths: numbers or auto, separated by commas")
    return args


def cases(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Settings of each session, by name."""
    if args.draft_vocab:
        given = [int(part) if part.isdigit() else part for part in args.draft_vocab.split(",")]
        drafting = {
            f"vocab {part}": {"draft_n_max": args.depths[0], "draft_vocab": part} for part in given
        }
    else:
        drafting = {
            "auto" if depth == "auto" else f"depth {depth}": {"draft_n_max": depth}
            for depth in args.depths
        }
        if "auto" in args.depths:
            drafting["auto, head only"] = {"draft_n_max": "auto", "ngram": False}
    return {PLAIN: {"draft_n_max": 0}, **drafting}


def one_round(
    sessions: dict[str, Session], prompts: list[tuple[str, list[int]]], max_tokens: int
) -> dict[str, dict[str, dict[str, float]]]:
    """Sums by class and case."""
    sums: dict[str, dict[str, dict[str, float]]] = {}
    for name, prompt in prompts:
        for case, generation in lockstep.decode(sessions, prompt, max_tokens).items():
            t = generation.telemetry
            new = {
                "n_decoded": t.n_generated - 1,
                "decode_s": t.decode_s,
                "draft_s": t.time_s["draft"],
                "rounds": t.rounds,
                "tried": sum(t.drafted[:1]),
                "held": sum(t.accepted[:1]),
                "looked_up": t.looked_up["accepted"],
            }
            for key in (name, "all"):
                old = sums.setdefault(key, {}).setdefault(case, dict.fromkeys(new, 0.0))
                for field, value in new.items():
                    old[field] += value
    return sums


def table(sums: Sums) -> list[str]:
    """Markdown lines."""
    from statistics import median

    def speed(found: dict[str, float]) -> float:
        return found["n_decoded"] / found["decode_s"]

    rows = []
    for name, by_case in sorted(sums.items(), key=lambda item: (item[0] == "all", item[0])):
        for case, rounds in by_case.items():
            plain = by_case[PLAIN]
            ratios = [speed(a) / speed(b) for a, b in zip(rounds, plain, strict=True)]
            total = {field: sum(each[field] for each in rounds) for field in rounds[0]}
            drafted = total["tried"] > 0
            rows.append(
                [
                    name,
                    case,
                    f"{median(map(speed, rounds)):.0f}",
                    f"{median(ratios):.3f}",
                    f"{total['held'] / total['tried']:.3f}" if drafted else "-",
                    f"{total['n_decoded'] / total['rounds']:.2f}",
                    f"{100 * total['looked_up'] / total['n_decoded']:.0f}",
                    f"{1000 * total['draft_s'] / total['rounds']:.2f}" if drafted else "-",
                ]
            )
    head = ["class", "case", "tok/s", "ratio", "first drafts accepted", "tokens per round"]
    head.append("% looked up")
    return results.markdown_table([*head, "ms to draft per round"], rows)


def run(args: argparse.Namespace) -> int:
    """Round after round; the exit code."""
    from pyllama_mtp import Model, Session, Settings
    from pyllama_mtp.llama import native
    from pyllama_mtp.measure.machine import describe_machine
    from pyllama_mtp.measure.promptset import demo_prompts, read_prompts
    from pyllama_mtp.models.demo import demo_path

    path = args.model or demo_path()
    chosen = read_prompts(args.prompts) if args.prompts else demo_prompts()
    sums: Sums = {}
    with contextlib.ExitStack() as stack:
        model = stack.enter_context(Model(path))
        prompts = [(prompt.kind, prompt.tokens(model)) for prompt in chosen]
        n_ctx = max(len(prompt) for _, prompt in prompts) + args.max_tokens + 16
        sessions = {
            name: stack.enter_context(
                Session(model, Settings(n_ctx=n_ctx, n_threads=args.threads, **options))
            )
            for name, options in cases(args).items()
        }
        one_round(sessions, prompts[:2], 16)  # warm-up
        for number in range(args.rounds):
            for name, by_case in one_round(sessions, prompts, args.max_tokens).items():
                for case, found in by_case.items():
                    sums.setdefault(name, {}).setdefault(case, []).append(found)
            print(f"[{number + 1}/{args.rounds}]", file=sys.stderr)
    result = {
        **results.header(describe_machine(), native.load().stamp),
        "model": Path(path).name,
        "max_tokens": args.max_tokens,
        "threads": args.threads,
        "rounds": args.rounds,
        "sums": sums,
    }
    lines = [
        "# Decode speed and acceptance by class of prompt",
        "",
        *results.header_lines(result),
        f"- Model: {result['model']}; {args.max_tokens} tokens after each of {len(prompts)} "
        f"prompts, greedy, {args.threads} threads, {args.rounds} rounds",
        "",
        *table(sums),
        "",
        "Sessions decode side by side; `ratio` is to no MTP, the median of the rounds' ratios. "
        "`% looked up`: tokens that were drafted from earlier in the text, not by the head.",
    ]
    print("\n".join(lines))
    if not args.dry_run:
        results.write(result, "\n".join(lines), args.name)
    return 0


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    args = parse_arguments(argv)
    ensure_driver()
    from pyllama_mtp import PyllamaMtpError

    try:
        return run(args)
    except PyllamaMtpError as error:
        print(f"classes: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
