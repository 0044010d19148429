#!/usr/bin/env python3
"""Prefill with MTP against prefill without, in pairs close enough for a machine that is not quiet.

    python bench/prefill_pairs.py --model FILE.gguf --sizes 2048,8192 --rounds 6

bench/prefill.py measures whole prompts in turn; where the speed of a machine drifts by several
percent within a minute, that is too coarse. Here three sessions are open at once, two without MTP
and one with it, and process the same prompt in steps of --step tokens, turn and turn about; which
goes first changes with every step, and which is made first with every round. A round's figure is
the sum over its steps. The two sessions without MTP are alike in everything but the memory they
got: their ratio is what the machine does by itself. Writes results/NAME.json and .md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchkit import results
from benchkit.model import model_file
from benchkit.paths import ensure_driver
from benchkit.plan import random_prompt

BASE, CONTROL, MTP = CASES = ("no MTP", "no MTP again", "MTP")
WARMUP = (512, 8)  # tokens of prompt, generated tokens
Round = dict[str, float]
Rounds = list[Round]


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    ensure_driver()
    from pyllama_mtp.settings import available_threads

    parser = argparse.ArgumentParser(description="Prefill with MTP against prefill without.")
    add = parser.add_argument
    add("--model", type=Path, metavar="FILE", help="GGUF with an MTP head (default: synthetic)")
    add("--sizes", default="2048,8192", metavar="N,N,...", help="default: %(default)s")
    add("--rounds", type=int, default=6, metavar="N", help="a multiple of 3 (default: %(default)s)")
    add("--step", type=int, default=512, metavar="N", help="default: %(default)s")
    add("--depth", type=int, default=3, metavar="K", help="drafts per round (default: %(default)s)")
    add("--threads", type=int, default=available_threads(), metavar="N")
    add("--name", default="prefill-pairs", help="of the result files")
    args = parser.parse_args(argv)
    try:
        args.sizes = tuple(int(part) for part in args.sizes.split(","))
    except ValueError:
        parser.error("--sizes: whole numbers, separated by commas")
    if min((*args.sizes, args.rounds, args.step, args.depth)) < 1:
        parser.error("sizes, rounds, step and depth must be at least 1")
    if args.rounds % len(CASES):
        parser.error("--rounds must be a multiple of 3: each session is made first equally often")
    return args


def turned(cases: Sequence[str], by: int) -> list[str]:
    """The cases, begun with another one."""
    by %= len(cases)
    return [*cases[by:], *cases[:by]]


def text_of(model: Any, size: int, number: int) -> list[int]:
    """Random tokens, one more than the prompt: the last one is never processed."""
    prompt = random_prompt(size + 1, model.n_vocab)
    return [(token + number) % model.n_vocab for token in prompt]


def open_session(model: Any, args: argparse.Namespace, prompt: list[int], **options: Any) -> Any:
    """A session that has had its warm-up."""
    from pyllama_mtp import Session, Settings

    n_ctx = len(prompt) + WARMUP[1] + 63
    session = Session(model, Settings(n_ctx=n_ctx, n_threads=args.threads, **options))
    session.generate(prompt[: WARMUP[0]], max_tokens=WARMUP[1], ignore_eos=True).run()
    session.reset()
    return session


def one_round(model: Any, args: argparse.Namespace, size: int, number: int) -> Round:
    """Seconds of the whole prompt by case: a session each."""
    prompt, order = text_of(model, size, number), turned(CASES, number)
    found = dict.fromkeys(CASES, 0.0)
    sessions: dict[str, Any] = {}
    try:
        for case in order:
            depth = args.depth if case == MTP else 0
            sessions[case] = open_session(model, args, prompt, draft_n_max=depth)
        for end in [*range(args.step, size, args.step), size]:
            order = turned(order, 1)
            for case in order:
                # process() leaves the last token: each step computes exactly its own tokens
                found[case] += sessions[case].process(prompt[: end + 1]).prefill_s
    finally:
        for session in sessions.values():
            session.close()
    return found


def summarize(size: int, rounds: Rounds) -> dict[str, Any]:
    """Medians over the rounds of one size; ratios are taken within a round."""
    base, again, mtp = ([r[case] for r in rounds] for case in CASES)
    plain = [(b + c) / 2 for b, c in zip(base, again, strict=True)]
    ratios = [p / m for p, m in zip(plain, mtp, strict=True)]
    controls = [b / c for b, c in zip(base, again, strict=True)]
    return {
        "tokens_per_s": {BASE: size / median(plain), MTP: size / median(mtp)},
        "ratio": median(ratios),
        "ratios": ratios,
        "controls": controls,
    }


def markdown(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    plan = result["plan"]
    lines = ["# Prefill with MTP against prefill without, in interleaved pairs", ""]
    lines += results.header_lines(result)
    lines += [
        f"- Model: {plan['model']}; depth {plan['depth']}, steps of {plan['step']} tokens, "
        f"{plan['threads']} threads; a session each",
        "",
        "| prompt | no MTP tok/s | MTP tok/s | ratio | per round | control |",
        "|---|---|---|---|---|---|",
    ]
    for size, found in result["sizes"].items():
        speed = found["tokens_per_s"]
        per_round = ", ".join(f"{ratio:.3f}" for ratio in found["ratios"])
        controls = found["controls"]
        lines.append(
            f"| {int(size):,} | {speed[BASE]:.1f} | {speed[MTP]:.1f} | {found['ratio']:.3f} | "
            f"{per_round} | {min(controls):.3f} to {max(controls):.3f} |"
        )
    lines += [
        "",
        "`ratio` is the median of the rounds' ratios (above 1: faster with MTP). `control` is the",
        "same ratio between two sessions without MTP: what the machine, and the memory that a",
        'session got, make by themselves; "no MTP" is the mean of both.',
    ]
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    """Measure, print, write after every round."""
    args = parse_arguments(argv)
    from pyllama_mtp import Model, native
    from pyllama_mtp.measure.machine import describe_machine

    path = model_file(args.model)
    samples: dict[str, Rounds] = {str(size): [] for size in args.sizes}
    with Model(path) as model:
        stamp = native.load().stamp
        for number in range(args.rounds):
            for size in args.sizes:
                samples[str(size)].append(one_round(model, args, size, number))
                latest = summarize(size, samples[str(size)])
                label = f"[{len(samples[str(size)])}/{args.rounds}] {size} tokens"
                print(f"{label}: {latest['ratios'][-1]:.3f}", file=sys.stderr, flush=True)
            result = {
                **results.header(describe_machine(), stamp),
                "plan": {
                    "model": path.name,
                    **{
                        name: getattr(args, name) for name in ("rounds", "step", "depth", "threads")
                    },
                },
                "sizes": {size: summarize(int(size), found) for size, found in samples.items()},
                "samples": samples,
            }
            results.write(result, markdown(result), args.name)
    print(markdown(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
