#!/usr/bin/env python3
"""What MTP costs while a prompt is processed: the original defect, upstream's state, and ours.

    python bench/prefill.py --model FILE.gguf --output bench/results/prefill-NAME.md
    python bench/prefill.py --sizes 512,4096 --each-switch   # 0.8B shape, Q8_0, synthetic weights
    python bench/prefill.py --dry-run                        # a few tokens, nothing is written

One process per library keeps the model loaded; the cases take turns (A D C B B C D A), each in a
fresh session after a warm-up, all with the same text, another one in every round. "no MTP" and "K/V
only" stand side by side, each first in turn: which session of a process comes first, and so gets
which memory, makes 2 or 3 % by itself. Writes the
Markdown file and a .json with every raw sample beside it after every round, so that an interrupted
run keeps its finished rounds. Nothing else should run on the machine meanwhile; the load average is
recorded.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchkit import results
from benchkit.model import model_file
from benchkit.ours import DriverError
from benchkit.paths import RESULTS, ensure_driver
from benchkit.plan import Plan
from benchkit.statistics import Ratio, Spread
from benchkit.worker import Load, Prefill, Prompt, Worker

WARMUP_TOKENS = 32
#: A worker that used more of a core than this while others were measured was not idle.
IDLE_CPU_SHARE = 0.01
#: What must be the same in both libraries' builds.
SAME = ("upstream_commit", "compiler", "cpu_features", "cuda")
DRY_RUN = {"rounds": 1, "sizes": (48, 96)}


@dataclass(frozen=True)
class Case:
    """One line of the tables: a library, and the settings in which it differs from the defaults."""

    name: str
    variant: str
    settings: dict[str, Any] = field(default_factory=dict)


BASE, DEFECT = "no MTP", "all rows"
CASES = (
    Case(BASE, "patched", {"draft_n_max": 0}),
    Case(DEFECT, "patched", {"prompt_rows": "all", "prompt_sync": "full"}),
    Case("upstream", "upstream"),
    Case("K/V only", "patched"),
)
#: What the improvement of the MTP block does by itself, and what the library does.
SWITCH_CASES = (
    Case("full block", "patched", {"prompt_sync": "full"}),
    Case("no MTP, upstream", "upstream", {"draft_n_max": 0}),
)

HEAD = ("tok/s", "to no MTP", "per round", "prompt sync")
DEFINITIONS = """\
## How to read this

- `tok/s`: prompt tokens over the time until everything is computed, the logits of the last row and
  the MTP block's cache included; median of the rounds, lowest and highest in brackets. `to no MTP`
  is the median of the ratios to "{base}" in the same round, `per round` the lowest and the highest
  of them.
- `prompt sync`: the part of that time in which the host fills the MTP block's cache in upstream's
  way (totals over the rounds); on a CPU that is what it costs, a GPU computes on while the host
  goes on. With K/V only the target's own decodes fill it: their part is not told apart. Upstream's
  own programs do not measure it.
- {base}: draft depth 0; the MTP head is loaded.
- all rows: our library with `prompt_rows="all"`, `prompt_sync="full"`: the LM head runs on every
  row of the prompt, which is the defect that this project began with; the rest as upstream.
- upstream: upstream's library, driven as it can be: the LM head runs on the last row, the whole MTP
  block runs over the prompt in a context of its own, hidden states go over the host.
- K/V only: our library with its defaults: every decode computes the block's K and V, too, and
  nothing else of it; hidden states stay where they are.
