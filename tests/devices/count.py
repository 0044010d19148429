"""Counts what a round and a prompt of four batches give to a device, with each of some settings:
prints a line of JSON for each.

    LD_PRELOAD="traffic.so libggml-base.so.0" python count.py MODEL '[{"draft_n_max": 3, ...}]'

The first library is traffic.c, compiled; see test_traffic.py.
"""

from __future__ import annotations

import ctypes
import json
import statistics
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

from pyllama_mtp import BatchSession, Model, Settings, scheduler
from pyllama_mtp import round as rounds_of
from pyllama_mtp.drafting.choice import Drafting
from pyllama_mtp.engine import Engine

FIELDS = ("graphs", "uploads", "downloads", "waits", "cpu_graphs")
#: The phases of a round, and whose functions they are.
PHASES = {"draft": Drafting, "verify": Engine, "accept": rounds_of, "roll_back": Engine}
N_PROMPT, N_BATCH, N_TOKENS = 64, 16, 24


class Traffic(ctypes.Structure):
    """As in traffic.c."""

    _fields_ = [(name, ctypes.c_long) for name in FIELDS]


class Rounds:
    """What each round did, by phase."""

    def __init__(self) -> None:
        self._now = Traffic.in_dll(ctypes.CDLL(None), "traffic")
        self._phases: Counter[tuple[str, str]] = Counter()
        self.all: list[Counter[tuple[str, str]]] = []
        for phase, owner in PHASES.items():
            setattr(owner, phase, self._counted(phase, getattr(owner, phase)))
        speculate = scheduler.speculate

        def next_round(*arguments: Any) -> Any:
            found = speculate(*arguments)
            self.all.append(self._phases)
            self._phases = Counter()
            return found

        scheduler.speculate = next_round

    def _counted(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with what it gives to the device counted."""

        def counted(*arguments: Any) -> Any:
            before = self.now()
            found = function(*arguments)
            for name in FIELDS:
                self._phases[phase, name] += self.now()[name] - before[name]
            return found

        return counted

    def now(self) -> Counter[str]:
        """Counts of everything so far."""
        return Counter({name: getattr(self._now, name) for name in FIELDS})


def main() -> None:
    """See above."""
    rounds = Rounds()
    small = {"n_ctx": 512, "n_batch": N_BATCH, "n_ubatch": N_BATCH, "checkpoints": 0}
    with Model(sys.argv[1]) as model:
        for options in json.loads(sys.argv[2]):
            n = options.pop("n_sequences", 1)
            with BatchSession(model, Settings(**{**small, **options}), n) as session:
                print(json.dumps(counted(session, rounds)))


def counted(session: BatchSession, rounds: Rounds) -> dict[str, Any]:
    """What a prompt takes, and a round by phase: the median of the later rounds."""
    prompt = [7 * i % 251 + 5 for i in range(N_PROMPT)]
    before = rounds.now()
    session.generate([prompt], max_tokens=1, ignore_eos=True).run()
    prefill = rounds.now() - before
    rounds.all.clear()
    prompts = [[*prompt, 5 + i] for i in range(session.n_sequences)]
    session.generate(prompts, max_tokens=N_TOKENS, ignore_eos=True).run()
    settled = rounds.all[len(rounds.all) // 2 :]
    phases = sorted({phase for counts in settled for phase, _ in counts})
    return {
        "prompt": prefill,
        "round": {
            phase: {name: statistics.median(c[phase, name] for c in settled) for name in FIELDS}
            for phase in phases
        },
    }


if __name__ == "__main__":
    main()
