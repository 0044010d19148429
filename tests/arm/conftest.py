"""Programs for 64-bit ARM, run by qemu: patched kernels and the files of ggml they need."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FILES = ("ggml.c", "ggml-quants.c", "ggml-threading.cpp", "ggml-cpu/quants.c")
#: Of (program, its files of ggml-cpu, (-march, qemu's CPU)): the words of each line by its first.
Printed = Callable[[str, tuple[str, ...], tuple[str, str]], dict[str, list[str]]]


def run(*command: str | Path) -> str:
    """What a command prints; it must succeed."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The patched tree, with the header that cmake writes."""
    made = tmp_path_factory.mktemp("arm") / "tree"
    run(sys.executable, ROOT / "vendor" / "fetch.py")
    queue = (sys.executable, ROOT / "patches" / "patchqueue.py")
    run(*queue, "apply", "--dest", made, "--variant", "patched")
    version = '#define GGML_VERSION ""\n#define GGML_COMMIT ""\n'
    (made / "ggml" / "src" / "ggml-version.h").write_text(version)
    return made


def compiled(tree: Path, file: Path, march: str) -> Path:
    """The object of a file; kernels are compiled with warnings as errors."""
    source, target = tree / "ggml" / "src", tree / f"{march}-{file.parent.name}-{file.name}.o"
    language = ["gcc", "-std=c11"] if file.suffix == ".c" else ["g++", "-std=c++17"]
    warnings = ["-Wall", "-Wextra", "-Wno-unused-function", "-Werror"]
    ours = "batch" in file.name or "few-rows" in file.name
    level = "-O1" if file.suffix == ".c" else "-O2"
    include = [f"-I{path}" for path in (tree / "ggml" / "include", source, source / "ggml-cpu")]
    flags = [level, f"-march={march}", "-D_GNU_SOURCE", "-ffunction-sections", *include]
    command = [f"aarch64-linux-gnu-{language[0]}", language[1], *flags, *(warnings if ours else [])]
    run(*command, "-c", file, "-o", target)
    return target


@pytest.fixture(scope="session")
def rest_of_ggml(tree: Path) -> list[Path]:
    """Objects that are the same for every CPU."""
    return [compiled(tree, tree / "ggml" / "src" / name, "armv8-a") for name in FILES]


@pytest.fixture(scope="session")
def printed(tree: Path, rest_of_ggml: list[Path]) -> Printed:
    """What a program of this folder prints on a CPU."""

    def on(name: str, kernels: tuple[str, ...], machine: tuple[str, str]) -> dict[str, list[str]]:
        march, cpu = machine
        files = [tree / "ggml" / "src" / "ggml-cpu" / kernel for kernel in kernels]
        objects = [compiled(tree, file, march) for file in (*files, HERE / name)]
        program = tree / f"{march}-{name}-program"
        link = ("-Wl,--gc-sections", "-o", program)
        run("aarch64-linux-gnu-g++", *objects, *rest_of_ggml, *link)
        lines = run("qemu-aarch64", "-cpu", cpu, "-L", "/usr/aarch64-linux-gnu", program)
        return {words[0]: words[1:] for words in map(str.split, lines.splitlines())}

    return on
