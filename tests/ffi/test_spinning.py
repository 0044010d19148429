"""OpenMP's threads are told to spin little, unless the user has said something else."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile

import pytest

from pyllama_mtp.llama.native import ROUNDS, USER_VARIABLES

from ..processes import environment

LOAD = """
import os
from pyllama_mtp.llama import native
before = dict(os.environ)
native.load()
assert dict(os.environ) == before, "what is started later would inherit it"
"""


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, ROUNDS), ({"GOMP_SPINCOUNT": "77"}, 77), ({"OMP_WAIT_POLICY": "passive"}, 0)],
)
def test_how_often_threads_spin(given: dict[str, str], expected: int) -> None:
    """As libgomp says when the library is loaded. With more threads than cores they spin 1,000
    times, not 100, by its "active" policy."""
    variables = environment(OMP_DISPLAY_ENV="VERBOSE")
    done = subprocess.run(
        [sys.executable, "-c", LOAD],
        env={k: v for k, v in variables.items() if k not in USER_VARIABLES} | given,
        cwd=tempfile.gettempdir(),  # in the checkout the sources would be imported
        capture_output=True,
        text=True,
        timeout=120,
    )
    found = re.search(r"GOMP_SPINCOUNT = '(\d+)'", done.stderr)
    assert found, f"this library was built without OpenMP of GCC: {done.stderr}"
    assert int(found[1]) == expected and done.returncode == 0
    assert given or "OMP_WAIT_POLICY = 'ACTIVE'" in done.stderr
