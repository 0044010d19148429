#!/usr/bin/env python3
"""What products of a few columns should cost on ARM CPUs, by llvm-mca's models: no measurement.

    python patches/patchqueue.py apply --dest build/arm --variant patched
    python bench/arm_products.py build/arm

qemu lists the instructions that a kernel executes for 4 rows (gemv, gemm of K quants: 8, halved),
with rows of two lengths; the difference, by instructions and by llvm-mca's cycles, is what 256 more
weights of 4 rows cost. Everything is taken to lie in the first-level cache.
bench/results/native.md has the table.
Needs Debian's g++-aarch64-linux-gnu, qemu-user and llvm-19.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from pathlib import Path

HERE = Path(__file__).parent
TYPES = ("Q8_0", "Q4_K", "Q6_K", "Q5_K", "Q4_0", "IQ4_XS")
MARCH = "armv8.2-a+dotprod+i8mm"
#: llvm-mca's names of CPUs.
CPUS = ("neoverse-n2", "neoverse-v2")
C_FILES = ("ggml.c", "ggml-quants.c", "ggml-cpu/quants.c", "ggml-cpu/arch/arm/quants.c")
CPP_FILES = ("ggml-threading.cpp", "ggml-cpu/arch/arm/repack.cpp", "ggml-cpu/small-batch.cpp")
#: Kernel and its number of columns.
WAYS = (("ours", 1), ("ours", 2), ("ours", 4), ("ours", 8), ("dot", 1), ("gemv", 1), ("gemm", 4))
SHORT, LONG = 4 * 256, 12 * 256


def run(*command: str | Path) -> str:
    """What a command prints."""
    words = [str(word) for word in command]
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def built(tree: Path) -> Path:
    """The program that runs one kernel, optimized as a release is."""
    source, folder = tree / "ggml" / "src", tree / MARCH
    folder.mkdir(exist_ok=True)
    (source / "ggml-version.h").write_text('#define GGML_VERSION ""\n#define GGML_COMMIT ""\n')
    include = [f"-I{path}" for path in (source.parent / "include", source, source / "ggml-cpu")]
    flags = ["-O3", f"-march={MARCH}", "-D_GNU_SOURCE", "-ffunction-sections", *include]
    objects = []
    for file in [source / name for name in C_FILES + CPP_FILES] + [HERE / "arm_products.cpp"]:
        objects.append(folder / f"{file.parent.name}-{file.name}.o")
        if not objects[-1].exists():
            language = ["gcc", "-std=c11"] if file.suffix == ".c" else ["g++", "-std=c++17"]
            command = [f"aarch64-linux-gnu-{language[0]}", language[1], *flags]
            run(*command, "-c", file, "-o", objects[-1])
    run("aarch64-linux-gnu-g++", "-static", *objects, "-Wl,--gc-sections", "-o", folder / "program")
    return folder / "program"


def instructions(program: Path) -> dict[int, tuple[str, str]]:
    """Function and text of the instruction at each address; jumps lose their targets."""
    found, function = {}, ""
    for line in run("aarch64-linux-gnu-objdump", "-dC", "--no-show-raw-insn", program).split("\n"):
        if heading := re.match(r"[0-9a-f]+ <(.*)>:$", line):
            function = heading[1]
        elif code := re.match(r" +([0-9a-f]+):\t([^/<]*)", line):
            text = code[2].strip()
            if re.match(r"(b|bl|b\.\w+|cbn?z|tbn?z|adrp?)\t", text):
                text = re.sub(r"[0-9a-f]+$", "0", text)
            found[int(code[1], 16)] = (function, text)
    return found


def executed(program: Path, known: dict[int, tuple[str, str]], *words: str) -> list[str]:
    """The instructions of the kernel itself, in the order of their execution."""
    log = program.with_suffix(".log")
    trace = ["-singlestep", "-d", "exec,nochain", "-D", str(log)]
    run("qemu-aarch64", "-cpu", "max", *trace, program, *words)
    lines = []
    for address in re.findall(r"\[\w+/(\w+)/", log.read_text()):
        function, text = known.get(int(address, 16), ("", ""))
        if re.match(
            r"(void )?(\(anonymous namespace\)::rows_neon|ggml_vec_dot_|ggml_gem[mv]_)", function
        ):
            lines.append(text)
    return lines


def cycles(lines: list[str], cpu: str) -> int:
    """llvm-mca's cycles for all of them, once."""
    command = ["llvm-mca-19", "-mtriple=aarch64", f"-mcpu={cpu}", "-mattr=+dotprod,+i8mm"]
    said = subprocess.run(
        [*command, "-iterations=1", "-all-stats=false", "-all-views=false", "-summary-view"],
        input="\n".join(lines), check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    return int(re.findall(r"Total Cycles: +(\d+)", said)[0])


def main() -> None:
    """Print a table for each CPU: cycles, and instructions behind them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("tree", type=Path, help="the patched tree")
    parser.add_argument("--types", default=",".join(TYPES))
    options = parser.parse_args()
    program = built(options.tree)
    known = instructions(program)
    for name in options.types.split(","):
        for way, columns in WAYS:
            if name == "IQ4_XS" and way in ("gemv", "gemm"):
                continue
            few, many = (
                executed(program, known, way, name, str(columns), str(n)) for n in (SHORT, LONG)
            )
            rows = 2 if way in ("gemv", "gemm") and name[-1] == "K" else 1
            scale = rows * (LONG - SHORT) / 256
            count = f"{(len(many) - len(few)) / scale:.0f}"
            cost = [f"{cpu} {(cycles(many, cpu) - cycles(few, cpu)) / scale:.0f}" for cpu in CPUS]
            print(name, way, columns, "instructions", count, *cost, flush=True)


if __name__ == "__main__":
    main()
