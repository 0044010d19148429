"""One session that processes the same step of a prompt several times, with MTP and without.

Two sessions differ by several percent through nothing but the memory they were given. Here the
caches, states and buffers are the same ones: before every repetition both contexts go back to where
the step began. A step that is told not to draft (`draft=False`) builds the graphs of a session
without MTP (tests/regression/test_graph.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyllama_mtp import Session

_START, _END = 1, 2  # slots of kept hidden rows; 0 is the drafter's own


class OneSession:
    """Takes a session, made with ``checkpoints=0``, through a prompt step by step."""

    def __init__(self, session: Session) -> None:
        self._session, self._engine = session, session._engine
        self._drafter = session._engine.drafter

    def step(
        self, prompt: Sequence[int], start: int, end: int, drafts: Sequence[bool]
    ) -> list[Any]:
        """Process tokens start .. end-1 once for every item of `drafts`.

        Returns:
            The telemetry of each. At least one must draft; the caches then hold `end` tokens.
        """
        engine, drafter, found = self._engine, self._drafter, []
        state = engine.target.save_state(recurrent_only=True) if start else None
        carry = drafter.sequences[0].carry.keep(_START)
        synced = None
        for i, draft in enumerate(drafts):
            if i:
                self._back(prompt, start, state, carry)
            telemetry = self._session.process(prompt[: end + 1], draft=draft)
            assert (telemetry.n_cached, telemetry.n_prompt) == (start, end)
            found.append(telemetry)
            if draft:
                synced = drafter.sequences[0].carry.keep(_END)
        drafter.resume(0, end, synced)  # what was written for these tokens is there still
        return found

    def _back(self, prompt: Sequence[int], start: int, state: Any, carry: Any) -> None:
        from pyllama_mtp.speculative.rollback import go_back

        if start:
            go_back(self._engine.target, state, start)
        else:
            self._engine.target.clear()
        self._engine.places[0].cached = list(prompt[:start])
        self._drafter.resume(0, start, carry)
