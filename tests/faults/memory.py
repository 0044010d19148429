"""Out of memory: scenarios in address spaces of every size between too little and enough.

A scenario is first played without a limit, which gives its text and how far its address space
grows. Then it is played once for each of a number of limits from nothing to a little more than
that, closer together where little is left, in a process of its own each. See ``memory_child.py``
for what a run does.

``bench/faults.py`` does it on a large scale.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pyllama_mtp

CHILD = Path(__file__).with_name("memory_child.py")
TIMEOUT_S = 120.0
DONE, CLEAN = "done", "clean error"
SCENARIOS = (
    *("load", "context", "first generation", "later generation", "sampled generation"),
    *("save and restore", "batch", "everything"),
)
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

    @property
    def good(self) -> bool:
        return self.kind in (DONE, CLEAN)


@dataclass
class Sweep:
    """All runs of a scenario."""

    scenario: str
    threads: int
    growth: int
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def bad(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if not outcome.good]

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


def run_child(model: Path, scenario: str, threads: int, headroom: int) -> tuple[int, str, str]:
    """Exit code (-1000: not done after TIMEOUT_S), stdout and stderr of one run."""
    root = str(Path(pyllama_mtp.__file__).parents[1])
    arguments = [str(model), scenario, str(threads), str(headroom)]
    environment = {
        "PYTHONPATH": root,
        "OMP_WAIT_POLICY": "passive",
        "GGML_NO_BACKTRACE": "1",  # it would start a debugger
    }
    try:
        done = subprocess.run(
            [sys.executable, str(CHILD), *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
            env={**os.environ, **environment},
        )
    except subprocess.TimeoutExpired:
        return -1000, "", ""
    return done.returncode, done.stdout, done.stderr


def judge(headroom: int, result: tuple[int, str, str], text: str) -> Outcome:
    """What a run's end means; `text` is the reference."""
    code, out, err = result
    if code == -1000:
        return Outcome(headroom, "hang", f"more than {TIMEOUT_S:.0f} s")
    if code < 0:
        return Outcome(headroom, f"killed by {signal.Signals(-code).name}", err[-1500:])
    if code > 0 or not out.strip():
        return Outcome(headroom, f"exit code {code}", err[-1500:])
    found = json.loads(out.splitlines()[-1])
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
    code, out, err = run_child(model, scenario, threads, -1)
    if code:
        raise RuntimeError(f"{scenario} fails without a limit: {err}")
    found = json.loads(out)
    growth = int(found["peak"] - found["before"])
    result = Sweep(scenario, threads, growth)
    most = growth * ENOUGH + ARENAS
    limits = [int(most * (step / (steps - 1)) ** 2) for step in range(steps)]

    def one(headroom: int) -> Outcome:
        return judge(headroom, run_child(model, scenario, threads, headroom), found["again"])

    with ThreadPoolExecutor(jobs) as pool:
        result.outcomes = list(pool.map(one, limits))
    return result


def sweeps(
    model: Path, scenarios: Sequence[str], threads: Sequence[int], steps: int, jobs: int
) -> Iterator[Sweep]:
    """Every scenario with every number of threads."""
    for scenario in scenarios:
        for n in threads:
            yield sweep(model, scenario, n, steps, jobs)
