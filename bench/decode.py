#!/usr/bin/env python3
"""Decode with MTP at imposed acceptance: every depth, adaptive depth, and upstream's llama-server.

    python bench/decode.py                                   # 0.8B shape, Q8_0, synthetic weights
    python bench/decode.py --model FILE.gguf --acceptance 0.1,0.5,0.8 --rounds 7
    python bench/decode.py --server-depths ""                # without upstream's llama-server

`--acceptance P` imposes P at every position: a draft is accepted with probability P if those before
it were. In a round, sessions without MTP, at each fixed depth and with adaptive depth decode side
by side; then llama-server with draft-mtp at each of --server-depths, in a process of its own. Last
comes the share of a decode round that is not spent in the native library. Writes results/NAME.json
and .md after every round.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import peers as peers_module
from benchkit import llama_server, lockstep, results
from benchkit.model import model_file
from benchkit.paths import ensure_driver
from benchkit.plan import Plan, random_prompt
from benchkit.sample import Sample
from benchkit.statistics import expected_tokens_per_round

if TYPE_CHECKING:
    from pyllama_mtp import Model, Session

#: Rounds' samples by acceptance and case: "0" to "6", "auto", "server 1", ...
Samples = dict[float, dict[str, list[Sample]]]
#: Depths go up to here, as those that adaptive depth chooses from.
DEEPEST = 6


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    ensure_driver()
    from pyllama_mtp.settings import PROMPT_SYNC, available_threads

    parser = argparse.ArgumentParser(description="Decode with MTP at imposed acceptance.")
    add = parser.add_argument
    add("--model", type=Path, metavar="FILE", help="GGUF with an MTP head (default: synthetic)")
    add("--acceptance", type=numbers(float, 0, 1), default=(0.1, 0.5, 0.8), metavar="P,P,...")
    depths = tuple(range(1, DEEPEST + 1))
    add("--depths", type=numbers(int, 1, DEEPEST), default=depths, metavar="K,K,...")
    add("--server-depths", type=numbers(int, 1, 16), default=(1, 2, 3), metavar="K,K,...")
    add("--server-acceptance", type=numbers(float, 0, 1), metavar="P,P,...", help="default: all")
    add("--rounds", type=int, default=5, metavar="N", help="default: %(default)s")
    add("--n-prompt", type=int, default=256, metavar="N", help="tokens in the cache at the start")
    add("--n-decode", type=int, default=128, metavar="N", help="tokens of a measurement")
    add("--threads", type=int, default=available_threads(), metavar="N")
    add("--draft-vocab", default="auto", metavar="N|FILE|full")
    add("--sync", default="auto", choices=PROMPT_SYNC)
    add("--peers", type=Path, default=peers_module.DEFAULT_FOLDER, help="their build folder")
    add("--name", default="decode", help="of the result files")
    add("--dry-run", action="store_true", help="a few tokens, one round, nothing is written")
    args = parser.parse_args(argv)
    if args.server_acceptance is None:
        args.server_acceptance = args.acceptance
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


def at_equal_acceptance(sample: Sample, acceptance: float, depth: int) -> float:
    """Tokens per second, had exactly the imposed share been accepted: llama-server draws it."""
    rate = sample.rounds_per_second or 0.0
    return rate * expected_tokens_per_round(rates(acceptance, depth))


def run(args: argparse.Namespace) -> int:
    """Round after round; the exit code."""
    from pyllama_mtp import Model
    from pyllama_mtp.llama import native
    from pyllama_mtp.measure.machine import describe_machine

    library, path = native.load(), model_file(args.model)
    built = None
    if args.server_depths and args.server_acceptance:
        built = peers_module.build(args.peers.resolve())
        built.program("llama-server")
    plan = Plan(path, n_prompt=args.n_prompt, n_decode=args.n_decode, threads=args.threads)
    samples: Samples = {p: {} for p in args.acceptance}
    shares: list[float] = []
    with contextlib.ExitStack() as stack:
        model = stack.enter_context(Model(path))
        sessions = {
            name: stack.enter_context(session) for name, session in open_sessions(model, plan, args)
        }
        prompt = random_prompt(args.n_prompt, model.n_vocab)
        lockstep.decode(sessions, prompt, min(16, args.n_decode))  # warm-up
        for number in range(args.rounds):
            for acceptance in args.acceptance:
                for session in sessions.values():
                    lockstep.impose(session, rates(acceptance, DEEPEST))
                decoded = lockstep.decode(sessions, prompt, args.n_decode)
                found = {name: lockstep.sample(each) for name, each in decoded.items()}
                if built and acceptance in args.server_acceptance:
                    found |= serve(built, plan, args, acceptance, number)
                for name, sample in found.items():
                    samples[acceptance].setdefault(name, []).append(sample)
                print(f"[{number + 1}/{args.rounds}] acceptance {acceptance}", file=sys.stderr)
            deepest = sessions[str(max(args.depths))]
            shares.append(lockstep.python_share(deepest, prompt, args.n_decode))
            result = {
                **results.header(describe_machine(), library.stamp),
                "plan": {**plan.to_dict(), "rates": None, "depth": None},
                "prompt_sync": args.sync,
                "draft_vocab": args.draft_vocab,
                "peers": built.info if built else None,
                "rounds": {"done": number + 1, "planned": args.rounds},
                "samples": {
                    str(p): {name: [s.to_dict() for s in found] for name, found in by.items()}
                    for p, by in samples.items()
                },
                "python_share": {"depth": max(args.depths), "samples": list(shares)},
            }
            if not args.dry_run:
                results.write(result, render(result, samples), args.name)
    print("\n".join(tables(result, samples)))
    return 0


def open_sessions(
    model: Model, plan: Plan, args: argparse.Namespace
) -> Iterator[tuple[str, Session]]:
    """Without MTP ("0"), at each fixed depth, and with adaptive depth ("auto")."""
    from pyllama_mtp import Session, Settings

    usual = plan.driver_settings(args.n_prompt + args.n_decode + DEEPEST + 1)
    for depth in (0, *args.depths, "auto"):
        settings = Settings(
            **usual,
            draft_n_max=depth,
            draft_vocab=args.draft_vocab,
            prompt_sync=args.sync,
            synthetic_acceptance=rates(0.5, DEEPEST) if depth else None,
        )
        yield str(depth), Session(model, settings)


def serve(
    built: peers_module.Peers,
    plan: Plan,
    args: argparse.Namespace,
    acceptance: float,
    number: int,
) -> dict[str, Sample]:
    """Upstream's server at each depth."""
    prompt = random_prompt(plan.n_prompt, 10_000)
    plans = {k: replace(plan, rates=rates(acceptance, k)) for k in args.server_depths}
    return {
        f"server {k}": llama_server.measure(built, own, prompt, number) for k, own in plans.items()
    }


