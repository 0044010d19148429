"""bindings/cmake/CpuFeatures.cmake: what the CPU backend is compiled for."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

MODULES = Path(__file__).resolve().parents[2] / "bindings" / "cmake"
TOOLCHAIN = MODULES / "aarch64-linux-gnu.cmake"
PROJECT = f"""
cmake_minimum_required(VERSION 3.26)
project(features LANGUAGES CXX)
set(CMAKE_MODULE_PATH {MODULES.as_posix()})
include(CpuFeatures)
message(STATUS "said: ${{GGML_CPU_ARM_ARCH}}|${{PYLLAMA_CPU_FEATURES}}|${{GGML_CPU_ALL_VARIANTS}}")
"""
#: /proc/cpuinfo of a Neoverse N1, a Neoverse V2 and a Cortex-A72, shortened.
N1 = "Features\t: fp asimd aes crc32 atomics fphp asimdhp cpuid asimddp ssbs"
V2 = N1 + " sve asimdfhm sve2 sveaes i8mm svei8mm bf16 svebf16"
A72 = "Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 cpuid"
MISSING = [name for name in ("cmake", "aarch64-linux-gnu-g++") if shutil.which(name) is None]
pytestmark = [
    pytest.mark.arm_build,
    pytest.mark.skipif(bool(MISSING), reason=f"not here: {', '.join(MISSING)}"),
]


def said(folder: Path, *defines: str) -> list[str]:
    """-march, features and whether all generations are built."""
    (folder / "CMakeLists.txt").write_text(PROJECT)
    command = ["cmake", "-S", str(folder), "-B", str(folder / "build"), *defines]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = (text for text in done.stdout.splitlines() if text.startswith("-- said: "))
    return line.removeprefix("-- said: ").split("|")


@pytest.mark.parametrize(
    ("cpuinfo", "arch", "features"),
    [
        (N1, "armv8.2-a+dotprod+fp16", "asimddp asimdhp"),
        (V2, "armv8.2-a+dotprod+fp16+i8mm+bf16+sve+sve2", "asimddp asimdhp i8mm bf16 sve sve2"),
        (A72, "armv8-a", ""),
    ],
    ids=["neoverse-n1", "neoverse-v2", "cortex-a72"],
)
def test_arm(tmp_path: Path, cpuinfo: str, arch: str, features: str) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{cpuinfo}\n")
    given = [f"-DCMAKE_TOOLCHAIN_FILE={TOOLCHAIN}", f"-DPYLLAMA_CPUINFO={tmp_path / 'cpuinfo'}"]
    assert said(tmp_path, *given) == [arch, features, "OFF"]


def test_a_build_for_another_kind_of_machine(tmp_path: Path) -> None:
    """It takes all generations, or what the user names; nothing of this machine."""
    given = f"-DCMAKE_TOOLCHAIN_FILE={TOOLCHAIN}"
    assert said(tmp_path, given) == ["", "", "ON"]
    shutil.rmtree(tmp_path / "build")
    arch = "armv8.2-a+dotprod"
    assert said(tmp_path, given, f"-DGGML_CPU_ARM_ARCH={arch}") == [arch, "asimddp", "OFF"]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="of x86-64")
def test_x86(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("flags\t\t: fpu sse4_2 avx avx2 bmi2 fma f16c ht\n")
    found = said(tmp_path, f"-DPYLLAMA_CPUINFO={tmp_path / 'cpuinfo'}")
    assert found == ["", "sse4_2 avx avx2 bmi2 fma f16c", "OFF"]