- full block (with `--each-switch`): our library with `prompt_sync="full"`, which is upstream's way.
- Depth {depth}. Every measurement has a fresh session of one process that keeps the model loaded
  (one per library), and a warm-up of {warmup} prompt and {warmup_tokens} generated tokens which is
  then forgotten. The text is real (sources of Python's standard library, or `--prompt-file`), the
  same for all cases of a round."""


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    ensure_driver()
    from pyllama_mtp.settings import CACHE_TYPES, FLASH_ATTENTION, available_threads

    parser = argparse.ArgumentParser(description="What MTP costs while a prompt is processed.")
    add = parser.add_argument
    add(
        "--model", type=Path, metavar="FILE", help="GGUF file with an MTP head (default: synthetic)"
    )
    add("--sizes", type=_sizes, default=(512, 2048, 8192), metavar="N,N,...", help="prompt tokens")
    add("--rounds", type=int, default=5, metavar="N", help="default: %(default)s")
    text = "rounds with the slow case, all rows (default: all)"
    add("--defect-rounds", type=int, metavar="N", help=text)
    add("--depth", type=int, default=3, metavar="K", help="drafts per round (default: %(default)s)")
    add("--each-switch", action="store_true", help="also the full block, and upstream without MTP")
    text = "prompt tokens of the warm-up (default: the size, at most --n-batch)"
    add("--warmup", type=int, metavar="N", help=text)
    add("--prompt-file", type=Path, metavar="FILE", help="text to cut the prompts from")
    add("--n-gpu-layers", type=int, default=-1, metavar="N", help="default: all")
    add(
        "--threads", type=int, default=available_threads(), metavar="N", help="default: %(default)s"
    )
    add("--n-batch", type=int, default=2048, metavar="N")
    add("--n-ubatch", type=int, default=512, metavar="N")
    add("--checkpoints", type=int, default=4, metavar="N", help="default: %(default)s")
    add("--flash-attn", choices=FLASH_ATTENTION, default="auto")
    add("--cache-type-k", choices=CACHE_TYPES, default="f16")
    add("--cache-type-v", choices=CACHE_TYPES, default="f16")
    add("--output", type=Path, default=RESULTS / "prefill.md", metavar="FILE.md", help="result")
    add("--dry-run", action="store_true", help="a few tokens, one round, nothing is written")
    args = parser.parse_args(argv)
    if args.dry_run:
        vars(args).update(DRY_RUN)
    if args.defect_rounds is not None and not 1 <= args.defect_rounds <= args.rounds:
        parser.error("--defect-rounds must be from 1 to --rounds")
    if args.rounds < 1:
        parser.error("--rounds must be at least 1")
    if args.depth < 1:
        parser.error("--depth must be at least 1: without MTP there is nothing to compare")
    if args.output.suffix != ".md":
        parser.error("--output must end in .md; the .json goes beside it")
    if not args.dry_run and not args.output.resolve().parent.is_dir():
        parser.error(f"--output: there is no folder {args.output.parent}")
    return args


def _sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError("whole numbers, separated by commas") from None
    if min(sizes) < 1 or len(set(sizes)) != len(sizes):
        raise argparse.ArgumentTypeError("sizes of at least 1 token, each one once")
    return sizes


# -- measuring -------------------------------------------------------------------------------------

#: Per size and case, one record for every finished round.
Samples = dict[int, dict[str, list[dict[str, Any]]]]


class Bench:
    """The workers, what they are asked, and what they said.

    Attributes:
        loaded: by variant, the answer to Load.
        idle: by variant, seconds that the worker waited while others were measured, and seconds of
            CPU time that it used meanwhile.
    """

    def __init__(self, plan: Plan, args: argparse.Namespace, workers: dict[str, Worker]) -> None:
        self.plan, self.args, self.workers = plan, args, workers
        self.cases = [*CASES, *(SWITCH_CASES if args.each_switch else ())]
        self.loaded = {
            variant: worker.ask(Load(str(plan.model), args.n_gpu_layers))
            for variant, worker in workers.items()
        }
        self.idle = {variant: {"s": 0.0, "cpu_s": 0.0} for variant in workers}

    def prompt(self, size: int, number: int) -> list[int]:
        """The text of a round, and one token more, on which the next generation would begin."""
        file = self.args.prompt_file
        request = Prompt(size + 1, number, file and str(file.resolve()))
        return list(next(iter(self.workers.values())).ask(request)["tokens"])

    def settings(self, case: Case, size: int) -> dict[str, Any]:
        """Fields of pyllama_mtp.Settings; the context is the same for all cases of a size."""
        n_tokens = max(size, self.warmup(size) + WARMUP_TOKENS) + self.args.depth + 2
        common = {"draft_n_max": self.args.depth, "checkpoints": self.args.checkpoints}
        return {**self.plan.driver_settings(n_tokens), **common, **case.settings}

    def warmup(self, size: int) -> int:
        """Tokens of the warm-up's prompt."""
        wanted = self.args.n_batch if self.args.warmup is None else self.args.warmup
        return max(1, min(size, wanted))

    def measure(self, case: Case, size: int, prompt: list[int]) -> dict[str, Any]:
        """One prefill of one case."""
        request = Prefill(self.settings(case, size), prompt, self.warmup(size), WARMUP_TOKENS)
        answer = self.workers[case.variant].ask(request)
        idle = self.idle[case.variant]
        idle["s"] += answer["idle_s"]
        idle["cpu_s"] += answer["idle_cpu_s"]
        telemetry = answer["telemetry"]
        names = ("n_prompt", "prefill_s", "prefill_tps", "prompt_sync")
        return {
            **{name: telemetry[name] for name in names},
            "prompt_sync_s": telemetry["time_s"]["prompt_sync"],
        }


def turns(cases: Sequence[Case], number: int, defect_rounds: int | None) -> list[Case]:
    """The order of a round: the base, then the others from the last to the first; or backwards."""
    base, *others = cases
    order = [base, *reversed(others)]
    if defect_rounds is not None and number >= defect_rounds:
        order = [case for case in order if case.name != DEFECT]
    return order[::-1] if number % 2 else order


def one_round(bench: Bench, number: int, samples: Samples) -> None:
    """Measure every case at every size; the cases take turns."""
    for size, by_case in samples.items():
        prompt = bench.prompt(size, number)
        for case in turns(bench.cases, number, bench.args.defect_rounds):
            sample = bench.measure(case, size, prompt)
            label = f"[{number + 1}/{bench.args.rounds}] {size} tokens, {case.name}"
            print(f"{label}: {sample['prefill_tps']:.1f} tok/s", file=sys.stderr, flush=True)
            by_case[case.name].append(sample)


def run(args: argparse.Namespace) -> int:
    """Round after round; the exit code."""
    names = ("n_batch", "n_ubatch", "threads", "flash_attn", "cache_type_k", "cache_type_v")
    plan = Plan(model_file(args.model), **{name: getattr(args, name) for name in names})
    load_before = os.getloadavg()[0]
    result: dict[str, Any] = {}
    code = 0
    with ExitStack() as stack:
        variants = dict.fromkeys(case.variant for case in CASES)
        workers = {variant: stack.enter_context(Worker(variant)) for variant in variants}
        bench = Bench(plan, args, workers)
        samples: Samples = {size: {case.name: [] for case in bench.cases} for size in args.sizes}
        for number in range(args.rounds):
            try:
                one_round(bench, number, samples)
            except KeyboardInterrupt:
                print("interrupted; finished rounds are kept", file=sys.stderr)
                code = 130
                break
            result = assemble(bench, samples, number + 1, load_before)
            if not args.dry_run:
                results.write(result, render(result), args.output.stem, args.output.parent)
    if result:
        print("\n".join([*tables(result), "", *condition_lines(result)]))
    return code


# -- the result ------------------------------------------------------------------------------------


def assemble(bench: Bench, samples: Samples, done: int, load_before: float) -> dict[str, Any]:
    """The result file's contents."""
    from pyllama_mtp.measure.machine import describe_machine

    args, loaded = bench.args, bench.loaded["patched"]
    build, upstream = {**loaded["stamp"]}, bench.loaded["upstream"]["stamp"]
    build["system_info"] = loaded["system_info"]
    plan = bench.plan.driver_settings(0)
    del plan["n_ctx"]
    return {
        **results.header(describe_machine(loaded["devices"]), build),
        "plan": {
            "model": bench.plan.model.name,
            "depth": args.depth,
            "checkpoints": args.checkpoints,
            "n_gpu_layers": args.n_gpu_layers,
            "warmup": {str(size): bench.warmup(size) for size in samples},
            "prompt_file": args.prompt_file is not None,
            **plan,
        },
        "upstream_series": upstream["series"],
        "builds_differ_in": [key for key in SAME if upstream.get(key) != build.get(key)],
        "rounds": {"done": done, "planned": args.rounds},
        "load_average": {"start": load_before, "end": os.getloadavg()[0]},
        "idle": bench.idle,
        "cases": {case.name: {"library": case.variant, **case.settings} for case in bench.cases},
        "sizes": {str(size): summarize(by_case) for size, by_case in samples.items()},
        "samples": {str(size): by_case for size, by_case in samples.items()},
    }


def summarize(by_case: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Medians, ratios and shares of one size."""
    rates = {name: [s["prefill_tps"] for s in given] for name, given in by_case.items()}
    return {
        name: {
            "prefill_tps": vars(Spread.of(rates[name])),
            "rounds": len(given),
            "to_base": vars(Ratio.of(rates[name], rates[BASE][: len(given)]).paired),
            "prompt_sync_share": sum(s["prompt_sync_s"] for s in given)
            / sum(s["prefill_s"] for s in given),
        }
        for name, given in by_case.items()
    }


def row(name: str, summary: dict[str, Any]) -> list[str]:
    """One line of a table."""
    ratio, share = summary["to_base"], summary["prompt_sync_share"]
    return [
        name,
        results.spread(summary["prefill_tps"]),
        f"{ratio['median']:.3f}",
        f"{ratio['low']:.3f}-{ratio['high']:.3f}" if name != BASE else "-",
        f"{100 * share:.1f} %" if share else "-",
    ]


def tables(result: dict[str, Any]) -> list[str]:
    """A table for every size."""
    lines: list[str] = []
    for size, by_case in result["sizes"].items():
        head = [f"{int(size):,} tokens", *HEAD]
        most = max(summary["rounds"] for summary in by_case.values())
        rows = [row(name, by_case[name]) for name in result["cases"]]
        for line, summary in zip(rows, by_case.values(), strict=True):
            if summary["rounds"] < most:
                line[0] += f" ({summary['rounds']} of {most} rounds)"
        lines += ["", *results.markdown_table(head, rows)]
    return lines[1:]


def condition_lines(result: dict[str, Any]) -> list[str]:
    """How quiet the machine was."""
    load = result["load_average"]
    lines = [
        f"- Load average: {load['start']:.2f} at the start, {load['end']:.2f} at the end (this "
        "benchmark's own work included)"
    ]
    for variant, idle in result["idle"].items():
        share = idle["cpu_s"] / idle["s"] if idle["s"] else 0.0
        if share > IDLE_CPU_SHARE:
            lines.append(
                f"- Note: while others were measured, the process with the {variant} library used "
                f"{100 * share:.1f} % of a core"
            )
    return lines


def render(result: dict[str, Any]) -> str:
    """The Markdown file."""
    plan = result["plan"]
    settings = ", ".join(
        f"{key} {value}" for key, value in plan.items() if key not in ("model", "warmup")
    )
    warmup = sorted(set(plan["warmup"].values()))
    filled = {"base": BASE, "depth": plan["depth"], "warmup_tokens": WARMUP_TOKENS}
    filled["warmup"] = " or ".join(map(str, warmup))
    lines = [
        "# What MTP costs while a prompt is processed",
        "",
        *results.header_lines(result),
        f"- Upstream's library: patch series {result['upstream_series'][:12]}",
        *(f"- Note: the libraries differ in {key}" for key in result["builds_differ_in"]),
        f"- Model: {plan['model']}",
        f"- Settings: {settings}",
        f"- Rounds: {result['rounds']['done']} of {result['rounds']['planned']}, interleaved",
        *condition_lines(result),
        "",
        *tables(result),
        "",
        DEFINITIONS.format(**filled),
    ]
    return "\n".join(lines)


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
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
