"""Patch 0019: products in AMX tiles have the bits that they have without. 1 minute of a core.

``products.cpp`` computes both with the patched kernels, on any x86 CPU with AVX2: ``emulated.h``
has the instructions of AMX in C++.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ..processes import patched_tree, printed_by

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FILES = ("ggml.c", "ggml-quants.c", "ggml-threading.cpp", "ggml-cpu/quants.c")
FILES += ("ggml-cpu/arch/x86/quants.c",)
KERNEL = "ggml-cpu/large-batch.cpp"
#: Registers of rows in a tile, where it says so: with 4 of AVX2 a tile is as high as with AVX-512.
HEIGHT = ("ggml-cpu/large-batch-kernels.h", "constexpr int VECTORS   = 2;")
TYPES = ["Q8_0", "Q5_0", "Q4_0", "IQ4_NL", "MXFP4", "Q6_K", "Q5_K", "Q4_K", "Q3_K", "Q2_K"]
TYPES += ["IQ4_XS", "IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_S", "IQ1_M"]
TYPES += ["TQ2_0", "TQ1_0", "Q5_1", "Q4_1", "Q2_0", "Q1_0"]
#: ggml's for a CPU with AMX: ggml/src/CMakeLists.txt, sapphirerapids.
FEATURES = ("sse4.2", "f16c", "fma", "bmi2", "avx2", "avx512f", "avx512cd", "avx512vl", "avx512dq")
FEATURES += ("avx512bw", "avx512vbmi", "avx512vnni", "avx512bf16", "amx-tile", "amx-int8")
SAPPHIRE_RAPIDS = [f"-m{name}" for name in FEATURES]
INSTRUCTIONS = {"tdpbssd", "tileloadd", "tilestored", "tilezero", "ldtilecfg", "sttilecfg"}
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(platform.machine() != "x86_64", reason="AMX is of x86-64 only"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="no g++"),
]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return patched_tree(tmp_path_factory.mktemp("amx") / "tree")


@pytest.fixture(scope="module")
def compiled(tree: Path) -> Callable[..., Path]:
    """A function that compiles a file, of the patched tree or of the tests, to an object."""
    source = tree / "ggml" / "src"
    include = [f"-I{path}" for path in (tree / "ggml" / "include", source, source / "ggml-cpu")]

    def compiled(name: str, *flags: object) -> Path:
        file = HERE / name if (HERE / name).exists() else source / name
        target = tree / (name.replace("/", "-") + ".o")
        language = ("gcc", "-std=c11") if file.suffix == ".c" else ("g++", "-std=c++17")
        flags = (*language, "-D_GNU_SOURCE", "-ffunction-sections", *include, *flags)
        printed_by(*flags, "-c", file, "-o", target)
        return target

    return compiled


@pytest.fixture(scope="module", params=[2, 4], ids=["16 rows", "32 rows"])
def program(
    compiled: Callable[..., Path], tree: Path, request: pytest.FixtureRequest, rest: list[Path]
) -> Iterator[Path]:
    """The comparison, with emulated tiles."""
    header = tree / "ggml" / "src" / HEIGHT[0]
    text = header.read_text()
    assert HEIGHT[1] in text, f"{HEIGHT[0]} has changed: teach this test where the height is"
    header.write_text(text.replace(HEIGHT[1], HEIGHT[1].replace("2", str(request.param))))
    made, flags = tree / "products", ("-march=haswell", "-Wall", "-Wextra", "-Wno-unused-function")
    emulated = compiled(KERNEL, "-O1", "-Werror", *flags, "-include", HERE / "emulated.h")
    printed_by("g++", *rest, emulated, "-Wl,--gc-sections", "-pthread", "-o", made)
    yield made
    header.write_text(text)


@pytest.fixture(scope="module")
def rest(compiled: Callable[..., Path]) -> list[Path]:
    """What is linked to the kernel."""
    return [compiled(name, "-O1", "-march=haswell") for name in (*FILES, "products.cpp")]


def differing(printed: str) -> dict[str, int]:
    """How many products of each type differ; and, as "products", how many the tiles computed."""
    rows = (line.split() for line in printed.splitlines())
    return {row[0]: int(row[-1]) for row in rows}


def test_tiles_change_no_bit(program: Path) -> None:
    """All types, matrices of any size, experts with any number of tokens, several threads."""
    found = differing(printed_by(program))
    assert found.pop("products") > 100_000
    assert found == dict.fromkeys(TYPES, 0)


@pytest.mark.parametrize(("cpu", "products"), [("refused", 0), ("wrong", 4)])
def test_without_right_tiles_other_instructions_serve(
    program: Path, cpu: str, products: int
) -> None:
    """The system may permit no tiles. If their first products are wrong there are no others."""
    found = differing(printed_by(program, EMULATED_AMX=cpu))
    assert found.pop("products") <= products
    assert found == dict.fromkeys(TYPES, 0)


def test_compilers_make_the_instructions(compiled: Callable[..., Path]) -> None:
    """Of the same source, with the flags of a build for CPUs with AMX."""
    probe = subprocess.run(
        ["g++", *SAPPHIRE_RAPIDS, "-E", "-x", "c++", "/dev/null"], capture_output=True
    )
    if probe.returncode != 0 or shutil.which("objdump") is None:
        pytest.skip("g++ does not know AMX, or no objdump")
    listing = printed_by(
        "objdump", "-d", "--no-show-raw-insn", compiled(KERNEL, "-O1", *SAPPHIRE_RAPIDS)
    )
    assert set(re.findall(r"\b(?:tdp\w+|tile\w+|\w+tilecfg)\b", listing)) == INSTRUCTIONS
