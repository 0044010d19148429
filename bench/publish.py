#!/usr/bin/env python3
"""Measure everything that the README and docs/ quote, and print it as parts of pages of results.

    python bench/publish.py --models MODELS                     # hours; the same command goes on
    python bench/publish.py --models MODELS --minutes 5         # ... in pieces of five minutes
    python bench/publish.py --models MODELS --only filetypes --files 0.8b-q8_0
    python bench/publish.py --models MODELS --quick             # try it: figures mean nothing
    python bench/publish.py --models MODELS --only contexts --files qwen3.6-27b --minutes 25 \
        --more '--repeat 1 --n-ubatch 2048'                     # long contexts on a GPU

A section is one `pyllama-mtp matrix` command for each of some models. Its samples are kept in
bench/results/SECTION.jsonl, from which it goes on after Ctrl-C or when the time was over, with the
same --more; remove the file to measure anew. Lengths of the context come in ascending order, and
those for which there is no time are left out. The tables of each section that was asked for are
printed. Models that MODELS lacks are made first; llama-server and llama-bench are those of the
folder that PYLLAMA_MTP_PEERS names, or bench/peers.py builds them. Sections of a GPU are those of
bench/gpu.py; they have to be named, and so have large models.

Exit codes: 0 all that was asked for is measured, 1 a command failed, 3 the time is over.
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchkit import BENCH, RESULTS, parser_of
from benchkit.model import OTHERS, SYNTHETIC, make_models, make_picture
from benchkit.speedpage import part

from pyllama_mtp.measure.peers import VARIABLE
from pyllama_mtp.measure.records import last_run

EIGHT = tuple(SYNTHETIC)[:8]
PEERS = "--peers llama-server,llama-bench"
DEMO = "demo"
FAILED, UNFINISHED = 1, 3


@dataclass(frozen=True)
class Section:
    """A matrix command for each of some models.

    Attributes:
        options: of `pyllama-mtp matrix`; {models} is the folder of the models.
        models: names of files, without ".gguf".
        further: models that are measured only if --files names them.
    """

    name: str
    title: str
    options: str
    models: tuple[str, ...] = (DEMO,)
    further: tuple[str, ...] = ()


LARGE = tuple(SYNTHETIC)[8:]
AT = "--at 1k,4k,16k,32k,64k,128k,192k -p 512 -n 128 --no-ngram"
GOLDEN = "--synthetic-acceptance golden:qwen3.5"
BOTH = ("0.8b-q4_k_m", "0.8b-q8_0")
THREE = (*BOTH, "moe-q4_k_m")

SECTIONS = (
    Section("filetypes", "By type of file",
            "-p 512 -n 128 --depths 0,2,3,4,auto --no-ngram --repeat 10", EIGHT),
    Section("long", "The depth `auto` in a long answer",
            "-p 512 -n 448 --depths 2,3,4,auto --no-ngram --repeat 10", EIGHT),
    Section("peers", "Beside llama-server and llama-bench",
            f"-p 512 -n 128 --depths 0,2,3 --no-ngram --repeat 5 {PEERS}", THREE),
    Section("golden", "At the acceptance of Qwen3.5's head, beside llama-server",
            "-p 512 -n 128 --depths 0,2,3,auto --no-ngram --repeat 5 --peers llama-server "
            f"{GOLDEN}",
            ("0.8b-q4_k_m", "moe-q4_k_m")),
    Section("sequences", "Several sequences at once",
            "-p 64 -n 128 --depths 0,1,3,auto --axis n-sequences=2,4,8 --no-ngram --repeat 3",
            BOTH),
    Section("contexts", "By length of the context",
            f"{AT} --depths 0,3,auto --repeat 2", BOTH, LARGE),
    Section("contexts_q8_0", "By length of the context, with K and V in Q8_0",
            f"{AT} --depths 0,3,auto --repeat 2 --cache-type-k q8_0 --cache-type-v q8_0",
            BOTH, LARGE),
    Section("contexts_peers", "By length of the context, beside llama-server and llama-bench",
            f"{AT} --depths 0,3 --repeat 1 {PEERS}", BOTH, LARGE),
    Section("prompts", "Prompts with MTP and without, and the same library once more",
            "-p 2k -n 8 --depths 0,3 --variants patched,patched:AGAIN=1 --repeat 5",
            ("0.8b-q4_k_m", "0.8b-q8_0", "moe-q4_k_m", "moe-q8_0")),
    Section("architectures", "Other architectures, beside llama-server",
            "-p 256 -n 128 --depths 0,1,3,auto --no-ngram --repeat 3 --peers llama-server", OTHERS),
    Section("classes", "Real text by class of prompt: the demo model",
            "--classes code,factual,instruction,thinking -p 192 -n 96 --depths 0,1,2,3,auto "
            "--threads 1 --repeat 9"),
    Section("images", "Prompts with an image and without, beside llama-server",
            "-p 288,512 -n 128 --depths 0,3 --classes text,image --image {models}/picture.png "
            "--mmproj {models}/encoder-0.8b.gguf --no-ngram --repeat 3 --peers llama-server",
            ("0.8b-q4_k_m",)),
    # Of bench/gpu.py, in the order of their worth.
    Section("gpu_golden", "On a GPU, at the acceptance of Qwen3.5's head",
            f"-p 1k -n 192 --depths 0,2,3,4,5,auto --no-ngram --repeat 3 {GOLDEN} {PEERS}", LARGE),
    Section("gpu", "On a GPU, with real drafts",
            "-p 1k -n 128 --depths 0,2,3,4,auto --no-ngram --repeat 3", LARGE),
    Section("gpu_32k", "On a GPU, after 32k tokens",
            "--at 32k -p 512 -n 128 --depths 0,2,3,4,auto --no-ngram --repeat 2 "
            "--axis synthetic-acceptance=golden:qwen3.5,none", LARGE),
    Section("gpu_experts", "On a GPU, with all experts on the CPU",
            f"--cpu-moe -p 1k -n 64 --depths 0,2,3,auto --no-ngram --repeat 2 {GOLDEN}", LARGE[1:]),
    Section("gpu_half", "On a GPU, with half of the layers on the CPU",
            f"--n-gpu-layers 33 -p 1k -n 48 --depths 0,3,auto --no-ngram --repeat 2 {GOLDEN}",
            LARGE[:1]),
)  # fmt: skip


def missing_samples(records: Path, model: str) -> int | None:
    """Samples of a model that its plan still lacks; None: it has not begun."""
    run = last_run(records, f"{model}.gguf") if records.exists() else None
    if run is None:
        return None
    skipped = sum(cell.repeat for cell in run.cells.values() if cell.skipped)
    return run.header.plan.n_samples - len(run.measured) - skipped


def command(section: Section, model: str, args: argparse.Namespace, records: Path) -> list[str]:
    """The words of a matrix command, without the program's."""
    # As many threads whatever else runs, or a run could not go on.
    options = [word.format(models=args.models) for word in section.options.split()]
    words = ["--threads", str(args.threads), *options, "--output", str(records)]
    words += [] if model == DEMO else ["-m", str(args.models / f"{model}.gguf")]
    words += shlex.split(args.more)
    words += ["--repeat", "1", "-n", "8"] if args.quick else []
    return [*words, *["--resume"] * (missing_samples(records, model) is not None)]


