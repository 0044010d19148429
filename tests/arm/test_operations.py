"""Attention of a few rows and delta nets on 64-bit ARM, run by qemu.

``operations.cpp`` compares them with sums of doubles, rows beside others with rows alone, tokens
together with one by one and, without SVE, with upstream's vector functions.
"""

from __future__ import annotations

import shutil

import pytest

KERNELS = ("arch/arm/quants.c", "few-rows-attention.cpp", "large-batch-ops.cpp", "vec.cpp")
NEEDED = ("aarch64-linux-gnu-g++", "aarch64-linux-gnu-gcc", "qemu-aarch64")
MISSING = [name for name in NEEDED if shutil.which(name) is None]
pytestmark = [
    pytest.mark.arm_build,
    pytest.mark.skipif(bool(MISSING), reason=f"not here: {', '.join(MISSING)}"),
]


@pytest.fixture(
    scope="module",
    params=[
        ("armv8-a", "cortex-a72"),
        ("armv8.2-a+dotprod+fp16", "neoverse-n1"),
        ("armv8.2-a+dotprod+fp16+i8mm+sve", "max,sve-max-vq=2"),
    ],
    ids=["baseline", "fp16", "sve"],
)
def measured(printed, request: pytest.FixtureRequest) -> dict[str, list[str]]:
    """For each operation: the largest error, and whether bits were the same."""
    return printed("operations.cpp", KERNELS, request.param)


@pytest.mark.parametrize("name", ["F16", "Q8_0", "delta_nets", "convolutions"])
def test_operation(measured: dict[str, list[str]], name: str) -> None:
    """All is computed in floats, whatever the type of the cache."""
    error, bits = measured[name]
    assert float(error) < 2e-6
    assert bits == "same"
