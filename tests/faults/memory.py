"""Out of memory: scenarios in address spaces of every size between too little and enough.

A scenario is first played without a limit, which gives its text and how far its address space
grows. Then it is played once for each of a number of limits from nothing to a little more than
that, closer together where little is left, in a process of its own each. See ``memory_child.py``
for what a run does.

``bench/faults.py`` does it on a large scale.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ..processes import environment

CHILD = Path(__file__).with_name("memory_child.py")
TIMEOUT_S = 300.0
DONE, CLEAN = "done", "clean error"
ABOUT = """Every scenario was played at each of so many limits of its address space (RLIMIT_AS),
from what it had before to 1.05 times what it takes beyond that ("growth") and 256 MiB for what
glibc reserves, closer together where little is left, in a process of its own each. Good is success
with the right text, or an exception of this package or MemoryError after which the same process,
without the limit, gives the right text."""
HEAD = "| scenario | threads | growth, MiB | limits | succeeded | clean error | anything else |"
#: Of the growth that a scenario needs: a run with all of it must succeed.
ENOUGH = 1.05
#: Address space that a run may reserve and the one before it did not: glibc gives threads that
#: allocate at the same time arenas of 64 MiB each, aligned to as much.
ARENAS = 256 << 20


@dataclass
class Outcome:
    """How a run went: `kind` is DONE, CLEAN, or what was wrong; `detail` is the error's type, or
    the process's last words."""

    headroom: int
    kind: str
    detail: str


@dataclass
class Sweep:
    """All runs of a scenario."""

    scenario: str
    threads: int
    growth: int
    outcomes: list[Outcome]

    @property
    def bad(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.kind not in (DONE, CLEAN)]

    def row(self) -> str:
        """A row of the report's table."""
        kinds = Counter(outcome.kind for outcome in self.outcomes)
        errors = Counter(o.detail for o in self.outcomes if o.kind == CLEAN)
        others = [f"{kind}: {n}" for kind, n in kinds.items() if kind not in (DONE, CLEAN)]
        named = ", ".join(f"{name} {n}" for name, n in errors.most_common())
        return (
            f"| {self.scenario} | {self.threads} | {self.growth / 2**20:.0f} | "
            f"{len(self.outcomes)} | {kinds[DONE]} | {kinds[CLEAN]} ({named or '-'}) | "
            f"{'; '.join(others) or 'none'} |"
        )


def play(
    model: Path, scenario: str, threads: int, headroom: int
) -> subprocess.CompletedProcess[str]:
    """The end of one run. Raises TimeoutExpired."""
    words = (CHILD, model, scenario, threads, headroom)
    return subprocess.run(
        [sys.executable, *map(str, words)],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=TIMEOUT_S,
        # A backtrace would start a debugger.
        env=environment(OMP_WAIT_POLICY="passive", GGML_NO_BACKTRACE="1"),
    )


def judge(headroom: int, done: subprocess.CompletedProcess[str], text: str) -> Outcome:
    """What a run's end means; `text` is the reference."""
    code = done.returncode
    if code < 0:
        return Outcome(headroom, f"killed by {signal.Signals(-code).name}", done.stderr[-1500:])
    if code > 0 or not done.stdout.strip():
        return Outcome(headroom, f"exit code {code}", done.stderr[-1500:])
    found = json.loads(done.stdout.splitlines()[-1])
    if found["again"] != text:
        return Outcome(headroom, "wrong text afterwards", repr(found["again"]))
    if "unclean" in found:
        return Outcome(headroom, "unclean error", f"{found['unclean']}: {found['message']}")
    if "error" in found:
        return Outcome(headroom, CLEAN, found["error"])
    if found["text"] != text:
        return Outcome(headroom, "wrong text", repr(found["text"]))
    return Outcome(headroom, DONE, "")


def sweep(model: Path, scenario: str, threads: int, steps: int, jobs: int = 1) -> Sweep:
    """Play a scenario `steps` times.

    Raises:
        RuntimeError: it fails without a limit.
    """
    done = play(model, scenario, threads, -1)
    if done.returncode:
        raise RuntimeError(f"{scenario} fails without a limit: {done.stderr}")
    found = json.loads(done.stdout)
    growth = int(found["peak"] - found["before"])
    most = growth * ENOUGH + ARENAS
    limits = [int(most * (step / (steps - 1)) ** 2) for step in range(steps)]

    def one(headroom: int) -> Outcome:
        try:
            return judge(headroom, play(model, scenario, threads, headroom), found["again"])
        except subprocess.TimeoutExpired:
            return Outcome(headroom, "hang", f"more than {TIMEOUT_S:.0f} s")

    with ThreadPoolExecutor(jobs) as pool:
        return Sweep(scenario, threads, growth, list(pool.map(one, limits)))
