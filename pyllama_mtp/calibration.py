"""What rounds cost here, measured when contexts are made: :func:`open_engine`.

"auto" needs the seconds of rounds of every depth before it can choose one. They are measured in
real rounds (:func:`.speculate`) after a few made-up tokens, in the engine's own contexts, which are
empty again afterwards: no text, and no figure of a generation, depends on it. All drafts are
rejected, so that a round also takes them back.

What was measured is kept in the folder pyllama-mtp/measured of XDG_CACHE_HOME, or of ~/.cache; so
is, at a session's end, what its rounds made of it. The folder may be deleted at any time: a file
that is not there, damaged or cannot be written only means that a session measures again.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import median_low

import msgspec
import numpy as np

from .drafting.choice import Drafting
from .drafting.depth import Costs
from .drafting.drafter import Drafter
from .engine import Engine, Resolved
from .errors import PyllamaMtpError
from .files import cache_folder, write_whole
from .llama.context import Context
from .llama.model import Model
from .machine import describe_machine, waited_for_core
from .request import Limits, make_request
from .round import accept, speculate
from .sequence import Drafts, Sequence
from .settings import MOST_TOKENS

log = logging.getLogger("pyllama_mtp")

#: Seconds to measure rounds of one number of sequences in. On slow machines three depths are
#: measured, however long they take, and the others interpolated.
BUDGET_S = 3.0
#: Most rounds of a depth, and tokens before them: fewer than the shortest context has, 256.
REPEATS, N_PROMPT = 8, 8
#: What was measured while threads waited this part of the time for a core, or while their number
#: changed, is not kept.
BUSY = 0.1


def open_engine(model: Model, resolved: Resolved, chats: bool = False) -> Engine:
    """An engine that knows what its rounds cost, as far as it chooses depths itself. Arguments and
    errors: see :class:`.Engine`."""
    engine = Engine(model, resolved, chats)
    if engine.drafting.adaptive:
        try:
            _calibrate(engine, resolved.measured_counts)
        except BaseException:
            engine.close()
            raise
    return engine


def _calibrate(engine: Engine, counts: list[int]) -> None:
    """Have the engine choose depths by costs of these numbers of sequences."""
    context = engine.head.context or engine.target
    settings = engine.settings
    kinds = context.options.mtp_head, settings.draft_head_type, settings.rollback
    kept = CostsFile(engine.target, context.n_head, *kinds, engine.depth)
    costs, n_threads, idle = kept.load(), engine.target.n_threads, True

    def keep(costs: dict[int, Costs]) -> None:
        if idle and engine.target.n_threads == n_threads:
            kept.store(costs)

    if costs.keys() != {*counts} or any(one.limit != engine.depth for one in costs.values()):
        began, waited_s = time.perf_counter(), waited_for_core()
        costs = {count: measure_costs(engine, count) for count in counts}
        took_s, waited_s = time.perf_counter() - began, waited_for_core() - waited_s
        log.info("measured in %.1f s what drafts cost here", took_s)
        idle = waited_s < BUSY * took_s
        keep(costs)
    engine.drafting.know(costs, keep)


def _costs(limit: int, times: dict[int, list[tuple[float, float]]]) -> Costs:
    """Costs of all depths from (seconds of drafting, of the rest) of some: medians, which stalls do
    not move, without a depth's first round, which builds graphs; other depths are interpolated."""
    depths = sorted(times)
    counted = [times[depth][1:] or times[depth] for depth in depths]
    draft, rest = (
        np.interp(range(limit + 1), depths, [median_low(t[part] for t in of) for of in counted])
        for part in (0, 1)
    )
    # A plain step takes no longer than a pass over more rows, nor a draft than two.
    rest[0] = rest.min()
    draft = np.maximum(np.minimum.accumulate(draft[::-1])[::-1], 1e-9)
    return Costs((0.0, *rest.tolist()), (0.0, *draft[1:].tolist()))


