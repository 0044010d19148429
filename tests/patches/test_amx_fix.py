"""Patch 0001, proven on any x86-64 machine with GCC: all 64 bytes of the AMX configuration arrive.

The function is cut out of the tree and compiled with a ``_tile_loadconfig`` that tells the
optimizer what GCC's own tells it, and copies the 64 bytes: no AMX is needed.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from pq.apply import stage
from pq.series import VARIANTS, read_series

from ..marks import usual

SOURCE = "ggml/src/ggml-cpu/amx/mmq.cpp"

# From the table above the function: B in tiles 0 and 1 (8 rows of 64 bytes), A in 2 and 3 (16 rows
# of 32 bytes), C in 4 to 7 (16 rows of 16 int32). Layout: palette, start row, 14 reserved bytes,
# the bytes per row of 16 tiles as uint16, the rows of 16 tiles as uint8.
BYTES_PER_ROW = [64, 64, 32, 32, 64, 64, 64, 64] + [0] * 8
ROWS = [8, 8, 16, 16, 16, 16, 16, 16] + [0] * 8
EXPECTED = (
    bytes([1, 0] + [0] * 14)
    + b"".join(n.to_bytes(2, "little") for n in BYTES_PER_ROW)
    + bytes(ROWS)
)

HARNESS = """
#include <cstdint>
#include <cstdio>
#include <immintrin.h>

extern "C" { unsigned char loaded[64]; }

// As GCC 12 writes ldtilecfg: the operand has 8 of the 64 bytes that are read.
#define _tile_loadconfig(config) __asm__ volatile( \\
    "leaq %%0, %%%%rsi; leaq loaded(%%%%rip), %%%%rdi; movl $64, %%%%ecx; rep movsb" \\
    :: "m" (*(const void * const *) (config)) : "rsi", "rdi", "rcx")

%s

static __attribute__((noinline)) void dirty_the_stack() {
    volatile unsigned char garbage[4096];
    for (int i = 0; i < 4096; i++) { garbage[i] = 0xAA; }
}

static __attribute__((noinline)) void load() { ggml_tile_config_init(); }

int main() {
    dirty_the_stack();
    load();
    for (unsigned char byte : loaded) { printf("%%02x", byte); }
}
"""


@pytest.fixture(scope="module")
def gcc() -> str:
    """GCC for x86-64."""
    compiler = shutil.which("g++")
    if compiler is None or platform.machine() != "x86_64":
        pytest.skip("GCC for x86-64 is not here")
    said = subprocess.run([compiler, "--version"], text=True, capture_output=True).stdout
    if "Free Software Foundation" not in said:
        pytest.skip("g++ is not GCC")
    return compiler


def function_text(tree: Path) -> str:
    """The configuration struct and the function that loads it, as the tree has them."""
    text = (tree / SOURCE).read_text()
    parts = [
        re.search(rf"^{start}.*?^}};?\n", text, re.S | re.M)
        for start in ("struct tile_config_t", r"inline void ggml_tile_config_init\(void\)")
    ]
    assert all(parts), f"{SOURCE} has changed: teach this test where the function is"
    return "".join(part.group() for part in parts if part)


def loaded_configuration(tree: Path, compiler: str, level: str, folder: Path) -> bytes:
    """Compile the tree's function, run it, and return the 64 bytes that it would have loaded."""
    source, program = folder / "amx.cpp", folder / "amx"
    source.write_text(HARNESS % function_text(tree))
    subprocess.run([compiler, "-std=c++17", level, "-w", "-o", program, source], check=True)
    return bytes.fromhex(subprocess.run([program], check=True, capture_output=True).stdout.decode())


@pytest.fixture(scope="module")
def copies(pinned_tree, tmp_path_factory) -> dict[str, Path]:
    """The patched files of the pinned tree, by variant."""
    root = tmp_path_factory.mktemp("copies")
    for variant in VARIANTS:
        stage(read_series().of(variant), pinned_tree, root / variant)
    return {variant: root / variant for variant in VARIANTS}


@pytest.mark.parametrize("level", usual("-O3", long=["-O1", "-O2"]))
def test_patched_function_loads_the_whole_configuration(copies, gcc, tmp_path, level):
    loaded = loaded_configuration(copies["patched"], gcc, level, tmp_path)
    assert loaded.hex() == EXPECTED.hex()


def test_both_variants_carry_the_fix(copies, pinned_tree):
    texts = {name: function_text(copy) for name, copy in copies.items()}
    assert texts["upstream"] == texts["patched"] != function_text(pinned_tree)


def test_pristine_function_is_miscompiled(pinned_tree, gcc, tmp_path):
    """The defect itself; when neither pin nor compiler has it any more, the patch can go. Without
    optimization the function is right, and the harness must say so."""
    assert loaded_configuration(pinned_tree, gcc, "-O0", tmp_path) == EXPECTED
    loaded = loaded_configuration(pinned_tree, gcc, "-O3", tmp_path)
    if loaded == EXPECTED:
        pytest.skip("this compiler keeps the stores without the patch")
    assert loaded[16:] != EXPECTED[16:]
