#!/usr/bin/env python3
"""Decode with MTP at imposed acceptance: every depth, adaptive depth, and upstream's llama-server.

    python bench/decode.py                                   # 0.8B shape, Q8_0, synthetic weights
    python bench/decode.py --model FILE.gguf --acceptance 0.1,0.5,0.8 --rounds 7
    python bench/decode.py --server-depths ""                # without upstream's llama-server

`--acceptance P` imposes P at every position: a draft is accepted with probability P if those before
it were. A round measures each case once, in turn: without MTP, at each fixed depth, with adaptive
depth (which starts without any experience), and llama-server with draft-mtp at each of
--server-depths, in a process of its own. Ours share one session and so one memory. Last comes the
share of a decode round that is not spent in the native library. Writes results/NAME.json and .md
after every round.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import peers as peers_module
from benchkit import llama_server, results
from benchkit.model import model_file
from benchkit.onedecoder import Depth, OneDecoder
from benchkit.paths import ensure_driver
from benchkit.plan import Plan, random_prompt
from benchkit.sample import Sample
from benchkit.statistics import expected_tokens_per_round

#: Rounds' samples by acceptance and case: "0" to "6", "auto", "server 1", ...
Samples = dict[float, dict[str, list[Sample]]]
Take = Callable[[], Sample]
SHARE_DEPTH = 3


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    ensure_driver()
    from pyllama_mtp.settings import AUTO_DEPTH, available_threads

    parser = argparse.ArgumentParser(description="Decode with MTP at imposed acceptance.")
    add = parser.add_argument
    add("--model", type=Path, metavar="FILE", help="GGUF with an MTP head (default: synthetic)")
    add("--acceptance", type=numbers(float, 0, 1), default=(0.1, 0.5, 0.8), metavar="P,P,...")
    depths = tuple(range(1, AUTO_DEPTH + 1))
    add("--depths", type=numbers(int, 1, AUTO_DEPTH), default=depths, metavar="K,K,...")
    add("--server-depths", type=numbers(int, 1, 16), default=(1, 2, 3), metavar="K,K,...")
    add("--rounds", type=int, default=5, metavar="N", help="default: %(default)s")
    add("--n-prompt", type=int, default=256, metavar="N", help="tokens in the cache at the start")
    add("--n-decode", type=int, default=128, metavar="N", help="tokens of a measurement")
    add("--threads", type=int, default=available_threads(), metavar="N")
    add("--draft-vocab", default="auto", metavar="N|FILE|full")
    add("--drafting", default="auto", choices=("auto", "chain", "stepwise"))
    add("--peers", type=Path, default=peers_module.DEFAULT_FOLDER, help="their build folder")
    add("--name", default="decode", help="of the result files")
    add("--dry-run", action="store_true", help="a few tokens, one round, nothing is written")
    args = parser.parse_args(argv)
    if args.dry_run:
        vars(args).update(rounds=1, n_prompt=16, n_decode=8)
    if min(args.rounds, args.n_prompt, args.n_decode) < 1:
        parser.error("rounds, n-prompt and n-decode must be at least 1")
    return args


def numbers(kind: type[Any], least: float, most: float) -> Callable[[str], tuple[Any, ...]]:
    """An argparse type: numbers separated by commas; "" is none."""

    def parse(text: str) -> tuple[Any, ...]:
        try:
            found = tuple(kind(part) for part in text.split(",") if part)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r}: numbers separated by commas") from None
        if not all(least <= number <= most for number in found):
            raise argparse.ArgumentTypeError(f"{text!r}: numbers from {least} to {most}")
        return found

    return parse


def rates(acceptance: float, depth: int) -> tuple[float, ...]:
    """Unconditional acceptance of each position."""
    return tuple(acceptance**position for position in range(1, depth + 1))


def at_equal_acceptance(sample: Sample, acceptance: float, depth: Depth) -> float:
    """Tokens per second, had exactly the imposed share been accepted (llama-server draws it)."""
    rate = sample.rounds_per_second or 0.0
    if depth == "auto" or not depth:
        return sample.decode_tps or 0.0
    return rate * expected_tokens_per_round(rates(acceptance, int(depth)))


def run(args: argparse.Namespace) -> int:
    """Round after round; the exit code."""
    from pyllama_mtp import Model, Session, Settings, native
    from pyllama_mtp.measure.machine import describe_machine
    from pyllama_mtp.settings import AUTO_DEPTH

    library, path = native.load(), model_file(args.model)
    built = None
    if args.server_depths:
        built = peers_module.build(args.peers.resolve())
        built.program("llama-server")
    plan = Plan(path, n_prompt=args.n_prompt, n_decode=args.n_decode, threads=args.threads)
    with Model(path) as model:
        prompt = random_prompt(args.n_prompt, model.n_vocab)
        settings = Settings(
            **plan.driver_settings(args.n_prompt + args.n_decode + AUTO_DEPTH + 1),
            draft_n_max="auto",
            draft_vocab=args.draft_vocab,
            drafting=args.drafting,
            synthetic_acceptance=rates(0.5, AUTO_DEPTH),
        )
        with Session(model, settings) as session:
            ours = OneDecoder(session, prompt, args.n_decode)
            for depth in (0, *args.depths):  # each depth has graphs of its own: warm them up
                ours.measure(depth, rates(0.5, AUTO_DEPTH))
            samples: Samples = {p: {} for p in args.acceptance}
            for number in range(args.rounds):
                for acceptance in args.acceptance:
                    cases = list(our_cases(ours, args, acceptance).items())
                    if built:
                        cases += server_cases(built, plan, args, acceptance, number).items()
                    turn = number % len(cases)
                    for name, take in [*cases[turn:], *cases[:turn]]:
                        samples[acceptance].setdefault(name, []).append(take())
                    print(f"[{number + 1}/{args.rounds}] acceptance {acceptance}", file=sys.stderr)
                if number == args.rounds - 1:
                    python = [
                        1 - ours.native_share(SHARE_DEPTH, rates(0.8, AUTO_DEPTH)) for _ in range(5)
                    ]
                else:
                    python = []
                result = {
                    **results.header(describe_machine(), library.stamp),
                    "plan": {**plan.to_dict(), "rates": None, "depth": None},
                    "settings": {**asdict(settings), "synthetic_acceptance": None},
                    "peers": built.info if built else None,
                    "rounds": {"done": number + 1, "planned": args.rounds},
                    "samples": {
                        str(p): {name: [s.to_dict() for s in found] for name, found in by.items()}
                        for p, by in samples.items()
                    },
                    "python_share": python,
                }
                if not args.dry_run:
                    results.write(result, render(result, samples), args.name)
    print("\n".join(tables(samples, result["python_share"])))
    return 0


def our_cases(ours: OneDecoder, args: argparse.Namespace, acceptance: float) -> dict[str, Take]:
    """What is measured in our session."""
    from pyllama_mtp.settings import AUTO_DEPTH

    depths: tuple[Depth, ...] = (0, *args.depths, "auto")
    imposed = rates(acceptance, AUTO_DEPTH)
    return {str(depth): lambda depth=depth: ours.measure(depth, imposed) for depth in depths}


def server_cases(
    built: peers_module.Peers,
    plan: Plan,
    args: argparse.Namespace,
    acceptance: float,
    number: int,
) -> dict[str, Take]:
    """Upstream's server at each depth."""
    prompt = random_prompt(plan.n_prompt, 10_000)
    return {
        f"server {depth}": lambda depth=depth: llama_server.measure(
            built, replace(plan, rates=rates(acceptance, depth)), prompt, number
        )
        for depth in args.server_depths
    }