class Trials(Drafting):
    """Rounds of a depth that is set. No draft can be used, so that all are taken back.

    Attributes:
        depth: drafts of the next rounds.
        times: seconds of drafting, and of the rest, of every round, by depth.
    """

    def __init__(self, head: Drafter) -> None:
        self.head, self.depth = head, 0
        self.times: dict[int, list[tuple[float, float]]] = {}

    def draft(self, sequences: list[Sequence]) -> None:
        """See :meth:`.Drafting.draft`. Without a head, any tokens are drafts."""
        drafts = [Drafts([one.newest] * self.depth) for one in sequences]
        if self.depth and self.head.context:
            drafts = self.head.draft(sequences, self.depth)
        for one, its in zip(sequences, drafts, strict=True):
            one.drafts, one.n_usable = its, 0

    def accepted(self, sequences: list[Sequence]) -> None:
        """The made-up text teaches nothing."""

    def learn(self, sequences: list[Sequence], draft_s: float, total_s: float) -> None:
        """See :meth:`.Drafting.learn`."""
        self.times.setdefault(self.depth, []).append((draft_s, total_s - draft_s))


def measure_costs(engine: Engine, n: int) -> Costs:
    """Measure rounds of `n` sequences of an empty engine, which is empty again afterwards."""
    usual, trials = engine.drafting, Trials(engine.head)
    sequences = [_begin(engine, sequence) for sequence in engine.sequences[:n]]
    limit, deadline = engine.depth, time.perf_counter() + BUDGET_S
    first = {0, limit // 2, limit}
    depths = sorted(range(limit + 1), key=lambda depth: depth not in first)
    engine.drafting = trials
    try:
        for i, depth in enumerate(depths * REPEATS):
            if i >= len(first) and time.perf_counter() > deadline:
                break
            trials.depth = depth
            speculate(engine, sequences)
    finally:
        engine.drafting = usual
    engine.reset()
    return _costs(limit, trials.times)


def _begin(engine: Engine, sequence: Sequence) -> Sequence:
    prompt = [(7 * i * i + 13 * i + 5) % engine.model.n_vocab for i in range(N_PROMPT)]
    request = make_request(engine.model, prompt, Limits(MOST_TOKENS, ignore_eos=True))
    engine.enter(engine.prefixes.find([sequence], request))
    while (row := engine.prefill(sequence)) is None:
        pass
    accept(engine, sequence, row)
    return sequence


# -- what was measured, for later sessions ---------------------------------------------------------


#: Changes with the meaning of what is kept. And the most files: the oldest make way.
_FORMAT, MOST_FILES = 2, 200

#: Environment variables that ggml, its backends and OpenMP read.
VARIABLES = ("GGML_", "GOMP_", "OMP_", "KMP_", "CUDA_")


def _describe(file: Path) -> tuple[str, int, int]:
    """A file by its path, size and time; 0 and 0: it is gone."""
    with suppress(OSError):
        stat = file.stat()
        return str(file.resolve()), stat.st_size, stat.st_mtime_ns
    return str(file), 0, 0


class CostsFile:
    """The file of the costs, by number of sequences, in a context as it is."""

    def __init__(self, context: Context, *more: object) -> None:
        """The file's name is a hash of all that the figures depend on: the files of model and head
        by name, size and time, how they are loaded, the context's options but its length, the
        library with its switches and variables, the machine, the devices, and `more`."""
        model, options, library = context.model, context.options, context.library
        files = [_describe(Path(file)) for file in (model.path, model.info.head) if file]
        same = replace(options, n_ctx=0, n_batch=0, n_outputs_max=0)
        variables = sorted(item for item in os.environ.items() if item[0].startswith(VARIABLES))
        native = library.stamp, sorted(library.switches.items()), variables
        text, description = library.text, library.lib.ggml_backend_dev_description
        devices = [text(description(device)) for device in model.used_devices]
        key = _FORMAT, files, model.options, same, native, describe_machine(devices), more
        self._name = hashlib.sha256(repr(key).encode()).hexdigest()[:32] + ".json"

    @property
    def path(self) -> Path:
        """The file. Raises UsageError: there is no folder for it."""
        return cache_folder() / "measured" / self._name

    def load(self) -> dict[int, Costs]:
        """What was stored; empty: nothing that can be read."""
        with suppress(OSError, msgspec.DecodeError, RecursionError, PyllamaMtpError):
            return msgspec.json.decode(self.path.read_bytes(), type=dict[int, Costs])
        return {}

    def store(self, costs: dict[int, Costs]) -> None:
        """Keep them, as far as the folder can be written."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.path, msgspec.json.encode(costs))
            files = sorted(self.path.parent.glob("*.json"), key=lambda file: file.stat().st_mtime)
            for file in files[:-MOST_FILES]:
                file.unlink(missing_ok=True)
        except (OSError, PyllamaMtpError) as error:
            log.info("what was measured is not kept: %s", error)
