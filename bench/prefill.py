#!/usr/bin/env python3
"""Prompts without MTP and with it, beside upstream's llama-bench and ik_llama.cpp's; peak memory.

    python bench/peers.py                            # once: upstream's programs
    python bench/prefill.py --ik BUILD_FOLDER        # 512 and 2,048 tokens, four files
    python bench/prefill.py --types dense-q8_0 --sizes 8192 --rounds 3 --name prefill-8k

Files are those of bench/filetypes.py. A round of a file measures every size, one side right after
the other, in the other direction in every second round:

- ours: three sessions, made anew, two without MTP and one with it, process the same prompt in steps
  of --step tokens, turn and turn about; another one is first in every step, and made first in every
  round. The two without MTP are alike in everything but the memory that they got: their ratio is
  what the machine does by itself.
- llama-bench, and ik_llama.cpp's without and with -rtr 1: a process each, with a warm-up.

Peak resident memory is measured once, in processes that do nothing else: ours (the library's
Python, warm-up and prompt) without MTP, with it, and with it in upstream's library; and
llama-bench (the same). Needs Linux (/proc) for that. Writes results/NAME.json and .md after every
round.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import filetypes
import peers as peers_module
from benchkit import llama_bench, ours, results, rivals
from benchkit.filetable import BENCH, OURS, Claim, Job, Records, Speeds, claims_table, paired
from benchkit.model import FOLDER, dimensions
from benchkit.ours import DriverError
from benchkit.paths import ensure_driver
from benchkit.plan import Plan, random_prompt
from benchkit.rivals import IK, UPSTREAM
from benchkit.sample import Sample

from pyllama_mtp.measure.peers import PeerError

TYPES = "dense-q8_0,dense-q4_k_m,moe-q8_0,moe-q4_k_m"
OFF, CONTROL, ON = CASES = ("MTP off", "MTP off again", "MTP on")
THEIR_ON = "MTP on, upstream's way"
#: What ratios should be at least: to llama-bench with AVX-512 and without, of MTP on to off.
TO_BENCH, TO_BENCH_AVX2, ON_TO_OFF = 1.6, 1.2, 0.99
WARM_UP = 512  # tokens of a session's first prompt
LOOK_S = 0.02
MIB = 2**20
DRY_RUN = {"rounds": 1, "sizes": (32, 64), "step": 16}


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    ensure_driver()
    from pyllama_mtp.settings import available_threads

    parser = argparse.ArgumentParser(description="Prompts beside llama-bench and ik_llama.cpp.")
    add = parser.add_argument
    words = filetypes.words
    add("--types", type=words(), default=TYPES, metavar="NAME,...", help="default: %(default)s")
    add("--folder", type=Path, default=FOLDER, help="of the model files")
    add("--sizes", type=words(int), default="512,2048", metavar="N,...", help="prompt tokens")
    add("--rounds", type=int, default=6, metavar="N", help="default: %(default)s")
    add("--step", type=int, default=512, metavar="N", help="default: %(default)s")
    add("--depth", type=int, default=3, metavar="K", help="drafts per round (default: %(default)s)")
    add("--peers", type=Path, default=peers_module.DEFAULT_FOLDER, help="upstream's programs")
    add("--ik", type=Path, metavar="FOLDER", help="ik_llama.cpp's programs")
    add("--threads", type=int, default=available_threads(), metavar="N")
    add("--name", default="prefill", help="of the result files")
    add("--dry-run", action="store_true", help="a few tokens, one round, nothing is written")
    args = parser.parse_args(argv)
    if args.dry_run:
        vars(args).update(DRY_RUN)
    args.peer_depths = (0,)  # for filetypes.find_peers()
    if min((*args.sizes, 1 if args.sizes else 0, args.rounds, args.step, args.depth)) < 1:
        parser.error("sizes, rounds, step and depth must be at least 1")
    filetypes.check_types(parser, args)
    return args


# -- measuring -------------------------------------------------------------------------------------


def plan_of(args: argparse.Namespace, job: Job) -> Plan:
    """Of a file and size."""
    return Plan(filetypes.model_path(args, job.file), job.context, threads=args.threads)


def settings_of(args: argparse.Namespace, plan: Plan, case: str) -> dict[str, Any]:
    """Fields of pyllama_mtp.Settings; no checkpoints, which llama-bench does not have either."""
    usual = plan.driver_settings(plan.n_prefill + args.depth + 2)
    return {**usual, "checkpoints": 0, "draft_n_max": args.depth if case in (ON, THEIR_ON) else 0}


def turned(cases: Sequence[str], by: int) -> list[str]:
    """The cases, begun with another one."""
    by %= len(cases)
    return [*cases[by:], *cases[:by]]


def steps(model: Any, args: argparse.Namespace, plan: Plan, number: int) -> dict[str, Sample]:
    """The prompt in three sessions, turn and turn about."""
    from pyllama_mtp import Session, Settings

    size = plan.n_prefill
    prompt, order = random_prompt(size + 1, model.n_vocab, seed=number), turned(CASES, number)
    seconds = dict.fromkeys(CASES, 0.0)
    sessions: dict[str, Any] = {}
    try:
        for case in order:
            session = sessions[case] = Session(model, Settings(**settings_of(args, plan, case)))
            session.process(prompt[: WARM_UP + 1])
            session.reset()
        for end in [*range(args.step, size, args.step), size]:
            order = turned(order, 1)
            for case in order:
                # process() leaves the last token: each step computes exactly its own tokens
                seconds[case] += sessions[case].process(prompt[: end + 1]).prefill_s
    finally:
        for session in sessions.values():
            session.close()
    return {case: Sample(size / s, None, size, 0) for case, s in seconds.items()}


def one_round(
    model: Any, args: argparse.Namespace, job: Job, number: int, peers: filetypes.Peers
) -> Records:
    """Every side once; a peer that fails is noted."""
    plan, found = plan_of(args, job), Records()
    upstream, ik = (peers.programs.get((side, BENCH)) for side in (UPSTREAM, IK))
    sides: list[tuple[str, Callable[[], dict[str, Sample]]]] = []
    if ik:
        sides.append((IK, partial(rivals.ik_prefill, ik, plan)))
    sides.append((OURS, partial(steps, model, args, plan, number)))
    if upstream:
        sides.append((BENCH, lambda: {"0": llama_bench.prefill(upstream, plan)}))
    for side, measure in sides if number % 2 == 0 else sides[::-1]:
        try:
            found.add(job, number, side, "prefill", measure())
        except PeerError as error:
            peers.note(f"{job.file}: {side} is incomplete", error)
    return found


def memory_of(args: argparse.Namespace, job: Job, bench: str | None) -> dict[str, Any]:
    """Bytes: of the file, and by side the peak of a process, of ours also before the model."""
    plan = plan_of(args, job)
    n_vocab = dimensions(plan.model).n_vocab
    found: dict[str, Any] = {"model": plan.model.stat().st_size}
    for case in (OFF, ON, THEIR_ON):
        settings, prompt = settings_of(args, plan, case), random_prompt(job.context, n_vocab)
        variant = "upstream" if case == THEIR_ON else "patched"
        answer = ours.measure(
            ours.Request(str(plan.model), variant, case != OFF, settings, prompt, 1, job.context)
        )
        if answer.resident["end"]:
            at = {name: answer.resident[name]["VmHWM"] for name in ("start", "end")}
            found[case] = {"peak": at["end"], "before": at["start"]}
    if bench:
        test = ("-p", str(job.context), "-n", "0", "-r", "1")
        found[BENCH] = {"peak": peak([bench, *llama_bench.options(plan).arguments(), *test])}
    return found


def peak(command: Sequence[str]) -> int:
    """Most resident memory of a program, in bytes; looked at again and again while it runs.

    What the system sums up at its end (ru_maxrss) is at least what this process has.
    """
    most, status = 0, subprocess.DEVNULL
    with subprocess.Popen(command, stdout=status, stderr=status) as process:
        while process.poll() is None:
            try:
                lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
            except OSError:
                break
            most = max(most, ours.parse_status(lines).get("VmHWM", 0))
            time.sleep(LOOK_S)
    return most


# -- the result ------------------------------------------------------------------------------------


def claims(records: Records, jobs: Sequence[Job], to_bench: float) -> list[Claim]:
    """What can be said of each file and size."""
    found = []
    for job in jobs:
        own = records.speeds(job, OURS, "prefill")
        theirs = records.speeds(job, BENCH, "prefill").get("0", {})
        if not own:
            continue
        on, n = own[ON], f"{job.context:,} tokens"
        off = {number: (own[OFF][number] + own[CONTROL][number]) / 2 for number in on}
        rows: list[tuple[str, Speeds, float | None]] = [
            ("MTP on / llama-bench", paired(on, theirs), to_bench),
            ("MTP on / off", paired(on, off), ON_TO_OFF),
            ("MTP off / off again (the machine)", paired(own[OFF], own[CONTROL]), None),
        ]
        rivalling = records.speeds(job, IK, "prefill")
        for case in records.near_best(job, IK, 0.0, "prefill")[:1]:
            option = case.partition(" ")[2]
            rows.append((f"MTP on / {IK} {option}".strip(), paired(on, rivalling[case]), None))
        found += [Claim(job.file, f"{n}: {w}", r, least) for w, r, least in rows if r]
    return found


def speeds_table(records: Records, jobs: Sequence[Job]) -> list[str]:
    """Tokens per second by side: median, lowest and highest."""
    sides = [(OURS, case) for case in CASES] + [(BENCH, "0"), (IK, "0"), (IK, "0 -rtr")]
    names = [*CASES, BENCH, IK, f"{IK} -rtr"]
    rows = []
    for job in jobs:
        cells = []
        for side, case in sides:
            by = [*records.speeds(job, side, "prefill").get(case, {}).values()]
            cells.append(f"{median(by):.0f} ({min(by):.0f}-{max(by):.0f})" if by else "-")
        rows.append([f"{job.file}, {job.context:,}", *cells])
    return results.markdown_table(["file, tokens", *names], rows)


def memory_table(memory: dict[str, Any]) -> list[str]:
    """Peaks, and how far ours are above llama-bench's."""
    head = ["file, tokens", "side", "peak MiB", "above llama-bench", "without Python"]
    rows = []
    for name, found in memory.items():
        theirs = found.get(BENCH, {}).get("peak")
        for side in (BENCH, OFF, ON, THEIR_ON):
            if side not in found:
                continue
            at, shares = found[side], ["-", "-"]
            if side != BENCH and theirs:
                more = at["peak"] - theirs
                shares = [f"{100 * m / found['model']:+.1f} %" for m in (more, more - at["before"])]
            rows.append([name, side, f"{at['peak'] / MIB:.0f}", *shares])
    return results.markdown_table(head, rows)


