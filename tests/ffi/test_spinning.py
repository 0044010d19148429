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


def said(**given: str) -> str:
    """What libgomp says it was told when the library was loaded."""
    variables = environment(OMP_DISPLAY_ENV="VERBOSE")
    done = subprocess.run(
        [sys.executable, "-c", LOAD],
        env={k: v for k, v in variables.items() if k not in USER_VARIABLES} | given,
        cwd=tempfile.gettempdir(),  # in the checkout the sources would be imported
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def spin_count(text: str) -> int:
    """How often threads spin."""
    found = re.search(r"GOMP_SPINCOUNT = '(\d+)'", text)
    assert found, "this library was built without OpenMP of GCC"
    return int(found[1])


def test_threads_spin_little() -> None:
    """With more threads than cores they spin 1,000 times, not 100: libgomp's "active" policy."""
    text = said()
    assert spin_count(text) == ROUNDS
    assert "OMP_WAIT_POLICY = 'ACTIVE'" in text


@pytest.mark.parametrize(
    ("given", "expected"),
    [({"GOMP_SPINCOUNT": "77"}, 77), ({"OMP_WAIT_POLICY": "passive"}, 0)],
)
def test_the_user_has_the_last_word(given: dict[str, str], expected: int) -> None:
    assert spin_count(said(**given)) == expected