def tables(samples: Samples, python: list[float]) -> list[str]:
    """Markdown lines: speeds, what adaptive depth makes of them, llama-server."""
    first = next(iter(samples.values()))
    depths = [name for name in first if name.isdigit()]
    servers = [name for name in first if name.startswith("server")]
    speeds: dict[float, dict[str, float]] = {}
    for p, by in samples.items():
        speeds[p] = {}
        for name, found in by.items():
            depth = name.removeprefix("server ")
            depth_or_auto: Depth = depth if depth == "auto" else int(depth)
            speeds[p][name] = median(at_equal_acceptance(s, p, depth_or_auto) for s in found)
    head = ["acceptance", "no MTP", *(f"depth {d}" for d in depths if d != "0"), "auto"]
    rows = [
        [f"{p:g}", *(f"{found[name]:.1f}" for name in (*depths, "auto"))]
        for p, found in speeds.items()
    ]
    lines = [*results.markdown_table([f"{head[0]} (tok/s)", *head[1:]], rows), ""]
    head = [
        "acceptance",
        "best fixed",
        "its depth",
        "best / no MTP",
        "auto / best",
        "auto / no MTP",
    ]
    rows = []
    for p, found in speeds.items():
        best = max(depths, key=found.__getitem__)
        ratios = [
            found[best] / found["0"],
            found["auto"] / found[best],
            found["auto"] / found["0"],
        ]
        rows.append([f"{p:g}", f"{found[best]:.1f}", best, *(f"{ratio:.2f}" for ratio in ratios)])
    lines += [*results.markdown_table(head, rows), ""]
    if servers:
        head = ["acceptance", *(f"llama-server {s.split()[1]}" for s in servers)]
        head += ["best of them", "ours / best of them", "auto / best of them"]
        rows = []
        for p, found in speeds.items():
            theirs, best = max(found[s] for s in servers), max(found[d] for d in depths)
            row = [f"{p:g}", *(f"{found[s]:.1f}" for s in servers), f"{theirs:.1f}"]
            rows.append([*row, f"{best / theirs:.2f}", f"{found['auto'] / theirs:.2f}"])
        lines += [*results.markdown_table(head, rows), ""]
    if python:
        lines += [
            f"Python's share of a decode round at depth {SHARE_DEPTH} (all that is not inside the "
            f"native library): {100 * median(python):.2f} % (median of {len(python)})."
        ]
    return lines


def render(result: dict[str, Any], samples: Samples) -> str:
    """The Markdown page."""
    plan, rounds = result["plan"], result["rounds"]
    settings = result["settings"]
    return "\n".join(
        [
            "# Decode with MTP at imposed acceptance",
            "",
            *results.header_lines(result),
            f"- Model: {plan['model']}; {plan['n_prompt']} tokens in the cache, {plan['n_decode']} "
            f"decoded, {plan['threads']} threads; drafting {settings['drafting']}, draft "
            f"vocabulary {settings['draft_vocab']}; medians of {rounds['done']} interleaved rounds "
            f"(of {rounds['planned']} planned)",
            "",
            *tables(samples, result["python_share"]),
            "",
            "Acceptance is that of every position, given that the drafts before it were accepted.",
            "Tokens per second are rounds per second times the tokens that a round gains at just",
            'this acceptance (llama-server draws it at random); for "no MTP" and "auto" they are',
            'those measured. "auto" starts without experience: what it takes to learn is in it.',
        ]
    )


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    args = parse_arguments(argv)
    from pyllama_mtp import PyllamaMtpError

    try:
        return run(args)
    except (peers_module.PeerError, PyllamaMtpError) as error:
        print(f"decode: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; finished rounds are kept", file=sys.stderr)
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
