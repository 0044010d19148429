#!/usr/bin/env python3
"""Aggregate decode speed of several sequences at once, by how many there are and by draft depth.

    python bench/sequences.py --model FILE.gguf --sequences 1,2,4,8 --depths 0,1,3,auto

A round measures every number of sequences at every depth once, each in a session of its own after a
warm-up in it; the order changes from round to round. Depth 0 is a session without MTP. "auto"
learns from its own rounds, warm-up included. Writes results/NAME.json and .md.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

from benchkit import results
from benchkit.model import model_file
from benchkit.paths import ensure_driver
from benchkit.plan import RATES, Plan, random_prompt
from benchkit.statistics import Spread

DRY_RUN = {"prompt": 12, "tokens": 16, "warmup": 4, "rounds": 1}
Case = tuple[int, "int | str"]  # sequences, depth
Samples = dict[Case, list[dict[str, Any]]]


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    ensure_driver()
    from pyllama_mtp.settings import available_threads

    parser = argparse.ArgumentParser(description="Decode speed of several sequences at once.")
    add = parser.add_argument
    add("--model", type=Path, metavar="FILE", help="GGUF with an MTP head (default: synthetic)")
    add("--sequences", default="1,2,4,8", metavar="N,N,...", help="default: %(default)s")
    add("--depths", default="0,1,3,auto", metavar="K,K,...", help="default: %(default)s")
    add("--prompt", type=int, default=128, metavar="N", help="tokens (default: %(default)s)")
    add("--tokens", type=int, default=128, metavar="N", help="decoded (default: %(default)s)")
    add("--warmup", type=int, default=64, metavar="N", help="decoded before (default: %(default)s)")
    add("--rounds", type=int, default=5, metavar="N", help="default: %(default)s")
    add("--text", type=Path, metavar="FILE", help="prompts are cut from it (default: random)")
    add(
        "--synthetic-acceptance",
        metavar="P,P,...",
        help="imposed acceptance per draft position, unconditional; 'none': the model's own "
        f"(default: {','.join(map(str, RATES))} without --model, else the model's own)",
    )
    add("--threads", type=int, default=available_threads(), metavar="N")
    add("--name", default="sequences", help="of the result files")
    add("--dry-run", action="store_true", help="a few tokens, once, no result files")
    args = parser.parse_args(argv)
    try:
        args.sequences = tuple(int(part) for part in args.sequences.split(","))
        args.depths = tuple(
            part if part == "auto" else int(part) for part in args.depths.split(",")
        )
        args.rates = rates_of(args)
    except ValueError:
        parser.error("--sequences, --depths, --synthetic-acceptance: numbers, separated by commas")
    if args.dry_run:
        vars(args).update(DRY_RUN)
    numbers = (*args.sequences, args.prompt, args.tokens, args.warmup, args.rounds, args.threads)
    if min(numbers) < 1:
        parser.error("sequences, prompt, tokens, warmup, rounds and threads must be at least 1")
    if 0 not in args.depths:
        parser.error("--depths must have 0, which the others are compared with")
    return args


def rates_of(args: argparse.Namespace) -> tuple[float, ...] | None:
    """The imposed acceptance, for as many positions as any depth has; None: the model's own."""
    from pyllama_mtp.settings import AUTO_DEPTH

    given = args.synthetic_acceptance
    if given == "none" or (given is None and args.model):
        return None
    rates = RATES if given is None else tuple(float(part) for part in given.split(","))
    most = max(AUTO_DEPTH if depth == "auto" else depth for depth in args.depths)
    return extended(rates, most)


def extended(rates: tuple[float, ...], n: int) -> tuple[float, ...]:
    """At least `n` rates: each further draft holds as often as the last one that has a rate, given
    that all before it held."""
    before = (1.0, *rates)
    last = before[-1] / before[-2] if before[-2] else 0.0
    more = [rates[-1] * last**k for k in range(1, n - len(rates) + 1)]
    return (*rates, *(round(rate, 4) for rate in more))


def prompts_for(model: Any, args: argparse.Namespace, n: int) -> list[list[int]]:
    """A prompt for each of `n` sequences, all of one length and all different."""
    if not args.text:
        return [random_prompt(args.prompt, model.n_vocab, seed) for seed in range(n)]
    tokens = model.tokenize(args.text.read_text(encoding="utf-8"))
    if len(tokens) < n * args.prompt:
        raise SystemExit(f"{args.text.name} has {len(tokens)} tokens, {n * args.prompt} are needed")
    return [tokens[i * args.prompt : (i + 1) * args.prompt] for i in range(n)]


