#!/usr/bin/env python3
"""What kernels of a few rows should cost on ARM CPUs, by llvm-mca's models: no measurement.

    python patches/patchqueue.py apply --dest build/arm --variant patched
    python bench/arm_kernels.py build/arm

qemu lists the instructions that a kernel executes, llvm-mca counts their cycles: of a cell of
attention (64, divided), of a head of a delta net. Everything is taken to lie in the first-level
cache.
bench/results/native.md has the tables.
Needs Debian's g++-aarch64-linux-gnu, qemu-user and llvm-19.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
#: llvm-mca's names of CPUs, by what the program is compiled for: as ggml is on these CPUs.
CPUS = {
    "armv8.2-a+dotprod+fp16": ("neoverse-n1", "apple-m1"),
    "armv8.2-a+dotprod+fp16+i8mm+sve+sve2": ("neoverse-n2", "neoverse-v2"),
}
C_FILES = (
    "ggml.c",
    "ggml-quants.c",
    "ggml-cpu/ggml-cpu.c",
    "ggml-cpu/quants.c",
    "ggml-cpu/arch/arm/quants.c",
)
CPP_FILES = ("ggml-threading.cpp", "ggml-cpu/ops.cpp", "ggml-cpu/vec.cpp")
OURS = HERE.parent / "bindings" / "ggml-cpu"
OUR_FILES = (
    "few-rows-attention.cpp",
    "large-batch-attention.cpp",
    "large-batch-ops.cpp",
    "small-batch.cpp",
)


class Kernel(NamedTuple):
    """What is counted: its types, ways with their numbers of rows or tokens; of so many cells or
    heads."""

    types: tuple[str, ...]
    ways: tuple[tuple[str, int], ...]
    length: int


KERNELS = {
    "attention": Kernel(("F16", "Q8_0"), (("upstream", 1), ("ours", 1), ("ours", 4)), length=64),
    "delta_net": Kernel(
        ("F32",),
        (("upstream", 1), ("ours", 1), ("upstream", 4), ("ours", 4), ("ours", 16)),
        length=1,
    ),
}


def run(*command: str | Path) -> str:
    """What a command prints."""
    words = [str(word) for word in command]
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def built(tree: Path, march: str) -> Path:
    """The program that runs one kernel, optimized as a release is."""
    source, folder = tree / "ggml" / "src", tree / march
    folder.mkdir(exist_ok=True)
    (source / "ggml-version.h").write_text('#define GGML_VERSION ""\n#define GGML_COMMIT ""\n')
    folders = (source.parent / "include", source, source / "ggml-cpu", OURS)
    include = [f"-I{path}" for path in folders]
    flags = ["-O3", f"-march={march}", "-D_GNU_SOURCE", "-ffunction-sections", *include]
    objects = []
    files = [*(source / name for name in C_FILES + CPP_FILES), *(OURS / name for name in OUR_FILES)]
    for file in [HERE / "arm_kernels.cpp", *files]:
        objects.append(folder / f"{file.parent.name}-{file.name}.o")
        if not objects[-1].exists():
            language = ["gcc", "-std=c11"] if file.suffix == ".c" else ["g++", "-std=c++17"]
            command = [f"aarch64-linux-gnu-{language[0]}", language[1], *flags]
            run(*command, "-c", file, "-o", objects[-1])
    # the first of several functions counts: those of one thread
    link = ["-static", "-Wl,--gc-sections,--allow-multiple-definition", "-o", folder / "program"]
    run("aarch64-linux-gnu-g++", *objects, *link)
    return folder / "program"


def instructions(program: Path) -> dict[int, tuple[str, str]]:
    """Function and text of the instruction at each address; jumps lose their targets."""
    found, function = {}, ""
    for line in run("aarch64-linux-gnu-objdump", "-dC", "--no-show-raw-insn", program).split("\n"):
        if heading := re.match(r"[0-9a-f]+ <(.*)>:$", line):
            function = heading[1]
        elif code := re.match(r" +([0-9a-f]+):\t((?:(?!//|<).)*)", line):
            text = code[2].strip()
            if re.match(r"(b|bl|b\.\w+|cbn?z|tbn?z|adrp?)\t", text):
                text = re.sub(r"[0-9a-f]+$", "0", text)
            found[int(code[1], 16)] = (function, text)
    return found


def executed(program: Path, known: dict[int, tuple[str, str]], *words: str) -> list[str]:
    """The instructions of the kernel itself, in the order of their execution."""
    log = program.with_suffix(".log")
    trace = ["-singlestep", "-d", "exec,nochain", "-D", str(log)]
    run("qemu-aarch64", "-cpu", "max,sve-max-vq=1", *trace, program, *words)
    lines, inside = [], False
    for address in re.findall(r"\[\w+/(\w+)/", log.read_text()):
        function, text = known.get(int(address, 16), ("", ""))
        if function in ("kernel_begins", "kernel_ends"):
            inside = function == "kernel_begins"
        elif inside:
            lines.append(text)
    return lines


def cycles(lines: list[str], cpu: str) -> int:
    """llvm-mca's cycles for all of them, once."""
    if not lines:
        return 0
    command = ["llvm-mca-19", "-mtriple=aarch64", f"-mcpu={cpu}", "-mattr=+dotprod,+i8mm,+fullfp16"]
    said = subprocess.run(
        [*command, "-iterations=1", "-all-stats=false", "-all-views=false", "-summary-view"],
        input="\n".join(lines), check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    return int(re.findall(r"Total Cycles: +(\d+)", said)[0])


def count(program: Path, name: str, type_: str, cpus: tuple[str, ...]) -> None:
    """Print instructions and each CPU's cycles, a line for each way."""
    known, kernel = instructions(program), KERNELS[name]
    for way, n in kernel.ways:
        lines = executed(program, known, name, type_, way, str(n), str(kernel.length))
        number = f"{len(lines) / kernel.length:.0f}"
        cost = [f"{cpu} {cycles(lines, cpu) / kernel.length:.0f}" for cpu in cpus]
        print(name, type_, way, n, "instructions", number, *cost, flush=True)


def main() -> None:
    """Print a line for each kernel, type, way, number and what the program is compiled for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("tree", type=Path, help="the patched tree")
    parser.add_argument("--kernels", default=",".join(KERNELS))
    options = parser.parse_args()
    for name in options.kernels.split(","):
        for march, cpus in CPUS.items():
            program = built(options.tree, march)
            for type_ in KERNELS[name].types:
                count(program, name, type_, cpus)


if __name__ == "__main__":
    main()
