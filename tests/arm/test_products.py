"""Patch 0021: the products of a few columns on 64-bit ARM, run by qemu.

``products.cpp`` compares them with sums of doubles, and columns beside others with columns alone.
"""

from __future__ import annotations

import shutil

import pytest

KERNELS = ("arch/arm/quants.c", "small-batch.cpp")
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


@pytest.fixture(scope="module")
def measured(printed) -> dict[tuple[str, str], dict[str, list[str]]]:
    """For each CPU and type: the largest error, and whether bits were the same."""
    machines = (DOTPROD, I8MM, BASELINE)
    return {machine: printed("products.cpp", KERNELS, machine) for machine in machines}


@pytest.mark.parametrize("type_", TYPES)
def test_products(measured, type_: str) -> None:
    """Only floats are rounded, once for a block: so little may differ from sums of doubles."""
    error, bits = measured[I8MM][type_]
    assert float(error) < 5e-7
    assert bits == "same"


@pytest.mark.parametrize("machine", [DOTPROD, BASELINE], ids=["dotprod", "baseline"])
def test_others_have_upstreams_ways(measured, machine) -> None:
    assert measured[machine] == {name: ["none"] for name in TYPES}
