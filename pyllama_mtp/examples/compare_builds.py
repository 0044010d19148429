"""Two builds of the library, measured side by side: which figures got better.

    python -m pyllama_mtp.examples.compare_builds [--model FILE] [--libraries upstream,patched]

A process can load only one build, so ``pyllama-mtp matrix`` gives each build a process, and takes
turns. A library may also be a folder with your own build.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from pyllama_mtp import bench
from pyllama_mtp.models.demo import demo_path

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", default=demo_path(), metavar="FILE")
parser.add_argument("--libraries", default="upstream,patched", metavar="OLD,NEW")
parser.add_argument("--repeat", type=int, default=3)
args = parser.parse_args()

with tempfile.TemporaryDirectory() as folder:
    cells = Path(folder) / "cells.jsonl"
    command = [sys.executable, "-m", "pyllama_mtp", "matrix", "--model", str(args.model)]
    command += ["--variants", args.libraries, "--output", str(cells)]
    command += ["--prompt-sizes", "256", "--depths", "0,3", "--max-tokens", "24"]
    command += ["--repeat", str(args.repeat)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    results = bench.read(cells)

old, new = args.libraries.split(",")
comparison = results.compare_variants(old, new)
for change in comparison.changes:
    size = "all sizes" if change.n_prompt is None else f"prompt {change.n_prompt}"
    print(
        f"{change.name}, {size}, {change.figure}: {change.ratio:.3f} "
        f"({change.low:.3f} to {change.high:.3f}), {change.verdict}"
    )
print(f"{len(comparison.faster)} faster, {len(comparison.slower)} slower")
