"""How long OpenMP's threads spin at a barrier before they sleep.

GCC's libgomp spins 300,000 rounds by default, which takes milliseconds: longer than a time slice
of the system. When other programs want the cores too, a thread that has its core burns it waiting
for a thread that has none, at every barrier of every layer. With far fewer rounds an idle machine
loses nothing on models of real size, and a busy one keeps most of its speed (bench/README.md has
the command).

Every Python thread that decodes has a team of OpenMP threads of its own, which stays. When all
teams together have more threads than there are cores, libgomp spins 100 rounds only, and each
barrier becomes a sleep: a model loaded in one thread and used in another, as in a server, was half
as fast. Under the policy "active" that number is 1,000.

The user's environment variables win. libgomp reads them once, when it is loaded: a program that
loads libgomp before us (some builds of PyTorch do) decides for itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

#: Rounds of spinning, some 60 to 200 microseconds: more than barriers take where all threads run.
ROUNDS = 3000
#: Either is the user's word on it (libgomp's manual, "Environment Variables").
VARIABLE = "GOMP_SPINCOUNT"
USER_VARIABLES = (VARIABLE, "OMP_WAIT_POLICY")


@contextmanager
def little_spinning() -> Iterator[None]:
    """Libraries that are loaded in this block spin little; programs started later do not."""
    if any(name in os.environ for name in USER_VARIABLES):
        yield
        return
    given = {VARIABLE: str(ROUNDS), "OMP_WAIT_POLICY": "active"}
    os.environ.update(given)
    try:
        yield
    finally:
        for name in given:
            os.environ.pop(name, None)
