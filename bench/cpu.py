#!/usr/bin/env python3
"""What our patches of ggml's CPU backend are worth in decode: patches 12 and 18, on and off.

    python bench/cpu.py                         # the 0.8B shape, depths 0, 1, 3 and 4
    python bench/cpu.py --model FILE.gguf --depths 0,2 --rounds 7

Everything is one process and one session per depth: in each round the same prompt is continued with
neither patch, with each, and with both, by turns: another one begins each time. The results are the
same bit for bit, so the texts must be equal; that is checked. Without --model the synthetic one has
a head that drafts well (`pyllama-mtp synth --head-noise`). Writes results/NAME.json and .md.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from benchkit import results
from benchkit.model import HEAD_NOISE, dimensions, model_file
from benchkit.paths import ensure_driver
from benchkit.plan import random_prompt
from benchkit.statistics import Ratio

#: Patches 12 and 18, and which of them are on.
SWITCHES = {
    "neither": (False, False),
    "12: products of a few columns": (True, False),
    "18: states written where they are kept": (False, True),
    "both": (True, True),
}


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    ensure_driver()
    from pyllama_mtp.settings import available_threads

    parser = argparse.ArgumentParser(description="What the CPU backend's patches are worth.")
    add = parser.add_argument
    add("--model", type=Path, metavar="FILE", help="GGUF (default: 0.8B shape, Q8_0)")
    add("--depths", default="0,1,3,4", metavar="N,...", help="drafts (default: %(default)s)")
    add("--rounds", type=int, default=8, metavar="R", help="default: %(default)s")
    add("--n-prompt", type=int, default=64, metavar="N", help="default: %(default)s")
    add("--n-decode", type=int, default=64, metavar="N", help="default: %(default)s")
    add("--threads", type=int, default=available_threads(), metavar="N")
    add("--name", default="cpu", help="of the result files")
    add("--dry-run", action="store_true", help="a few tokens, one round, nothing is written")
    args = parser.parse_args(argv)
    if args.dry_run:
        vars(args).update(rounds=1, n_prompt=16, n_decode=8)
    try:
        args.depths = [int(word) for word in args.depths.split(",")]
    except ValueError:
        parser.error(f"--depths {args.depths} is no list of numbers")
    if min(args.rounds, args.n_prompt, args.n_decode) < 1 or min(args.depths) < 0:
        parser.error("rounds, n-prompt and n-decode must be 1 or more, depths 0 or more")
    return args


def measure(args: argparse.Namespace, path: Path) -> dict[int, dict[str, list[float]]]:
    """Decode speeds in tokens per second, by depth and switches."""
    from pyllama_mtp import Model, Session, Settings, native

    library, n_vocab = native.load(), dimensions(path).n_vocab
    n_ctx = args.n_prompt + args.n_decode + 1
    speeds: dict[int, dict[str, list[float]]] = {d: {} for d in args.depths}
    with ExitStack() as stack:
        model = stack.enter_context(Model(path, mtp=any(args.depths)))
        sessions = {}
        for depth in args.depths:
            settings = Settings(n_ctx=n_ctx, n_threads=args.threads, draft_n_max=depth)
            sessions[depth] = stack.enter_context(Session(model, settings))
            sessions[depth].generate([1], max_tokens=8, ignore_eos=True).run()  # warm-up
        stack.callback(library.set_small_batch, True)
        stack.callback(library.set_direct_states, True)
        for number in range(args.rounds):
            prompt = random_prompt(args.n_prompt, n_vocab, number)
            for depth, session in sessions.items():
                names, texts = list(SWITCHES), set()
                for name in (*names[number % 4 :], *names[: number % 4]):
                    small_batch, direct = SWITCHES[name]
                    library.set_small_batch(small_batch)
                    library.set_direct_states(direct)
                    session.reset()
                    answer = session.generate(
                        prompt, max_tokens=args.n_decode + 1, ignore_eos=True
                    ).run()
                    texts.add(tuple(answer.tokens))
                    speeds[depth].setdefault(name, []).append(answer.telemetry.decode_tps)
                if len(texts) > 1:
                    raise RuntimeError(f"depth {depth}: the texts differ with the switches")
            print(f"[{number + 1}/{args.rounds}]", file=sys.stderr)
    return speeds


def table(speeds: dict[int, dict[str, list[float]]]) -> list[str]:
    """Markdown: medians, and ratios to the first with their ranges."""
    names = list(SWITCHES)
    head = ["drafts", f"{names[0]}, tok/s", *names[1:], "both, tok/s"]
    rows = []
    for depth, found in speeds.items():
        ratios = [Ratio.of(found[name], found[names[0]]).paired for name in names[1:]]
        rows.append(
            [
                str(depth),
                f"{median(found[names[0]]):.1f}",
                *(f"{one.median:.2f} ({one.low:.2f} to {one.high:.2f})" for one in ratios),
                f"{median(found[names[-1]]):.1f}",
            ]
        )
    return results.markdown_table(head, rows)


def main(argv: list[str] | None = None) -> int:
    """Measure, print, write."""
    args = parse_arguments(argv)
    from pyllama_mtp import native
    from pyllama_mtp.measure.machine import describe_machine

    path = model_file(args.model, HEAD_NOISE)
    speeds = measure(args, path)
    lines = table(speeds)
    print("\n".join(lines))
    if args.dry_run:
        return 0
    result: dict[str, Any] = {
        **results.header(describe_machine(), native.load().stamp),
        "model": path.name,
        "settings": {k: getattr(args, k) for k in ("n_prompt", "n_decode", "threads", "rounds")},
        "decode_tps": {str(depth): found for depth, found in speeds.items()},
    }
    text = [
        "# What the CPU backend's patches are worth in decode",
        "",
        *results.header_lines(result),
        f"- Model: {path.name}; {args.n_decode} tokens after a prompt of {args.n_prompt}, "
        f"{args.threads} threads, {args.rounds} rounds with a prompt each; acceptance is real",
        "",
        *lines,
        "",
        "Medians; the ratios are to neither patch, medians of the rounds' ratios, with their",
        "range. The texts were equal in every round.",
    ]
    results.write(result, "\n".join(text), args.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
