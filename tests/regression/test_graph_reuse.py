"""Graphs that are found again compute what graphs that are built anew do, bit for bit, whatever was
switched in between. A setting on which graphs depend, but which llama_mtp_cparams does not compare,
shows here."""

from __future__ import annotations

import random

import numpy as np
import pytest

from pyllama_mtp import Model
from pyllama_mtp.llama.context import Context
from pyllama_mtp.llama.drafts import compute_drafts, draft_logits

from ..marks import usual
from .support import made_up
from .test_round_at_once import round_of
from .twocontexts import context, every, last, one_sequence

DEPTH, N_TURNS = 3, 60
ONE = np.zeros(1, dtype=np.int32)
#: What is switched, and whether it is on at first.
SWITCHES = {
    "greedy": False,
    "candidates": False,
    "window": False,
    "tap": True,
    "point": False,
    "slice": True,
}


def switch(found: Context, name: str, on: bool) -> None:
    if name == "greedy":
        found.set_greedy(on)
    elif name == "candidates":
        found.set_candidates(3 * on)
    elif name == "window":
        found.set_draft_window(5 * on)
    elif name == "tap":
        found.set_tap(on)
    elif name == "point":
        found.clear()  # rows that were carried are of the other point
        found.set_tap_point("pre-norm" if on else "post-norm")
    else:
        found.library.lib.llama_mtp_set_slice(found.handle, on)


def outcome(found: Context, what: str, tapped: bool) -> list[object]:
    """What a computation leaves."""
    past, n = found.past(), {"prompt": 20, "step": 1}.get(what, 4)
    if what == "drafts":
        drafts = compute_drafts(found, ONE + 7, ONE, DEPTH, n_candidates=2)
        return [drafts.tolist(), draft_logits(found).tobytes()]
    if what == "drawn":
        noise = np.ones((DEPTH, 1, found.n_head), np.float32)
        return [
            compute_drafts(found, ONE + 7, ONE, DEPTH, 0, np.ones(1, np.float32), noise).tolist()
        ]
    if what == "round":
        return [round_of(found, [7], DEPTH, at_once=True)]
    marks = every(n) if what in ("verify", "step") else last(n)
    found.decode_batch(one_sequence(made_up(found.model, n, past), past, outputs=marks))
    left: list[object] = [found.hidden_rows().tobytes()] if tapped else []
    for row in np.flatnonzero(marks).tolist():
        left.append(found.argmax(row))
        if not found.greedy:
            left.append(found.logits(row).tobytes())
        elif found.n_candidates:
            left += [part.tobytes() for part in found.candidates(row)]
    return left


@pytest.mark.parametrize("seed", usual(0, long=[1]))
def test_as_built_anew(model: Model, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"n_rs_seq": DEPTH, "need_embd_pre_norm": True, "slice": True}
    with context(model, **options) as reused:
        monkeypatch.setenv("LLAMA_GRAPH_REUSE_DISABLE", "1")
        with context(model, **options) as built:
            choose, on = random.Random(seed), dict(SWITCHES)
            for turn in range(N_TURNS):
                name = choose.choice([*SWITCHES])
                on[name] = not on[name]
                full = reused.past() > 300
                for one in (reused, built):
                    switch(one, name, on[name])
                    if full:
                        one.clear()
                decodes, drafts = ("step", "verify", "last", "prompt"), ("drafts", "drawn", "round")
                whats = [choose.choice(decodes), *choose.choices(decodes + drafts, k=3)]
                for what in whats:
                    got = [outcome(one, what, on["tap"]) for one in (reused, built)]
                    assert got[0] == got[1], (turn, what, on)
            assert reused.graphs_built < 0.9 * built.graphs_built
