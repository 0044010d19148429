#!/usr/bin/env python3
"""What each generation of x86-64 CPUs gets, ours and upstream's: speed by CPU backend.

    pip install . -C cmake.define.PYLLAMA_CPU_ALL=ON
    python bench/generations.py --model FILE.gguf

The install is copied for each backend that this machine can run, with that backend only, and a
matrix compares its two variants: upstream's kernels are what llama-bench of the same build has. So
the figures are of this machine with features off, not of an old machine. Products of 1 to 8
columns, by type, are `python bench/columns.py` in such a copy: --keep FOLDER leaves the copies, for
PYTHONPATH. Prints the table of results/native.md.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from benchkit import results

import pyllama_mtp
from pyllama_mtp import bench
from pyllama_mtp.measure.figures import ratio_to

#: Backends by what upstream calls them, the newest first: a feature that each needs, what it has.
GENERATIONS = {
    "zen4": ("avx512_bf16", "AVX-512, VNNI, BF16"),
    "icelake": ("avx512_vnni", "AVX-512, VNNI"),
    "skylakex": ("avx512bw", "AVX-512"),
    "alderlake": ("avx_vnni", "AVX2, VNNI"),
    "haswell": ("avx2", "AVX2"),
    "ivybridge": ("f16c", "AVX, F16C"),
    "sandybridge": ("avx", "AVX"),
    "sse42": ("sse4_2", "SSE4.2"),
    "x64": ("sse2", "SSE2"),
}
MATRIX = "--depths 0,3 --no-ngram --variants patched,upstream"


def copy_with(name: str, package: Path, to: Path) -> Path:
    """A copy of a package in which `name` is the only CPU backend: `to`, for PYTHONPATH."""
    shutil.copytree(package, to / package.name, symlinks=True, dirs_exist_ok=True)
    for library in to.glob("pyllama_mtp/lib/libggml-cpu-*.so"):
        if library.name != f"libggml-cpu-{name}.so":
            library.unlink()
    return to


def row(name: str, at: Path, args: argparse.Namespace) -> list[str]:
    """Measure one backend: name, features, then tokens per second and ratios to upstream's."""
    records = at / "matrix.jsonl"
    words = ["matrix", *MATRIX.split(), "--threads", str(args.threads), "-m", str(args.model)]
    words += ["-p", str(args.prompt), "-n", str(args.tokens)]
    words += ["--repeat", str(args.repeat), "--output", str(records)]
    environment = {**os.environ, "PYTHONPATH": str(at)}
    command = [sys.executable, "-m", "pyllama_mtp", *words]
    subprocess.run(command, check=True, cwd=at, env=environment, stdout=subprocess.DEVNULL)
    cells = {(cell.variant, cell.n_max): cell for cell in bench.read(records)}
    figures = []
    for depth, figure in ((0, "prefill_tps"), (0, "decode_tps"), (3, "decode_tps")):
        ours, upstream = cells["patched", depth], cells["upstream", depth]
        ratio = ratio_to(ours, upstream, figure)
        figures += [f"{getattr(ours, figure):.1f}", f"{ratio.value:.2f}" if ratio else "-"]
    return [name, GENERATIONS[name][1], *figures]


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", type=Path, required=True, metavar="FILE", help="a GGUF file with an MTP head")
    add("--threads", type=int, default=len(os.sched_getaffinity(0)), metavar="N")
    add("--repeat", type=int, default=3, metavar="N", help="samples (default: %(default)s)")
    add("--prompt", type=int, default=128, metavar="N", help="its tokens (default: %(default)s)")
    add("--tokens", type=int, default=32, metavar="N", help="decoded (default: %(default)s)")
    add("--backends", metavar="NAME,...", help="default: all that this machine can run")
    add("--keep", type=Path, metavar="FOLDER", help="leave the copies there")
    args = parser.parse_args(argv)
    args.model = args.model.resolve()
    features = Path("/proc/cpuinfo").read_text().split()
    package = Path(pyllama_mtp.__file__).parent
    built = {path.name for path in package.glob("lib/libggml-cpu-*.so")}
    names = [name for name in GENERATIONS if f"libggml-cpu-{name}.so" in built]
    names = [name for name in names if GENERATIONS[name][0] in features]
    if not names:
        parser.error("this install has no backend for each generation; see docs/building.md")
    if args.backends:
        unknown = set(args.backends.split(",")) - set(names)
        if unknown:
            parser.error(f"--backends: {', '.join(unknown)} not in {', '.join(names)}")
        names = [name for name in names if name in args.backends.split(",")]
    head = ["backend", "has", "prompt", "to upstream", "decode", "to upstream", "3 drafts", "to it"]
    with tempfile.TemporaryDirectory() as folder:
        at = args.keep.resolve() if args.keep else Path(folder)
        rows = [row(name, copy_with(name, package, at / name), args) for name in names]
    print(f"{results.command_line()}, commit {results.project_commit()}\n")
    print("\n".join(results.markdown_table(head, rows)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
