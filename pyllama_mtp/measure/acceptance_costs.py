"""What a round of each depth costs against decoding without MTP, on one session."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from pyllama_mtp.measure.costs import measure_costs, tokens_needed
from pyllama_mtp.session import Session
from pyllama_mtp.speculative.costs import Costs

#: Plain steps timed for every round that is timed at a depth; half of them before, half after.
_STEPS = 8


def tokens_after(depth: int, repeats: int) -> int:
    """Most tokens that the measurement generates after its prompt; 0 without repeats."""
    return max(tokens_needed(depth, repeats), _STEPS * repeats) if repeats else 0


def costs_against_no_mtp(session: Session, prompt: Sequence[int], repeats: int) -> Costs:
    """As :func:`measure_costs`, but ``verify[1]`` is a step that has nothing to do with MTP.

    There it is a round without drafts, which writes the MTP head's keys and values, too; that is
    what a depth chosen while generating competes with, and dearer than a model without MTP.

    Raises:
        UsageError: the session does not draft, or the context is too short.
    """
    steps = _plain_steps(session, prompt, _STEPS * repeats // 2)
    found = measure_costs(session, prompt, repeats)
    steps += _plain_steps(session, prompt, _STEPS * repeats // 2)
    return Costs(verify=(0.0, median(steps), *found.verify[2:]), draft=found.draft)


def _plain_steps(session: Session, prompt: Sequence[int], n: int) -> list[float]:
    """Seconds of `n` decode steps without MTP, as far as they could be told apart by their text."""
    generation = session.generate(prompt, max_tokens=n + 1, ignore_eos=True, draft=False)
    telemetry = generation.telemetry
    steps, seen, spent = [], 1, 0.0
    for _ in generation:
        new = telemetry.n_generated - seen
        if new > 0:
            steps += [(telemetry.decode_s - spent) / new] * new
            seen, spent = telemetry.n_generated, telemetry.decode_s
    return steps
