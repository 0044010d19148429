#!/usr/bin/env python3
"""Compare our driver with upstream's llama-bench and llama-server, on the same model and settings.

    python bench/compare_upstream.py                        # 0.8B shape, Q8_0, synthetic weights
    python bench/compare_upstream.py --model FILE.gguf --threads 8 --rounds 7
    python bench/compare_upstream.py --dry-run              # a few tokens, nothing is written

Builds the programs first if they are missing (bench/peers.py). Three comparisons take turns, and
within each the two sides: plain prefill, plain decode (llama-bench), draft-MTP decode at an imposed
acceptance (llama-server). Writes bench/results/NAME.json and .md after every round, so that an
interrupted run keeps its finished rounds. Nothing else should run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import peers as peers_module
from benchkit import measures, report, results
from benchkit.model import dimensions, model_file
from benchkit.ours import DriverError
from benchkit.paths import ensure_driver
from benchkit.plan import RATES, Plan
from benchkit.sample import Sample

from pyllama_mtp.measure.peers.output import parse_system_info

Samples = dict[str, dict[str, list[Sample]]]
#: ggml options that decide the speed of the CPU backend, and how its description names them.
BACKEND_OPTIONS = {
    "GGML_LLAMAFILE": "LLAMAFILE",
    "GGML_OPENMP": "OPENMP",
    "GGML_CPU_REPACK": "REPACK",
}
DRY_RUN = {"rounds": 1, "n_prefill": 32, "n_prompt": 16, "n_decode": 8}


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    ensure_driver()
    from pyllama_mtp.settings import CACHE_TYPES, FLASH_ATTENTION, available_threads

    parser = argparse.ArgumentParser(description="Our driver against upstream's own programs.")
    add = parser.add_argument
    add(
        "--model", type=Path, metavar="FILE", help="GGUF file with an MTP head (default: synthetic)"
    )
    add("--rounds", type=int, default=5, metavar="N", help="default: %(default)s")
    add("--only", nargs="+", choices=[m.name for m in measures.MEASURES], help="default: all")
    add("--lib", default="patched", help="our library: patched, upstream, or a folder")
    add("--n-prefill", type=int, default=512, metavar="N", help="tokens of the prefill test")
    add("--n-prompt", type=int, default=256, metavar="N", help="context of the decode tests")
    add("--n-decode", type=int, default=192, metavar="N", help="tokens of the decode tests")
    add("--rates", type=_rates, default=RATES, metavar="R,R,...", help="imposed acceptance")
    add(
        "--threads", type=int, default=available_threads(), metavar="N", help="default: %(default)s"
    )
    add("--n-batch", type=int, default=2048, metavar="N")
    add("--n-ubatch", type=int, default=512, metavar="N")
    add("--flash-attn", choices=FLASH_ATTENTION, default="auto")
    add("--cache-type-k", choices=CACHE_TYPES, default="f16")
    add("--cache-type-v", choices=CACHE_TYPES, default="f16")
    add("--peers", type=Path, default=peers_module.DEFAULT_FOLDER, help="their build folder")
    add("--define", action="append", default=[], help="passed on to their build, see peers.py")
    add("--name", default="compare-upstream", help="of the result files")
    add("--dry-run", action="store_true", help="a few tokens, one round, nothing is written")
    args = parser.parse_args(argv)
    if args.rounds < 1:
        parser.error("--rounds must be at least 1")
    if args.dry_run:
        vars(args).update(DRY_RUN)
    return args


def _rates(text: str) -> tuple[float, ...]:
    rates = tuple(float(part) for part in text.split(","))
    falling = all(a >= b for a, b in pairwise(rates))
    if not falling or not all(0 <= rate <= 1 for rate in rates):
        raise argparse.ArgumentTypeError("rates from 0 to 1 that do not increase")
    return rates


def make_bench(args: argparse.Namespace) -> measures.Bench:
    """Check the settings, build or find the programs, make or find the model."""
    from pyllama_mtp import Settings

    names = {field.name for field in fields(Plan)} - {"model"}
    plan = Plan(model_file(args.model), **{name: getattr(args, name) for name in names})
    rates, settings = plan.rates, plan.driver_settings(plan.n_prompt + plan.n_decode + 1)
    Settings(**settings, draft_n_max=plan.depth, synthetic_acceptance=rates)  # refuses bad values
    n_vocab = dimensions(plan.model).n_vocab
    built = peers_module.build(args.peers.resolve(), defines=args.define)
    return measures.Bench(plan, built, args.lib, n_vocab)


def run(bench: measures.Bench, args: argparse.Namespace) -> int:
    """Round after round; the exit code."""
    chosen = [m for m in measures.MEASURES if not args.only or m.name in args.only]
    missing = {m.peer for m in chosen} & set(bench.peers.missing)
    for program in sorted(missing):
        print(f"{program} is not built: its comparison is left out", file=sys.stderr)
    chosen = [m for m in chosen if m.peer not in missing]
    samples: Samples = {m.name: {"theirs": [], "ours": []} for m in chosen}
    result: dict[str, Any] = {}
    for number in range(args.rounds):
        try:
            one_round(bench, chosen, number, args.rounds, samples)
        except KeyboardInterrupt:
            print("interrupted; finished rounds are kept", file=sys.stderr)
            break
        result = assemble(bench, chosen, samples, number + 1, args.rounds, sorted(missing))
        if not args.dry_run:
            results.write(result, report.render(result), args.name)
    if not result:
        return 130
    print(
        "\n".join([*report.table(result["measures"]), *report.acceptance_lines(result["measures"])])
    )
    for note in result["notes"]:
        print(f"note: {note}")
    return 1 if missing else 0


def one_round(
    bench: measures.Bench,
    chosen: list[measures.Measure],
    number: int,
    n_rounds: int,
    samples: Samples,
) -> None:
    """Measure both sides of every comparison; odd rounds begin with ours."""
    finished = []
    for measure in chosen:
        sides = [("theirs", measure.theirs), ("ours", measure.ours)]
        for side, take in sides if number % 2 == 0 else sides[::-1]:
            sample = take(bench, number)
            label = measure.peer if side == "theirs" else "ours"
            rate = measure.value(sample) or 0.0
            line = f"[{number + 1}/{n_rounds}] {measure.title}: {label} {rate:.2f}"
            if sample.rounds:
                line += f", {sample.tokens_per_round:.2f} tokens per round"
            print(line, file=sys.stderr, flush=True)
            finished.append((samples[measure.name][side], sample))
    for target, sample in finished:  # only whole rounds count
        target.append(sample)


def assemble(
    bench: measures.Bench,
    chosen: list[measures.Measure],
    samples: Samples,
    done: int,
    planned: int,
    missing: list[str],
) -> dict[str, Any]:
    """The result file's contents."""
    from pyllama_mtp.measure.machine import describe_machine

    stamp, info = bench.stamp, bench.peers.info
    build = {**stamp, "peers": info, "system_info": parse_system_info(bench.system_info)}
    return {
        **results.header(describe_machine(), build),
        "plan": bench.plan.to_dict(),
        "rounds": {"done": done, "planned": planned},
        "notes": build_notes(bench, missing),
        "measures": {m.name: measures.summarize(m, bench.plan, samples[m.name]) for m in chosen},
    }


def build_notes(bench: measures.Bench, missing: list[str]) -> list[str]:
    """What a reader must know: programs left out, and builds that differ where they should not."""
    notes = [f"{program} was not built, its comparison is left out" for program in missing]
    for key in ("upstream_commit", "cpu_features", "compiler"):
        theirs, own = bench.peers.info.get(key), bench.stamp.get(key)
        if theirs != own:
            notes.append(f"the builds differ in {key}: upstream's {theirs!r}, ours {own!r}")
    backend = parse_system_info(bench.system_info)
    for option, feature in BACKEND_OPTIONS.items():
        theirs, own = bench.peers.info["ggml"][option], feature in backend
        if theirs != own:
            state = {True: "on", False: "off"}
            notes.append(
                f"the builds differ in {option}: {state[theirs]} in upstream's programs (its "
                f"default), {state[own]} in our library"
            )
    return notes


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    args = parse_arguments(argv)
    from pyllama_mtp import PyllamaMtpError

    try:
        return run(make_bench(args), args)
    except (peers_module.PeerError, DriverError, PyllamaMtpError) as error:
        print(f"compare_upstream: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
