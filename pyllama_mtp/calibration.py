"""What rounds cost here, measured when contexts are made: :func:`open_engine`.

"auto" needs the seconds of rounds of every depth before it can choose one. They are measured in
real rounds after a few made-up tokens, in the engine's own contexts, which are empty again
afterwards: no text, and no figure of a generation, depends on it. All drafts are rejected, so that
a round also takes them back. What was measured is kept, see :mod:`.measured`, until rounds
contradict it.
"""

from __future__ import annotations

import logging
import time
from statistics import median_low

import numpy as np

from .drafting.depth import Costs
from .engine import Engine
from .llama.contextoptions import NodeTimes
from .llama.model import Model
from .machine import waited_for_core
from .measured import Measured
from .request import Limits, make_request
from .resolved import Resolved
from .round import accept
from .sequence import NO_DRAFTS, Drafts, Sequence
from .settings import MOST_TOKENS

log = logging.getLogger("pyllama_mtp")

#: Seconds to measure rounds of one number of sequences in. On slow machines three depths are
#: measured, however long they take, and the others interpolated.
BUDGET_S = 1.5
#: Most rounds of a depth, and tokens before them: fewer than the shortest context has, 256.
REPEATS, N_PROMPT = 8, 8
#: What was measured while threads waited this part of the time for a core is not kept.
BUSY = 0.1


def open_engine(
    model: Model, resolved: Resolved, times: NodeTimes | None = None, chats: bool = False
) -> Engine:
    """An engine that knows what its rounds cost, as far as it chooses depths itself. Arguments and
    errors: see :class:`.Engine`. With `times`, which would count it, nothing is measured."""
    engine = Engine(model, resolved, times, chats)
    if engine.drafting.depths and not times:
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
    heads = engine.head.heads
    rows = heads.chosen.kind if heads and heads.chosen else settings.draft_head_type
    kinds = context.options.mtp_head, rows, settings.rollback
    kept = Measured(engine.target, context.n_head, *kinds, engine.depth)
    costs: dict[int, Costs] | None = kept.load(dict[int, Costs])
    if (
        not costs
        or costs.keys() != {*counts}
        or any(one.limit != engine.depth for one in costs.values())
    ):
        began, waited_s = time.perf_counter(), waited_for_core()
        costs = {count: measure_costs(engine, count) for count in counts}
        took_s, waited_s = time.perf_counter() - began, waited_for_core() - waited_s
        log.info("measured in %.1f s what drafts cost here", took_s)
        if waited_s < BUSY * took_s:
            kept.store(costs)
    engine.drafting.know(costs, kept.forget)


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


def measure_costs(engine: Engine, n: int) -> Costs:
    """Measure rounds of `n` sequences of an empty engine, which is empty again afterwards."""
    p_min, engine.head.p_min = engine.head.p_min, 0.0
    try:
        sequences = [_begin(engine, sequence) for sequence in engine.sequences[:n]]
        costs = _measure(engine, sequences)
    finally:
        engine.head.p_min = p_min
    engine.reset()
    return costs


def _measure(engine: Engine, sequences: list[Sequence]) -> Costs:
    limit, deadline = engine.depth, time.perf_counter() + BUDGET_S
    times: dict[int, list[tuple[float, float]]] = {}
    first = {0, limit // 2, limit}
    depths = sorted(range(limit + 1), key=lambda depth: depth not in first)
    for turn in range(REPEATS):
        for i, depth in enumerate(depths):
            if (turn or i >= len(first)) and time.perf_counter() > deadline:
                return _costs(limit, times)
            times.setdefault(depth, []).append(_round(engine, sequences, depth))
    return _costs(limit, times)


def _begin(engine: Engine, sequence: Sequence) -> Sequence:
    prompt = [(7 * i * i + 13 * i + 5) % engine.model.n_vocab for i in range(N_PROMPT)]
    sequence.begin(make_request(engine.model, prompt, Limits(MOST_TOKENS, ignore_eos=True)))
    engine.enter(sequence)
    while (row := engine.prefill(sequence)) is None:
        pass
    accept(engine, sequence, row)
    return sequence


def _round(engine: Engine, sequences: list[Sequence], depth: int) -> tuple[float, float]:
    """A round whose drafts are all rejected: seconds of drafting, and of the rest."""
    began = time.perf_counter()
    engine.intact = False
    drafts = [NO_DRAFTS] * len(sequences)
    if depth and engine.head.context:
        drafts = engine.head.draft(sequences, depth)
    elif depth:
        drafts = [Drafts([one.newest] * depth) for one in sequences]
    for one, its in zip(sequences, drafts, strict=True):
        one.drafts, one.n_usable = its, 0
    drafted = time.perf_counter()
    engine.verify(sequences)
    for one in sequences:
        accept(engine, one, one.entry)
    engine.roll_back(sequences)
    engine.intact = True
    return drafted - began, time.perf_counter() - drafted
