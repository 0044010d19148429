"""A window for the attention of drafts: what it hides, and that texts stay the same."""

from __future__ import annotations

import numpy as np
import pytest

from pyllama_mtp import Model
from pyllama_mtp.llama.batch import Floats, Ints
from pyllama_mtp.llama.context import Context
from pyllama_mtp.llama.drafts import compute_drafts, draft_logits
from pyllama_mtp.settings import MOST_TOKENS

from .support import N_CTX, written
from .twocontexts import ROUNDING, beside, context, turns

#: First positions, to which every draft attends; N_FIRST of llama-mtp-window.cpp.
FIRST = 64
#: Tokens of two sequences, which take turns in one cache.
LENGTHS = (230, 170)
NEWEST, SEQS = np.array([5, 6], dtype=np.int32), np.arange(2, dtype=np.int32)
DEPTH = 3


def drafted(found: Context) -> tuple[Ints, Floats]:
    """[DEPTH, 2] drafts, and the logits of each, the smallest first: [DEPTH, 2, n_vocab]."""
    drafts = compute_drafts(found, NEWEST, SEQS, DEPTH, n_candidates=found.model.n_vocab)
    return drafts, np.sort(draft_logits(found), axis=-1)


@pytest.mark.parametrize("flash", ["on", "off"])
def test_what_a_window_hides(model: Model, flash: str) -> None:
    """Logits are those of single steps out of whose cache the hidden positions are removed."""
    options = {"n_seq_max": 2, "unified": True, "flash_attn": flash}
    with beside(model, turns(model, LENGTHS, 48), **options) as (found, wanted):
        for window in (100, 17, 2):  # the longest first: what is removed does not come back
            found.set_draft_window(window)
            drafts, logits = drafted(found)
            for seq, token in enumerate(NEWEST.tolist()):
                steps = wanted.draft(token, DEPTH, seq, window=(FIRST, window))
                for step in range(DEPTH):
                    apart = np.abs(np.sort(steps.logits[step]) - logits[step, seq]).max()
                    assert apart < ROUNDING, (window, seq, step)
                    if steps.tokens[step] != drafts[step, seq]:
                        break  # two are equally good, and the next steps are not comparable


def test_windows_that_hide_nothing_change_no_bit(model: Model) -> None:
    with context(model, n_seq_max=2, unified=True) as found:
        for batch in turns(model, LENGTHS, 48):
            found.decode_batch(batch)
        whole = drafted(found)[1].tobytes()
        longest = max(LENGTHS) - FIRST + DEPTH
        windows = ((longest, True), (MOST_TOKENS, True), (longest - 1, False), (0, True))
        for window, same in windows:
            found.set_draft_window(window)
            assert (drafted(found)[1].tobytes() == whole) == same, window


def test_a_session_drafts_within_it(demo: Model, text: list[int]) -> None:
    """The text is the same whatever a window does to drafts: test_same_text.py."""
    found = [written(demo, text[:300], 48, 3, draft_window=n).telemetry for n in (0, N_CTX, 1)]
    whole, long, short = ([pair.drafted for pair in told.pairs or ()] for told in found)
    assert whole == long != short
