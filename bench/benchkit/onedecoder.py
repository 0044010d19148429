"""One session that decodes at every depth and acceptance, so that all figures share its memory.

Two sessions differ by several percent through nothing but the memory they were given. The session
is made for the greatest depth; a smaller one is imposed where adaptive depth would choose.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from benchkit.sample import Sample

if TYPE_CHECKING:
    from pyllama_mtp import Session

#: How a generation drafts: a number of drafts (0: no MTP), or "auto".
Depth = int | str


class Fixed:
    """Chooses the same depth for every round."""

    def __init__(self, depth: int) -> None:
        self._depth = depth

    def choose(self, at_most: int | None = None) -> int:
        """Drafts of the next round."""
        return self._depth if at_most is None else max(min(self._depth, at_most), 0)

    def update(self, n_drafted: int, n_accepted: int, draft_s: float, total_s: float) -> None:
        """Nothing is learned."""


class OneDecoder:
    """Takes a session made with ``draft_n_max="auto"``; every measurement starts anew."""

    def __init__(self, session: Session, prompt: Sequence[int], n_decode: int) -> None:
        self._session, self._prompt, self._n_decode = session, list(prompt), n_decode

    def measure(self, depth: Depth, rates: Sequence[float]) -> Sample:
        """Decode after the prompt.

        Args:
            depth: "auto" begins without any experience.
            rates: imposed acceptance per position, unconditional.
        """
        return self._run(depth, rates)[0]

    def native_share(self, depth: Depth, rates: Sequence[float]) -> float:
        """Share of the time of decoding that is spent inside the native library.

        Every call is timed from Python, so the rest includes what the timing costs.
        """
        engine = self._session._engine
        assert engine.drafter
        contexts = [engine.target, engine.drafter.context]
        holders = [*contexts, engine.model, *(c.tap for c in contexts if c.tap)]
        timed = TimedLibrary(engine.target._lib)
        for holder in holders:
            holder._lib = timed
        try:
            sample, began_s = self._run(depth, rates, lambda: timed.seconds)
            assert sample.decode_tps
            return (timed.seconds - began_s) / (sample.n_decoded / sample.decode_tps)
        finally:
            for holder in holders:
                holder._lib = timed.library

    def _run(
        self, depth: Depth, rates: Sequence[float], first: Callable[[], float] = lambda: 0.0
    ) -> tuple[Sample, float]:
        """The sample, and what `first` said when the first token had come."""
        from pyllama_mtp.speculative.depth import DepthController

        engine = self._session._engine
        limit = engine.settings.depth_limit
        engine.settings = replace(engine.settings, synthetic_acceptance=tuple(rates[:limit]))
        engine.depths = DepthController(limit) if depth == "auto" else Fixed(int(depth))
        generation = self._session.generate(
            self._prompt, max_tokens=self._n_decode + 1, ignore_eos=True, draft=depth != 0
        )
        tokens, began = iter(generation), 0.0
        while not generation.tokens:
            next(tokens)
        began = first()
        for _ in tokens:
            pass
        t = generation.telemetry
        sample = Sample(
            prefill_tps=t.prefill_tps,
            decode_tps=t.decode_tps,
            n_prompt=t.n_prompt,
            n_decoded=t.n_generated - 1,
            drafted=sum(t.drafted),
            accepted=sum(t.accepted),
            rounds=t.rounds if depth else 0,
        )
        return sample, began


class TimedLibrary:
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
