"""Sessions that decode side by side: whichever has the fewest tokens makes the next round.

A machine whose speed drifts by a quarter within a minute slows all of them down alike, so their
ratios hold where speeds measured one after the other would not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchkit.sample import Sample

if TYPE_CHECKING:
    from pyllama_mtp import Generation, Model, Session, Settings


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


class SideBySide:
    """Sessions that decode side by side, all from the state after the same context.

    A context manager that closes them.

    Args:
        settings: of each session, by name.
        context: tokens that every text begins with.
        state: a file for the state after them. Sessions with MTP restore what one of them saved,
            those without another file: the MTP head's cache is a part of the state.
    """

    def __init__(
        self, model: Model, settings: Mapping[str, Settings], context: Sequence[int], state: Path
    ) -> None:
        from pyllama_mtp import Session

        self._context = list(context)
        self._states = {mtp: state.with_name(f"{state.name}-{mtp:d}") for mtp in (False, True)}
        with contextlib.ExitStack() as stack:
            self._sessions = {
                name: stack.enter_context(Session(model, given)) for name, given in settings.items()
            }
            self._closing = stack.pop_all()

    def __enter__(self) -> SideBySide:
        return self

    def __exit__(self, *raised: object) -> None:
        self._closing.close()

    def prefill(self, name: str) -> Sample:
        """The context, in this session, from nothing; the others of its kind begin with it."""
        session = self._sessions[name]
        session.reset()
        t = session.process([*self._context, 0])  # all but the last
        session.save(self._state(session))
        return Sample(t.prefill_tps, None, t.n_prompt, 0)

    def _state(self, session: Session) -> Path:
        return self._states[session.settings.depth_limit > 0]

    def decode(self, names: Iterable[str], tail: Sequence[int], n_decode: int) -> dict[str, Sample]:
        """Decode `n_decode` tokens after the context and `tail`, which is not empty, in each."""
        for name in names:
            session = self._sessions[name]
            if self._state(session).exists():
                session.restore(self._state(session))
            else:
                self.prefill(name)
            forget(session)
        chosen = {name: self._sessions[name] for name in names}
        decoded = decode(chosen, [*self._context, *tail], n_decode)
        return {name: sample(generation) for name, generation in decoded.items()}


def forget(session: Session) -> None:
    """What it has learned about drafting, as if it were new."""
    from pyllama_mtp.speculative.choice import DraftChoice

    session._engine.choice = DraftChoice(session._engine.settings)


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
