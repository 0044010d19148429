#!/usr/bin/env python3
"""Build for the NVIDIA GPU present, check, and measure the 27B and 35B-A3B shapes on it.

    python bench/gpu_runbook.py bundle           # where there is a network: what the others need
    python bench/gpu_runbook.py check            # what this machine lacks
    python bench/gpu_runbook.py all              # build ... table, a step after the other
    python bench/gpu_runbook.py next             # 9 minutes of it, then the table so far
    python bench/gpu_runbook.py matrix           # one step; exit code 3: call it again
    python bench/gpu_runbook.py all --dry-run    # all of it on the CPU with tiny models

Steps run for --budget at most (9 minutes), so that they can be made one by one. What is done is
remembered in --work and not done again; a build that was cut goes on, and so does a matrix. No
network is needed from `check` on, if --bundle (or the machine) has upstream's tree and the Python
packages. cuBLAS and nvcc must be on the machine.

Steps of `all`, in order:

    check         GPU, driver, nvcc, cuBLAS, compiler, Python packages, disk
    build         both variants with CUDA for this GPU only; that they use it, and work without
    shapes        models with random weights, 35 GB in IQ4_NL
    correctness   the regression suite on the GPU (tolerances: --tolerance-scale)
    matrix        no MTP and depths 2, 3, 4 at 1k, 8k, 32k, 64k, 128k and 192k
    prefill       with MTP against without; hidden states on the device and over the host
    decode        acceptance 0.8, 0.5 and 0.1; chain and stepwise; 32k drafted tokens and all
    peers         upstream's llama-server at the same acceptance
    table         everything that was measured; --publish writes it below bench/results

Others: `bundle`, `toolchain` (configures with CUDA and compiles one file; needs no GPU), `list`.

A build takes about 40 minutes of one core, most of it flash attention and matrix kernels: on 16
cores some 4 minutes. Shorter, at the price of cache types: --define GGML_CUDA_FA_QUANTS=f16-f16.

Exit codes: 0 done, 1 something failed (the message says what; logs are in WORK/logs), 2 the
options are wrong, 3 the time was over: the same command goes on.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpukit import bundle, collect, machine, measure, prepare, table
from gpukit import config as configs
from gpukit.config import Config
from gpukit.state import FAILED, RunbookError, Work
from gpukit.units import ALL_DONE, CALL_AGAIN, SOME_FAILED, USAGE, Unit, parse_budget, run_units

ROOT = Path(__file__).resolve().parent.parent
UNITS: dict[str, Callable[[Config], list[Unit]]] = {
    "build": prepare.build,
    "shapes": prepare.shapes,
    "correctness": prepare.correctness,
    "matrix": measure.matrix,
    "prefill": measure.prefill,
    "decode": measure.decode,
    "peers": measure.peers,
}
OTHERS: dict[str, Callable[[Config], list[Unit]]] = {"toolchain": prepare.toolchain}
ORDER = ("check", *UNITS, "table")
STEPS = (*ORDER, *OTHERS, "bundle", "list", "next", "all")
#: What a dry run measures, so that it takes seconds.
DRY = {
    "shapes": ("tiny", "tiny-moe"),
    "sizes": (16, 48),
    "contexts": (16,),
    "handoff_contexts": (32,),
    "acceptance": (0.8,),
    "n_gpu_layers": 0,
    "n_decode": 6,
    "draft_vocab": 512,
}


def numbers(text: str) -> tuple[int, ...]:
    """An argparse type: tokens, "1024,32k"."""
    try:
        found = tuple(
            int(part[:-1]) * 1024 if part[-1] in "kK" else int(part) for part in text.split(",")
        )
    except (ValueError, IndexError):
        raise argparse.ArgumentTypeError(f"{text!r}: whole numbers such as 1024,32k") from None
    if min(found) < 0:
        raise argparse.ArgumentTypeError(f"{text!r}: numbers from 0")
    return found


def words(text: str) -> tuple[str, ...]:
    """An argparse type: names separated by commas."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    build = ROOT / "build"
    add("step", choices=STEPS, metavar="STEP", help=", ".join(STEPS))
    add("--budget", default="9m", metavar="TIME", help="most time of a step (default: 9m)")
    add("--work", type=Path, metavar="DIR", help="default: build/gpu (dry runs: build/gpu-dry)")
    add("--models", type=Path, metavar="DIR", help="a tmpfs will do (default: WORK/models)")
    add("--bundle", type=Path, default=build / "gpu-bundle", metavar="DIR")
    add("--dry-run", action="store_true", help="tiny models on the CPU; figures mean nothing")
    add("--keep-going", action="store_true", help="`all` measures even where tests fail")
    add("--type", default=configs.TENSOR_TYPE, help="of the models (default: %(default)s)")
    add("--shapes", type=words, default=configs.SHAPES, metavar="NAME,...")
    add("--sizes", type=numbers, default=configs.SIZES, metavar="N,...", help="of the matrix")
    add("--depths", type=numbers, default=configs.DEPTHS, metavar="K,...")
    add("--contexts", type=numbers, default=configs.CONTEXTS, metavar="N,...", help="of decode")
    add("--n-gpu-layers", type=int, default=-1, metavar="N")
    scale = "fixed tolerances of the tests are multiplied by this (default: 10; dry run: 1)"
    add("--tolerance-scale", type=float, metavar="X", help=scale)
    add("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="compilers at a time")
    add("--define", action="append", default=[], metavar="NAME=VALUE", help="for CMake")
    add("--commit", metavar="HASH", help="of the sources, where there is no git")
    add("--publish", action="store_true", help="table: write below bench/results")
    add("--python", default="3.12", metavar="X.Y", help="bundle: Python of the other machine")
    add("--leave-out", type=words, default=(), metavar="NAME,...", help="bundle: what it has")
    add("--project", action="store_true", help="bundle: this checkout as well")
    args = parser.parse_args(argv)
    if any("=" not in define for define in args.define):
        parser.error("--define takes NAME=VALUE")
    return args


def configure(args: argparse.Namespace) -> Config:
    """The state of the work folder and the options. Raises RunbookError."""
    usual = ROOT / "build" / ("gpu-dry" if args.dry_run else "gpu")
    work = Work.open(args.work or usual, args.dry_run)
    chosen: dict[str, Any] = {
        "shapes": args.shapes,
        "sizes": args.sizes,
        "contexts": args.contexts,
        "handoff_contexts": configs.HANDOFF_CONTEXTS,
        "acceptance": configs.ACCEPTANCE,
        "n_gpu_layers": args.n_gpu_layers,
        "n_decode": 192,
        "draft_vocab": 32768,
    }
    return Config(
        work=work,
        models=(args.models or work.folder / "models").resolve(),
        bundle=args.bundle.resolve(),
        gpu=None if args.dry_run else machine.find_gpu(),
        tensor_type=args.type,
        depths=args.depths,
        tolerance_scale=args.tolerance_scale or (1.0 if args.dry_run else 10.0),
        jobs=args.jobs,
        defines=tuple(args.define),
        commit=args.commit,
        **{**chosen, **(DRY if args.dry_run else {})},
    )


def check(config: Config) -> int:
    """Print what is there and what is missing; remember GPU and compiler for the results."""
    wheels = config.bundle / "wheels"
    findings = [
        *machine.check_gpu(config.gpu),
        *machine.check_toolkit(),
        *machine.check_python(wheels if wheels.is_dir() else None),
        machine.check_space(config.work.folder, machine.BUILD_BYTES, "disk"),
        machine.check_space(config.models, model_bytes(config), "disk, models"),
        tree_finding(config),
    ]
    for finding in findings:
        print(finding.line(config.dry_run))
    nvcc, known = machine.find_nvcc(), config.work.facts.get("gpu")
    if known and config.gpu and known != config.gpu.to_dict():
        raise RunbookError(
            f"{config.work.folder} has figures of {known['name']}, driver {known['driver']}; give "
            f"another --work folder for {config.gpu.name}, driver {config.gpu.driver}"
        )
    if config.gpu is None and not config.dry_run:
        return SOME_FAILED  # nothing to remember: there is no GPU whose figures could follow
    config.work.facts.update(
        gpu=config.gpu.to_dict() if config.gpu else None,
        nvcc=machine.nvcc_version(nvcc) if nvcc else None,
        defines=prepare.defines(config),
    )
    config.work.save()
    bad = [f for f in findings if not f.ok and not (f.gpu and config.dry_run)]
    return SOME_FAILED if bad else ALL_DONE


def model_bytes(config: Config) -> float:
    """Bytes of the models that are still to be written."""
    known = {("qwen3.6-27b", "iq4_nl"): 15.4e9, ("qwen3.6-35b-a3b", "iq4_nl"): 20.1e9}
    known |= {("qwen3.6-27b", "q8_0"): 29.1e9, ("qwen3.6-35b-a3b", "q8_0"): 37.8e9}
    absent = [shape for shape in config.shapes if not config.model(shape).exists()]
    return sum(known.get((shape, config.tensor_type), 1e7) for shape in absent)


def tree_finding(config: Config) -> machine.Finding:
    """Upstream's sources: in vendor/, or in the bundle."""
    there = bundle.is_complete() or (config.bundle / bundle.TREE).exists()
    todo = "bring the folder that the step `bundle` makes (--bundle), or build with a network"
    return machine.Finding("llama.cpp", there, "laid out" if there else "no tree", todo)


def run_step(step: str, config: Config, args: argparse.Namespace, limit_s: float) -> int:
    """One step, for so many seconds at most; the exit code."""
    if step == "check":
        return check(config)
    if config.gpu and config.work.facts.get("gpu") != config.gpu.to_dict():
        check(config)
    if step == "table":
        table.write(config, args.publish)
        return ALL_DONE
    if "gpu" not in config.work.facts:
        check(config)
    if not config.dry_run and config.gpu is None and step != "toolchain":
        raise RunbookError("there is no GPU here; --dry-run runs everything on the CPU")
    units = {**UNITS, **OTHERS}[step](config)
    whole_s = parse_budget(args.budget)
    return run_units(config.work, units, limit_s, stop=step == "build", whole_s=whole_s)


def run_next(config: Config, args: argparse.Namespace) -> int:
    """What is to be done next, one step after the other, until the budget of them all is over; then
    the table of what there is."""
    end, code = time.monotonic() + parse_budget(args.budget), ALL_DONE
    for step in ORDER[:-1]:
        left = end - time.monotonic()
        worst = CALL_AGAIN if left <= 0 else run_step(step, config, args, left)
        code = SOME_FAILED if SOME_FAILED in (code, worst) else max(code, worst)
        if worst == CALL_AGAIN or (worst and _ends_all(step, args)):
            break
    if collect.rows(config):
        table.write(config, args.publish)
    return code


def _ends_all(step: str, args: argparse.Namespace) -> bool:
    """Whether nothing goes on where this step failed."""
    needed = step in ("check", "build", "shapes")
    return needed or (step == "correctness" and not args.keep_going)


def run_all(config: Config, args: argparse.Namespace) -> int:
    """Every step in order, each as often as it needs; what fails ends it, but for measurements."""
    worst, limit_s = ALL_DONE, parse_budget(args.budget)
    for step in ORDER:
        while True:
            before = progress(config)
            code = run_step(step, config, args, limit_s)
            if code != CALL_AGAIN:
                break
            if progress(config) == before:
                print(f"runbook: {step} makes no progress in {args.budget}", file=sys.stderr)
                code = SOME_FAILED
                break
        worst = max(worst, code)
        if code and _ends_all(step, args):
            print(f"runbook: stopped after {step}", file=sys.stderr)
            return code
    return worst


def progress(config: Config) -> list[tuple[str, str, str]]:
    """Changes whenever a unit gets further."""
    return [(name, r.status, r.message) for name, r in config.work.units.items()]


def show(config: Config) -> int:
    """Print the steps and what became of their units."""
    for step in ORDER:
        print(step)
        for name, record in config.work.units.items():
            if name.split()[0] in (step, *_ALSO.get(step, ())):
                note = f" {record.message}" if record.status == FAILED else ""
                print(f"    {record.status:7}{record.seconds:7.0f} s  {name}{note}")
    return ALL_DONE


#: Units of a step that are named after something else.
_ALSO = {"prefill": ("handoff",), "decode": ("drafting",)}


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    args = parse_arguments(argv)
    try:
        parse_budget(args.budget)
        if args.step == "bundle":
            given = (args.bundle.resolve(), args.python, args.leave_out, args.project)
            print("\n".join(bundle.lay_out(*given, fetch=not args.dry_run)))
            return ALL_DONE
        config = configure(args)
        if args.step == "list":
            return show(config)
        if args.step == "all":
            return run_all(config, args)
        if args.step == "next":
            code = run_next(config, args)
        else:
            code = run_step(args.step, config, args, parse_budget(args.budget))
        if code == CALL_AGAIN:
            print("runbook: the time is over; the same command goes on", file=sys.stderr)
        return code
    except RunbookError as error:
        print(f"runbook: {error}", file=sys.stderr)
        return USAGE if "budget" in str(error) else SOME_FAILED
    except KeyboardInterrupt:
        print("runbook: interrupted; what is done is kept", file=sys.stderr)
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
