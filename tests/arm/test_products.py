"""Patch 0021: the products of a few columns on 64-bit ARM, run by qemu.

``products.cpp`` compares them with sums of doubles, and columns beside others with columns alone.
It is compiled with the patched kernels and the few files of ggml that they need.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FILES = ("ggml.c", "ggml-quants.c", "ggml-threading.cpp", "ggml-cpu/quants.c")
KERNELS = ("ggml-cpu/arch/arm/quants.c", "ggml-cpu/small-batch.cpp")
TYPES = ("Q8_0", "Q4_K", "Q6_K", "Q5_K", "Q4_0", "IQ4_XS")
#: -march, and which CPU qemu is: the second has i8mm, the last neither that nor dotprod.
DOTPROD = ("armv8.2-a+dotprod", "neoverse-n1")
I8MM = ("armv8.2-a+dotprod+i8mm", "max")
BASELINE = ("armv8-a", "cortex-a72")
NEEDED = ("aarch64-linux-gnu-g++", "aarch64-linux-gnu-gcc", "qemu-aarch64")
MISSING = [name for name in NEEDED if shutil.which(name) is None]
pytestmark = [
    pytest.mark.arm_build,
    pytest.mark.skipif(bool(MISSING), reason=f"not here: {', '.join(MISSING)}"),
]


def run(*command: str | Path) -> str:
    """What a command prints; it must succeed."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The patched tree, with the header that cmake writes."""
    made = tmp_path_factory.mktemp("arm") / "tree"
    run(sys.executable, ROOT / "vendor" / "fetch.py")
    run(
        sys.executable,
        ROOT / "patches" / "patchqueue.py",
        "apply",
        "--dest",
        made,
        "--variant",
        "patched",
    )
    version = '#define GGML_VERSION ""\n#define GGML_COMMIT ""\n'
    (made / "ggml" / "src" / "ggml-version.h").write_text(version)
    return made


@pytest.fixture(scope="module")
def rest_of_ggml(tree: Path) -> list[Path]:
    """Objects that are the same for every CPU."""
    return [compiled(tree, tree / "ggml" / "src" / name, BASELINE[0]) for name in FILES]


def compiled(tree: Path, file: Path, march: str) -> Path:
    """The object of a file; kernels are compiled with warnings as errors."""
    source, target = tree / "ggml" / "src", tree / f"{march}-{file.parent.name}-{file.name}.o"
    language = ["gcc", "-std=c11"] if file.suffix == ".c" else ["g++", "-std=c++17"]
    warnings = (
        ["-Wall", "-Wextra", "-Wno-unused-function", "-Werror"] if "batch" in file.name else []
    )
    level = "-O1" if file.suffix == ".c" else "-O2"
    include = [f"-I{path}" for path in (tree / "ggml" / "include", source, source / "ggml-cpu")]
    flags = [level, f"-march={march}", "-D_GNU_SOURCE", "-ffunction-sections", *warnings, *include]
    run(f"aarch64-linux-gnu-{language[0]}", language[1], *flags, "-c", file, "-o", target)
    return target


@pytest.fixture(scope="module")
def measured(tree: Path, rest_of_ggml: list[Path]) -> dict[tuple[str, str], dict[str, list[str]]]:
    """For each CPU and type: the largest error, and whether bits were the same."""
    printed = {}
    for march, cpu in (DOTPROD, I8MM, BASELINE):
        files = [tree / "ggml" / "src" / name for name in KERNELS] + [HERE / "products.cpp"]
        objects = [compiled(tree, file, march) for file in files] + rest_of_ggml
        program = tree / f"{march}-products"
        run("aarch64-linux-gnu-g++", *objects, "-Wl,--gc-sections", "-o", program)
        lines = run("qemu-aarch64", "-cpu", cpu, "-L", "/usr/aarch64-linux-gnu", program).split(
            "\n"
        )
        printed[march, cpu] = {line.split()[0]: line.split()[1:] for line in lines if line}
    return printed


@pytest.mark.parametrize("type_", TYPES)
def test_products(measured, type_: str) -> None:
    """Only floats are rounded, once for a block: so little may differ from sums of doubles."""
    error, bits = measured[I8MM][type_]
    assert float(error) < 5e-7
    assert bits == "same"


@pytest.mark.parametrize("machine", [DOTPROD, BASELINE], ids=["dotprod", "baseline"])
def test_others_have_upstreams_ways(measured, machine) -> None:
    assert measured[machine] == {name: ["none"] for name in TYPES}
