"""Programs for 64-bit ARM, run by qemu: patched kernels and the files of ggml they need."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ..processes import patched_tree, printed_by

HERE = Path(__file__).parent
OURS = HERE.parents[1] / "bindings" / "ggml-cpu"
FILES = ("ggml.c", "ggml-quants.c", "ggml-threading.cpp", "ggml-cpu/quants.c")
#: Of (program, its files of ggml-cpu, (-march, qemu's CPU)): the words of each line by its first.
Printed = Callable[[str, tuple[str, ...], tuple[str, str]], dict[str, list[str]]]


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return patched_tree(tmp_path_factory.mktemp("arm") / "tree")


def compiled(tree: Path, file: Path, march: str) -> Path:
    """The object of a file; kernels are compiled with warnings as errors."""
    source, target = tree / "ggml" / "src", tree / f"{march}-{file.parent.name}-{file.name}.o"
    language = ["gcc", "-std=c11"] if file.suffix == ".c" else ["g++", "-std=c++17"]
    warnings = ["-Wall", "-Wextra", "-Wno-unused-function", "-Werror"]
    level = "-O1" if file.suffix == ".c" else "-O2"
    folders = (tree / "ggml" / "include", source, source / "ggml-cpu", OURS)
    include = [f"-I{path}" for path in folders]
    flags = [level, f"-march={march}", "-D_GNU_SOURCE", "-ffunction-sections", *include]
    strict = warnings if file.parent == OURS else []
    command = [f"aarch64-linux-gnu-{language[0]}", language[1], *flags, *strict]
    printed_by(*command, "-c", file, "-o", target)
    return target


@pytest.fixture(scope="session")
def rest_of_ggml(tree: Path) -> list[Path]:
    """Objects that are the same for every CPU."""
    return [compiled(tree, tree / "ggml" / "src" / name, "armv8-a") for name in FILES]


@pytest.fixture(scope="session")
def printed(tree: Path, rest_of_ggml: list[Path]) -> Printed:
    """What a program of this folder prints on a CPU."""

    def on(name: str, kernels: tuple[str, ...], machine: tuple[str, str]) -> dict[str, list[str]]:
        march, qemu = machine
        cpu = tree / "ggml" / "src" / "ggml-cpu"
        files = [next(f / name for f in (OURS, cpu) if (f / name).exists()) for name in kernels]
        objects = [compiled(tree, file, march) for file in (*files, HERE / name)]
        program = tree / f"{march}-{name}-program"
        link = ("-Wl,--gc-sections", "-o", program)
        printed_by("aarch64-linux-gnu-g++", *objects, *rest_of_ggml, *link)
        lines = printed_by("qemu-aarch64", "-cpu", qemu, "-L", "/usr/aarch64-linux-gnu", program)
        return {words[0]: words[1:] for words in map(str.split, lines.splitlines())}

    return on