def measure(model: Any, args: argparse.Namespace, case: Case) -> dict[str, Any]:
    """One case, in a fresh session: figures of all its sequences together."""
    from pyllama_mtp import BatchSession, Settings

    n, depth = case
    settings = Settings(
        n_ctx=Plan.n_ctx(args.prompt + max(args.tokens, args.warmup) + 1),
        n_threads=args.threads,
        draft_n_max=depth,
        synthetic_acceptance=args.rates if depth else None,
    )
    prompts = prompts_for(model, args, n)
    with BatchSession(model, settings, n) as session:
        session.generate(prompts, max_tokens=args.warmup + 1, ignore_eos=True).run()
        run = session.generate(prompts, max_tokens=args.tokens + 1, ignore_eos=True).run()
    found: dict[str, Any] = run.telemetry.to_dict()
    return found


def all_cases(args: argparse.Namespace, number: int) -> list[Case]:
    """The cases of a round: begun with another one each time, depths next to each other."""
    cases = [(n, depth) for n in args.sequences for depth in args.depths]
    by = number * len(args.depths) + number
    by %= len(cases)
    return [*cases[by:], *cases[:by]]


def mean_depth(samples: list[dict[str, Any]]) -> float:
    """Drafts of each sequence in a round, over the rounds with all sequences."""
    counts: Counter[int] = Counter()
    for sample in samples:
        counts.update({int(k): n for k, n in sample["passes"][max(sample["passes"])].items()})
    return sum(k * n for k, n in counts.items()) / sum(counts.values())


def summarize(samples: Samples) -> list[dict[str, Any]]:
    """A line for each case: medians over the rounds; ratios are taken within a round."""
    least = min(n for n, _ in samples)
    lines = []
    for (n, depth), found in samples.items():
        speeds = [sample["decode_tps"] for sample in found]
        ratios, scaling = (
            [a / b["decode_tps"] for a, b in zip(speeds, samples[base], strict=False)]
            for base in ((n, 0), (least, 0))
        )
        lines.append(
            {
                "sequences": n,
                "depth": depth,
                "tokens_per_s": vars(Spread.of(speeds)),
                "ratio": median(ratios),
                "ratios": ratios,
                "scaling": median(scaling),
                "tokens_per_round": median(sample["tokens_per_round"] for sample in found),
                "mean_depth": mean_depth(found),
            }
        )
    return lines


HEAD = ("sequences", "depth", "tok/s", "to no MTP", "per round", "to one", "gain", "mean depth")


def markdown(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    plan = result["plan"]
    rates = plan["synthetic_acceptance"]
    imposed = "imposed at " + ", ".join(map(str, rates)) if rates else "the model's own"
    rows = [
        [
            str(line["sequences"]),
            str(line["depth"]),
            f"{line['tokens_per_s']['median']:.1f}",
            f"{line['ratio']:.3f}",
            f"{min(line['ratios']):.3f}-{max(line['ratios']):.3f}",
            f"{line['scaling']:.2f}",
            f"{line['tokens_per_round']:.2f}",
            f"{line['mean_depth']:.2f}",
        ]
        for line in result["cases"]
    ]
    return "\n".join(
        [
            "# Decode speed of several sequences at once",
            "",
            *results.header_lines(result),
            f"- Model: {plan['model']}; {plan['threads']} threads; per sequence a prompt of "
            f"{plan['prompt']} tokens, {plan['tokens']} decoded",
            f"- Acceptance: {imposed}",
            f"- Rounds: {plan['rounds']}, interleaved",
            "",
            *results.markdown_table(HEAD, rows),
            "",
            "`tok/s`: tokens of all sequences after their first ones, over the wall clock of all",
            "rounds; the median. `to no MTP`: the median of the ratios to depth 0 with as many",
            "sequences, within a round; `per round`: the lowest and the highest. `to one`: to the",
            "fewest sequences without MTP. `gain`: tokens of a sequence per verification pass.",
            '`mean depth`: drafts per sequence and pass, which "auto" chooses.',
        ]
    )


def main(argv: list[str] | None = None) -> int:
    """Measure, print, write after every round."""
    args = parse_arguments(argv)
    from pyllama_mtp import Model
    from pyllama_mtp.llama import native
    from pyllama_mtp.measure.machine import describe_machine

    path = model_file(args.model)
    samples: Samples = {case: [] for case in all_cases(args, 0)}
    with Model(path) as model:
        stamp = native.load().stamp
        for number in range(args.rounds):
            for case in all_cases(args, number):
                samples[case].append(measure(model, args, case))
                speed = samples[case][-1]["decode_tps"]
                label = f"[{number + 1}/{args.rounds}] {case[0]} sequences, depth {case[1]}"
                print(f"{label}: {speed:.1f} tok/s", file=sys.stderr, flush=True)
            names = ("prompt", "tokens", "warmup", "rounds", "threads")
            result = {
                **results.header(describe_machine(), stamp),
                "plan": {
                    "model": path.name,
                    "text": args.text.name if args.text else None,
                    "synthetic_acceptance": args.rates,
                    **{name: getattr(args, name) for name in names},
                },
                "cases": summarize(samples),
                "samples": {f"{n} x {depth}": found for (n, depth), found in samples.items()},
            }
            if not args.dry_run:
                results.write(result, markdown(result), args.name)
    print(markdown(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
