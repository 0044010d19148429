"""A device computes what the CPU computes, operation by operation: upstream's test-backend-ops."""

from __future__ import annotations

import os
import re
import subprocess
from functools import partial
from pathlib import Path

import pytest

from pyllama_mtp.llama import native

from ..preloaded import INCLUDE, ggml_base
from .test_traffic import HERE

#: Operations of our graphs, in the form of `test-backend-ops --test-file`.
CASES = HERE / "ops-cases.txt"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """test-backend-ops of the pinned tree, with ggml of the package that is tested."""
    path, base = tmp_path_factory.mktemp("ops") / "test-backend-ops", ggml_base()
    command = [os.environ.get("CXX", "c++"), "-std=c++17", "-O1", "-w", "-pthread"]
    command += [f"-I{INCLUDE}", f"-I{INCLUDE.parents[1] / 'tests'}", HERE / "backend_ops.cpp"]
    command += [*base.parent.glob("libggml.so*"), base, f"-Wl,-rpath,{base.parent}", "-o", path]
    subprocess.run(command, check=True)
    return path


@pytest.mark.parametrize(
    ("n", "arguments"),
    [
        (len(CASES.read_text().splitlines()), ["--test-file", CASES]),
        # What a file cannot ask for: the best of a vocabulary, in any order; products with H.
        (33, ["-o", "TOP_K,MUL_MAT_HADAMARD", "-p", r"ne=\[202048,|m=\d+,n=\d+,k=(64|256),"]),
    ],
    ids=["our graphs", "upstream's own"],
)
def test_as_on_the_cpu(
    program: Path, device: native.Device, n: int, arguments: list[object]
) -> None:
    command = [program, "test", "-b", device.name, *arguments]
    # Backends are looked for in the working folder. This ends the run, when all cores are free.
    folder, free = ggml_base().parent, partial(os.sched_setaffinity, 0, range(os.cpu_count() or 1))
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, preexec_fn=free)
    said = re.sub(r"\x1b\[\d*m|\S+: OK\n", "", done.stdout)
    assert done.returncode == 0 and f"{n}/{n} tests passed" in said, said[-5000:] + done.stderr