def tables(result: dict[str, Any], records: Records, jobs: Sequence[Job]) -> list[str]:
    """Ratios, speeds, memory: Markdown lines."""
    avx512 = "avx512" in str(result["build"].get("cpu_features", "")).lower()
    return [
        *claims_table(claims(records, jobs, TO_BENCH if avx512 else TO_BENCH_AVX2)),
        *("", "Tokens per second, medians with lowest and highest:", ""),
        *speeds_table(records, jobs),
        *("", "Peak resident memory; differences in per cent of the model's file:", ""),
        *memory_table(result["memory"]),
    ]


def render(result: dict[str, Any], records: Records, jobs: Sequence[Job]) -> str:
    """The Markdown page."""
    plan = result["plan"]
    lines = ["# Prompts, without MTP and with it, beside other programs", ""]
    lines += results.header_lines(result)
    lines += [
        f"- {side}: {build['version']} {build['upstream_commit'][:12]}"
        for side, build in result["peers"].items()
    ]
    lines += [
        f"- {plan['threads']} threads; MTP on: {plan['depth']} drafts; steps of {plan['step']}",
        *(f"- Note: {note}" for note in result["notes"]),
        "",
        *tables(result, records, jobs),
        "",
        "A ratio is the Hodges-Lehmann estimate of those within a round; to ik_llama.cpp's better",
        "one of plain and -rtr. `MTP off` is the mean of two sessions, whose ratio is what the",
        "machine, and the memory that a session got, make by themselves. Ours process a prompt in",
        "steps, side by side; peers are processes of their own. `without Python`: less what our",
        "process has before a model is loaded, interpreter and libraries. `upstream's way`: with",
        "upstream's library and its draft context, in our driver.",
    ]
    return "\n".join(lines)