def tables(result: dict[str, Any], samples: Samples) -> list[str]:
    """Markdown lines: speeds, what adaptive depth makes of them, llama-server."""
    names = list(next(iter(samples.values())))
    depths = [name for name in names if name.isdigit()]
    speed = {
        p: {name: median(s.decode_tps or 0.0 for s in found) for name, found in by.items()}
        for p, by in samples.items()
    }

    def ratio(p: float, a: str, b: str) -> float:
        pairs = zip(samples[p][a], samples[p][b], strict=True)
        return median((x.decode_tps or 0.0) / (y.decode_tps or 1.0) for x, y in pairs)

    head = ["acceptance", "no MTP", *(f"depth {d}" for d in depths[1:]), "auto"]
    rows = [
        [f"{p:g}", *(f"{by[name]:.1f}" for name in (*depths, "auto"))] for p, by in speed.items()
    ]
    lines = [f"Tokens per second, medians of {len(samples[p]['0'])} rounds:" for p in samples][:1]
    lines += ["", *results.markdown_table(head, rows), ""]
    rows = []
    for p in samples:
        to_plain = {d: ratio(p, d, "0") for d in (*depths, "auto")}
        best = max(depths, key=to_plain.__getitem__)
        figures = [f"{to_plain[d]:.3f}" for d in (*depths[1:], "auto")]
        rows.append([f"{p:g}", *figures, best, f"{ratio(p, 'auto', best):.3f}"])
    head = ["acceptance", *(f"depth {d}" for d in depths[1:]), "auto", "best depth", "auto / best"]
    lines += ["As ratios to no MTP, medians of the ratios within a round:", ""]
    lines += [*results.markdown_table(head, rows), ""]
    lines += server_table(samples, speed, depths)
    share = result["python_share"]
    return [
        *lines,
        f"Python's share of a decode round at depth {share['depth']} (all that is not inside the "
        f"native library): {100 * median(share['samples']):.2f} % (median of "
        f"{len(share['samples'])}).",
    ]


def server_table(
    samples: Samples, speed: dict[float, dict[str, float]], depths: list[str]
) -> list[str]:
    """Upstream's server beside our best depth, at equal acceptance."""
    rows: list[list[str]] = []
    servers: list[str] = []
    for p, by in samples.items():
        servers = [name for name in by if name.startswith("server")] or servers
        if not any(name.startswith("server") for name in by):
            continue
        theirs = [
            median(at_equal_acceptance(s, p, int(name.split()[1])) for s in by[name])
            for name in servers
        ]
        ours = max(speed[p][d] for d in depths)
        figures = [*(f"{value:.1f}" for value in theirs), f"{ours:.1f}", f"{speed[p]['auto']:.1f}"]
        ratios = [f"{ours / max(theirs):.2f}", f"{speed[p]['auto'] / max(theirs):.2f}"]
        rows.append([f"{p:g}", *figures, *ratios])
    if not rows:
        return []
    head = ["acceptance", *(f"llama-server, depth {name.split()[1]}" for name in servers)]
    head += ["our best depth", "auto", "best / best of theirs", "auto / best of theirs"]
    return ["Upstream's llama-server, tok/s:", "", *results.markdown_table(head, rows), ""]


def render(result: dict[str, Any], samples: Samples) -> str:
    """The Markdown page."""
    plan, rounds = result["plan"], result["rounds"]
    return "\n".join(
        [
            "# Decode with MTP at imposed acceptance",
            "",
            *results.header_lines(result),
            f"- Model: {plan['model']}; {plan['n_prompt']} tokens in the cache, {plan['n_decode']} "
            f"decoded, {plan['threads']} threads; sync {result['prompt_sync']}, draft vocabulary "
            f"{result['draft_vocab']}; {rounds['done']} rounds of {rounds['planned']} planned",
            "",
            *tables(result, samples),
            "",
            "Acceptance is that of every position, given that the drafts before it were accepted.",
            "In a round our sessions take turns, the one with the fewest tokens next, so that they",
            'share what the machine does meanwhile. "auto" starts without experience: what it',
            "takes to learn is in it. llama-server runs by itself; it draws acceptance, and its",
            "figure is rounds per second times the tokens of a round at just this acceptance.",
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
