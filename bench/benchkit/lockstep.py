"""Sessions that decode side by side: whichever has the fewest tokens makes the next round.

A machine whose speed drifts by a quarter within a minute slows all of them down alike, so their
ratios hold where speeds measured one after the other would not.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from benchkit.sample import Sample

if TYPE_CHECKING:
    from pyllama_mtp import Generation, Session


def decode(
    sessions: Mapping[str, Session], prompt: Sequence[int], n_decode: int
) -> dict[str, Generation]:
    """Decode `n_decode` tokens after the prompt in every session."""
    found = {
        name: session.generate(prompt, max_tokens=n_decode + 1, ignore_eos=True)
        for name, session in sessions.items()
    }
    running = dict(found)
    while running:
        name = min(running, key=lambda name: len(found[name].tokens))
        if next(iter(running[name]), None) is None:
            del running[name]
    return found


def impose(session: Session, rates: Sequence[float]) -> None:
    """Impose acceptance per position, unconditional, on the generations to come. A session that
    chooses its depth forgets its experience."""
    from pyllama_mtp.speculative.depth import DepthController

    engine = session._engine
    limit = engine.settings.depth_limit
    if limit:
        engine.settings = replace(engine.settings, synthetic_acceptance=tuple(rates[:limit]))
    if engine.choice.depths:
        engine.choice.depths = DepthController(limit)
    engine.choice.lookup = None  # what it drafts is not accepted at imposed rates


def sample(generation: Generation) -> Sample:
    """Its figures, in the terms that all sides share."""
    t = generation.telemetry
    return Sample(
        prefill_tps=t.prefill_tps,
        decode_tps=t.decode_tps,
        n_prompt=t.n_prompt,
        n_decoded=t.n_generated - 1,
        drafted=sum(t.drafted),
        accepted=sum(t.accepted),
        rounds=t.rounds if sum(t.drafted) else 0,
    )


def python_share(session: Session, prompt: Sequence[int], n_decode: int) -> float:
    """Share of the time of decoding that is not spent inside the native library.

    Every native call is timed from Python, so what the timing costs is in it.
    """
    engine = session._engine
    assert engine.drafter
    contexts = [engine.target, engine.drafter.context]
    holders: list[Any] = [*contexts, engine.model, *(c.tap for c in contexts if c.tap)]
    timed = _TimedLibrary(engine.target._lib)
    for holder in holders:
        holder._lib = timed
    try:
        generation = session.generate(prompt, max_tokens=n_decode + 1, ignore_eos=True)
        pieces = iter(generation)
        while not generation.tokens:
            next(pieces)
        began = timed.seconds
        generation.run()
        return 1 - (timed.seconds - began) / generation.telemetry.decode_s
    finally:
        for holder in holders:
            holder._lib = timed.library


class _TimedLibrary:
    """A cffi library whose functions add up their time in `seconds`."""

    def __init__(self, library: Any) -> None:
        self.library, self.seconds = library, 0.0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.library, name)
        if not callable(found):
            return found

        def call(*args: Any) -> Any:
            began = time.perf_counter()
            try:
                return found(*args)
            finally:
                self.seconds += time.perf_counter() - began

        setattr(self, name, call)
        return call
