"""bench/parity.py: how a trial ends, and what llama-server's log says of drafts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import parity
import pytest

from pyllama_mtp.telemetry import NearTie

LOG = """\
D slot new n_tokens = 12
D spec - seq_id 0, draft candidate   0, pos   0:   1174 (   0.495) 'qu'
D spec - seq_id 0, draft candidate   1, pos   0:    333 (   0.487) 'he'
D spec - seq_id 0, draft candidate   0, pos   1:      7 (   0.900) 'x'
D spec - seq_id 0, draft candidate   1, pos   1:      8 (   0.050) 'y'
"""
THEIRS = {10: [], 12: [{1174: 0.495, 333: 0.487}, {7: 0.9, 8: 0.05}]}


def test_drafts_are_read_from_the_log() -> None:
    assert parity.rounds_of(LOG, 10) == THEIRS


@pytest.mark.parametrize(
    ("tokens", "accepted", "drafts", "end"),
    [
        ([1, 2, 3], 2, [1174, 7], "equal"),
        ([1, 2, 3], 1, [1174, 7], "text only"),
        ([1, 2, 3], 1, [333, 7], "near tie"),
        ([1, 9, 3], 2, [1174, 7], "near tie"),
        ([1, 4, 3], 2, [1174, 7], "different"),
        ([1, 2], 2, [1174, 7], "different"),
    ],
)
def test_how_a_trial_ends(tokens: list[int], accepted: int, drafts: list[int], end: str) -> None:
    """Ours has tokens 1 2 3, a near tie of 2 and 9, and 2 accepted drafts."""
    told = SimpleNamespace(
        accepted=[1, 1], drafted=[2, 2], near_ties=[NearTie(1, 2, 9, 0.01, "a", "b")]
    )
    ours: Any = SimpleNamespace(tokens=[1, 2, 3], telemetry=told)
    theirs = {"tokens": tokens, "timings": {"draft_n_accepted": accepted}, "rounds": THEIRS}
    assert parity.compared(ours, theirs, {12: drafts})["end"] == end