def measure(section: Section, args: argparse.Namespace, folder: Path, end: float) -> int:
    """Run a section's commands until `end`, and print its part; returns an exit code."""
    records, failed = folder / f"{section.name}.jsonl", False
    named = [name for name in (*section.models, *section.further) if name in (args.files or ())]
    models = named if args.files else section.models
    make_models(args.models, [name for name in models if name != DEMO])
    if "--image" in section.options:
        make_picture(args.models)
    if "--peers" in section.options and VARIABLE not in os.environ:
        subprocess.run([sys.executable, BENCH / "peers.py"], check=True)
    for model in models:
        left_s = end - time.monotonic()
        if missing_samples(records, model) == 0 or left_s <= 0:
            continue
        words = command(section, model, args, records)
        words += ["--budget", f"{max(1, int(left_s))}s"] if left_s < math.inf else []
        print(f"publish: pyllama-mtp matrix {shlex.join(words)}", file=sys.stderr, flush=True)
        # Elsewhere than in a checkout, whose sources are not built.
        done = subprocess.run([sys.executable, "-m", "pyllama_mtp", "matrix", *words], cwd=folder)
        failed |= done.returncode != 0
    missing = [model for model in models if missing_samples(records, model) != 0]
    if records.exists():
        print(part(section.title, records), end="\n\n")
        print(*(f"**Not finished: {model}.**\n\n" for model in missing), sep="", end="", flush=True)
    return FAILED if failed else UNFINISHED if missing else 0


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = parser_of(__doc__)
    names = [section.name for section in SECTIONS]
    usual = [name for name in names if not name.startswith("gpu")]
    add = parser.add_argument
    add("--models", type=Path, required=True, metavar="DIR", help="where models are, or are made")
    add("--only", nargs="+", choices=names, default=usual, metavar="NAME", help=f"of {names}")
    add("--files", nargs="+", metavar="NAME", help="only these models of a section")
    add("--more", default="", metavar="OPTIONS", help="further options of every matrix command")
    add("--results", type=Path, default=RESULTS, metavar="DIR", help="default: bench/results")
    what = "stop after so long; the same command goes on"
    add("--minutes", type=float, default=math.inf, metavar="M", help=what)
    cores = len(os.sched_getaffinity(0))
    add("--threads", type=int, default=cores, metavar="N", help="default: %(default)s, all cores")
    add("--quick", action="store_true", help="one short sample of each, into build/publish-quick")
    args = parser.parse_args(argv)
    args.models = args.models.resolve()
    folder = BENCH.parent / "build" / "publish-quick" if args.quick else args.results.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * args.minutes
    codes = [measure(one, args, folder, end) for one in SECTIONS if one.name in args.only]
    return FAILED if FAILED in codes else max(codes)


if __name__ == "__main__":
    raise SystemExit(main())
