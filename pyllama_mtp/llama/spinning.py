"""How long OpenMP's threads spin at a barrier before they sleep.

GCC's libgomp spins 300,000 times round where nothing else is said, which is milliseconds: longer
than a time slice of the system. On a machine whose cores other programs want too, a thread that has
its core then burns it waiting for one that has not, at every barrier of every layer. With far fewer
rounds a machine that is idle loses nothing on models of real size, and a busy one keeps most of its
speed (bench/README.md has the command).

Every thread of Python that decodes has a team of OpenMP threads of its own, which stays. As soon as
all teams together have more threads than there are cores, libgomp spins 100 times only, and each
barrier becomes a sleep: a model that was loaded in one thread and used in another, as in a server,
was half as fast. Under the policy "active" that number is 1,000.

What the user has set in the environment holds. libgomp reads it once, when it is loaded; so a
program that has loaded it before us (some builds of PyTorch do) decides for itself.
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
    """Libraries that are loaded in this block spin little; programs started later do as they do."""
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
