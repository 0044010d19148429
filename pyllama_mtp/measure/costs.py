"""Costs on this machine, measured on sessions: drafting, verifying, and prompts by n_ubatch."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

from pyllama_mtp.drafting.depth import Costs, DepthController, Outcomes
from pyllama_mtp.errors import InsufficientMemoryError, UsageError
from pyllama_mtp.measure.profile import process_prompt
from pyllama_mtp.measure.tune import UbatchTimes
from pyllama_mtp.session import Session

if TYPE_CHECKING:
    from pyllama_mtp import Model
    from pyllama_mtp.settings import Settings

#: Sizes of n_ubatch that are compared with the size that is set.
UBATCHES = (256, 512, 1024)
#: Tokens of the prompt that they are compared on, at most.
UBATCH_PROMPT = 2048
UBATCH_ROUNDS = 3
#: Most seconds of a round, which is the prompt in every size; a longer prompt is shortened.
MOST_ROUND_S = 20.0
#: Plain steps timed for every round that is timed at a depth; half of them before, half after.
_PLAIN_STEPS = 8


class Rotation(DepthController):
    """Takes every depth in turn, in place of the engine's own choice.

    Each depth has two rounds, and the second counts: the first may have to build its graphs. Every
    other turn goes through the depths backwards, so that a machine that grows slower slows all
    depths alike.
    """

    looks_up = False

    def __init__(self, limit: int, repeats: int) -> None:
        super().__init__(limit)
        depths = [*range(limit + 1)]
        turns = [depths[:: 1 if turn % 2 == 0 else -1] for turn in range(repeats)]
        self._plan = [depth for turn in turns for depth in turn for _ in range(2)]
        self._rounds = 0
        self.draft_s: list[list[float]] = [[] for _ in depths]
        self.rest_s: list[list[float]] = [[] for _ in depths]

    @property
    def done(self) -> bool:
        """Whether every depth has had its rounds."""
        return self._rounds >= len(self._plan)

    def choose(self, at_most: int | None = None, n_sequences: int = 1) -> int:
        """The depth of the next round."""
        depth = 0 if self.done else self._plan[self._rounds]
        return depth if at_most is None else min(depth, at_most)

    def update(self, n_drafted: int, outcomes: Outcomes, draft_s: float, total_s: float) -> None:
        """Take the times of a round; a round that was cut short does not count."""
        if self.done:
            return
        if self._rounds % 2 and n_drafted == self._plan[self._rounds]:
            self.draft_s[n_drafted].append(draft_s)
            self.rest_s[n_drafted].append(total_s - draft_s)
        self._rounds += 1

    def medians(self) -> Costs:
        """The costs. Raises UsageError when a depth was never measured."""
        if not all(self.rest_s):
            raise UsageError("too few rounds to measure every depth; use a longer context")
        drafts = [median(times) for times in self.draft_s[1:]]
        rounds = [median(times) for times in self.rest_s]
        return Costs(verify=(0.0, *rounds), draft=(0.0, *drafts))


def tokens_needed(limit: int, repeats: int) -> int:
    """Most tokens that :func:`measure_costs` generates."""
    return 1 + repeats * (limit + 1) * (limit + 2)


def measure_costs(session: Session, prompt: Sequence[int], repeats: int) -> Costs:
    """Generate after `prompt`, greedily, at every depth from 0 to the session's limit in turn.

    Args:
        session: with ``draft_n_max`` above 0 and room for :func:`tokens_needed` tokens.
        repeats: rounds that count, per depth.

    Raises:
        UsageError: the session does not draft, or the context is too short.
    """
    engine = session._engine
    limit = engine.depth  # a model may allow fewer drafts than were asked for
    if limit < 1:
        raise UsageError("costs are measured at depths 0 to draft_n_max; give at least 1")
    n_tokens = tokens_needed(limit, repeats)
    rotation, before = Rotation(limit, repeats), engine.drafting.depths
    engine.drafting.depths = rotation
    try:
        for _ in session.generate(prompt, max_tokens=n_tokens, ignore_eos=True):
            if rotation.done:
                break
    finally:
        engine.drafting.depths = before
    return rotation.medians()


def tokens_after(depth: int, repeats: int) -> int:
    """Most tokens that :func:`costs_against_no_mtp` generates; 0 without repeats."""
    return max(tokens_needed(depth, repeats), _PLAIN_STEPS * repeats) if repeats else 0


def costs_against_no_mtp(session: Session, prompt: Sequence[int], repeats: int) -> Costs:
    """As :func:`measure_costs`, but ``verify[1]`` is a step of the model without MTP.

    In :func:`measure_costs` it is a round without drafts, which also writes the MTP head's keys and
    values: the alternative of an adaptive depth, and dearer than a model without MTP.
    """
    steps = _plain_steps(session, prompt, _PLAIN_STEPS * repeats // 2)
    found = measure_costs(session, prompt, repeats)
    steps += _plain_steps(session, prompt, _PLAIN_STEPS * repeats // 2)
    return Costs(verify=(0.0, median(steps), *found.verify[2:]), draft=found.draft)


def _plain_steps(session: Session, prompt: Sequence[int], n: int) -> list[float]:
    """Seconds of `n` decode steps without MTP. A step without a piece of text of its own shares the
    time of the next."""
    generation = session.generate(prompt, max_tokens=n + 1, ignore_eos=True, draft=False)
    telemetry = generation.telemetry
    steps, seen, spent = [], 1, 0.0
    for _ in generation:
        new = telemetry.n_generated - seen
        if new > 0:
            steps += [(telemetry.decode_s - spent) / new] * new
            seen, spent = telemetry.n_generated, telemetry.decode_s
    return steps


def measure_ubatches(model: Model, settings: Settings, prompt: list[int]) -> UbatchTimes | None:
    """Process `prompt`, or its first part, with every size of UBATCHES in turn.

    Args:
        settings: of the sessions; their n_ubatch is measured, too. `n_ctx` must be 0 or hold the
            prompt.
        prompt: token ids.

    Returns:
        None where there are no two sizes to compare: the prompt is too short, memory too small, or
        the machine too slow for MOST_ROUND_S.

    Raises:
        InterruptedSample: by Ctrl-C.
    """
    usual, n_prompt = min(settings.n_ubatch, settings.n_batch), len(prompt)
    sizes = {n for n in (*UBATCHES, usual) if n <= min(n_prompt, settings.n_batch)}
    if usual not in sizes:
        return None
    sessions: dict[int, Session] = {}
    seconds: dict[int, list[float]] = {}
    with ExitStack() as stack:

        def warm_up(n_ubatch: int) -> float:
            session = stack.enter_context(Session(model, replace(settings, n_ubatch=n_ubatch)))
            took_s = process_prompt(session, prompt[:n_ubatch])
            sessions[n_ubatch] = session
            return took_s

        with suppress(InsufficientMemoryError):
            token_s = warm_up(usual) / usual
            while n_prompt * len(sizes) * token_s > MOST_ROUND_S:
                n_prompt //= 2
                sizes = {n for n in sizes if n <= n_prompt}
                if usual not in sizes:
                    return None
            for n in sorted(sizes - {usual}):
                warm_up(n)
        sizes &= {*sessions}
        if len(sizes) < 2:
            return None
        for turn in range(UBATCH_ROUNDS):
            for n in sorted(sizes, reverse=turn % 2 == 1):
                seconds.setdefault(n, []).append(process_prompt(sessions[n], prompt[:n_prompt]))
    return UbatchTimes(n_prompt, usual, seconds)