def run(args: argparse.Namespace) -> int:
    """File after file, round after round; the exit code."""
    from pyllama_mtp import Model
    from pyllama_mtp.llama import native
    from pyllama_mtp.measure.machine import describe_machine

    library = native.load()
    peers = filetypes.find_peers(args, library)
    plan = {name: getattr(args, name) for name in ("rounds", "step", "depth", "threads")}
    header = results.header(describe_machine(), library.stamp)
    records, memory = Records(), dict[str, Any]()
    result = {**header, "plan": plan, "peers": peers.builds, "notes": peers.notes}
    jobs = [Job(name, size, "f16") for name in args.types for size in args.sizes]
    for name in args.types:
        mine = [job for job in jobs if job.file == name]
        for job in mine:
            bench = peers.programs.get((UPSTREAM, BENCH))
            memory[f"{job.file}, {job.context:,}"] = memory_of(args, job, bench)
        with Model(filetypes.model_path(args, name)) as model:
            for number in range(args.rounds):
                found = [one_round(model, args, job, number, peers) for job in mine]
                records.rows += [row for one in found for row in one.rows]
                print(f"[{number + 1}/{args.rounds}] {name}", file=sys.stderr, flush=True)
                result |= {"memory": memory, "samples": records.rows}
                if not args.dry_run:
                    results.write(result, render(result, records, jobs), args.name)
    print("\n".join(tables(result, records, jobs)))
    return 0


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    args = parse_arguments(argv)
    from pyllama_mtp import PyllamaMtpError

    try:
        return run(args)
    except (DriverError, PyllamaMtpError) as error:
        print(f"prefill: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; finished rounds are kept", file=sys.stderr)
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
